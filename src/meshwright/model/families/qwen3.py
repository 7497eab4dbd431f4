"""Qwen3: Llama's tensors with a norm on every head's query and key."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, largest, llama_block, read_decoder
from meshwright.model.families.qwen2 import qwen_windows
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Qwen3 config."""
    d = read_decoder(fields, positions=32768, kv_heads=32, head_dim=128)
    bias = fields.flag("attention_bias", default=False)
    windows = qwen_windows(fields, d.layers)
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=bias, out_bias=bias, qk_norm=True, window=windows[i])
        for i in range(d.layers)
    ]
    attention = gqa(d, qk_norm=True, window=largest(windows))
    return assemble(fields, family, source, d, blocks=blocks, attention=attention)


FAMILY = Family(name="qwen3", architecture="Qwen3ForCausalLM", model_types=("qwen3",), build=build)
