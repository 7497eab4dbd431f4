"""OLMo 2 and 3: norms behind attention and feed-forward only, and one over the queries (and keys) of all heads together.

In OLMo 3 three layers of four have a window.
"""

from __future__ import annotations

from meshwright.model.families.pieces import (
    Decoder,
    Family,
    K,
    Q,
    assemble,
    gated_mlp,
    gqa,
    grouped_attention,
    largest,
    layer_windows,
    norm,
    read_decoder,
)
from meshwright.model.fields import Fields
from meshwright.model.spec import BlockSpec, ModelSpec


def _block(index: int, d: Decoder, bias: bool, window: int | None) -> BlockSpec:
    at = f"model.layers.{index}"
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=(
            *grouped_attention(f"{at}.self_attn", d, qkv_bias=bias, out_bias=bias),
            *norm(f"{at}.self_attn.q_norm", d.q_size, dim=Q),
            *norm(f"{at}.self_attn.k_norm", d.kv_size, dim=K),
            *gated_mlp(f"{at}.mlp", d.hidden, d.ffn),
            *norm(f"{at}.post_attention_layernorm", d.hidden),
            *norm(f"{at}.post_feedforward_layernorm", d.hidden),
        ),
        sliding_window=window,
        norms="after",
    )


def build(fields: Fields, family: Family, source: str) -> ModelSpec:
    """Return the ModelSpec of an OLMo 2 or 3 config."""
    d = read_decoder(fields, positions=2048)
    bias = fields.flag("attention_bias", default=False)
    windows: tuple[int | None, ...] = (None,) * d.layers
    if family.name == "olmo3":
        window = fields.optional_size("sliding_window", default=4096)
        windows = layer_windows(fields, d.layers, window, lambda i: (i + 1) % 4 != 0)
    fields.refuse()
    blocks = [_block(i, d, bias, windows[i]) for i in range(d.layers)]
    attention = gqa(d, qk_norm=True, window=largest(windows))
    return assemble(fields, family, source, d, blocks=blocks, attention=attention)


THIRD = Family(name="olmo3", architecture="Olmo3ForCausalLM", model_types=("olmo3",), build=build)
FAMILY = Family(name="olmo2", architecture="Olmo2ForCausalLM", model_types=("olmo2",), build=build)
