"""GLM-4: fused gate/up, biases on q, k and v, rotary positions on half of each head; the newer ones with norms around.

GLM-4-9B (``glm``) has norms before attention and feed-forward, GLM-4-0414 (``glm4``) before and after.
"""

from __future__ import annotations

from meshwright.model.families.pieces import (
    FFN,
    HIDDEN,
    Decoder,
    Family,
    assemble,
    gqa,
    grouped_attention,
    matrix,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec


def _block(index: int, d: Decoder, bias: bool, around: bool) -> BlockSpec:
    at = f"model.layers.{index}"
    names = ["input_layernorm", "post_attention_layernorm"]
    if around:  # in the order in which they are computed
        names = [
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ]
    tensors: list[TensorSpec] = [
        *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias),
        *matrix(f"{at}.mlp.gate_up_proj", (f"{FFN}|{FFN}", 2 * d.ffn), (HIDDEN, d.hidden), "mlp_in"),
        *matrix(f"{at}.mlp.down_proj", (HIDDEN, d.hidden), (FFN, d.ffn), "mlp_out"),
    ]
    for name in names:
        tensors += norm(f"{at}.{name}", d.hidden)
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        norms="around" if around else "before",
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a GLM-4 config of either generation."""
    d = read_decoder(fields, positions=131072, kv_heads=2, head_dim=128)
    bias = fields.flag("attention_bias", default=True)
    fields.refuse()
    blocks = [_block(i, d, bias, family.name == "glm4") for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


FAMILY = Family(name="glm4", architecture="Glm4ForCausalLM", model_types=("glm4",), build=build)
FIRST = Family(name="glm", architecture="GlmForCausalLM", model_types=("glm",), build=build)
