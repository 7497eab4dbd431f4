"""Phi-3: fused q/k/v and fused gate/up."""

from __future__ import annotations

from meshwright.model.families.pieces import (
    FFN,
    HIDDEN,
    Decoder,
    Family,
    K,
    Q,
    assemble,
    gqa,
    matrix,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec


def _block(index: int, d: Decoder, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    hidden = (HIDDEN, d.hidden)
    fused = (f"{Q}|{K}|{K}", d.q_size + 2 * d.kv_size)
    tensors: list[TensorSpec] = [
        *matrix(f"{at}.self_attn.o_proj", hidden, (Q, d.q_size), "attention_out"),
        *matrix(f"{at}.self_attn.qkv_proj", fused, hidden, "attention_in"),
        *matrix(f"{at}.mlp.gate_up_proj", (f"{FFN}|{FFN}", 2 * d.ffn), hidden, "mlp_in"),
        *matrix(f"{at}.mlp.down_proj", hidden, (FFN, d.ffn), "mlp_out"),
        *norm(f"{at}.input_layernorm", d.hidden),
        *norm(f"{at}.post_attention_layernorm", d.hidden),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors), sliding_window=window)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Phi-3 config."""
    dropout = fields.probability("resid_pdrop", default=0.0)
    d = read_decoder(fields, positions=4096, dropout=dropout)
    window = fields.optional_size("sliding_window", default=None)
    fields.refuse()
    blocks = [_block(i, d, window) for i in range(d.layers)]
    return assemble(fields, family, source, d, blocks=blocks, attention=gqa(d, window=window))


FAMILY = Family(name="phi3", architecture="Phi3ForCausalLM", model_types=("phi3",), build=build)
