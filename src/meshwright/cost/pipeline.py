"""Seconds of a pipeline: its rows played or in closed form, its messages, and cores that its ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import Floats, GroupShape, neighbours_shape
from meshwright.cost.work import Facts, work_key
from meshwright.layout.context import local_length
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import strides
from meshwright.schedule.actions import ActionKind
from meshwright.schedule.clock import Clock, run_clock
from meshwright.schedule.generate import V_SHAPED, generate
from meshwright.schedule.order import play

Bools: TypeAlias = NDArray[np.bool_]


ROUNDS: Final = 2
"""Micro-batches per stage after which 1F1B is periodic."""


PLAYED_STAGES: Final = 16
"""Depth up to which a search plays 1F1B; deeper pipelines have its closed form until they are priced exactly."""


def message_seconds(facts: Facts, layout: Layout) -> float:
    """Return the seconds of one message between neighbouring stages: a micro-batch's residual stream on one rank.

    Where some neighbours share a node and others do not it is the mean over the stages of one node.
    """
    if layout.pp < 2:
        return 0.0
    wire = 4 if work_key(layout).autocast else facts.compute_bytes
    num_bytes = layout.micro_batch * local_length(layout, facts.seq_len) * facts.spec.hidden_size * wire
    node, step = facts.cluster.gpus_per_node, strides(layout)["pp"]
    inside = float(facts.times.seconds("send", float(num_bytes), GroupShape(2, 1, 2)))
    if neighbours_shape(layout.pp, step, node).nodes == 1:
        return inside
    outside = float(facts.times.seconds("send", float(num_bytes), GroupShape(2, 2, 1)))
    away = min(1.0, max(step / node, 1.0 / (layout.pp - 1)))
    return (1.0 - away) * inside + away * outside


def tied_seconds(facts: Facts, layout: Layout) -> float:
    """Return the seconds of summing a tied embedding's gradient between first and last stage."""
    if layout.pp < 2 or layout.schedule in V_SHAPED:
        return 0.0
    table = facts.spec.vocab_size * facts.spec.hidden_size / layout.tp / max(1, layout.dp_shard)
    shape = neighbours_shape(layout.pp, strides(layout)["pp"], facts.cluster.gpus_per_node)
    once = float(facts.times.seconds("all_reduce", table * facts.state_bytes, shape))
    return once + facts.placed.later("link", facts.placed.meetings.most, shape)  # after a whole step's work


def pipeline_seconds(
    forward: Floats, backward: Floats, send: Floats, m: Floats, depth: Floats, gpipe: Bools
) -> Floats:
    """Return [layouts] seconds from the first forward to the last backward.

    GPipe by closed form: fill and drain of both directions at the pace of the slowest stage. 1F1B by playing its
    rows for all layouts of one depth and number of micro-batches at once; beyond a few rounds every further
    micro-batch adds the same cycle.
    """
    fill: Floats = (forward + backward).sum(axis=1) + 2.0 * send * (depth - 1.0)
    out: Floats = fill + (m - 1.0) * (forward.max(axis=1) + backward.max(axis=1))
    groups: dict[tuple[int, int], list[int]] = {}
    deep = ~gpipe & (depth > PLAYED_STAGES)
    if deep.any():
        out = np.where(deep, _closed_1f1b(forward, backward, send, m, depth), out)
    for row in np.flatnonzero(~gpipe & (depth > 1) & ~deep):
        groups.setdefault((int(depth[row]), int(m[row])), []).append(int(row))
    for (stages, count), rows in groups.items():
        f, b, c = forward[rows, :stages].T, backward[rows, :stages].T, send[rows]
        short = min(count, ROUNDS * stages)
        length = _play_1f1b(f, b, c, short)
        if count > short:
            length = length + (count - short) * (length - _play_1f1b(f, b, c, short - 1))
        out[rows] = length
    return out


def _closed_1f1b(forward: Floats, backward: Floats, send: Floats, m: Floats, depth: Floats) -> Floats:
    """Return the makespan as the sum over stages, then micro-batches at the slowest stage's or round trip's pace."""
    total: Floats = forward + backward
    tail: Floats = np.cumsum(total[:, ::-1], axis=1)[:, ::-1]
    left: Floats = np.maximum(depth[:, None] - np.arange(total.shape[1], dtype=np.float64)[None, :], 0.0)
    trips: Floats = (tail + 2.0 * send[:, None] * np.maximum(left - 1.0, 0.0)) / np.maximum(left, 1.0)
    cycle: Floats = np.where(left > 0, trips, 0.0).max(axis=1)
    slowest: Floats = total.max(axis=1)
    fill: Floats = total.sum(axis=1) + 2.0 * send * (depth - 1.0)
    return fill + (m - 1.0) * np.maximum(slowest, cycle)


def _play_1f1b(forward: Floats, backward: Floats, send: Floats, m: int) -> Floats:
    """Return the makespan of 1F1B for columns of stage times, [stages, layouts]."""
    stages = forward.shape[0]
    rows = generate("1f1b", stages, m).rows
    done: dict[tuple[bool, int, int], Floats] = {}
    free = [np.zeros_like(send) for _ in range(stages)]
    for rank, action in play(rows, stages).order:
        k = action.micro_batch
        assert k is not None
        ahead = action.kind is ActionKind.FORWARD
        needs = (ahead, rank - 1 if ahead else rank + 1, k)
        start = free[rank]
        if needs in done:
            start = np.maximum(start, done[needs] + send)
        free[rank] = start + (forward[rank] if ahead else backward[rank])
        done[ahead, rank, k] = free[rank]
    return np.max(np.stack(free), axis=0)


def shares_cores(cluster: ClusterSpec, layout: Layout) -> bool:
    """Return whether ranks of a pipeline on a CPU take turns on fewer cores than there are ranks."""
    cores = cluster.measured.get("cores")
    return bool(cluster.device.is_cpu and cores and layout.pp > 1 and cores < layout.world_size)


def contention(clock: Clock, cluster: ClusterSpec, layout: Layout) -> float:
    """Return the factor on the clock's length on a CPU with fewer cores than ranks, else 1.

    A CPU's rates are measured while every rank computes. While only some stages are active, each gets a larger share
    of the cores: a slice of the clock in which ``a`` ranks compute takes max(a, cores) / ranks of its length.
    """
    if not shares_cores(cluster, layout) or not clock.makespan_s:
        return 1.0
    cores = cluster.measured["cores"]
    world = layout.world_size
    replicas = world / layout.pp
    edges: list[tuple[float, int]] = []
    for span in clock.spans:
        edges += [(span.start_s, 1), (span.end_s, -1)]
    edges.sort()
    length = last = 0.0
    active = 0
    for when, change in edges:
        length += (when - last) * max(active * replicas, cores) / world
        last, active = when, active + change
    return length / clock.makespan_s


def shared_cores(
    facts: Facts, layouts: Sequence[Layout], m: Floats, forward: Floats, backward: Floats, send: Floats
) -> Floats:
    """Return [layouts] the factor on pipelines whose ranks take turns on a CPU's cores, 1 for all others."""
    out = np.ones(len(layouts))
    for r, layout in enumerate(layouts):
        if shares_cores(facts.cluster, layout) and layout.schedule in ("gpipe", "1f1b"):
            schedule = generate(layout.schedule, layout.pp, int(m[r]))
            ahead = [float(x) for x in forward[r, : layout.pp]]
            behind = [float(x) for x in backward[r, : layout.pp]]
            clock = run_clock(schedule, ahead, behind, float(send[r]))
            out[r] = contention(clock, facts.cluster, layout)
    return out
