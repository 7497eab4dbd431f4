"""Qwen2-MoE (Qwen1.5-MoE and Qwen2-57B-A14B): Qwen2's attention, and a shared expert behind a gate of its own."""

from __future__ import annotations

from meshwright.model import fields as limits
from meshwright.model.families.pieces import (
    HIDDEN,
    Decoder,
    Family,
    assemble,
    expert_stack,
    gated_mlp,
    gqa,
    grouped_attention,
    largest,
    layer_windows,
    llama_block,
    matrix,
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
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias),
            *router(f"{at}.mlp", d.hidden, moe.num_experts),
            *expert_stack(f"{at}.mlp", d.hidden, moe),
            *gated_mlp(f"{at}.mlp.shared_expert", d.hidden, moe.shared_ffn_size, shared=True),
            *matrix(f"{at}.mlp.shared_expert_gate", ("one", 1), (HIDDEN, d.hidden), "shared_in"),
            *norm(f"{at}.input_layernorm", d.hidden),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
        ),
        sliding_window=window,
        moe=moe,
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: off unless ``use_sliding_window``, then on every other of the first layers."""
    on = fields.flag("use_sliding_window", default=False)
    window = fields.optional_size("sliding_window", default=4096, least=0) if on else None
    first = fields.size("max_window_layers", default=28, least=0, most=limits.MOST_LAYERS)
    return layer_windows(fields, layers, window, lambda i: i % 2 == 0 and i < first, idle=not on)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Qwen2-MoE config."""
    d = read_decoder(fields, positions=32768, kv_heads=16)
    moe = read_moe(fields, experts_keys=("num_experts",), ffn_key="moe_intermediate_size", top_k=4)
    shared = fields.size("shared_expert_intermediate_size", default=5632, most=limits.MOST_VOCABULARY)
    moe = MoESpec(
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
        ffn_size=moe.ffn_size,
        num_shared_experts=1,
        shared_ffn_size=shared,
    )
    bias = fields.flag("qkv_bias", default=True)
    windows = _windows(fields, d.layers)
    step = fields.size("decoder_sparse_step", default=1)
    dense: tuple[int, ...] = fields.items("mlp_only_layers", int) or ()
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=bias, window=windows[i])
        if i in dense or (i + 1) % step
        else _moe_block(i, d, moe, bias, windows[i])
        for i in range(d.layers)
    ]
    return assemble(
        fields, family, source, d, blocks=blocks, attention=gqa(d, window=largest(windows)), moe=moe
    )


FAMILY = Family(name="qwen2_moe", architecture="Qwen2MoeForCausalLM", model_types=("qwen2_moe",), build=build)
