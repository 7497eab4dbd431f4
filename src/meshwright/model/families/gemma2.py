"""Gemma-2: norms before and after attention and feed-forward, every other layer with a window."""

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
    """Return the ModelSpec of a Gemma-2 config."""
    d = read_decoder(
        fields,
        positions=8192,
        tied=True,
        kv_heads=4,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
    )
    bias = fields.flag("attention_bias", default=False)
    only_causal(fields)
    window = fields.optional_size("sliding_window", default=4096)
    windows = layer_windows(fields, d.layers, window, lambda i: i % 2 == 0)
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=bias, out_bias=bias, sandwich=True, window=windows[i])
        for i in range(d.layers)
    ]
    attention = gqa(d, window=largest(windows))
    return assemble(fields, family, source, d, blocks=blocks, attention=attention)


FAMILY = Family(name="gemma2", architecture="Gemma2ForCausalLM", model_types=("gemma2",), build=build)
