"""What a block keeps for backward, tensor by tensor, as transformers' eager modules save it.

The list was read off the saved-tensor hooks of the modules themselves (unique storages, parameters left
out) and is held to them by a test. Things that a formula on paper misses: the RMSNorm upcasts to fp32 and
keeps that copy, its root and the normed value; the tanh form of GELU spelled out in Python keeps four
tensors of the feed-forward's width; the Gemma norm keeps the normed value in fp32 and a copy of its weight.

Sizes are per micro-batch. ``c`` below is the byte size of the compute dtype and ``r`` that of the residual
stream, which differs under autocast (compute bf16, residual fp32): then every linear layer keeps its own cast
of its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from meshwright.model.randomness import drops_probabilities, drops_residual, residual_drops
from meshwright.model.spec import NORM_PLACES, BlockSpec, ModelSpec, MoESpec

AttentionKernel: TypeAlias = Literal["flash", "math", "parts", "heads"]
Along: TypeAlias = Literal["tp", "sequence", "column_input"]

_FP32: Final = 4
_INT64: Final = 8

FEED_FORWARD: Final = frozenset(
    {"input of the feed-forward", "feed-forward", "shared expert"}
    | {"input of the experts", "router", "dispatched inputs", "routed experts", "expert outputs"}
)
"""Operations whose tensors are gone when backward has gone through a block's feed-forward."""

_INSIDE_ACTIVATION: Final = {"gelu_new": 4, "gelu_pytorch_tanh": 1, "gelu": 1, "silu": 1, "relu": 0}
"""Tensors of the feed-forward's width kept inside the activation, its output not counted."""


_ONE_PLUS_WEIGHT: Final = ("gemma", "gemma2", "gemma3")
"""Families whose norms multiply by 1 + weight, in fp32."""

_NORMED_WIDE: Final = (*_ONE_PLUS_WEIGHT, "olmo2", "olmo3", "gpt_oss")
"""Families whose norms are multiplied by the weight in fp32."""

_COMPOSED_LAYER_NORM: Final = ("cohere", "cohere2")
"""Families whose layer norm is written out, in fp32."""

_FUSED_QKV: Final = ("gpt2", "phi3", "bloom", "gpt_neox", "falcon")
_FUSED_GATE: Final = ("phi3", "glm", "glm4")

_QUERIES_JOINED: Final = ("glm", "glm4", "glm4_moe", "stablelm", "phi")
"""Families whose queries come from a concatenation, head first: the attention output is copied to token first."""

_ROTATED_IN_PAIRS: Final = ("glm", "glm4", "ernie4_5")
"""Families whose blocks each make tables of their own of the rotary angles."""

