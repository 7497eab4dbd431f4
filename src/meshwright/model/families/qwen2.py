"""Qwen2 and Qwen2.5: Llama's tensors with biases on q, k and v."""

from __future__ import annotations

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


def qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: off unless ``use_sliding_window``, then from ``max_window_layers`` on."""
    on = fields.flag("use_sliding_window", default=False)
    window = fields.optional_size("sliding_window", default=4096) if on else None
    first = fields.size("max_window_layers", default=28, least=0)
    return layer_windows(fields, layers, window, lambda i: i >= first)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Qwen2 config."""
    d = read_decoder(fields, positions=32768, kv_heads=32)
    windows = qwen_windows(fields, d.layers)
    fields.refuse()
    blocks = [llama_block(i, d, qkv_bias=True, window=windows[i]) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, window=largest(windows)))


FAMILY = Family(name="qwen2", architecture="Qwen2ForCausalLM", model_types=("qwen2",), build=build)
