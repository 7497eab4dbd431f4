"""Falcon: q/k/v fused, one key/value head (7B) or queries group by group (40B, 180B), a parallel residual.

The oldest ones (RW) have a key/value head for every query head and positions by attention bias (ALiBi).
"""

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
)
from meshwright.model.fields import Fields
from meshwright.model.sharding import BY_KV_HEAD
from meshwright.model.spec import BlockSpec, ModelSpec, ModulePaths, TensorSpec

PATHS = ModulePaths(
    base="transformer",
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
)


def _fused(d: Decoder, newer: bool, multi_query: bool) -> tuple[str, int]:
    """Return the name and size of the fused output of queries, keys and values."""
    if newer:
        return BY_KV_HEAD, d.q_size + 2 * d.kv_size
    if multi_query:
        return f"{Q}|{K}|{K}", d.q_size + 2 * d.kv_size
    return "heads*3*head_dim", 3 * d.hidden


def _block(index: int, d: Decoder, fused: tuple[str, int], bias: bool, norms: tuple[str, ...]) -> BlockSpec:
    at = f"transformer.h.{index}"
    hidden = (HIDDEN, d.hidden)
    tensors: list[TensorSpec] = [
        *matrix(f"{at}.self_attention.query_key_value", fused, hidden, "attention_in", bias=bias),
        *matrix(f"{at}.self_attention.dense", hidden, (Q, d.q_size), "attention_out", bias=bias),
        *matrix(f"{at}.mlp.dense_h_to_4h", (FFN, d.ffn), hidden, "mlp_in", bias=bias),
        *matrix(f"{at}.mlp.dense_4h_to_h", hidden, (FFN, d.ffn), "mlp_out", bias=bias),
    ]
    for name in norms:
        tensors += norm(f"{at}.{name}", d.hidden, bias=True)
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        norms="shared" if len(norms) == 1 else "before",
        parallel="post_attention_layernorm" not in norms,
    )


def _norms(fields: Fields, newer: bool) -> tuple[str, ...]:
    """Return the names of a block's norms, in the order in which they are computed."""
    parallel = fields.flag("parallel_attn", default=True)
    count = fields.optional_size("num_ln_in_parallel_attn", default=None)
    if not parallel and newer:
        fields.not_built("parallel_attn", "false with new_decoder_architecture", "true")
    if not parallel:
        return ("input_layernorm", "post_attention_layernorm")
    if count == 2 and not newer:
        fields.not_built("num_ln_in_parallel_attn", "2 without new_decoder_architecture", "1")
    return ("ln_attn", "ln_mlp") if newer and count in (None, 2) else ("input_layernorm",)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a Falcon config."""
    hidden = fields.size("n_embed", "hidden_size")
    heads = fields.size("num_attention_heads", "n_head", most=limits.MOST_HEADS)
    check_heads_divide(fields, hidden, heads, "hidden_size", "num_attention_heads")
    newer = fields.flag("new_decoder_architecture", default=False)
    multi_query = fields.flag("multi_query", default=True) and not newer
    kv_heads = fields.size("num_kv_heads", "n_head_kv", default=heads, null=heads, most=limits.MOST_HEADS)
    good = fields.good("num_kv_heads", "num_attention_heads")
    if good and heads % kv_heads:
        fields.wrong("num_kv_heads", f"{kv_heads} for {heads} query heads", "a divisor of them")
    if good and kv_heads != heads and not newer and not multi_query:
        fields.wrong("num_kv_heads", f"{kv_heads} for {heads} query heads", f"{heads}: neither is grouped")
    kv_heads = kv_heads if newer else 1 if multi_query else heads
    if fields.probability("attention_dropout", default=0.0) > 0:
        fields.not_built("attention_dropout", "above 0", "0")
    norms = _norms(fields, newer)
    bias = fields.flag("bias", default=False)
    alibi = fields.flag("alibi", default=False)
    d = Decoder(
        hidden=hidden,
        layers=fields.size("num_hidden_layers", "n_layer", most=limits.MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=fields.size("ffn_hidden_size", default=4 * hidden, most=limits.MOST_VOCABULARY),
        vocab=fields.size("vocab_size", default=65024, most=limits.MOST_VOCABULARY),
        positions=fields.size("max_position_embeddings", default=2048, most=limits.MOST_POSITIONS),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=fields.text("activation", default="gelu"),
        dropout=fields.probability("hidden_dropout", default=0.0),
    )
    fields.refuse()
    fused = _fused(d, newer, multi_query)
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, fused, bias, norms) for i in range(d.layers)],
        attention=gqa(d, rope=not alibi),
        paths=PATHS,
        norm_kind="layernorm",
        gated=False,
    )


FAMILY = Family(name="falcon", architecture="FalconForCausalLM", model_types=("falcon",), build=build)
