"""GLM-4.5: a router like DeepSeek-V3's, dense first layers, a shared expert, rotary positions on half of each head.

The router's correction bias is a buffer in transformers, not a parameter; the module that predicts a further token is
not part of the causal-LM module.
"""

from __future__ import annotations

from meshwright.model import fields as limits
from meshwright.model.families.pieces import (
    Decoder,
    Family,
    assemble,
    expert_stack,
    gated_mlp,
    gqa,
    grouped_attention,
    llama_block,
    norm,
    read_decoder,
    read_moe,
    router,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, MoESpec


def _moe_block(index: int, d: Decoder, moe: MoESpec, bias: bool, qk_norm: bool) -> BlockSpec:
    at = f"model.layers.{index}"
    return BlockSpec(
        index=index,
        kind="moe",
        ffn_size=0,
        tensors=(
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, qk_norm=qk_norm),
            *expert_stack(f"{at}.mlp", d.hidden, moe),
            *router(f"{at}.mlp", d.hidden, moe.num_experts),
            *gated_mlp(f"{at}.mlp.shared_experts", d.hidden, moe.shared_ffn_size, shared=True),
            *norm(f"{at}.input_layernorm", d.hidden),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
        ),
        moe=moe,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a GLM-4.5 config."""
    d = read_decoder(fields, positions=131072, kv_heads=8)
    moe = read_moe(
        fields,
        experts_keys=("n_routed_experts", "num_experts", "num_local_experts"),
        ffn_key="moe_intermediate_size",
        top_k=8,
        shared=1,
        shared_key="n_shared_experts",
    )
    if fields.good("n_shared_experts") and moe.num_shared_experts == 0:
        fields.not_built("n_shared_experts", "0", "at least one shared expert")
    bias = fields.flag("attention_bias", default=False)
    qk_norm = fields.flag("use_qk_norm", default=False)
    first_moe = fields.size("first_k_dense_replace", default=1, least=0, most=limits.MOST_LAYERS)
    fields.refuse()
    blocks = [
        _moe_block(i, d, moe, bias, qk_norm)
        if i >= first_moe
        else llama_block(i, d, qkv_bias=bias, qk_norm=qk_norm)
        for i in range(d.layers)
    ]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, qk_norm=qk_norm), moe=moe)


FAMILY = Family(name="glm4_moe", architecture="Glm4MoeForCausalLM", model_types=("glm4_moe",), build=build)
