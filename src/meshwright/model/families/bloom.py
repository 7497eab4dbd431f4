"""BLOOM: position by attention bias (ALiBi), a norm after the embedding, q/k/v fused head by head."""

from __future__ import annotations

from meshwright.model import fields as limits
from meshwright.model.families.pieces import (
    FFN,
    HIDDEN,
    Decoder,
    Family,
    Q,
    assemble,
    check_heads_divide,
    gqa,
    matrix,
    norm,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, ModulePaths, TensorSpec

PATHS = ModulePaths(
    base="transformer",
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    embedding_extras=("transformer.word_embeddings_layernorm",),
)


def _block(index: int, d: Decoder) -> BlockSpec:
    at = f"transformer.h.{index}"
    hidden = (HIDDEN, d.hidden)
    fused = ("heads*3*head_dim", 3 * d.hidden)
    tensors: list[TensorSpec] = [
        *norm(f"{at}.input_layernorm", d.hidden, bias=True),
        *matrix(f"{at}.self_attention.query_key_value", fused, hidden, "attention_in", bias=True),
        *matrix(f"{at}.self_attention.dense", hidden, (Q, d.q_size), "attention_out", bias=True),
        *norm(f"{at}.post_attention_layernorm", d.hidden, bias=True),
        *matrix(f"{at}.mlp.dense_h_to_4h", (FFN, d.ffn), hidden, "mlp_in", bias=True),
        *matrix(f"{at}.mlp.dense_4h_to_h", hidden, (FFN, d.ffn), "mlp_out", bias=True),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors))


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a BLOOM config."""
    hidden = fields.size("hidden_size", "n_embed")
    heads = fields.size("n_head", "num_attention_heads", most=limits.MOST_HEADS)
    check_heads_divide(fields, hidden, heads, "hidden_size", "n_head")
    if fields.flag("slow_but_exact", default=False) and fields.size("pretraining_tp", default=1) > 1:
        fields.not_built("slow_but_exact", "true", "false, or pretraining_tp = 1")
    d = Decoder(
        hidden=hidden,
        layers=fields.size("n_layer", "num_hidden_layers", most=limits.MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=fields.size("vocab_size", most=limits.MOST_VOCABULARY),
        positions=fields.size("seq_length", default=2048, most=limits.MOST_POSITIONS),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation="bloom_gelu",
        dropout=max(
            fields.probability("hidden_dropout", default=0.0),
            fields.probability("attention_dropout", default=0.0),
        ),
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
        extra_embedding=norm(PATHS.embedding_extras[0], d.hidden, bias=True),
    )


FAMILY = Family(name="bloom", architecture="BloomForCausalLM", model_types=("bloom",), build=build)
