"""OPT: learned positions with two spare rows, separate q/k/v, ReLU."""

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
    base="model.decoder",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    blocks="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
)


def _block(index: int, d: Decoder, bias: bool) -> BlockSpec:
    at = f"model.decoder.layers.{index}"
    hidden = (HIDDEN, d.hidden)
    tensors: list[TensorSpec] = [
        *matrix(f"{at}.self_attn.k_proj", (K, d.kv_size), hidden, "attention_in", bias=bias),
        *matrix(f"{at}.self_attn.v_proj", (K, d.kv_size), hidden, "attention_in", bias=bias),
        *matrix(f"{at}.self_attn.q_proj", (Q, d.q_size), hidden, "attention_in", bias=bias),
        *matrix(f"{at}.self_attn.out_proj", hidden, (Q, d.q_size), "attention_out", bias=bias),
        *norm(f"{at}.self_attn_layer_norm", d.hidden, bias=True),
        *matrix(f"{at}.fc1", (FFN, d.ffn), hidden, "mlp_in", bias=bias),
        *matrix(f"{at}.fc2", hidden, (FFN, d.ffn), "mlp_out", bias=bias),
        *norm(f"{at}.final_layer_norm", d.hidden, bias=True),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors))


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of an OPT config."""
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads", most=limits.MOST_HEADS)
    check_heads_divide(fields, hidden, heads, "hidden_size", "num_attention_heads")
    projected = fields.size("word_embed_proj_dim", default=hidden)
    if projected != hidden:
        fields.not_built("word_embed_proj_dim", f"{projected}", f"the hidden size, {hidden}")
    for key, usual in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if fields.flag(key, default=usual) is not usual:
            fields.not_built(key, str(not usual).lower(), str(usual).lower())
    if (skipped := fields.probability("layerdrop", default=0.0)) > 0:
        fields.not_built("layerdrop", f"{skipped:g}", "0: no layer is left out at random")
    bias = fields.flag("enable_bias", default=True)
    d = Decoder(
        hidden=hidden,
        layers=fields.size("num_hidden_layers", most=limits.MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=fields.size("ffn_dim", most=limits.MOST_VOCABULARY),
        vocab=fields.size("vocab_size", most=limits.MOST_VOCABULARY),
        positions=fields.size("max_position_embeddings", default=2048, most=limits.MOST_VOCABULARY),
        tied=fields.flag("tie_word_embeddings", default=True),
        activation=fields.text("activation_function", default="relu"),
        dropout=max(
            fields.probability("dropout", default=0.1),
            fields.probability("attention_dropout", default=0.0),
        ),
    )
    fields.refuse()
    positions = table(PATHS.positions, ("positions", d.positions + 2), d.hidden, "position")
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, bias) for i in range(d.layers)],
        attention=gqa(d, rope=False),
        paths=PATHS,
        norm_kind="layernorm",
        gated=False,
        extra_embedding=(positions,),
    )


FAMILY = Family(name="opt", architecture="OPTForCausalLM", model_types=("opt",), build=build)
