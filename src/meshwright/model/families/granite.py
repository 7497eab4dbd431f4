"""Granite 3: Llama's tensors, with factors on embedding, scores, residuals and logits."""

from __future__ import annotations

import math

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Granite config."""
    d = read_decoder(fields, positions=2048)
    attention_bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    scaling = fields.config.get("logits_scaling", 1.0)
    if isinstance(scaling, bool) or not isinstance(scaling, int | float) or not 0 < scaling < math.inf:
        fields.wrong("logits_scaling", f"{scaling!r}", "a number above 0: logits are divided by it")
    fields.refuse()
    blocks = [
        llama_block(i, d, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)
        for i in range(d.layers)
    ]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


FAMILY = Family(name="granite", architecture="GraniteForCausalLM", model_types=("granite",), build=build)
