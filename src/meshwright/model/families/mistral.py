"""Mistral: Llama's tensors with a sliding window in every layer."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Mistral config."""
    d = read_decoder(fields, positions=131072, kv_heads=8)
    window = fields.optional_size("sliding_window", default=4096)
    fields.refuse()
    blocks = [llama_block(i, d, window=window) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, window=window))


FAMILY = Family(name="mistral", architecture="MistralForCausalLM", model_types=("mistral",), build=build)
