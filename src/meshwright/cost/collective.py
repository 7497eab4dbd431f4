"""Seconds of collectives: alpha-beta over the links that a group really spans, or a probe's own points.

The link is chosen by placement: a group of 8 whose members sit on 8 nodes runs over the network between nodes.
Volumes are those of ring algorithms; a group over several nodes is hierarchical (inside the node, then between).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.spec import ClusterSpec, LinkSpec
from meshwright.cost.shipped import factors

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

CALL_BYTES: Final = 20e6
"""Payload at which a collective has half of what it takes beside its bytes (8 devices of A100, H100 and B200 nodes)."""


NODE: Final = 8
"""Devices of the nodes on which what a collective takes beside its bytes was measured."""
MOST_STARTS: Final = 128
"""Places on a node at which groups start that are looked at."""


def link_share(nodes: int) -> float:
    """Return the reachable share of a link's rate, inside a node or between ``nodes`` of them."""
    known = factors()
    return 1.0 / (known["inner"] if nodes == 1 else known["outer"])


def call_share(size: float, apart: bool) -> float:
    """Return what a collective over ``size`` devices of a node takes beside its bytes, over what it takes over 8.

    A ring has one more step for each member. ``apart`` is of all-gathers and reduce-scatters: 23 us + 9 us a member each
    on a B200 node (SimuMax's profile), 8, 17 and 30 us over 2, 4 and 8 H100. All-reduces over 2, 4 and 8 A100 of an
    NVSwitch node take 60, 69 and 89 us (vTrain's traces: 55 us + 4.8 us a member).
    """
    alone = 2.0 if apart else 10.0
    return (alone + size) / (alone + NODE)


def call_seconds(kind: str, num_bytes: Floats, size: int) -> Floats:
    """Return what a collective takes beside its bytes and hops: kernels of small payloads reach less of the link.

    ``size`` counts its members; over several nodes those beyond ``NODE`` have hops of their own.
    """
    weight = {"all_reduce": 1.0, "send": 0.2, "recv": 0.2}.get(kind, 0.5)
    if kind != "all_to_all":  # as many for any size: SimuMax's profile has 51 us over 2, 58 over 8
        weight *= call_share(size, kind != "all_reduce")
    return np.where(num_bytes > 0, weight * factors()["call"] * num_bytes / (num_bytes + CALL_BYTES), 0.0)


MEASURED_KIND: Final[Mapping[str, str]] = {"send": "send_recv", "recv": "send_recv"}


@dataclass(frozen=True)
class GroupShape:
    """Where a group's members sit: ``size`` ranks on ``nodes`` nodes, the fewest on one being ``per_node``."""

    size: int
    nodes: int
    per_node: int


