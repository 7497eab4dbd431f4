"""Seconds of data-parallel communication: units gathered, scattered and reduced, and what of it is exposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats, GroupShape
from meshwright.cost.meeting import Meetings
from meshwright.cost.pieces import SHARD_OPS_PER_TENSOR, SHARD_OPS_PER_UNIT, Facts
from meshwright.cost.units import StageUnits, UnitSize, expert_shapes
from meshwright.layout.layout import Layout

OVERLAP: Final = 0.90
"""Share of a compute window behind which communication can hide on a GPU (assumed until calibrated)."""


@dataclass(frozen=True, kw_only=True)
class DataSeconds:
    """Seconds of data-parallel communication of one stage, by what it is; ``edge`` parts cannot be hidden.

    ``hooks`` is what sharded units take of every micro-batch beside gathers and scatters, ``rows`` by how much longer a
    gather of stage 3 is for matrices in 4 bits; ``apart`` by how much one gather, or one scatter, of every unit is longer
    for each e-fold of the work before it (see ``cost.meeting``).
    """

    gather: float = 0.0
    gather_edge: float = 0.0
    scatter: float = 0.0
    scatter_edge: float = 0.0
    reduce: float = 0.0
    reduce_edge: float = 0.0
    hooks: float = 0.0
    hooks_edge: float = 0.0
    rows: float = 0.0
    rows_edge: float = 0.0
    apart: float = 0.0
    apart_edge: float = 0.0


DATA_PARTS = tuple(f.name for f in fields(DataSeconds))


def unit_seconds(
    facts: Facts, sizes: Mapping[str, Floats], sharded: bool, shards: GroupShape, copies: GroupShape
) -> dict[str, Floats]:
    """Return seconds of gathering, scattering and reducing single units, from columns of ``UnitSize``'s figures."""
    times, rates = facts.times, facts.rates
    state, compute = float(facts.state_bytes), float(facts.compute_bytes)
    none = np.zeros_like(sizes["full"])
    out = {"gather": none, "scatter": none, "reduce": none, "hooks": none, "rows": none, "apart": none}
    reduced = sizes["trainable"] * state
    if sharded and shards.size > 1:
        gathered = sizes["full"] * compute
        out["gather"] = times.seconds("all_gather", gathered, shards)
        out["scatter"] = times.seconds("reduce_scatter", reduced, shards)
        packed = sizes["packed"]
        if packed.any():
            copied = 0.0 if rates.overlaps else 2.0 * packed / rates.copy_rate
            out["rows"] = times.seconds("all_gather", gathered + packed, shards) - out["gather"] + copied
        if not rates.overlaps:  # copies in and out, and the small operations around them
            small = SHARD_OPS_PER_UNIT + SHARD_OPS_PER_TENSOR * sizes["tensors"]
            out["gather"] = out["gather"] + 2.0 * gathered / rates.copy_rate + small * rates.op_s
            small = SHARD_OPS_PER_UNIT + SHARD_OPS_PER_TENSOR * sizes["trainable_tensors"]
            out["scatter"] = out["scatter"] + 2.0 * reduced / rates.copy_rate + small * rates.op_s
            out |= facts.placed.of_units(gathered, reduced, shards)
        out["reduce"] = times.seconds("all_reduce", reduced / shards.size, copies)
    elif not sharded and shards.size > 1:
        out["reduce"] = times.seconds("all_reduce", reduced, shards)
    return {name: np.where(sizes["full"] > 0, seconds, 0.0) for name, seconds in out.items()}


def _data_seconds(
    facts: Facts,
    units: Sequence[tuple[UnitSize, int]],
    stage: int,
    shards: GroupShape,
    copies: GroupShape,
) -> DataSeconds:
    """Return the communication of one stage, the root unit being the first of ``units`` (size, how many)."""
    held = [(unit, count) for unit, count in units if unit.full and count]
    sizes = {f.name: np.array([float(getattr(u, f.name)) for u, _ in held]) for f in fields(UnitSize)}
    counts = np.array([float(count) for _, count in held])
    total: dict[str, float] = {}
    for name, seconds in unit_seconds(facts, sizes, stage > 0, shards, copies).items():
        total[name] = float((seconds * counts).sum())
        # what cannot be hidden is the root unit's, or the first block's where there is none
        total[f"{name}_edge"] = float(seconds[0]) if len(held) else 0.0
    return DataSeconds(**total)