_SCALED_SCORES: Final = ("deepseek_v3", "glm4_moe")
"""Families whose routers take a sigmoid and choose groups of experts first."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """One tensor (or a few alike) kept for backward.

    Attributes:
        op: the module or operation that keeps it.
        num_bytes: bytes for the whole micro-batch on one device without any cut.
        along: what divides it: "tp" always the tensor axis; "sequence" that axis only with sequence-sharded
            norms; "column_input" nothing: the replicated (or gathered) input of column-cut matrices, a mask.
    """

    op: str
    num_bytes: int
    along: Along


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    seq_len: int
    c: int
    r: int

    @property
    def mixed(self) -> bool:
        return self.c != self.r

    def casts(self, width: int, layers: int) -> int:
        """Bytes of a linear input kept by ``layers`` layers: one storage, or a cast each under autocast."""
        return self.tokens * width * self.c * (layers if self.mixed else 1)

    def keep(self, width: float, size: int) -> int:
        return round(self.tokens * width * size)


def saved_activation_bytes(
    spec: ModelSpec,
    block: BlockSpec,
    seq_len: int,
    micro_batch: int,
    compute_bytes: int,
    attention: AttentionKernel = "flash",
    residual_bytes: int | None = None,
    mask_bytes: int = 1,
) -> int:
    """Return the bytes that one block keeps for backward of one micro-batch; see ``saved_activations``."""
    listed = saved_activations(
        spec, block, seq_len, micro_batch, compute_bytes, attention, residual_bytes, mask_bytes
    )
    return sum(s.num_bytes for s in listed)


def saved_activations(
    spec: ModelSpec,
    block: BlockSpec,
    seq_len: int,
    micro_batch: int,
    compute_bytes: int,
    attention: AttentionKernel = "flash",
    residual_bytes: int | None = None,
    mask_bytes: int = 1,
) -> tuple[SavedTensor, ...]:
    """Return what one block keeps for backward, operation by operation.

    Args:
        spec: the model.
        block: one of its blocks.
        seq_len: tokens per sequence on this rank.
        micro_batch: sequences.
        compute_bytes: bytes of the compute dtype (fp32 4, bf16 2, fp64 8).
        attention: "flash" for any fused kernel (keeps q, k, v, output, log-sum-exp), "math" for scores in
            memory, "parts" for attention over a context axis (``parallel.ring``), which keeps what a fused kernel does
            and makes masks and dropped scores again, "heads" for the same behind an exchange of heads
            (``parallel.ulysses``), whose result is another copy of the output. Families that transformers runs unfused
            (BLOOM, soft-capped Gemma-2) always keep scores.
        residual_bytes: bytes of the residual stream; 4 under autocast, by default the compute dtype's.
        mask_bytes: bytes per element of a dropout mask: 1 on a GPU; a CPU keeps the noise in the compute dtype.

    Excluded: parameters, the cos/sin tables (shared by all blocks), weight casts of autocast. With dropout on the
    attention probabilities attention is not fused (``parallel.dropout``), unless it goes over a context axis.
    Expert inputs are counted at perfect balance.
    """
    z = _Sizes(micro_batch * seq_len, seq_len, compute_bytes, residual_bytes or compute_bytes)
    places = NORM_PLACES[block.norms]
    saved: list[SavedTensor] = []
    for name, part in (
        ("attention", _attention(spec, block, z, attention)),
        ("feed-forward", _feed_forward(spec, block, z)),
    ):
        if "before" in places and not (block.norms == "shared" and name == "feed-forward"):
            shared = block.parallel and name == "feed-forward"  # both norms read the block's input
            saved += _norm(spec, z, f"norm before {name}", spec.hidden_size, z.r, shared=shared)
        saved += part
        if "after" in places:
            saved += _norm(spec, z, f"norm after {name}", spec.hidden_size, z.c)
    if drops_residual(spec):
        masks = z.keep(residual_drops(spec) * spec.hidden_size, mask_bytes)
        saved.append(SavedTensor(op="dropout masks", num_bytes=masks, along="sequence"))
    saved += _adapters(spec, block, z)
    return tuple(s for s in saved if s.num_bytes)


def _adapters(spec: ModelSpec, block: BlockSpec, z: _Sizes) -> Iterable[SavedTensor]:
    """Return what adapters keep: the rank-wide product A x of each; its input is the matrix's own.

    Those of experts do so for each of a token's k choices.
    """
    if spec.adapter is None:
        return
    factors = [t for t in block.tensors if t.role == "adapter"]
    choices = block.moe.experts_per_token if block.moe is not None else 1
    count = sum(choices if t.of_experts else 1 for t in factors) // 2
    kept = z.keep(count * spec.adapter.rank, z.c)
    yield SavedTensor(op="inputs of the adapters' second factors", num_bytes=kept, along="column_input")


def saved_final_bytes(
    spec: ModelSpec, seq_len: int, micro_batch: int, compute_bytes: int, residual_bytes: int | None = None
) -> int:
    """Return the bytes that the final norm and the head's input keep for one micro-batch (no logits)."""
    z = _Sizes(micro_batch * seq_len, seq_len, compute_bytes, residual_bytes or compute_bytes)
    kept = sum(s.num_bytes for s in _norm(spec, z, "final norm", spec.hidden_size, z.r))
    return kept + z.keep(spec.hidden_size, z.c)


def _norm(
    spec: ModelSpec,
    z: _Sizes,
    op: str,
    width: int,
    out: int,
    count: int = 1,
    along: Along = "sequence",
    shared: bool = False,
) -> Iterable[SavedTensor]:
    """Return what ``count`` norms of ``width`` per token keep; ``out`` is the byte size of their input.

    ``shared``: another layer norm keeps the same input.
    """
    total = count * width
    if writes_layer_norm(spec):
        weight = total * _FP32 if z.r != _FP32 else 0  # heads have weights of their own
        kept = z.keep(3 * total, _FP32) + z.keep(count, _FP32) + weight
    elif spec.norm == "layernorm":
        kept = (0 if shared else z.keep(total, out)) + z.keep(2 * count, z.r)
    else:
        gemma = spec.family in _ONE_PLUS_WEIGHT
        normed = _FP32 if spec.family in _NORMED_WIDE else out
        weight = width * _FP32 if gemma else 0
        kept = z.keep(total, _FP32) + z.keep(count, _FP32) + z.keep(total, normed) + weight
    yield SavedTensor(op=op, num_bytes=kept, along=along)


