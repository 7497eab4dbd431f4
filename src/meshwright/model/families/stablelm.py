"""StableLM: layer norms, a gated feed-forward, rotary positions on a part of each head.

The larger ones have attention and feed-forward side by side behind one norm, and a norm per head on queries and keys.
"""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    assemble,
    gated_mlp,
    gqa,
    grouped_attention,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec


def _block(index: int, d: Decoder, bias: bool, qk_norm: bool, parallel: bool) -> BlockSpec:
    at = f"model.layers.{index}"
    tensors: list[TensorSpec] = [*grouped_attention(f"{at}.self_attn", d, qkv_bias=bias)]
    for name, heads in (("q_layernorm", d.heads), ("k_layernorm", d.kv_heads)) if qk_norm else ():
        for head in range(heads):
            tensors += norm(f"{at}.self_attn.{name}.norms.{head}", d.head_dim, dim="head_dim")
    tensors += gated_mlp(f"{at}.mlp", d.hidden, d.ffn)
    tensors += norm(f"{at}.input_layernorm", d.hidden, bias=True)
    if not parallel:
        tensors += norm(f"{at}.post_attention_layernorm", d.hidden, bias=True)
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        norms="shared" if parallel else "before",
        parallel=parallel,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a StableLM config."""
    dropout = fields.probability("hidden_dropout", default=0.0)
    d = read_decoder(fields, positions=4096, kv_heads=32, dropout=dropout, own_head_dim=False)
    bias = fields.flag("use_qkv_bias", default=False)
    qk_norm = fields.flag("qk_layernorm", default=False)
    parallel = fields.flag("use_parallel_residual", default=False)
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, bias, qk_norm, parallel) for i in range(d.layers)],
        attention=gqa(d, qk_norm=qk_norm),
        norm_kind="layernorm",
    )


FAMILY = Family(name="stablelm", architecture="StableLmForCausalLM", model_types=("stablelm",), build=build)
