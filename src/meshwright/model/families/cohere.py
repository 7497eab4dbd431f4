"""Cohere's Command R (``cohere``) and R7B, A (``cohere2``): attention and feed-forward side by side behind one norm.

The norm subtracts the mean, has no bias and computes in fp32; logits are multiplied by a factor. Command R+ has such
norms on queries and keys too, with weights of their own for every head. In Command R7B three layers of four have a
window, and only those rotate anything.
"""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    assemble,
    gated_mlp,
    gqa,
    grouped_attention,
    largest,
    layer_windows,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec


def _block(index: int, d: Decoder, bias: bool, qk_norm: bool, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    heads = (("q_norm", d.heads, "heads"), ("k_norm", d.kv_heads, "kv_heads")) if qk_norm else ()
    tensors: list[TensorSpec] = [
        *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias),
        *(
            TensorSpec(
                name=f"{at}.self_attn.{name}.weight",
                shape=(count, d.head_dim),
                dims=(dim, "head_dim"),
                role="norm",
            )
            for name, count, dim in heads
        ),
        *gated_mlp(f"{at}.mlp", d.hidden, d.ffn),
        *norm(f"{at}.input_layernorm", d.hidden),
    ]
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        sliding_window=window,
        norms="shared",
        parallel=True,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Cohere config of either generation."""
    second = family.name == "cohere2"
    d = read_decoder(fields, positions=8192, tied=True)
    bias = fields.flag("attention_bias", default=False)
    qk_norm = fields.flag("use_qk_norm", default=False) and not second
    scale = fields.config.get("logit_scale", 0.0625)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        fields.wrong("logit_scale", f"{scale!r}", "a number above 0: logits are multiplied by it")
    windows: tuple[int | None, ...] = (None,) * d.layers
    if second:
        every = fields.size("sliding_window_pattern", default=4)
        window = fields.optional_size("sliding_window", default=4096)
        windows = layer_windows(fields, d.layers, window, lambda i: (i + 1) % every != 0)
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, bias, qk_norm, windows[i]) for i in range(d.layers)],
        attention=gqa(d, qk_norm=qk_norm, window=largest(windows)),
        norm_kind="layernorm",
        norm_bias=False,
    )


FAMILY = Family(name="cohere", architecture="CohereForCausalLM", model_types=("cohere",), build=build)
SECOND = Family(name="cohere2", architecture="Cohere2ForCausalLM", model_types=("cohere2",), build=build)
