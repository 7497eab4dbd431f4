"""Gemma-3 (text): Gemma-2's norms, q/k norms, five windowed layers to each full one.

Published configs leave out sizes that equal the library's defaults, so those defaults hold here.
"""

from __future__ import annotations

from meshwright.model.families.gemma import only_causal
from meshwright.model.families.pieces import (
    Family,
    assemble,
    gqa,
    largest,
    layer_windows,
    llama_block,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Gemma-3 text config."""
    d = read_decoder(
        fields,
        positions=131072,
        tied=True,
        heads=8,
        kv_heads=4,
        head_dim=256,
        vocab=262208,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    )
    bias = fields.flag("attention_bias", default=False)
    only_causal(fields)
    window = fields.optional_size("sliding_window", default=4096)
    pattern = fields.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    windows = layer_windows(fields, d.layers, window, lambda i: (i + 1) % pattern != 0)
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=bias, out_bias=bias, qk_norm=True, sandwich=True, window=windows[i])
        for i in range(d.layers)
    ]
    attention = gqa(d, qk_norm=True, window=largest(windows))
    return assemble(fields, family, source, d, blocks=blocks, attention=attention)


FAMILY = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_types=("gemma3_text", "gemma3"),
    build=build,
)