def _attention(
    spec: ModelSpec, block: BlockSpec, z: _Sizes, kernel: AttentionKernel
) -> Iterable[SavedTensor]:
    a = spec.attention
    latent = a.kind == "mla"
    unfused = kernel == "math" or always_unfused(spec)
    if latent:
        yield from _latent_inputs(spec, z)
    else:
        fused = spec.family in _FUSED_QKV
        yield SavedTensor(
            op="input of q, k, v",
            num_bytes=z.casts(spec.hidden_size, 1 if fused else 3),
            along="column_input",
        )
    if spec.family in _ROTATED_IN_PAIRS:
        turned_in = max(z.r, _FP32) if spec.family == "ernie4_5" else z.r
        tables = z.seq_len * 2 * _rotated(spec) * turned_in
        yield SavedTensor(op="rotary angles of the block", num_bytes=tables, along="column_input")
    if a.qk_norm:
        for name, heads in (("query norm", a.num_heads), ("key norm", a.num_kv_heads)):
            together = spec.family in ("olmo2", "olmo3")
            count = 1 if together else heads  # one norm over all heads, or one of each
            yield from _norm(spec, z, name, heads * a.head_dim // count, z.c, count, "tp")
    if kernel in ("parts", "heads"):
        yield from _fused(spec, block, z, masks=False)
        if kernel == "heads":
            copy = z.keep(a.num_heads * a.value_head_dim, z.c)
            yield SavedTensor(op="attention output, exchanged", num_bytes=copy, along="tp")
    elif drops_probabilities(spec):
        yield from _dropped(spec, z)
    else:
        yield from (_scores(spec, z) if unfused else _fused(spec, block, z))


def _rotated(spec: ModelSpec) -> int:
    """Return how many numbers of a head are turned: of a GLM-4's half."""
    usual = 1.0 if spec.family == "ernie4_5" else 0.5
    said = spec.config.get("rope_parameters")
    within: Mapping[str, Any] = cast("Mapping[str, Any]", said) if isinstance(said, Mapping) else {}
    factor = within.get("partial_rotary_factor", spec.config.get("partial_rotary_factor", usual))
    return int(spec.attention.head_dim * float(factor))


def _dropped(spec: ModelSpec, z: _Sizes) -> Iterable[SavedTensor]:
    """Keep q, k, v for all heads, the softmax in at least fp32, the mask and the probabilities that are left."""
    a = spec.attention
    widths = a.num_heads * (2 * a.head_dim + a.value_head_dim)
    yield SavedTensor(op="queries, keys and values", num_bytes=z.keep(widths, z.c), along="tp")
    yield SavedTensor(
        op="attention output", num_bytes=z.keep(a.num_heads * a.value_head_dim, z.c), along="tp"
    )
    square = z.tokens * z.seq_len * a.num_heads
    yield SavedTensor(op="attention scores", num_bytes=square * (max(z.c, _FP32) + 1 + z.c), along="tp")


def writes_layer_norm(spec: ModelSpec) -> bool:
    """Return whether the model's layer norms are written out operation by operation."""
    return spec.family in _COMPOSED_LAYER_NORM


def always_unfused(spec: ModelSpec) -> bool:
    """Return whether no fused kernel runs the model's attention in transformers.

    Those are ALiBi, soft-capped scores, sinks, and Falcon's one key/value head, which it hands over as one.
    """
    return _eager(spec) or (
        spec.family == "falcon" and spec.num_kv_heads < spec.num_heads and not _grouped(spec)
    )


def _eager(spec: ModelSpec) -> bool:
    return caps_scores(spec) or spec.family in ("bloom", "gpt_oss")


def _grouped(spec: ModelSpec) -> bool:
    """Return whether a Falcon is a newer one, which repeats keys and values to all heads itself."""
    return bool(spec.config.get("new_decoder_architecture"))


def caps_scores(spec: ModelSpec) -> bool:
    """Return whether the model caps its attention scores, which no fused kernel with a log-sum-exp does."""
    return spec.family == "gemma2" and spec.config.get("attn_logit_softcapping", 50.0) is not None


def _latent_inputs(spec: ModelSpec, z: _Sizes) -> Iterable[SavedTensor]:
    """Latent projections: inputs of the down projections, their norms, and inputs of the up projections."""
    a = spec.attention
    rank, rope = a.kv_lora_rank or 0, a.qk_rope_head_dim or 0
    yield SavedTensor(
        op="input of the latent projections",
        num_bytes=z.casts(spec.hidden_size, 2),
        along="column_input",
    )
    if a.q_lora_rank is not None:
        yield from _norm(spec, z, "query latent norm", a.q_lora_rank, z.c)
        yield SavedTensor(
            op="input of the query up projection", num_bytes=z.casts(a.q_lora_rank, 1), along="column_input"
        )
    yield from _norm(spec, z, "key/value latent norm", rank, z.c)
    beside = z.keep(rope, _FP32) if z.c == _FP32 else 0  # the rotary part shares the norm input's storage
    yield SavedTensor(
        op="input of the key/value up projection",
        num_bytes=z.casts(rank, 1) + beside,
        along="column_input",
    )


def _fused(spec: ModelSpec, block: BlockSpec, z: _Sizes, masks: bool = True) -> Iterable[SavedTensor]:
    """Keep q, k, v, output and log-sum-exp, as a fused kernel does; no ``masks``: none is whole over a context axis.

    With a mask (a sliding window not longer than the sequence) transformers repeats keys and values to all
    heads before the kernel, and the kernel keeps the mask as numbers; without one it takes grouped heads.
    """
    a = spec.attention
    q, out = a.num_heads * a.head_dim, a.num_heads * a.value_head_dim
    window = block.sliding_window is not None and z.seq_len >= block.sliding_window
    masked = masks and (window or spec.family == "falcon")  # which always makes its mask
    heads = a.num_heads if masked or a.kind == "mla" else a.num_kv_heads
    keys, values = heads * a.head_dim, heads * a.value_head_dim
    again = 0
    if a.kind == "mla":
        values += a.num_heads * (a.qk_nope_head_dim or 0)  # values are a view of the up projection's output
    elif spec.family in _QUERIES_JOINED:
        again = out if masks else 0  # as with phi3
    elif spec.family == "gpt_neox":
        again = out if masks else 0
        values += q + keys  # values are a view of the fused output, which is kept whole
    elif spec.family == "phi3":
        again = (
            out if masks else 0
        )  # q comes from a concatenation, head first, so the output is copied to token first
        if heads == a.num_kv_heads:
            values += q + a.num_kv_heads * a.head_dim  # values are a view of the fused q|k|v output
    yield SavedTensor(op="queries, keys and values", num_bytes=z.keep(q + keys + values, z.c), along="tp")
    yield SavedTensor(op="attention output", num_bytes=z.keep(out + again, z.c), along="tp")
    yield SavedTensor(op="log-sum-exp", num_bytes=z.keep(a.num_heads, _FP32), along="tp")
    if masked:
        shared = (
            spec.family == "falcon" and not a.rope
        )  # numbers already, with its biases: one for all blocks
        mask = 0 if shared else z.tokens * z.seq_len * z.c
        yield SavedTensor(op="attention mask", num_bytes=mask, along="column_input")


def _scores(spec: ModelSpec, z: _Sizes) -> Iterable[SavedTensor]:
    """Keep q, k, v, the probabilities and the output, with keys and values repeated to all heads.

    torch's own unfused kernel computes in fp32 throughout; transformers' eager attention computes in the
    compute dtype but takes the softmax in fp32 and keeps both that and its cast (and the soft cap's output).
    """
    a = spec.attention
    eager = _eager(spec)
    inside = z.c if eager else max(z.c, _FP32)
    queries_keys_values = a.num_heads * (2 * a.head_dim + a.value_head_dim)
    yield SavedTensor(
        op="queries, keys and values", num_bytes=z.keep(queries_keys_values, inside), along="tp"
    )
    yield SavedTensor(
        op="attention output", num_bytes=z.keep(a.num_heads * a.value_head_dim, z.c), along="tp"
    )
    per_score = inside
    if eager:
        per_score = _FP32 if z.c == _FP32 else _FP32 + z.c
        per_score += z.c if spec.family == "gemma2" else 0
    square = z.tokens * z.seq_len * a.num_heads
    if (
        spec.family == "gpt_oss"
    ):  # the softmax stays in the compute dtype, and has the sink's share beside the keys'
        share = z.keep(a.num_heads * (z.seq_len + 1), max(z.c, z.r))
        cast = square * z.c if z.mixed else 0
        largest = z.keep(a.num_heads, _INT64)
        yield SavedTensor(op="attention scores", num_bytes=share + cast + largest, along="tp")
        return
    yield SavedTensor(op="attention scores", num_bytes=square * per_score, along="tp")


def _feed_forward(spec: ModelSpec, block: BlockSpec, z: _Sizes) -> Iterable[SavedTensor]:
    if block.moe is not None:
        yield from _experts(spec, block.moe, z)
        if block.moe.shared_ffn_size:
            yield from _gated(spec, block.moe.shared_ffn_size, z, "shared expert")
        if spec.family == "qwen2_moe":
            width = spec.hidden_size + 1
            yield SavedTensor(op="shared expert", num_bytes=z.keep(width, z.c), along="column_input")
        return
    fused = spec.family in _FUSED_GATE or not spec.gated_mlp
    if block.norms != "shared" or z.mixed:  # else it is what q, k and v read
        yield SavedTensor(
            op="input of the feed-forward",
            num_bytes=z.casts(spec.hidden_size, 1 if fused else 2),
            along="column_input",
        )
    if spec.gated_mlp:
        yield from _gated(spec, block.ffn_size, z, "feed-forward")
        return
    inside = _INSIDE_ACTIVATION.get(spec.activation, 1)
    yield SavedTensor(op="feed-forward", num_bytes=z.keep((inside + 1) * block.ffn_size, z.c), along="tp")


def _gated(spec: ModelSpec, ffn: int, z: _Sizes, op: str) -> Iterable[SavedTensor]:
    """Gate, activated gate, up and their product: four tensors of the feed-forward's width."""
    inside = _INSIDE_ACTIVATION.get(spec.activation, 1)
    yield SavedTensor(op=op, num_bytes=z.keep((inside + 3) * ffn, z.c), along="tp")


def _experts(spec: ModelSpec, moe: MoESpec, z: _Sizes) -> Iterable[SavedTensor]:
    """Router, dispatched copies, grouped gate/up and down, weighted outputs: k copies of every token."""
    k, h = moe.experts_per_token, spec.hidden_size
    readers = 1 + (2 if moe.shared_ffn_size else 0) + (1 if spec.family == "qwen2_moe" else 0)
    yield SavedTensor(op="input of the experts", num_bytes=z.casts(h, readers), along="column_input")
    indices = k * _INT64
    wide = z.c if z.mixed and spec.family in _SCALED_SCORES else _FP32
    router = moe.num_experts * wide + indices
    if spec.family in ("mixtral", "deepseek_v3") or spec.config.get(
        "norm_topk_prob", spec.family == "glm4_moe"
    ):
        router += wide * (1 + k)
    if spec.family in _SCALED_SCORES:
        usual = (8, 4) if spec.family == "deepseek_v3" else (1, 1)
        groups = int(spec.config.get("n_group") or usual[0])
        router += _INT64 * (2 * groups + int(spec.config.get("topk_group") or usual[1])) + moe.num_experts
    if spec.family == "gpt_oss":
        router = indices + k * z.c
    weight = 0
    if spec.family in ("deepseek_v2", *_SCALED_SCORES) and z.r != _FP32:
        router += h * _FP32  # the router computes in fp32, from casts of its input and weight
        weight = moe.num_experts * h * _FP32
    yield SavedTensor(op="router", num_bytes=z.keep(router, 1) + weight, along="sequence")
    lists, widths = (
        (4, 7) if spec.family == "gpt_oss" else (3, 4)
    )  # each row's expert for its bias; a clamped gate
    yield SavedTensor(
        op="dispatched inputs",
        num_bytes=z.keep(k * h, z.r) + z.keep(lists * indices, 1),
        along="column_input",
    )
    yield SavedTensor(
        op="routed experts",
        num_bytes=z.keep(k * widths * moe.ffn_size, z.r) + z.keep(k, z.c),
        along="tp",
    )
    yield SavedTensor(op="expert outputs", num_bytes=z.keep(k * h, z.r), along="sequence")
