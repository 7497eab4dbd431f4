"""GPT-2 and GPT-3-shaped models: learned positions, fused q/k/v, weights stored [in, out]."""

from __future__ import annotations

from meshwright.model import fields as limits
from meshwright.model.families.pieces import (
    FFN,
    HIDDEN,
    Decoder,
    Family,
    K,
    Q,
    assemble,
    check_heads_divide,
    gqa,
    matrix,
    norm,
    table,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, ModulePaths, TensorSpec

PATHS = ModulePaths(
    base="transformer",
    embedding="transformer.wte",
    positions="transformer.wpe",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    embedding_extras=("transformer.drop",),
)


def _block(index: int, d: Decoder) -> BlockSpec:
    at = f"transformer.h.{index}"
    hidden = (HIDDEN, d.hidden)
    fused = (f"{Q}|{K}|{K}", 3 * d.hidden)
    tensors: list[TensorSpec] = [
        *norm(f"{at}.ln_1", d.hidden, bias=True),
        *matrix(f"{at}.attn.c_attn", fused, hidden, "attention_in", bias=True, transposed=True),
        *matrix(f"{at}.attn.c_proj", hidden, (Q, d.q_size), "attention_out", bias=True, transposed=True),
        *norm(f"{at}.ln_2", d.hidden, bias=True),
        *matrix(f"{at}.mlp.c_fc", (FFN, d.ffn), hidden, "mlp_in", bias=True, transposed=True),
        *matrix(f"{at}.mlp.c_proj", hidden, (FFN, d.ffn), "mlp_out", bias=True, transposed=True),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors))


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a GPT-2 config."""
    hidden = fields.size("n_embd", "hidden_size")
    heads = fields.size("n_head", "num_attention_heads", most=limits.MOST_HEADS)
    check_heads_divide(fields, hidden, heads, "n_embd", "n_head")
    if fields.flag("add_cross_attention", default=False):
        fields.not_built("add_cross_attention", "true", "a decoder without cross-attention")
    d = Decoder(
        hidden=hidden,
        layers=fields.size("n_layer", "num_hidden_layers", most=limits.MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=fields.size("n_inner", default=4 * hidden, most=limits.MOST_VOCABULARY),
        vocab=fields.size("vocab_size", most=limits.MOST_VOCABULARY),
        positions=fields.size(
            "n_positions", "max_position_embeddings", default=1024, most=limits.MOST_VOCABULARY
        ),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=fields.text("activation_function", default="gelu_new"),
        dropout=max(fields.probability(k, default=0.1) for k in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    )
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d) for i in range(d.layers)],
        attention=gqa(d, rope=False),
        paths=PATHS,
        norm_kind="layernorm",
        gated=False,
        extra_embedding=(table(PATHS.positions, ("positions", d.positions), d.hidden, "position"),),
    )


FAMILY = Family(name="gpt2", architecture="GPT2LMHeadModel", model_types=("gpt2",), build=build)
