"""Phi (1, 1.5 and 2): attention and feed-forward side by side behind one layer norm, biases also on the head."""

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
from meshwright.model.spec import BlockSpec, ModelSpec, ModulePaths, TensorSpec

PATHS = ModulePaths(
    base="model",
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.final_layernorm",
    head="lm_head",
    embedding_extras=("model.embed_dropout",),
)


def _block(index: int, d: Decoder, qk_norm: bool) -> BlockSpec:
    at = f"model.layers.{index}"
    hidden = (HIDDEN, d.hidden)
    tensors: list[TensorSpec] = [
        *matrix(f"{at}.self_attn.q_proj", (Q, d.q_size), hidden, "attention_in", bias=True),
        *matrix(f"{at}.self_attn.k_proj", (K, d.kv_size), hidden, "attention_in", bias=True),
        *matrix(f"{at}.self_attn.v_proj", (K, d.kv_size), hidden, "attention_in", bias=True),
        *matrix(f"{at}.self_attn.dense", hidden, (Q, d.q_size), "attention_out", bias=True),
    ]
    if qk_norm:
        tensors += norm(f"{at}.self_attn.q_layernorm", d.head_dim, dim="head_dim", bias=True)
        tensors += norm(f"{at}.self_attn.k_layernorm", d.head_dim, dim="head_dim", bias=True)
    tensors += matrix(f"{at}.mlp.fc1", (FFN, d.ffn), hidden, "mlp_in", bias=True)
    tensors += matrix(f"{at}.mlp.fc2", hidden, (FFN, d.ffn), "mlp_out", bias=True)
    tensors += norm(f"{at}.input_layernorm", d.hidden, bias=True)
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        norms="shared",
        parallel=True,
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Phi config."""
    dropout = max(fields.probability(k, default=0.0) for k in ("resid_pdrop", "embd_pdrop"))
    d = read_decoder(fields, positions=2048, activation="gelu_new", dropout=dropout)
    qk_norm = fields.flag("qk_layernorm", default=False)
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, qk_norm) for i in range(d.layers)],
        attention=gqa(d, qk_norm=qk_norm),
        paths=PATHS,
        norm_kind="layernorm",
        gated=False,
        head_bias=True,
    )


FAMILY = Family(name="phi", architecture="PhiForCausalLM", model_types=("phi",), build=build)
