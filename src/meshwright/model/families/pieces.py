"""Building pieces that the families share: sizes, tensors of attention, MLP and experts, and assembly.

Shapes: H hidden, Q = heads * head_dim, K = kv_heads * head_dim, F ffn, V vocab, E experts.
A tensor's ``dims`` name every dim; a fused tensor joins the names of its segments with "|".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from meshwright.model import fields as limits
from meshwright.model.fields import Fields
from meshwright.model.spec import (
    AttentionSpec,
    BlockSpec,
    ModelSpec,
    ModulePaths,
    MoESpec,
    Role,
    TensorSpec,
)

HIDDEN = "hidden"
Q = "heads*head_dim"
K = "kv_heads*head_dim"
FFN = "ffn"
VOCAB = "vocab"
EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: the model types and classes it answers to, and the function that reads its config."""

    name: str
    architecture: str
    model_types: tuple[str, ...]
    build: Callable[[Fields, Family, str], ModelSpec]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes that every decoder has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    activation: str
    dropout: float = 0.0

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of all key/value heads."""
        return self.kv_heads * self.head_dim


def read_decoder(
    fields: Fields,
    *,
    positions: int,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    heads: int | None = None,
    vocab: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    dropout: float = 0.0,
    reads_head_dim: bool = True,
    own_head_dim: bool = True,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Decoder:
    """Return the sizes of a Llama-shaped config; the keywords are the defaults of fields left out.

    ``kv_heads`` None means "as many as query heads"; ``head_dim`` None means hidden // heads. An explicit
    null always has those meanings. ``own_head_dim`` False: the family has no such field and ignores one.
    ``renamed``: activations that the family's configs name otherwise.
    """
    hidden = fields.size("hidden_size")
    layers = fields.size("num_hidden_layers", most=limits.MOST_LAYERS)
    num_heads = fields.size("num_attention_heads", default=heads, most=limits.MOST_HEADS)
    num_kv = fields.size(
        "num_key_value_heads", default=kv_heads or num_heads, null=num_heads, most=limits.MOST_HEADS
    )
    ffn = fields.size("intermediate_size", most=limits.MOST_VOCABULARY)
    said = fields.text(activation_key, "hidden_act", "hidden_activation", default=activation)
    vocabulary = fields.size("vocab_size", default=vocab, most=limits.MOST_VOCABULARY)
    size = _head_dim(fields, hidden, num_heads, head_dim, own_head_dim) if reads_head_dim else head_dim or 1
    if fields.good("num_attention_heads", "num_key_value_heads") and num_heads % num_kv:
        fields.wrong(
            "num_key_value_heads",
            f"{num_heads} query heads and {num_kv} key/value heads",
            "num_attention_heads % num_key_value_heads == 0",
            do=f"one of {_divisors(num_heads)}",
        )
    return Decoder(
        hidden=hidden,
        layers=layers,
        heads=num_heads,
        kv_heads=num_kv,
        head_dim=size,
        ffn=ffn,
        vocab=vocabulary,
        positions=fields.size("max_position_embeddings", default=positions, most=limits.MOST_POSITIONS),
        tied=fields.flag("tie_word_embeddings", default=tied),
        activation=renamed.get(said, said),
        dropout=max(dropout, fields.probability("attention_dropout", default=0.0)),
    )


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None, own: bool) -> int:
    given = fields.optional_size("head_dim", default=default, most=limits.MOST_HIDDEN) if own else None
    if given is None:
        check_heads_divide(fields, hidden, heads, "hidden_size", "num_attention_heads")
        given = hidden // heads
        if not fields.good("hidden_size", "num_attention_heads"):
            return 2
    if fields.good("head_dim") and given % 2:
        fields.wrong("head_dim", f"{given}", "an even size: rotary positions turn pairs")
    return given


def check_heads_divide(fields: Fields, hidden: int, heads: int, hidden_key: str, heads_key: str) -> None:
    """Note E123 unless the hidden size is a multiple of the heads."""
    if fields.good(hidden_key, heads_key) and hidden % heads:
        fields.wrong(
            hidden_key,
            f"{hidden} does not divide into {heads} heads",
            f"{hidden_key} % {heads_key} == 0 where head_dim is absent",
            do=f"{hidden_key} = {max(heads, hidden // heads * heads)} or {(hidden // heads + 1) * heads}",
        )


def _divisors(number: int) -> str:
    found = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return " | ".join(str(d) for d in found[-8:])


def matrix(
    name: str,
    out: tuple[str, int],
    into: tuple[str, int],
    role: Role,
    *,
    bias: bool = False,
    transposed: bool = False,
) -> Iterable[TensorSpec]:
    """Yield a linear layer's weight [out, in] (``transposed``: [in, out], as GPT-2 stores it) and its bias."""
    first, second = (into, out) if transposed else (out, into)
    yield TensorSpec(
        name=f"{name}.weight",
        shape=(first[1], second[1]),
        dims=(first[0], second[0]),
        role=role,
        transposed=transposed,
    )
    if bias:
        yield TensorSpec(name=f"{name}.bias", shape=(out[1],), dims=(out[0],), role=role, is_bias=True)