def stage_seconds(
    facts: Facts,
    layout: Layout,
    units: StageUnits,
    stage: int,
    counts: Sequence[int],
    zero: int,
    shapes: tuple[GroupShape, GroupShape],
) -> DataSeconds:
    """Return the communication of one stage; experts that are spread have groups of their own."""
    if not units.experts:
        held = [(units.root[stage], 1), *zip(units.kinds, counts, strict=True)]
        return _data_seconds(facts, held, zero, *shapes)
    held = [(units.root[stage], 1), *zip(units.rest, counts, strict=True)]
    one = _data_seconds(facts, held, zero, *shapes)
    groups = expert_shapes(layout, facts.cluster.gpus_per_node)
    other = _data_seconds(facts, list(zip(units.experts, counts, strict=True)), zero, *groups)
    sums = {n: getattr(one, n) + getattr(other, n) for n in DATA_PARTS if not n.endswith("_edge")}
    return replace(one, **sums)


def _exposed(rates_overlap: bool, seconds: Floats, window: Floats, edge: Floats) -> Floats:
    """Return what is not hidden: all of it on a CPU, else what outlasts the window, at least the edge."""
    if not rates_overlap:
        return seconds
    return np.where(seconds > 0, np.maximum(np.minimum(edge, seconds), seconds - OVERLAP * window), 0.0)


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Exposed seconds of data-parallel communication: of a micro-batch's forward and backward, and once a step.

    ``sent`` are the seconds of a step's whole communication, hidden or not.
    """

    forward: Floats
    backward: Floats
    once: Floats
    sent: Floats


def data_waits(
    overlap: bool,
    zero: Floats,
    m: Floats,
    ahead: Floats,
    behind: Floats,
    table: Mapping[str, Floats],
    meetings: Meetings,
    units: Floats,
) -> Waits:
    """Return what is exposed of ``table``'s data-parallel seconds beside windows of forward and backward compute.

    Each micro-batch: stage 3 gathers in forward and again in backward; stages 2 and 3 scatter. Once a step: stages 1
    and 2 gather, stage 1 scatters, replicas reduce. Hooks run in every micro-batch, half of them in either direction.
    ``behind`` holds recompute too. The work between two gathers or scatters is a window's over those in it, one or two
    for each of a stage's ``units``.
    """
    gather, scatter, reduce = table["gather"], table["scatter"], table["reduce"]
    three = zero == 3
    half = 0.5 * table["hooks"]
    all_of = gather + table["rows"]
    edge_of = table["gather_edge"] + table["rows_edge"]
    forward = np.where(three, _exposed(overlap, all_of, ahead, edge_of), 0.0) + half
    sent = np.where(three, all_of, 0.0) + np.where(zero >= 2, scatter, 0.0)
    edge = np.where(three, np.maximum(edge_of, table["scatter_edge"]), table["scatter_edge"])
    backward = _exposed(overlap, sent, behind, edge) + half
    once_gather = np.where((zero == 1) | (zero == 2), gather, 0.0)
    once_ahead = _exposed(overlap, once_gather, ahead, table["gather_edge"])
    once_sent = np.where(zero == 1, scatter, 0.0) + reduce
    once_edge = np.maximum(np.where(zero == 1, table["scatter_edge"], 0.0), table["reduce_edge"])
    once_behind = _exposed(overlap, once_sent, np.maximum(0.0, behind - sent), once_edge)
    found = Waits(
        forward=forward,
        backward=backward,
        once=once_ahead + once_behind,
        sent=m * (np.where(three, all_of, 0.0) + sent + table["hooks"]) + once_gather + once_sent,
    )
    return _apart(found, zero, m, ahead, behind, table["apart"], meetings, units) if meetings else found


def _apart(
    waits: Waits,
    zero: Floats,
    m: Floats,
    ahead: Floats,
    behind: Floats,
    apart: Floats,
    meetings: Meetings,
    units: Floats,
) -> Waits:
    """Return waits with what meetings take longer after a window's work (see ``data_waits``)."""

    def later(when: NDArray[np.bool_], window: Floats, times: float) -> Floats:
        return np.where(when, times * apart * meetings.log(window / (times * units)), 0.0)

    forward = later(zero == 3, ahead, 1.0)
    backward = later(zero == 3, behind, 2.0) + later(zero == 2, behind, 1.0)
    once = later((zero == 1) | (zero == 2), ahead, 1.0) + later(zero == 1, behind, 1.0)
    return Waits(
        forward=waits.forward + forward,
        backward=waits.backward + backward,
        once=waits.once + once,
        sent=waits.sent + m * (forward + backward) + once,
    )
