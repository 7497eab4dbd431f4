"""Gemma (the first): Llama's tensors, norms that multiply by 1 + weight, an embedding scaled by sqrt(hidden size)."""

from __future__ import annotations

from meshwright.model.families.pieces import Family, assemble, gqa, llama_block, read_decoder
from meshwright.model.fields import Fields
from meshwright.model.spec import ModelSpec


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Gemma config."""
    # Configs that say "gelu" mean its tanh form, and transformers reads them so.
    d = read_decoder(
        fields,
        positions=8192,
        tied=True,
        kv_heads=16,
        head_dim=256,
        activation="gelu_pytorch_tanh",
        renamed={"gelu": "gelu_pytorch_tanh"},
    )
    bias = fields.flag("attention_bias", default=False)
    only_causal(fields)
    fields.refuse()
    blocks = [llama_block(i, d, qkv_bias=bias, out_bias=bias) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d))


def only_causal(fields: Fields) -> None:
    """Note E125 for a Gemma whose tokens see later ones."""
    if fields.flag("use_bidirectional_attention", default=False):
        fields.not_built("use_bidirectional_attention", "true", "false: a causal model")


FAMILY = Family(name="gemma", architecture="GemmaForCausalLM", model_types=("gemma",), build=build)
