"""StarCoder2: grouped-query attention with biases, layer norms, a feed-forward without a gate."""

from __future__ import annotations

from meshwright.model.families.pieces import (
    FFN,
    HIDDEN,
    Decoder,
    Family,
    assemble,
    gqa,
    grouped_attention,
    matrix,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec


def _block(index: int, d: Decoder, bias: bool, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    hidden = (HIDDEN, d.hidden)
    tensors: list[TensorSpec] = [
        *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias),
        *matrix(f"{at}.mlp.c_fc", (FFN, d.ffn), hidden, "mlp_in", bias=bias),
        *matrix(f"{at}.mlp.c_proj", hidden, (FFN, d.ffn), "mlp_out", bias=bias),
        *norm(f"{at}.input_layernorm", d.hidden, bias=True),
        *norm(f"{at}.post_attention_layernorm", d.hidden, bias=True),
    ]
    return BlockSpec(index=index, kind="dense", ffn_size=d.ffn, tensors=tuple(tensors), sliding_window=window)


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of a StarCoder2 config."""
    dropout = max(fields.probability(k, default=0.0) for k in ("residual_dropout", "embedding_dropout"))
    d = read_decoder(
        fields, positions=4096, kv_heads=2, tied=True, activation="gelu_pytorch_tanh", dropout=dropout
    )
    bias = fields.flag("use_bias", default=True)
    window = fields.optional_size("sliding_window", default=None)
    fields.refuse()
    return assemble(
        fields,
        family,
        source,
        d,
        blocks=[_block(i, d, bias, window) for i in range(d.layers)],
        attention=gqa(d, window=window),
        norm_kind="layernorm",
        gated=False,
    )


FAMILY = Family(
    name="starcoder2", architecture="Starcoder2ForCausalLM", model_types=("starcoder2",), build=build
)
