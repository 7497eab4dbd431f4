"""All layouts at once: memory and step time as NumPy columns, one row per layout and one column per stage.

Distinct pieces (a block under one tp and micro-batch, a unit under one shard group) are priced once and put
together by index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats, strided_shape
from meshwright.cost.data_parallel import DATA_PARTS, DataSeconds, data_waits, stage_seconds
from meshwright.cost.loads import Sizes, over_ranks, rank_peaks, stage_load
from meshwright.cost.memory import StageLoad, outside_allocator, peak_memory
from meshwright.cost.offloaded import away_codes, away_seconds
from meshwright.cost.pieces import Pricer
from meshwright.cost.pipeline import (
    contention,
    message_seconds,
    pipeline_seconds,
    shared_cores,
    shares_cores,
    tied_seconds,
)
from meshwright.cost.replay import makespans
from meshwright.cost.units import StageUnits, group_shapes, stage_units
from meshwright.cost.work import Work, WorkKey, sharding_stage, work_key
from meshwright.layout.batch import Batch
from meshwright.layout.cut import resolve_cut
from meshwright.layout.layout import Layout
from meshwright.schedule.actions import Schedule
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import SPLIT, generate

ADAM_BYTES: Final = 28.0
"""Bytes that AdamW moves per fp32 parameter: reads weight, gradient, two moments; writes three."""


ADAM_PROBE_BYTES: Final = 16.0
"""Bytes per fp32 parameter by which a probe counts its measured AdamW: weight, gradient, two moments."""


NORM_BYTES: Final = 16.0
"""Bytes per fp32 parameter of zeroing gradients, their norm, and scaling them for the clip."""


ALL_SPLIT: Final = ("zb-h1", "zbv")
"""Schedules of which every backward but the first stage's is split; of DualPipeV's few are."""


_WORK = tuple(f.name for f in fields(Work))


SUMMED = ("full", "trainable", "resting", "trainable_resting", "matmul", "trainable_tensors", "packed")
"""Sizes of units that add up over a stage."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What every layout costs. Arrays are [layouts], or [layouts, stages] where said; absent stages hold 0.

    Attributes:
        forward, backward: [layouts, stages] seconds of one micro-batch, communication in it included; ``weight`` those
            of the weight half where a backward is split (the first stage's is its whole backward).
        compute, recompute, tensor, context, expert, data: [layouts, stages] exposed seconds of a step.
        send: [layouts] seconds of one message between stages.
        offload: [layouts] seconds that a step waits for what rests away.
        memory: bytes by category, [layouts, stages].
        peak: [layouts] the highest peak over stages.
        step: [layouts] predicted seconds of a step by the closed form.
    """

    layouts: tuple[Layout, ...]
    cuts: tuple[tuple[int, ...], ...]
    micro_batches: Floats
    present: Floats
    forward: Floats
    backward: Floats
    weight: Floats
    compute: Floats
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    data: Floats
    once: Floats
    hidden: Floats
    send: Floats
    optimizer: Floats
    offload: Floats
    other: Floats
    memory: dict[str, Floats]
    load: StageLoad
    outside: Floats
    peak: Floats
    step: Floats
    bubble: Floats


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where the distinct pieces of all layouts are: keys of work, ends with their loss, and tables of units.

    ``counts`` is [layouts, stages, kinds] blocks; ``first``, ``last`` and ``present`` are [layouts, stages] flags;
    ``key_at``, ``end_at`` and ``table_at`` are [layouts] places in ``keys``, ``ends`` and ``loads``.
    """

    counts: Floats
    first: Floats
    last: Floats
    present: Floats
    keys: tuple[WorkKey, ...]
    ends: tuple[tuple[WorkKey, str], ...]
    loads: tuple[dict[str, list[float]], ...]
    cuts: tuple[tuple[int, ...], ...]
    key_at: NDArray[np.intp]
    end_at: NDArray[np.intp]
    table_at: NDArray[np.intp]
    send: Floats


def _placed(pricer: Pricer, layouts: Sequence[Layout], stages: int) -> Placed:
    """Return the distinct pieces of the layouts, whose deepest has ``stages``."""
    rows, num_kinds = len(layouts), len(pricer.kinds)
    counts = np.zeros((rows, stages, num_kinds))
    first = np.zeros((rows, stages))
    last = np.zeros((rows, stages))
    present = np.zeros((rows, stages))
    keys: dict[WorkKey, int] = {}
    ends: dict[tuple[WorkKey, str], int] = {}
    key_at = np.zeros(rows, dtype=np.intp)
    end_at = np.zeros(rows, dtype=np.intp)
    tables: dict[tuple[object, ...], int] = {}
    table_at = np.zeros(rows, dtype=np.intp)
    loads: list[dict[str, list[float]]] = []
    cut_of: dict[tuple[object, ...], tuple[tuple[int, ...], Floats]] = {}
    cuts: list[tuple[int, ...]] = []
    send = np.zeros(rows)
    sends: dict[tuple[object, ...], float] = {}
    for r, layout in enumerate(layouts):
        slot = (layout.num_stages, layout.pp, layout.schedule, layout.cut)
        if slot not in cut_of:
            cut = resolve_cut(pricer.spec, layout, pricer.seq_len)
            cut_of[slot] = (cut, _kind_counts(pricer, cut))
        cut, kinds = cut_of[slot]
        cuts.append(cut)
        counts[r, : layout.num_stages] = kinds
        present[r, : layout.num_stages] = 1.0
        first[r, 0] = 1.0
        last[r, layout.num_stages - 1] = 1.0
        key = work_key(layout)
        key_at[r] = keys.setdefault(key, len(keys))
        end_at[r] = ends.setdefault((key, layout.loss), len(ends))
        stage = sharding_stage(layout)
        shards = layout.shard if stage else 1
        table = (
            cut,
            layout.tp,
            layout.ep,
            shards,
            layout.dp,
            layout.cp,
            stage > 0,
            layout.order,
        )
        if table not in tables:
            tables[table] = len(loads)
            units = stage_units(pricer, layout.num_stages, layout.tp, layout.ep, shards)
            loads.append(_table(pricer, layout, units, kinds, stages))
        table_at[r] = tables[table]
        if layout.pp > 1:
            place = (
                layout.micro_batch,
                layout.cp,
                layout.tp,
                layout.dp,
                layout.pp,
                layout.order,
                key,
            )
            if place not in sends:
                sends[place] = message_seconds(pricer, layout)
            send[r] = sends[place]
    return Placed(
        counts=counts,
        first=first,
        last=last,
        present=present,
        keys=tuple(keys),
        ends=tuple(ends),
        loads=tuple(loads),
        cuts=tuple(cuts),
        key_at=key_at,
        end_at=end_at,
        table_at=table_at,
        send=send,
    )


def columns(
    pricer: Pricer, layouts: Sequence[Layout], batches: Sequence[Batch], schedule: Schedule | None = None
) -> Columns:
    """Return what each layout costs; ``batches`` holds its batch arithmetic, one per layout.

    With the ``schedule`` of a single layout, which the caller plays itself, ``step``, ``peak`` and ``bubble`` are NaN.
    """
    rows, num_kinds = len(layouts), len(pricer.kinds)
    stages = max(layout.num_stages for layout in layouts)
    at = _placed(pricer, layouts, stages)
    counts, first, last, present = at.counts, at.first, at.last, at.present
    key_at, end_at, send = at.key_at, at.end_at, at.send
    work = {
        name: np.array([[getattr(pricer.block(k, key), name) for k in range(num_kinds)] for key in at.keys])
        for name in _WORK
    }
    heads = {
        name: np.array([getattr(pricer.head(key, loss), name) for key, loss in at.ends]) for name in _WORK
    }
    embeds = {name: np.array([getattr(pricer.embedding(key), name) for key in at.keys]) for name in _WORK}

    def per_stage(name: str) -> Floats:
        out: Floats = np.einsum("rsk,rk->rs", counts, work[name][key_at])
        out += first * embeds[name][key_at][:, None] + last * heads[name][end_at][:, None]
        return out

    table = {name: np.array([load[name] for load in at.loads])[at.table_at] for name in at.loads[0]}
    m = np.array([float(b.accumulation) for b in batches])
    zero = np.array([float(sharding_stage(layout)) for layout in layouts])
    gpipe = np.array([layout.schedule == "gpipe" for layout in layouts])
    depth = np.array([float(layout.num_stages) for layout in layouts])
    place = np.arange(stages)[None, :]
    late = np.array([layout.schedule == "zb-h1" for layout in layouts])  # holds as many on every rank
    left = depth[:, None] - np.where(late[:, None], 0, place)
    in_flight = np.where(gpipe[:, None], m[:, None], np.minimum(m[:, None], left)) * present

    def worst(name: str) -> Floats:
        out: Floats = np.where(counts > 0, work[name][key_at][:, None, :], 0.0).max(axis=2)
        return out

    homes = sorted({layout.offload for layout in layouts})
    home_of = np.array([homes.index(layout.offload) for layout in layouts], dtype=np.intp)
    load = stage_load(
        pricer,
        Sizes(
            zero=zero,
            micro_batches=m,
            tp=np.array([float(layout.tp) for layout in layouts]),
            tokens=np.array([layout.micro_batch * pricer.seq_len / layout.cp for layout in layouts]),
            autocast=np.array([float(work_key(layout).autocast) for layout in layouts]),
            chunked=np.array([float(layout.loss == "chunked") for layout in layouts]),
            piped=np.array([float(layout.pp > 1) for layout in layouts]),
            away=away_codes(homes, home_of, np.array([float(layout.dp) for layout in layouts])),
        ),
        table,
        per_stage,
        worst,
        in_flight,
        first,
        last,
    )
    outside = _outside(pricer, layouts)[:, None]
    memory = peak_memory(load, outside)
    memory = {name: value * present for name, value in memory.items()}

    overlap = pricer.rates.overlaps
    splits = np.array([layout.pp > 1 and layout.schedule in ALL_SPLIT for layout in layouts])
    ahead, behind = per_stage("forward"), per_stage("backward")
    ahead, behind = ahead + pricer.rates.pass_s[0] * present, behind + pricer.rates.pass_s[1] * present
    behind = behind + per_stage("split") * (splits[:, None] & (first == 0))
    again, tensor = per_stage("recompute"), per_stage("tensor") + embeds["each"][key_at][:, None] * present
    context, expert = per_stage("context"), per_stage("expert")
    mm = m[:, None]
    half = 0.5 * (tensor + context + expert)
    units = counts.sum(axis=2) + 1.0
    meetings = pricer.placed.meetings
    waits = data_waits(overlap, zero[:, None], mm, ahead, behind + again, table, meetings, units)
    forward = (ahead + half + waits.forward) * present
    backward = (behind + again + half + waits.backward) * present
    weight = per_stage("weight") + 0.5 * per_stage("split") * splits[:, None] + waits.backward
    weight = np.where(first > 0, backward, np.minimum(weight, backward)) * present
    once = waits.once * present
    data = mm * (waits.forward + waits.backward) + waits.once
    tied = np.zeros(rows)
    if pricer.spec.tied_embeddings:
        tied = np.array([tied_seconds(pricer, layout) for layout in layouts])
    update = optimizer_seconds(pricer, table)
    optimizer = update.max(axis=1)
    windows = (mm, zero[:, None], ahead, behind + again, update)
    travel = away_seconds(pricer, homes, home_of, table, *windows)
    offload = travel.max(axis=1)
    other = _other(pricer, layouts) + tied
    if schedule is None:
        makespan = pipeline_seconds(forward, backward, send, m, depth, gpipe)
        shared = shared_cores(pricer, layouts, m, forward, backward, send)
    else:
        makespan, shared = np.full(rows, np.nan), np.ones(rows)
    busy = ((forward + backward) * mm).max(axis=1)
    peak = memory["peak"].max(axis=1) if schedule is None else makespan.copy()
    owed = once.max(axis=1)
    for r, layout in enumerate(layouts):
        if layout.pp > 1 and (layout.chunks > 1 or layout.schedule in SPLIT):
            # few layouts have these schedules: each is played by itself
            if schedule is not None:
                optimizer[r] = over_ranks(update[r], schedule).max()
                offload[r] = over_ranks(travel[r], schedule).max()
                continue
            depth_r, rounds = layout.num_stages, int(m[r])
            ahead_s, behind_s, weight_s = forward[r, :depth_r], backward[r, :depth_r], weight[r, :depth_r]
            if shares_cores(pricer.cluster, layout):
                played = _schedule(layout, rounds)
                clock = run_clock(played, list(ahead_s), list(behind_s), float(send[r]), list(weight_s))
                makespan[r], shared[r] = clock.makespan_s, contention(clock, pricer.cluster, layout)
            else:
                named, chunks = _schedule_name(layout, rounds), layout.chunks
                times = (ahead_s[:, None], behind_s[:, None], send[r : r + 1], weight_s[:, None])
                length, played = makespans(named, layout.pp, chunks, rounds, *times)
                makespan[r], shared[r] = length[0], 1.0
            busy[r] = rounds * over_ranks((ahead_s + behind_s), played).max()
            owed[r] = over_ranks(once[r], played).max()
            optimizer[r] = over_ranks(update[r], played).max()
            offload[r] = over_ranks(travel[r], played).max()
            peak[r] = rank_peaks(load, r, played, outside[r : r + 1])["peak"].max()
    step = makespan * shared + owed + optimizer + offload + other
    return Columns(
        layouts=tuple(layouts),
        cuts=at.cuts,
        micro_batches=m,
        present=present,
        forward=forward,
        backward=backward,
        weight=weight,
        compute=(ahead + behind) * mm * present,
        recompute=again * mm * present,
        tensor=tensor * mm * present,
        context=context * mm * present,
        expert=expert * mm * present,
        data=data * present,
        once=once,
        hidden=(waits.sent - data) * present,
        send=send,
        optimizer=optimizer,
        offload=offload,
        other=other,
        memory=memory,
        load=load,
        outside=outside,
        peak=peak,
        step=step,
        bubble=np.maximum(0.0, makespan * shared - busy) / step,
    )


def _schedule_name(layout: Layout, m: int) -> str:
    """Return the schedule to play; a schedule file, which is not at hand here, counts as 1F1B or interleaved."""
    if not layout.schedule.startswith("@"):
        return layout.schedule
    if layout.chunks > 1 and m % layout.pp == 0:
        return "interleaved"
    return "zbv" if layout.chunks == 2 else "1f1b"


def _schedule(layout: Layout, m: int) -> Schedule:
    return generate(_schedule_name(layout, m), layout.pp, m, layout.chunks)


def _kind_counts(pricer: Pricer, cut: Sequence[int]) -> Floats:
    counts = np.zeros((len(cut), len(pricer.kinds)))
    block = 0
    for stage, layers in enumerate(cut):
        for _ in range(layers):
            counts[stage, pricer.kind_of[block]] += 1
            block += 1
    return counts


def _table(
    pricer: Pricer, layout: Layout, units: StageUnits, kinds: Floats, stages: int
) -> dict[str, list[float]]:
    """Return sizes and data-parallel seconds of each stage, padded with zeros to ``stages``."""
    shards, copies, _ = group_shapes(layout, pricer.cluster.gpus_per_node)
    stage_zero = sharding_stage(layout)
    out: dict[str, list[float]] = {}
    known: dict[tuple[object, ...], DataSeconds] = {}
    for s in range(stages):
        if s < layout.num_stages:
            row = [int(n) for n in kinds[s]]
            held = [(units.root[s], 1), *zip(units.kinds, row, strict=True)]
            here = [u for u, n in held[1:] if n]
            sums = {name: sum(getattr(u, name) * n for u, n in held) for name in SUMMED}
            sizes = {
                **sums,
                "largest": max(u.largest for u, n in held if n),
                "table": units.root[s].largest,
                "matrix": max((u.largest for u in here), default=0.0),
                "root": units.root[s].full,
                "root_trainable": units.root[s].trainable,
                "block": max((u.full for u in here), default=0.0),
                "block_trainable": max((u.trainable for u in here), default=0.0),
                "unpacked": max((u.unpacked for u in here), default=0.0),
                "packed_block": max((u.packed for u in here), default=0.0),
            }
            slot = (units.root[s], tuple(row))
            if slot not in known:
                known[slot] = stage_seconds(pricer, layout, units, s, row, stage_zero, (shards, copies))
            sizes |= {name: getattr(known[slot], name) for name in DATA_PARTS}
        else:
            sizes = dict.fromkeys(out, 0.0)
        for name, value in sizes.items():
            out.setdefault(name, []).append(value)
    return out


def _outside(pricer: Pricer, layouts: Sequence[Layout]) -> Floats:
    groups = [1 + sum(d > 1 for d in (x.tp, x.pp, x.cp, x.dp_replicate, x.dp_shard, x.ep)) for x in layouts]
    return outside_allocator(np.array(groups, dtype=np.float64), is_cpu=pricer.cluster.device.is_cpu)


def optimizer_seconds(pricer: Pricer, table: Mapping[str, Floats]) -> Floats:
    """Return [layouts, stages] seconds of zeroing, norm, clip and AdamW on a rank's shard."""
    scale = pricer.state_bytes / 4.0
    local = table["trainable_resting"]
    rates = pricer.rates
    measured = "optimizer_bytes_per_s" in pricer.cluster.measured
    adam = ADAM_PROBE_BYTES if measured else ADAM_BYTES
    out = local * scale * (adam / rates.optimizer_rate + NORM_BYTES / rates.copy_rate)
    tensor_s = rates.optimizer_tensor_s + (6.0 * rates.op_s if not rates.overlaps else rates.op_s)
    return out + table["trainable_tensors"] * tensor_s


def other_seconds(pricer: Pricer, world_size: int) -> float:
    """Return the seconds of the two small all-reduces over the world, and of what a step does beside."""
    world = strided_shape(world_size, 1, pricer.cluster.gpus_per_node)
    small = pricer.times.seconds("all_reduce", 8.0, world) + pricer.times.seconds("all_reduce", 24.0, world)
    return float(small) + pricer.cluster.measured.get("seconds_per_step_overhead", 0.0)


def _other(pricer: Pricer, layouts: Sequence[Layout]) -> Floats:
    sizes = {layout.world_size for layout in layouts}
    known = {size: other_seconds(pricer, size) for size in sizes}
    return np.array([known[layout.world_size] for layout in layouts])
