"""gpt-oss: every feed-forward a mixture with biases, a sink in every head's softmax, every other layer with a window.

The experts' matrices are stored [experts, in, out], gate and up number by number next to each other; their gate is
clamped. A sink is one more score of a head, the same for all queries, whose share goes nowhere.
"""

from __future__ import annotations

from meshwright.model.families.pieces import (
    EXPERTS,
    FFN,
    HIDDEN,
    Decoder,
    Family,
    assemble,
    gqa,
    grouped_attention,
    largest,
    layer_windows,
    norm,
    read_decoder,
    read_moe,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, MoESpec, Role, TensorSpec


def _experts(at: str, d: Decoder, moe: MoESpec) -> list[TensorSpec]:
    e, f, h = moe.num_experts, moe.ffn_size, d.hidden
    pairs = f"{FFN}*2"

    def tensor(name: str, shape: tuple[int, ...], dims: tuple[str, ...], role: Role) -> TensorSpec:
        bias = name.endswith("bias")
        return TensorSpec(
            name=f"{at}.{name}", shape=shape, dims=dims, role=role, is_bias=bias, transposed=len(shape) == 3
        )

    return [
        tensor("router.weight", (e, h), (EXPERTS, HIDDEN), "router"),
        tensor("router.bias", (e,), (EXPERTS,), "router"),
        tensor("experts.gate_up_proj", (e, h, 2 * f), (EXPERTS, HIDDEN, pairs), "expert_in"),
        tensor("experts.gate_up_proj_bias", (e, 2 * f), (EXPERTS, pairs), "expert_in"),
        tensor("experts.down_proj", (e, f, h), (EXPERTS, FFN, HIDDEN), "expert_out"),
        tensor("experts.down_proj_bias", (e, h), (EXPERTS, HIDDEN), "expert_out"),
    ]


def _block(index: int, d: Decoder, moe: MoESpec, bias: bool, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    sinks = TensorSpec(
        name=f"{at}.self_attn.sinks", shape=(d.heads,), dims=("heads",), role="attention_in", is_bias=True
    )
    return BlockSpec(
        index=index,
        kind="moe",
        ffn_size=0,
        tensors=(
            sinks,
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias),
            *_experts(f"{at}.mlp", d, moe),
            *norm(f"{at}.input_layernorm", d.hidden),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
        ),
        sliding_window=window,
        moe=moe,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a gpt-oss config."""
    d = read_decoder(fields, positions=131072, kv_heads=8, head_dim=64)
    moe = read_moe(
        fields, experts_keys=("num_local_experts", "num_experts"), ffn_key="intermediate_size", top_k=4
    )
    bias = fields.flag("attention_bias", default=True)
    window = fields.optional_size("sliding_window", default=128)
    windows = layer_windows(fields, d.layers, window, lambda i: i % 2 == 0)
    fields.refuse()
    blocks = [_block(i, d, moe, bias, windows[i]) for i in range(d.layers)]
    return assemble(
        fields, family, source, d, blocks=blocks, attention=gqa(d, window=largest(windows)), moe=moe
    )


FAMILY = Family(name="gpt_oss", architecture="GptOssForCausalLM", model_types=("gpt_oss",), build=build)
