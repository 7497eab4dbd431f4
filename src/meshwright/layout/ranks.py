"""Rank <-> coordinates, and the group of a rank on every axis; pure arithmetic for any world size.

The mesh is a grid in row-major order: the last axis is innermost, so neighbours on it have neighbouring rank
numbers. ``dp`` splits into ``dp_replicate`` (outer) and ``dp_shard`` (inner).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from meshwright.base.axes import TIED, WORLD
from meshwright.layout.layout import Layout

SHARD = "shard"
"""Group name of the ranks that one copy of the ZeRO state is spread over: dp_shard x cp."""

DATA = "data"
"""Group name of the ranks that hold copies of the same parameters and see other tokens: dp x cp."""
EP = "ep"
"""Group name of the ranks that the experts of a mixture are spread over."""

EXPERT_SHARD = "expert_shard"
"""Group name of the ranks that hold the same experts and that ZeRO spreads their state over."""

EXPERT_REPLICATE = "expert_replicate"
"""Group name of the ranks that hold the same elements of the same experts."""

EXPERT_AXES = (EP, EXPERT_REPLICATE, EXPERT_SHARD)
"""What the expert axis borrows from dp x cp: every rank of it is in one group of each."""


def mesh_shape(layout: Layout) -> dict[str, int]:
    """Return the degree of every mesh axis, outermost axis first (the order of ``layout.order``, reversed)."""
    degrees = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
    }
    out: dict[str, int] = {}
    for axis in reversed(layout.order):
        for name in ("dp_replicate", "dp_shard") if axis == "dp" else (axis,):
            out[name] = degrees[name]
    return out


def strides(layout: Layout) -> dict[str, int]:
    """Return the distance in rank numbers between neighbours on every mesh axis."""
    out: dict[str, int] = {}
    stride = 1
    for axis, degree in reversed(mesh_shape(layout).items()):
        out[axis] = stride
        stride *= degree
    return out


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return the coordinate of ``rank`` on every mesh axis."""
    shape, step = mesh_shape(layout), strides(layout)
    return {axis: rank // step[axis] % shape[axis] for axis in shape}


def rank_of(layout: Layout, coords: Mapping[str, int]) -> int:
    """Return the rank at ``coords``; axes that are left out count as 0."""
    step = strides(layout)
    return sum(step[axis] * coordinate for axis, coordinate in coords.items())


def group(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Return the ranks of ``rank``'s group on ``axis``, in the order of their coordinate.

    ``axis``: a mesh axis; "dp" (dp_replicate x dp_shard); "shard" (dp_shard x cp, over which ZeRO shards); "data"
    (dp x cp); "ep" (borrowed from dp x cp, its innermost part); "expert_shard" and "expert_replicate" (the ranks of
    dp x cp that hold the same experts, see ``expert_degrees``); "world"; "tied" (first and last stage, empty for other
    stages).
    """
    if axis == WORLD:
        return tuple(range(layout.world_size))
    if axis == TIED:
        return _tied(layout, rank)
    if axis in EXPERT_AXES:
        return _expert_group(layout, rank, axis)
    data = ("dp_replicate", "dp_shard")
    axes = {"dp": data, SHARD: ("dp_shard", "cp"), DATA: (*data, "cp")}.get(axis, (axis,))
    return _plane(layout, rank, axes)


def summed_over(layout: Layout, axis: str) -> str:
    """Return the group that a collective on ``axis`` runs over: the data axes of the ledger take cp in."""
    if layout.cp > 1 and axis == "dp_shard":
        return SHARD
    return DATA if layout.cp > 1 and layout.zero == 0 and axis == "dp_replicate" else axis


def expert_degrees(layout: Layout) -> tuple[int, int]:
    """Return (replicas, shards) of the ranks that hold the same experts: dp x cp / ep in all.

    ZeRO spreads an expert over the part of the shard group that has it, which is one rank where ``ep`` takes in several
    shard groups; without ZeRO all of them are replicas.
    """
    same = layout.dp * layout.cp // layout.ep
    shards = max(1, layout.shard // layout.ep) if layout.zero and layout.shard > 1 else 1
    return same // shards, shards


def _expert_group(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    members = _plane(layout, rank, ("dp_replicate", "dp_shard", "cp"))
    if layout.zero and layout.dp_replicate > 1 and layout.order.index("cp") > layout.order.index("dp"):
        # one shard group after the other, so that neighbours are in one, and what is spread over it too
        apart = sorted(members, key=lambda r: (coordinates(layout, r)["dp_replicate"], r))
        each = range(0, len(apart), layout.ep)
        members = tuple(r for i in each for r in sorted(apart[i : i + layout.ep]))  # torch numbers a group so
    at, ep = members.index(rank), layout.ep
    if axis == EP:
        return members[at // ep * ep : at // ep * ep + ep]
    same, place = members[at % ep :: ep], at // ep
    shards = expert_degrees(layout)[1]
    if axis == EXPERT_SHARD:
        return same[place // shards * shards : place // shards * shards + shards]
    return same[place % shards :: shards]


def groups(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return every group of ``axis``, each once, ordered by first rank; the groups cut the world apart."""
    seen: dict[tuple[int, ...], None] = {}
    for rank in range(layout.world_size):
        members = group(layout, rank, axis)
        if members and members[0] == rank:
            seen[members] = None
    return tuple(seen)


def _plane(layout: Layout, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` in ``axes`` only, in mesh order."""
    shape, step = mesh_shape(layout), strides(layout)
    ordered = [a for a in shape if a in axes]
    base = rank - sum(rank // step[a] % shape[a] * step[a] for a in ordered)
    return tuple(
        base + sum(step[a] * c for a, c in zip(ordered, cs, strict=True))
        for cs in product(*(range(shape[a]) for a in ordered))
    )


def _tied(layout: Layout, rank: int) -> tuple[int, ...]:
    column = group(layout, rank, "pp")
    if rank not in (column[0], column[-1]):
        return ()
    return (column[0], column[-1]) if len(column) > 1 else (rank,)


def nodes_of(ranks: Iterable[int], gpus_per_node: int) -> tuple[int, ...]:
    """Return the nodes that ``ranks`` live on, ascending (ranks are numbered node by node)."""
    return tuple(sorted({rank // gpus_per_node for rank in ranks}))


def nodes_spanned(layout: Layout, axis: str, gpus_per_node: int) -> int:
    """Return the largest number of nodes that any group of ``axis`` spans."""
    return max((len(nodes_of(members, gpus_per_node)) for members in groups(layout, axis)), default=1)
