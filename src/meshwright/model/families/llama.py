"""Llama (and what is shaped like it: TinyLlama, SmolLM2)."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Llama config."""
    d = read_decoder(fields, positions=2048)
    attention_bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)
        for i in range(d.layers)
    ]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


FAMILY = Family(name="llama", architecture="LlamaForCausalLM", model_types=("llama",), build=build)