def norm(name: str, size: int, *, dim: str = HIDDEN, bias: bool = False) -> Iterable[TensorSpec]:
    """Yield a norm's weight and, for a layer norm, its bias."""
    yield TensorSpec(name=f"{name}.weight", shape=(size,), dims=(dim,), role="norm")
    if bias:
        yield TensorSpec(name=f"{name}.bias", shape=(size,), dims=(dim,), role="norm", is_bias=True)


def grouped_attention(
    prefix: str, d: Decoder, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False
) -> Iterable[TensorSpec]:
    """Yield q, k, v and output projections and, with ``qk_norm``, the per-head norms after them."""
    hidden = (HIDDEN, d.hidden)
    yield from matrix(f"{prefix}.q_proj", (Q, d.q_size), hidden, "attention_in", bias=qkv_bias)
    yield from matrix(f"{prefix}.k_proj", (K, d.kv_size), hidden, "attention_in", bias=qkv_bias)
    yield from matrix(f"{prefix}.v_proj", (K, d.kv_size), hidden, "attention_in", bias=qkv_bias)
    yield from matrix(f"{prefix}.o_proj", hidden, (Q, d.q_size), "attention_out", bias=out_bias)
    if qk_norm:
        yield from norm(f"{prefix}.q_norm", d.head_dim, dim="head_dim")
        yield from norm(f"{prefix}.k_norm", d.head_dim, dim="head_dim")


def gated_mlp(
    prefix: str, hidden: int, ffn: int, *, bias: bool = False, shared: bool = False
) -> Iterable[TensorSpec]:
    """Yield gate, up and down of a gated MLP (of a shared expert with ``shared``)."""
    into: Role = "shared_in" if shared else "mlp_in"
    out: Role = "shared_out" if shared else "mlp_out"
    yield from matrix(f"{prefix}.gate_proj", (FFN, ffn), (HIDDEN, hidden), into, bias=bias)
    yield from matrix(f"{prefix}.up_proj", (FFN, ffn), (HIDDEN, hidden), into, bias=bias)
    yield from matrix(f"{prefix}.down_proj", (HIDDEN, hidden), (FFN, ffn), out, bias=bias)


def router(prefix: str, hidden: int, experts: int) -> Iterable[TensorSpec]:
    """Yield the expert router [E, H]."""
    yield from matrix(f"{prefix}.gate", (EXPERTS, experts), (HIDDEN, hidden), "router")


def expert_stack(prefix: str, hidden: int, moe: MoESpec) -> Iterable[TensorSpec]:
    """Yield the routed experts as transformers 5 stores them: gate_up [E, 2F, H] and down [E, H, F]."""
    yield TensorSpec(
        name=f"{prefix}.experts.gate_up_proj",
        shape=(moe.num_experts, 2 * moe.ffn_size, hidden),
        dims=(EXPERTS, f"{FFN}|{FFN}", HIDDEN),
        role="expert_in",
    )
    yield TensorSpec(
        name=f"{prefix}.experts.down_proj",
        shape=(moe.num_experts, hidden, moe.ffn_size),
        dims=(EXPERTS, HIDDEN, FFN),
        role="expert_out",
    )


def read_moe(
    fields: Fields,
    *,
    experts_keys: Sequence[str],
    ffn_key: str,
    top_k: int | None,
    shared: int = 0,
    shared_key: str = "",
) -> MoESpec:
    """Return the mixture's sizes; ``top_k`` and ``shared`` are defaults of fields left out."""
    num_experts = fields.size(*experts_keys, most=limits.MOST_HEADS)
    per_token = fields.size("num_experts_per_tok", default=top_k, most=limits.MOST_HEADS)
    ffn = fields.size(ffn_key, most=limits.MOST_VOCABULARY)
    num_shared = fields.size(shared_key, default=shared, least=0, most=1024) if shared_key else 0
    if fields.good(*experts_keys, "num_experts_per_tok") and per_token > num_experts:
        fields.wrong(
            "num_experts_per_tok",
            f"{per_token} experts per token of {num_experts}",
            f"num_experts_per_tok <= {num_experts}",
        )
    return MoESpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        ffn_size=ffn,
        num_shared_experts=num_shared,
        shared_ffn_size=num_shared * ffn,
    )


