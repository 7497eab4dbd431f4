"""Seed-OSS: Llama's tensors, a bias on q, k and v only, dropout by default."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Seed-OSS config."""
    dropout = max(fields.probability(k, default=0.1) for k in ("residual_dropout", "attention_dropout"))
    d = read_decoder(fields, positions=524288, kv_heads=8, head_dim=128, dropout=dropout)
    bias = fields.flag("attention_bias", default=True)
    out_bias = fields.flag("attention_out_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    fields.refuse()
    blocks = [llama_block(i, d, qkv_bias=bias, out_bias=out_bias, mlp_bias=mlp_bias) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


FAMILY = Family(name="seed_oss", architecture="SeedOssForCausalLM", model_types=("seed_oss",), build=build)
