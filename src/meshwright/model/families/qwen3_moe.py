"""Qwen3-MoE: Qwen3's attention; layers with experts by a step and a list of exceptions."""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    assemble,
    expert_stack,
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


def _moe_block(index: int, d: Decoder, moe: MoESpec, bias: bool, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    return BlockSpec(
        index=index,
        kind="moe",
        ffn_size=0,
        tensors=(
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias, qk_norm=True),
            *expert_stack(f"{at}.mlp", d.hidden, moe),
            *router(f"{at}.mlp", d.hidden, moe.num_experts),
            *norm(f"{at}.input_layernorm", d.hidden),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
        ),
        sliding_window=window,
        moe=moe,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Qwen3-MoE config."""
    d = read_decoder(fields, positions=32768, kv_heads=4)
    moe = read_moe(
        fields,
        experts_keys=("num_experts", "num_local_experts"),
        ffn_key="moe_intermediate_size",
        top_k=8,
    )
    bias = fields.flag("attention_bias", default=False)
    sliding = fields.flag("use_sliding_window", default=False)
    window = fields.optional_size("sliding_window", default=4096) if sliding else None
    step = fields.size("decoder_sparse_step", default=1)
    dense: tuple[int, ...] = fields.items("mlp_only_layers", int) or ()
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=bias, out_bias=bias, qk_norm=True, window=window)
        if i in dense or (i + 1) % step
        else _moe_block(i, d, moe, bias, window)
        for i in range(d.layers)
    ]
    attention = gqa(d, qk_norm=True, window=window)
    return assemble(fields, family, source, d, blocks=blocks, attention=attention, moe=moe)


FAMILY = Family(name="qwen3_moe", architecture="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), build=build)