def shape_of(ranks: Sequence[int], gpus_per_node: int) -> GroupShape:
    """Return the shape of the group of these ranks (ranks are numbered node by node)."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // gpus_per_node] = counts.get(rank // gpus_per_node, 0) + 1
    return GroupShape(len(ranks), len(counts), min(counts.values()))


@cache
def strided_shape(size: int, stride: int, gpus_per_node: int) -> GroupShape:
    """Return the shape of the worst of the groups of ``size`` ranks that are ``stride`` apart: it paces a step.

    Such groups fill the nodes one beside another. Where a node is no multiple of what they fill, some reach over its end.
    """
    if size == 1 or gpus_per_node % (size * stride) == 0:
        return GroupShape(size, 1, size)
    return _worst(np.arange(size) * stride, range(stride), size * stride, gpus_per_node)


def neighbours_shape(size: int, stride: int, gpus_per_node: int) -> GroupShape:
    """Return the shape of two ranks of such a group that are as far apart as neighbours, or its ends, come to be."""
    nodes = min(2, strided_shape(size, stride, gpus_per_node).nodes)
    return GroupShape(2, nodes, 2 // nodes)


def _worst(ranks: Ints, first: Sequence[int], every: int, gpus_per_node: int) -> GroupShape:
    """Return the shape on most nodes, then with the fewest ranks on one, of groups like ``ranks``.

    They start at the ranks ``first``, and again ``every`` so many. Of many places on a node only the last are looked at,
    whose groups reach furthest over its end.
    """
    apart = math.gcd(every, gpus_per_node)
    offsets = {start % apart for start in first}
    starts = [at for at in range(gpus_per_node) if at % apart in offsets]
    worst = (0, 0)
    for start in starts[-MOST_STARTS:]:
        counts = np.bincount((ranks + start) // gpus_per_node)
        counts = counts[counts > 0]
        worst = max(worst, (len(counts), -int(counts.min())))
    return GroupShape(len(ranks), worst[0], -worst[1])


@cache
def plane_shape(axes: tuple[tuple[int, int], ...], gpus_per_node: int) -> GroupShape:
    """Return the shape of the worst of the groups over two (degree, stride) axes."""
    (inner, near), (outer, far) = sorted(axes, key=lambda axis: axis[1])
    if inner == 1 or outer == 1 or far == near * inner:
        return strided_shape(outer * inner, near if inner > 1 else far, gpus_per_node)
    ranks = (np.arange(outer)[:, None] * far + np.arange(inner)[None, :] * near).reshape(-1)
    first = [at for at in range(far) if at % (near * inner) < near]
    return _worst(ranks, first, far * outer, gpus_per_node)


@dataclass(frozen=True)
class CollectiveTimes:
    """Prices collectives on one cluster. ``points`` are a probe's: (kind, ranks) to bytes and seconds."""

    cluster: ClusterSpec
    points: Mapping[tuple[str, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[str, int], tuple[Floats, Floats]]
    )

    def seconds(self, kind: str, num_bytes: Floats | float, shape: GroupShape) -> Floats:
        """Return the seconds of one collective with a payload of ``num_bytes`` (StepProgram's convention)."""
        size = np.asarray(num_bytes, dtype=np.float64)
        if shape.size < 2:
            return np.zeros_like(size)
        if self.cluster.num_nodes == 1:  # where a plane of experts is no whole part of it
            shape = GroupShape(shape.size, 1, shape.size)
        if self.points:
            return self._measured(MEASURED_KIND.get(kind, kind), size, shape)
        return self._rings(kind, size, shape)

    def _measured(self, kind: str, num_bytes: Floats, shape: GroupShape) -> Floats:
        sizes = sorted(n for k, n in self.points if k == kind)
        if not sizes:  # a probe without this collective: its all-reduce moves the same volume or more
            kind, sizes = "all_reduce", sorted(n for k, n in self.points if k == "all_reduce")
        if not sizes:
            return self._rings(kind, num_bytes, shape)
        near = min(sizes, key=lambda n: (abs(math.log(n / shape.size)), n))
        xs, ys = self.points[kind, near]
        safe = np.maximum(num_bytes, 1.0)
        seconds = np.exp(np.interp(np.log(safe), np.log(xs), np.log(ys)))
        seconds = np.where(safe > xs[-1], ys[-1] * safe / xs[-1], seconds)
        if near != shape.size:
            seconds = seconds * _steps(kind, shape.size) / _steps(kind, near)
        return np.where(num_bytes > 0, seconds, 0.0)

    def _rings(self, kind: str, num_bytes: Floats, shape: GroupShape) -> Floats:
        if kind in ("send", "recv"):
            link = self._link(shape)
            return link.latency.value + num_bytes / (link.rate.value * link_share(shape.nodes))
        # in an all-to-all each rank has its own payload, of which the part for its own node stays inside
        own = kind == "all_to_all"
        near = num_bytes * shape.per_node / shape.size if own else num_bytes
        inside = _leg(kind, near, shape.per_node, self.cluster.intra, link_share(1))
        inside = inside + call_seconds(
            kind, num_bytes, shape.size if shape.nodes == 1 else min(shape.size, NODE)
        )
        if shape.nodes == 1:
            return inside
        between = self.cluster.inter
        assert between is not None
        # of a payload that all have each member carries its share over its own part of the network
        far = num_bytes if own else num_bytes / shape.per_node
        return inside + _leg(kind, far, shape.nodes, between, link_share(2))

    def _link(self, shape: GroupShape) -> LinkSpec:
        if shape.nodes == 1 or self.cluster.num_nodes == 1 or self.cluster.inter is None:
            return self.cluster.intra
        return self.cluster.inter

    def link_name(self, shape: GroupShape) -> str:
        """Return the name of the slowest link that the group uses."""
        return self._link(shape).name


def _steps(kind: str, size: int) -> float:
    if kind == "all_reduce":
        return 2.0 * (size - 1) / size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 1.0


def _leg(kind: str, num_bytes: Floats, size: int, link: LinkSpec, share: float) -> Floats:
    if size < 2:
        return np.zeros_like(num_bytes)
    hops = 2 * (size - 1) if kind == "all_reduce" else size - 1
    return hops * link.latency.value + _steps(kind, size) * num_bytes / (link.rate.value * share)


def ascending(seconds: Floats) -> Floats:
    """Return the seconds of ascending sizes with every fall pooled: a larger message takes as long or longer.

    Where a point lies below one before it both are noise around the same value; neighbours are averaged until no fall is
    left (the least-squares fit among ascending ones).
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, k) = pools[-2:]
            pools[-2:] = [((a * n + b * k) / (n + k), n + k)]
    return np.array([value for value, count in pools for _ in range(count)])


def collective_times(cluster: ClusterSpec) -> CollectiveTimes:
    """Return the pricer of a cluster: by a probe's points where it has them, else by the links' figures."""
    raw: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, seconds in cluster.measured.items():
        parts = key.split("/")
        if parts[0] == "collective_s":
            raw.setdefault((parts[1], int(parts[2])), []).append((float(parts[3]), seconds))
    points: dict[tuple[str, int], tuple[Floats, Floats]] = {}
    for group, listed in raw.items():
        table = np.asarray(sorted(listed), dtype=np.float64)
        points[group] = (np.maximum(table[:, 0], 1.0), ascending(table[:, 1]))
    return CollectiveTimes(cluster, points)
