"""DeepSeek-V2 and V3: latent attention, dense first layers, routed and shared experts.

The router's correction bias of V3 is a buffer in transformers 5, not a parameter. The multi-token
prediction module of V3 is not part of the causal-LM module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.model import fields as limits
from meshwright.model.families.pieces import (
    HIDDEN,
    Decoder,
    Family,
    assemble,
    expert_stack,
    gated_mlp,
    matrix,
    norm,
    read_decoder,
    read_moe,
    router,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import AttentionSpec, BlockSpec, ModelSpec, MoESpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class _Latent:
    q_rank: int | None
    kv_rank: int
    rope: int
    nope: int
    value: int


def _attention(at: str, d: Decoder, m: _Latent, bias: bool) -> Iterable[TensorSpec]:
    hidden = (HIDDEN, d.hidden)
    queries = ("heads*qk_head_dim", d.heads * (m.nope + m.rope))
    if m.q_rank is None:
        yield from matrix(f"{at}.q_proj", queries, hidden, "attention_in")
    else:
        rank = ("q_lora_rank", m.q_rank)
        yield from matrix(f"{at}.q_a_proj", rank, hidden, "attention_in", bias=bias)
        yield from norm(f"{at}.q_a_layernorm", m.q_rank, dim="q_lora_rank")
        yield from matrix(f"{at}.q_b_proj", queries, rank, "attention_in")
    joined = ("kv_lora_rank+rope", m.kv_rank + m.rope)
    yield from matrix(f"{at}.kv_a_proj_with_mqa", joined, hidden, "attention_in", bias=bias)
    yield from norm(f"{at}.kv_a_layernorm", m.kv_rank, dim="kv_lora_rank")
    expanded = ("heads*(nope+value)", d.heads * (m.nope + m.value))
    yield from matrix(f"{at}.kv_b_proj", expanded, ("kv_lora_rank", m.kv_rank), "attention_in")
    values = ("heads*value_head_dim", d.heads * m.value)
    yield from matrix(f"{at}.o_proj", hidden, values, "attention_out", bias=bias)


def _block(index: int, d: Decoder, m: _Latent, moe: MoESpec | None, biases: tuple[bool, bool]) -> BlockSpec:
    at = f"model.layers.{index}"
    tensors = list(_attention(f"{at}.self_attn", d, m, biases[0]))
    if moe is None:
        tensors += gated_mlp(f"{at}.mlp", d.hidden, d.ffn, bias=biases[1])
    else:
        tensors += expert_stack(f"{at}.mlp", d.hidden, moe)
        tensors += router(f"{at}.mlp", d.hidden, moe.num_experts)
        shared = f"{at}.mlp.shared_experts"
        tensors += gated_mlp(shared, d.hidden, moe.shared_ffn_size, bias=biases[1], shared=True)
    tensors += norm(f"{at}.input_layernorm", d.hidden)
    tensors += norm(f"{at}.post_attention_layernorm", d.hidden)
    kind = "dense" if moe is None else "moe"
    return BlockSpec(
        index=index, kind=kind, ffn_size=d.ffn if moe is None else 0, tensors=tuple(tensors), moe=moe
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a DeepSeek-V2 or V3 config."""
    v3 = family.name == "deepseek_v3"
    d = read_decoder(
        fields, positions=4096 if v3 else 2048, kv_heads=128 if v3 else None, reads_head_dim=False
    )
    moe = read_moe(
        fields,
        experts_keys=("n_routed_experts", "num_experts", "num_local_experts"),
        ffn_key="moe_intermediate_size",
        top_k=8 if v3 else None,
        shared=1 if v3 else 2,
        shared_key="n_shared_experts",
    )
    m = _Latent(
        q_rank=fields.optional_size("q_lora_rank", default=1536, most=limits.MOST_HIDDEN),
        kv_rank=fields.size("kv_lora_rank", default=512),
        rope=fields.size("qk_rope_head_dim", default=64),
        nope=fields.size("qk_nope_head_dim", default=128),
        value=fields.size("v_head_dim", default=128),
    )
    if m.rope % 2:
        fields.wrong("qk_rope_head_dim", f"{m.rope}", "an even size: rotary positions turn pairs")
    if fields.good("n_shared_experts") and moe.num_shared_experts == 0:
        fields.not_built("n_shared_experts", "0", "at least one shared expert")
    bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False) and not v3
    first_moe = fields.size("first_k_dense_replace", default=3 if v3 else 0, least=0, most=limits.MOST_LAYERS)
    fields.refuse()
    d = replace(d, head_dim=m.nope + m.rope)
    blocks = [_block(i, d, m, moe if i >= first_moe else None, (bias, mlp_bias)) for i in range(d.layers)]
    attention = AttentionSpec(
        kind="mla",
        num_heads=d.heads,
        num_kv_heads=d.kv_heads,
        head_dim=m.nope + m.rope,
        value_head_dim=m.value,
        q_lora_rank=m.q_rank,
        kv_lora_rank=m.kv_rank,
        qk_rope_head_dim=m.rope,
        qk_nope_head_dim=m.nope,
    )
    return assemble(fields, family, source, d, blocks=blocks, attention=attention, moe=moe)


V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    model_types=("deepseek_v2",),
    build=build,
)
V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3",),
    build=build,
)
