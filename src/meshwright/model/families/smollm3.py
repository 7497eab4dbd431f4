"""SmolLM3: Llama's tensors; every fourth layer rotates nothing (and may have a window)."""

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


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: off unless ``use_sliding_window``, then where nothing is rotated."""
    on = fields.flag("use_sliding_window", default=False)
    window = fields.optional_size("sliding_window", default=None) if on else None
    every = fields.size("no_rope_layer_interval", default=4)
    rotated = fields.items("no_rope_layers", int, layers)
    return layer_windows(
        fields, layers, window, lambda i: not rotated[i] if rotated else (i + 1) % every == 0, idle=not on
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a SmolLM3 config."""
    d = read_decoder(fields, positions=32768, kv_heads=4, tied=True)
    attention_bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    windows = _windows(fields, d.layers)
    fields.refuse()
    blocks = [
        llama_block(
            i, d, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias, window=windows[i]
        )
        for i in range(d.layers)
    ]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, window=largest(windows)))


FAMILY = Family(name="smollm3", architecture="SmolLM3ForCausalLM", model_types=("smollm3",), build=build)
