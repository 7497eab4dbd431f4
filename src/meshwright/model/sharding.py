"""How each tensor is cut: by the tensor axis, by the expert axis, or not at all; and what a block expects.

The rule follows from a tensor's role and the names of its dims, so one table serves the runtime, the cost
model and the documentation. Column-cut matrices keep whole heads (or a slice of the feed-forward) of their
output; row-cut matrices keep the matching slice of their input and leave a partial sum. A norm over the queries (or keys)
of all heads together keeps the weights of the rank's heads, and takes its mean square over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from meshwright.model.spec import AttentionSpec, BlockSpec, ModelSpec, TensorSpec

Placement: TypeAlias = Literal["replicate", "shard(sequence)", "partial"]
KvHeads: TypeAlias = Literal["split", "replicate"]
Cut: TypeAlias = Literal["column", "row", "vocab", "replicated"]

_KV: Final = "kv_heads*head_dim"
_KV_HEADS: Final = "kv_heads"
BY_KV_HEAD: Final = "kv_heads*(group+2)*head_dim"
"""Queries of one key/value head after another, each followed by that head's key and value."""
_PAIRS: Final = "ffn*2"
"""Gate and up next to each other, number by number."""
_CUT_DIMS: Final = frozenset(
    {
        "heads*head_dim",
        _KV,
        "heads*3*head_dim",
        "heads*qk_head_dim",
        "heads*(nope+value)",
        "heads*value_head_dim",
        "heads",
        _KV_HEADS,
        BY_KV_HEAD,
        "ffn",
        _PAIRS,
        "vocab",
    }
)
_NEVER_CUT: Final = frozenset({"router", "position"})
_ROW: Final = frozenset({"attention_out", "mlp_out", "expert_out", "shared_out"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one tensor is cut.

    Attributes:
        cut: "column", "row", "vocab" or "replicated": what the tensor axis does to it.
        tp_dim: the dim that the tensor axis cuts, or None (a copy on every rank of the axis).
        segments: names of the parts along that dim; each part is cut on its own, so a fused q|k|v or
            gate|up keeps matching slices on one rank. One name where nothing is fused.
        ep_dim: the dim that the expert axis cuts (the expert index), or None.
    """

    cut: Cut
    tp_dim: int | None
    segments: tuple[str, ...]
    ep_dim: int | None


@lru_cache(maxsize=4096)
def rule(tensor: TensorSpec) -> Rule:
    """Return how the tensor and expert axes cut ``tensor``."""
    ep_dim = 0 if tensor.dims[0] == "experts" and tensor.of_experts else None
    if tensor.role not in _NEVER_CUT:
        for dim, name in enumerate(tensor.dims):
            segments = tuple(name.split("|"))
            if all(s in _CUT_DIMS for s in segments):
                cut: Cut = "vocab" if "vocab" in segments else "row" if tensor.role in _ROW else "column"
                return Rule(cut=cut, tp_dim=dim, segments=segments, ep_dim=ep_dim)
    return Rule(cut="replicated", tp_dim=None, segments=(), ep_dim=ep_dim)


def segment_sizes(tensor: TensorSpec, attention: AttentionSpec) -> tuple[int, ...]:
    """Return the sizes of the parts along the cut dim, in order; empty where nothing is cut."""
    cut = rule(tensor)
    if cut.tp_dim is None:
        return ()
    whole = tensor.shape[cut.tp_dim]
    if len(set(cut.segments)) == 1:
        return (whole // len(cut.segments),) * len(cut.segments)
    kv = attention.num_kv_heads * attention.head_dim
    num_kv = cut.segments.count(_KV)
    return tuple(kv if s == _KV else whole - num_kv * kv for s in cut.segments)


def tp_local_shape(
    tensor: TensorSpec, tp: int, attention: AttentionSpec, kv_heads: KvHeads = "split", ep: int = 1
) -> tuple[int, ...]:
    """Return the shape that one rank of a tensor axis of degree ``tp`` (and expert axis ``ep``) holds.

    With ``kv_heads`` "replicate" and more ranks than key/value heads, each rank keeps one whole head.
    Sizes that do not divide are rounded up to the largest rank's share; whether they may is for the layout
    check to say.
    """
    cut = rule(tensor)
    shape = list(tensor.shape)
    if cut.ep_dim is not None:
        shape[cut.ep_dim] = -(-shape[cut.ep_dim] // ep)
    if cut.tp_dim is not None and tp > 1:
        sizes = segment_sizes(tensor, attention)
        local = 0
        for name, size in zip(cut.segments, sizes, strict=True):
            if kv_heads == "replicate" and (head := _lone_head(name, tp, attention)):
                local += head
            else:
                local += _share(name, size, tp)
        shape[cut.tp_dim] = local
    return tuple(shape)


def tp_ranges(
    tensor: TensorSpec, tp: int, index: int, attention: AttentionSpec
) -> tuple[tuple[int, int], ...]:
    """Return (start, size) along the cut dim of each part that coordinate ``index`` holds; empty where nothing is cut.

    Sizes that do not divide are cut as ``torch.chunk`` does: ceil(size / tp) each and the rest on the last ranks.
    Key/value heads fewer than ``tp`` are one whole head per rank, the same on tp / heads neighbours.
    """
    cut = rule(tensor)
    parts: list[tuple[int, int]] = []
    at = 0
    for name, size in zip(cut.segments, segment_sizes(tensor, attention), strict=True):
        if each := _lone_head(name, tp, attention):
            parts.append((at + index * attention.num_kv_heads // tp * each, each))
        else:
            each = _share(name, size, tp)
            start = min(index * each, size)
            parts.append((at + start, min(each, size - start)))
        at += size
    return tuple(parts)


def _lone_head(name: str, tp: int, attention: AttentionSpec) -> int:
    """Return the size of one key/value head along a segment of them where there are fewer than ranks, else 0."""
    if attention.num_kv_heads >= tp:
        return 0
    return {_KV: attention.head_dim, _KV_HEADS: 1}.get(name, 0)


def _share(name: str, size: int, tp: int) -> int:
    """Return the largest rank's share of a segment, pairs kept together."""
    unit = 2 if name == _PAIRS else 1
    return -(-size // unit // tp) * unit


def tp_shape(tensor: TensorSpec, tp: int, index: int, attention: AttentionSpec) -> tuple[int, ...]:
    """Return the shape of what coordinate ``index`` holds (see ``tp_ranges``)."""
    shape = list(tensor.shape)
    dim = rule(tensor).tp_dim
    if dim is not None:
        shape[dim] = sum(size for _, size in tp_ranges(tensor, tp, index, attention))
    return tuple(shape)


def tp_copies(tensor: TensorSpec, tp: int, attention: AttentionSpec) -> int:
    """Return how many neighbouring ranks of the tensor axis hold the same elements of ``tensor``."""
    cut = rule(tensor)
    if cut.tp_dim is None:
        return tp
    lone = len(set(cut.segments)) == 1 and _lone_head(cut.segments[0], tp, attention)
    return tp // attention.num_kv_heads if lone else 1


def shared_norms(block: BlockSpec) -> tuple[TensorSpec, ...]:
    """Return the weights of a block's norms whose mean square is taken over the heads of all ranks of the tensor axis."""
    return tuple(t for t in block.tensors if t.role == "norm" and over_all_heads(t))


def over_all_heads(norm: TensorSpec) -> bool:
    """Return whether a norm is over the queries (or keys) of all heads together; one per head has [heads, head size]."""
    return len(norm.dims) == 1 and rule(norm).tp_dim is not None


GradientSum: TypeAlias = Literal["", "all", "heads"]


def gradient_sum(tensor: TensorSpec, tp: int, sp: bool, attention: AttentionSpec) -> GradientSum:
    """Return over which ranks of the tensor axis the gradient of a block's ``tensor`` is still a partial sum.

    "all": every rank saw its own tokens (sequence-sharded norms and biases), its own heads (norms per head, and what
    makes the latent that all heads read) or its own part of what the tensor is multiplied with (routers, whose weights
    multiply each expert's output; the gate of a shared expert; the factor of an adapter that is not cut);
    "heads": the ranks with a copy of one key/value head; "": the rank's gradient is whole.
    """
    if tp == 1:
        return ""
    if rule(tensor).tp_dim is None:
        inner = tensor.role == "norm" and tensor.dims != ("hidden",)
        own_part = inner or tensor.role in ("router", "adapter", "attention_in", "shared_in")
        own_part = own_part or (tensor.role == "expert_out" and tensor.is_bias)  # added on one rank
        return "all" if sp or own_part else ""
    return "heads" if tp_copies(tensor, tp, attention) > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Placements of the hidden states on the tensor axis at one kind of place in a block."""

    place: str
    before: Placement
    after: Placement

    @property
    def collective(self) -> str:
        """The collective that turns ``before`` into ``after`` ("" where they agree or a rank just slices)."""
        return {
            ("partial", "replicate"): "all_reduce",
            ("partial", "shard(sequence)"): "reduce_scatter",
            ("shard(sequence)", "replicate"): "all_gather",
        }.get((self.before, self.after), "")


def block_boundaries(sp: bool) -> tuple[Boundary, ...]:
    """Return the changes of placement in one block's forward; ``sp`` is sequence-sharded norms.

    Backward runs the transposed collective at each place (an all-gather for a reduce-scatter, and so on).
    """
    rest: Placement = "shard(sequence)" if sp else "replicate"
    return (
        Boundary(place="entry of the block", before=rest, after=rest),
        Boundary(place="into q, k, v", before=rest, after="replicate"),
        Boundary(place="out of the attention projection", before="partial", after=rest),
        Boundary(place="into gate and up", before=rest, after="replicate"),
        Boundary(place="out of down", before="partial", after=rest),
        Boundary(place="exit of the block", before=rest, after=rest),
    )


@dataclass(frozen=True, kw_only=True)
class ShardingTable:
    """The rules of a whole model by tensor name, and the placements at the edges of its blocks."""

    rules: dict[str, Rule]
    attention: AttentionSpec

    def replicated(self) -> tuple[str, ...]:
        """Return the names of the tensors of which every rank of a tensor axis keeps a full copy."""
        return tuple(name for name, r in self.rules.items() if r.tp_dim is None)


def sharding_table(spec: ModelSpec) -> ShardingTable:
    """Return the table of a model."""
    return ShardingTable(rules={t.name: rule(t) for t in spec.tensors()}, attention=spec.attention)


def local_parameters(spec: ModelSpec, tp: int, kv_heads: KvHeads = "split", ep: int = 1) -> int:
    """Return the parameters that one rank of the tensor axis holds of the whole model (no pipeline cut)."""
    total = 0
    for tensor in spec.tensors():
        if tensor.tied_to is None:
            product = 1
            for size in tp_local_shape(tensor, tp, spec.attention, kv_heads, ep):
                product *= size
            total += product
    return total