def layer_windows(
    fields: Fields, layers: int, window: int | None, sliding: Callable[[int], bool], idle: bool = False
) -> tuple[int | None, ...]:
    """Return each layer's sliding window or None; a ``layer_types`` list overrides the rule ``sliding``.

    ``idle``: windows are switched off, whatever the list says.
    """
    kinds = fields.items("layer_types", str, layers)
    if kinds is None:
        return tuple(window if sliding(i) else None for i in range(layers))
    for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        fields.not_built("layer_types", f"{kind!r}", "full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds and not idle:
        fields.wrong("sliding_window", "null, but layer_types names sliding_attention", "a window size")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


LLAMA_PATHS = ModulePaths(
    base="model",
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.norm",
    head="lm_head",
)


def table(name: str, rows: tuple[str, int], hidden: int, role: Role) -> TensorSpec:
    """Return an embedding table [rows, H]."""
    return TensorSpec(name=f"{name}.weight", shape=(rows[1], hidden), dims=(rows[0], HIDDEN), role=role)


def assemble(
    fields: Fields,
    family: Family,
    source: str,
    d: Decoder,
    *,
    blocks: Sequence[BlockSpec],
    attention: AttentionSpec,
    paths: ModulePaths = LLAMA_PATHS,
    norm_kind: Literal["rmsnorm", "layernorm"] = "rmsnorm",
    gated: bool = True,
    moe: MoESpec | None = None,
    extra_embedding: Iterable[TensorSpec] = (),
    norm_bias: bool = True,
    head_bias: bool = False,
) -> ModelSpec:
    """Return the ModelSpec: embedding, blocks, final norm and head around the given blocks.

    ``norm_bias``: a final layer norm has a bias.
    """
    embedding = table(paths.embedding, (VOCAB, d.vocab), d.hidden, "embedding")
    head = TensorSpec(
        name=f"{paths.head}.weight",
        shape=(d.vocab, d.hidden),
        dims=(VOCAB, HIDDEN),
        role="head",
        tied_to=embedding.name if d.tied else None,
    )
    bias = TensorSpec(name=f"{paths.head}.bias", shape=(d.vocab,), dims=(VOCAB,), role="head", is_bias=True)
    config: dict[str, Any] = dict(fields.config)
    return ModelSpec(
        name=fields.name,
        family=family.name,
        architecture=family.architecture,
        hidden_size=d.hidden,
        ffn_size=d.ffn,
        vocab_size=d.vocab,
        max_position_embeddings=d.positions,
        attention=attention,
        moe=moe,
        tied_embeddings=d.tied,
        gated_mlp=gated,
        activation=d.activation,
        norm=norm_kind,
        dropout=d.dropout,
        embedding=(embedding, *extra_embedding),
        blocks=tuple(blocks),
        final=tuple(norm(paths.final_norm, d.hidden, bias=norm_kind == "layernorm" and norm_bias)),
        head=(head, bias) if head_bias else (head,),
        paths=paths,
        source=source,
        config=config,
    )


def gqa(d: Decoder, *, qk_norm: bool = False, rope: bool = True, window: int | None = None) -> AttentionSpec:
    """Return the grouped-query AttentionSpec of a decoder."""
    return AttentionSpec(
        kind="gqa",
        num_heads=d.heads,
        num_kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        value_head_dim=d.head_dim,
        qk_norm=qk_norm,
        rope=rope,
        sliding_window=window,
    )


def largest(windows: Iterable[int | None]) -> int | None:
    """Return the window of the layers that have one."""
    return next((w for w in windows if w is not None), None)


def llama_block(
    index: int,
    d: Decoder,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sandwich: bool = False,
    window: int | None = None,
) -> BlockSpec:
    """Return a Llama-shaped dense block; ``sandwich`` adds Gemma's norms around the feed-forward."""
    at = f"model.layers.{index}"
    tensors: list[TensorSpec] = [
        *grouped_attention(f"{at}.self_attn", d, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm),
        *gated_mlp(f"{at}.mlp", d.hidden, d.ffn, bias=mlp_bias),
        *norm(f"{at}.input_layernorm", d.hidden),
        *norm(f"{at}.post_attention_layernorm", d.hidden),
    ]
    if sandwich:
        tensors += norm(f"{at}.pre_feedforward_layernorm", d.hidden)
        tensors += norm(f"{at}.post_feedforward_layernorm", d.hidden)
    return BlockSpec(
        index=index,
        kind="dense",
        ffn_size=d.ffn,
        tensors=tuple(tensors),
        sliding_window=window,
        norms="around" if sandwich else "before",
    )
