"""GPT-NeoX and Pythia: q/k/v fused head by head, rotary positions on a part of each head, a parallel residual."""

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
    base="gpt_neox",
    embedding="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    embedding_extras=("gpt_neox.emb_dropout",),
)


def _block(index: int, d: Decoder, bias: bool, parallel: bool) -> BlockSpec:
    at = f"gpt_neox.layers.{index}"
    hidden = (HIDDEN, d.hidden)
    fused = ("heads*3*head_dim", 3 * d.hidden)
    tensors: list[TensorSpec] = [
        *norm(f"{at}.input_layernorm", d.hidden, bias=True),
        *norm(f"{at}.post_attention_layernorm", d.hidden, bias=True),
        *matrix(f"{at}.attention.query_key_value", fused, hidden, "attention_in", bias=bias),
        *matrix(f"{at}.attention.dense", hidden, (Q, d.q_size), "attention_out", bias=bias),
        *matrix(f"{at}.mlp.dense_h_to_4h", (FFN, d.ffn), hidden, "mlp_in", bias=True),
        *matrix(f"{at}.mlp.dense_4h_to_h", hidden, (FFN, d.ffn), "mlp_out", bias=True),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors), parallel=parallel)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a GPT-NeoX config."""
    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads", most=limits.MOST_HEADS)
    check_heads_divide(fields, hidden, heads, "hidden_size", "num_attention_heads")
    d = Decoder(
        hidden=hidden,
        layers=fields.size("num_hidden_layers", most=limits.MOST_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=fields.size("intermediate_size", most=limits.MOST_VOCABULARY),
        vocab=fields.size("vocab_size", most=limits.MOST_VOCABULARY),
        positions=fields.size("max_position_embeddings", default=2048, most=limits.MOST_POSITIONS),
        tied=fields.flag("tie_word_embeddings", default=False),
        activation=fields.text("hidden_act", default="gelu"),
        dropout=max(
            fields.probability("hidden_dropout", default=0.0),
            fields.probability("attention_dropout", default=0.0),
        ),
    )
    bias = fields.flag("attention_bias", default=True)
    parallel = fields.flag("use_parallel_residual", default=True)
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, bias, parallel) for i in range(d.layers)],
        attention=gqa(d),
        paths=PATHS,
        norm_kind="layernorm",
        gated=False,
    )


FAMILY = Family(name="gpt_neox", architecture="GPTNeoXForCausalLM", model_types=("gpt_neox",), build=build)
