"""ERNIE 4.5 (dense): Llama's tensors, rotary positions on neighbouring numbers, one switch for all biases."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of an ERNIE 4.5 config."""
    d = read_decoder(fields, positions=131072, kv_heads=2, head_dim=128, tied=True)
    bias = fields.flag("use_bias", default=False)
    fields.refuse()
    blocks = [llama_block(i, d, qkv_bias=bias, out_bias=bias, mlp_bias=bias) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


FAMILY = Family(name="ernie4_5", architecture="Ernie4_5ForCausalLM", model_types=("ernie4_5",), build=build)
