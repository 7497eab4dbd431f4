"""Mixtral: every feed-forward is a mixture of experts, stacked in two tensors."""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    assemble,
    expert_stack,
    gqa,
    grouped_attention,
    norm,
    read_decoder,
    read_moe,
    router,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, MoESpec


def _block(index: int, d: Decoder, moe: MoESpec, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    return BlockSpec(
        index=index,
        kind="moe",
        ffn_size=0,
        tensors=(
            *grouped_attention(f"{at}.self_attn", d),
            *router(f"{at}.mlp", d.hidden, moe.num_experts),
            *expert_stack(f"{at}.mlp", d.hidden, moe),
            *norm(f"{at}.input_layernorm", d.hidden),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
        ),
        sliding_window=window,
        moe=moe,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Mixtral config."""
    d = read_decoder(fields, positions=131072, kv_heads=8)
    moe = read_moe(
        fields, experts_keys=("num_local_experts", "num_experts"), ffn_key="intermediate_size", top_k=2
    )
    window = fields.optional_size("sliding_window", default=None)
    fields.refuse()
    blocks = [_block(i, d, moe, window) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, window=window), moe=moe)


FAMILY = Family(name="mixtral", architecture="MixtralForCausalLM", model_types=("mixtral",), build=build)
