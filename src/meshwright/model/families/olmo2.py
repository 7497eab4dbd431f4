"""OLMo 2: norms behind attention and feed-forward only, and one over the queries (and keys) of all heads together."""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    K,
    Q,
    assemble,
    gated_mlp,
    gqa,
    grouped_attention,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec


def _block(index: int, d: Decoder, bias: bool) -> BlockSpec:
    at = f"model.layers.{index}"
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=(
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias),
            *norm(f"{at}.self_attn.q_norm", d.q_size, dim=Q),
            *norm(f"{at}.self_attn.k_norm", d.kv_size, dim=K),
            *gated_mlp(f"{at}.mlp", d.hidden, d.ffn),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
            *norm(f"{at}.post_feedforward_layernorm", d.hidden),
        ),
        norms="after",
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of an OLMo 2 config."""
    d = read_decoder(fields, positions=2048)
    bias = fields.flag("attention_bias", default=False)
    fields.refuse()
    blocks = [_block(i, d, bias) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, qk_norm=True))


FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", model_types=("olmo2",), build=build)
