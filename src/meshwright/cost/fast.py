"""All layouts at once: memory and step time as NumPy columns, one row per layout and one column per stage.

Distinct pieces (a block under one tp and micro-batch, a unit under one shard group) are priced once and put
together by index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import Floats, GroupShape, plane_shape, shape_of, strided_shape
from meshwright.cost.memory import StageLoad, fullest, outside_allocator, peak_memory
from meshwright.cost.offloaded import away_codes, away_seconds
from meshwright.cost.pieces import (
    COMPUTE_BYTES,
    SHARD_OPS_PER_TENSOR,
    SHARD_OPS_PER_UNIT,
    STATE_BYTES,
    Pricer,
    UnitSize,
    Work,
    WorkKey,
    sharding_stage,
    unit_size,
    work_key,
)
from meshwright.cost.replay import makespans, moments
from meshwright.layout.batch import Batch
from meshwright.layout.context import local_length
from meshwright.layout.cut import resolve_cut
from meshwright.layout.layout import LOSS_CHUNKS, Layout
from meshwright.layout.ranks import expert_degrees, strides
from meshwright.model.spec import TensorSpec
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.clock import Clock, run_clock
from meshwright.schedule.generate import SPLIT, V_SHAPED, generate
from meshwright.schedule.order import play

ADAM_BYTES: Final = 28.0
"""Bytes that AdamW moves per fp32 parameter: reads weight, gradient, two moments; writes three."""
ADAM_PROBE_BYTES: Final = 16.0
"""Bytes per fp32 parameter by which a probe counts its measured AdamW: weight, gradient, two moments."""
NORM_BYTES: Final = 16.0
"""Bytes per fp32 parameter of zeroing gradients, their norm, and scaling them for the clip."""
OVERLAP: Final = 0.90
"""Share of a compute window behind which communication can hide on a GPU (assumed until calibrated)."""

Bools: TypeAlias = NDArray[np.bool_]

ROUNDS: Final = 2
"""Micro-batches per stage after which 1F1B is periodic."""
ALL_SPLIT: Final = ("zb-h1", "zbv")
"""Schedules of which every backward but the first stage's is split; of DualPipeV's few are."""

PLAYED_STAGES: Final = 16
"""Depth up to which a search plays 1F1B; deeper pipelines have its closed form until they are priced exactly."""

_WORK = tuple(f.name for f in fields(Work))


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """Units of each stage of one cut under one tp, ep and shard group: the root unit and kinds of blocks."""

    root: tuple[UnitSize, ...]
    kinds: tuple[UnitSize, ...]
    experts: tuple[UnitSize, ...] = ()
    """The part of each kind that the expert axis spreads; empty where nothing is spread."""
    rest: tuple[UnitSize, ...] = ()
    """The other part of each kind."""


@dataclass(frozen=True, kw_only=True)
class DataSeconds:
    """Seconds of data-parallel communication of one stage, by what it is; ``edge`` parts cannot be hidden.

    ``hooks`` is what sharded units take of every micro-batch beside gathers and scatters.
    """

    gather: float = 0.0
    gather_edge: float = 0.0
    scatter: float = 0.0
    scatter_edge: float = 0.0
    reduce: float = 0.0
    reduce_edge: float = 0.0
    hooks: float = 0.0
    hooks_edge: float = 0.0


_DATA = tuple(f.name for f in fields(DataSeconds))

SUMMED = ("full", "trainable", "resting", "trainable_resting", "matmul", "trainable_tensors")
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


def stage_tensors(pricer: Pricer, stage: int, stages: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a stage's root unit: embedding, final norm and head, as far as they are there."""
    spec = pricer.spec
    out: list[TensorSpec] = []
    if stage == 0:
        out += spec.embedding
    if stage == stages - 1:
        out += spec.final
        # a tied head on the embedding's stage is the embedding; on another stage it is a tensor of its own
        out += [t for t in spec.head if t.tied_to is None or stages > 1]
    return tuple(out)


def _sizes(pricer: Pricer, tensors: Sequence[TensorSpec], tp: int, ep: int, shards: int) -> UnitSize:
    trains = [t.name not in pricer.stopped for t in tensors]
    return unit_size(tensors, trains, pricer.spec.attention, tp, ep, shards)


def stage_units(pricer: Pricer, stages: int, tp: int, ep: int, shards: int) -> StageUnits:
    """Return the unit sizes of every stage."""
    ends = {0, stages - 1}
    inner = _sizes(pricer, (), tp, ep, shards)
    root = [
        _sizes(pricer, stage_tensors(pricer, s, stages), tp, ep, shards) if s in ends else inner
        for s in range(stages)
    ]
    if stages == 1:  # a tied head is no tensor of its own, but a matrix that is multiplied with
        tied = [replace(t, tied_to=None) for t in pricer.spec.head if t.tied_to is not None]
        root[0] = replace(root[0], matmul=root[0].matmul + _sizes(pricer, tied, tp, ep, 1).matmul)
    kinds = [_sizes(pricer, b.tensors, tp, ep, shards) for b in pricer.kinds]
    if ep == 1:
        return StageUnits(root=tuple(root), kinds=tuple(kinds))
    spread = [[t for t in b.tensors if t.of_experts] for b in pricer.kinds]
    rest = [[t for t in b.tensors if not t.of_experts] for b in pricer.kinds]
    return StageUnits(
        root=tuple(root),
        kinds=tuple(kinds),
        experts=tuple(_sizes(pricer, tensors, tp, ep, shards) for tensors in spread),
        rest=tuple(_sizes(pricer, tensors, tp, ep, shards) for tensors in rest),
    )


def group_shapes(layout: Layout, gpus_per_node: int) -> tuple[GroupShape, GroupShape, GroupShape]:
    """Return the shapes of the group that shards (or, in stage 0, reduces), of the replicas, and of a hop."""
    step = strides(layout)
    stage = sharding_stage(layout)
    node = gpus_per_node
    if not stage:
        shards = plane_shape(((layout.dp, step["dp_shard"]), (layout.cp, step["cp"])), node)
        return shards, GroupShape(1, 1, 1), strided_shape(2, step["pp"], node)
    shards = plane_shape(((layout.dp_shard, step["dp_shard"]), (layout.cp, step["cp"])), node)
    return (
        shards,
        strided_shape(layout.dp_replicate, step["dp_replicate"], node),
        strided_shape(2, step["pp"], node),
    )


def expert_shapes(layout: Layout, gpus_per_node: int) -> tuple[GroupShape, GroupShape]:
    """Return the shapes of the group that shards (or, in stage 0, reduces) an expert, and of its replicas."""
    replicas, shards = expert_degrees(layout)
    sharded = sharding_stage(layout) > 0
    step = strides(layout)
    if step["dp_shard"] == step["cp"] * layout.cp:  # dp x cp is one row of ranks, equally far apart
        apart = step["cp"] * layout.ep
        inner = strided_shape(shards if sharded else replicas, apart, gpus_per_node)
        return inner, strided_shape(replicas if sharded else 1, apart * shards, gpus_per_node)
    same = np.arange(replicas * shards) * layout.ep  # places in dp x cp of rank 0's experts
    (near, degree), (far, _) = sorted(((step["cp"], layout.cp), (step["dp_shard"], layout.dp)))
    ranks = same // degree * far + same % degree * near
    inner = shape_of([int(r) for r in (ranks[:shards] if sharded else ranks)], gpus_per_node)
    return inner, shape_of([int(r) for r in ranks[::shards]] if sharded else [0], gpus_per_node)


def unit_seconds(
    pricer: Pricer, sizes: Mapping[str, Floats], sharded: bool, shards: GroupShape, copies: GroupShape
) -> dict[str, Floats]:
    """Return seconds of gathering, scattering and reducing single units, from columns of ``UnitSize``'s figures."""
    times, rates = pricer.times, pricer.rates
    state, compute = float(pricer.state_bytes), float(pricer.compute_bytes)
    none = np.zeros_like(sizes["full"])
    out = {"gather": none, "scatter": none, "reduce": none, "hooks": none}
    reduced = sizes["trainable"] * state
    if sharded and shards.size > 1:
        gathered = sizes["full"] * compute
        out["gather"] = times.seconds("all_gather", gathered, shards)
        out["scatter"] = times.seconds("reduce_scatter", reduced, shards)
        if not rates.overlaps:  # copies in and out, and the small operations around them
            small = SHARD_OPS_PER_UNIT + SHARD_OPS_PER_TENSOR * sizes["tensors"]
            out["gather"] = out["gather"] + 2.0 * gathered / rates.copy_rate + small * rates.op_s
            small = SHARD_OPS_PER_UNIT + SHARD_OPS_PER_TENSOR * sizes["trainable_tensors"]
            out["scatter"] = out["scatter"] + 2.0 * reduced / rates.copy_rate + small * rates.op_s
            out |= pricer.placed.of_units(gathered, reduced, shards)
        out["reduce"] = times.seconds("all_reduce", reduced / shards.size, copies)
    elif not sharded and shards.size > 1:
        out["reduce"] = times.seconds("all_reduce", reduced, shards)
    return {name: np.where(sizes["full"] > 0, seconds, 0.0) for name, seconds in out.items()}


def _data_seconds(
    pricer: Pricer,
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
    for name, seconds in unit_seconds(pricer, sizes, stage > 0, shards, copies).items():
        total[name] = float((seconds * counts).sum())
        # what cannot be hidden is the root unit's, or the first block's where there is none
        total[f"{name}_edge"] = float(seconds[0]) if len(held) else 0.0
    return DataSeconds(**total)


def _stage_seconds(
    pricer: Pricer,
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
        return _data_seconds(pricer, held, zero, *shapes)
    held = [(units.root[stage], 1), *zip(units.rest, counts, strict=True)]
    one = _data_seconds(pricer, held, zero, *shapes)
    groups = expert_shapes(layout, pricer.cluster.gpus_per_node)
    other = _data_seconds(pricer, list(zip(units.experts, counts, strict=True)), zero, *groups)
    sums = {n: getattr(one, n) + getattr(other, n) for n in _DATA if not n.endswith("_edge")}
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
    overlap: bool, zero: Floats, m: Floats, ahead: Floats, behind: Floats, table: Mapping[str, Floats]
) -> Waits:
    """Return what is exposed of ``table``'s data-parallel seconds beside windows of forward and backward compute.

    Each micro-batch: stage 3 gathers in forward and again in backward; stages 2 and 3 scatter. Once a step: stages 1
    and 2 gather, stage 1 scatters, replicas reduce. Hooks run in every micro-batch, half of them in either direction.
    ``behind`` holds recompute too.
    """
    gather, scatter, reduce = table["gather"], table["scatter"], table["reduce"]
    three = zero == 3
    half = 0.5 * table["hooks"]
    forward = np.where(three, _exposed(overlap, gather, ahead, table["gather_edge"]), 0.0) + half
    sent = np.where(three, gather, 0.0) + np.where(zero >= 2, scatter, 0.0)
    edge = np.where(three, np.maximum(table["gather_edge"], table["scatter_edge"]), table["scatter_edge"])
    backward = _exposed(overlap, sent, behind, edge) + half
    once_gather = np.where((zero == 1) | (zero == 2), gather, 0.0)
    once_ahead = _exposed(overlap, once_gather, ahead, table["gather_edge"])
    once_sent = np.where(zero == 1, scatter, 0.0) + reduce
    once_edge = np.maximum(np.where(zero == 1, table["scatter_edge"], 0.0), table["reduce_edge"])
    once_behind = _exposed(overlap, once_sent, np.maximum(0.0, behind - sent), once_edge)
    return Waits(
        forward=forward,
        backward=backward,
        once=once_ahead + once_behind,
        sent=m * (np.where(three, gather, 0.0) + sent + table["hooks"]) + once_gather + once_sent,
    )


def columns(
    pricer: Pricer, layouts: Sequence[Layout], batches: Sequence[Batch], schedule: Schedule | None = None
) -> Columns:
    """Return what each layout costs; ``batches`` holds its batch arithmetic, one per layout.

    With the ``schedule`` of a single layout, which the caller plays itself, ``step``, ``peak`` and ``bubble`` are NaN.
    """
    rows, num_kinds = len(layouts), len(pricer.kinds)
    stages = max(layout.num_stages for layout in layouts)
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
    cut_of: dict[tuple[int, str], tuple[tuple[int, ...], Floats]] = {}
    cuts: list[tuple[int, ...]] = []
    send = np.zeros(rows)
    tied = np.zeros(rows)
    sends: dict[tuple[object, ...], float] = {}
    for r, layout in enumerate(layouts):
        slot = (layout.num_stages, layout.cut)
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
            layout.num_stages,
            layout.cut,
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
    work = {
        name: np.array([[getattr(pricer.block(k, key), name) for k in range(num_kinds)] for key in keys])
        for name in _WORK
    }
    heads = {name: np.array([getattr(pricer.head(key, loss), name) for key, loss in ends]) for name in _WORK}
    embeds = {name: np.array([getattr(pricer.embedding(key), name) for key in keys]) for name in _WORK}

    def per_stage(name: str) -> Floats:
        out: Floats = np.einsum("rsk,rk->rs", counts, work[name][key_at])
        out += first * embeds[name][key_at][:, None] + last * heads[name][end_at][:, None]
        return out

    table = {name: np.array([load[name] for load in loads])[table_at] for name in loads[0]}
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
    waits = data_waits(overlap, zero[:, None], mm, ahead, behind + again, table)
    forward = (ahead + half + waits.forward) * present
    backward = (behind + again + half + waits.backward) * present
    weight = per_stage("weight") + 0.5 * per_stage("split") * splits[:, None] + waits.backward
    weight = np.where(first > 0, backward, np.minimum(weight, backward)) * present
    once = waits.once * present
    data = mm * (waits.forward + waits.backward) + waits.once
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
        shared = _shared(pricer, layouts, m, forward, backward, send)
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
        cuts=tuple(cuts),
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


def over_ranks(values: Floats, schedule: Schedule) -> Floats:
    """Return the sums over each pipeline rank's stages of per-stage ``values``, [stages] to [ranks]."""
    out = np.zeros(schedule.num_ranks)
    np.add.at(out, list(schedule.stage_ranks), values[: schedule.num_stages])
    return out


def rank_peaks(load: StageLoad, row: int, schedule: Schedule, outside: Floats) -> dict[str, Floats]:
    """Return bytes by category of each pipeline rank, [1, ranks], at its peak, from the stages of layout ``row``."""
    owns: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
    for stage, rank in enumerate(schedule.stage_ranks):
        owns[rank].append(stage)
    names = {f.name for f in fields(StageLoad)}
    one = replace(load, **{n: getattr(load, n)[row : row + 1, : schedule.num_stages] for n in names})
    index = np.array(owns, dtype=np.intp)
    halves = np.full(1, float(any(a.kind is ActionKind.INPUT_GRAD for a in schedule.rows[0])))
    found = [
        peak_memory(over_owned(one, index, x.held[None], x.waiting[None], x.half[None], halves), outside)
        for x in moments(schedule)
    ]
    return fullest(found)


def over_owned(
    load: StageLoad, owns: NDArray[np.intp], held: Floats, waiting: Floats, half: Floats, halves: Floats
) -> StageLoad:
    """Return what each rank holds at a moment, [layouts, ranks], of the stages (or runs of them) that it owns.

    Parameters and messages add over a rank's stages, the largest unit is the largest of any. Activations and weight
    casts are the mean over the chunks that are held then.

    Args:
        load: of the stages, [layouts, stages].
        owns: [ranks, chunks] the stages of each rank.
        held: [layouts, ranks, chunks] micro-batches of each stage that are held at that moment.
        waiting: the same of those whose input half is done.
        half: [layouts, ranks] 1 where a rank is in a half of a backward.
        halves: [layouts] 1 where the schedule splits backwards.
    """
    in_flight = held.sum(axis=2)
    total = np.maximum(in_flight, 1.0)
    end = load.full.shape[1] - 1

    def added(values: Floats) -> Floats:
        return values[:, owns].sum(axis=2)

    def largest(values: Floats) -> Floats:
        return values[:, owns].max(axis=2)

    def mean(values: Floats) -> Floats:
        return (values[:, owns] * held).sum(axis=2) / total

    sums = (
        *("full", "trainable", "resting", "trainable_resting", "root", "root_trainable"),
        *("boundary", "logits", "final", "kept_loss", "steps"),
    )
    means = ("cast", "activations")
    out = {
        f.name: (added if f.name in sums else mean if f.name in means else largest)(getattr(load, f.name))
        for f in fields(StageLoad)
    }
    at_end = owns[None] == end
    done = np.where(at_end, waiting, 0.0).sum(axis=2)
    # the micro-batch in whose half the rank is had its loss to do when that half began
    losses = np.where(at_end, held, 0.0).sum(axis=2) - done + half * (done > 0)
    out |= {n: np.where(losses > 0, out[n], 0.0) for n in ("logits", "final")}
    out |= {"in_flight": in_flight, "losses": losses}
    # gradients that were sent back: of every micro-batch but those whose backward (or input half) is still to come
    out["back"] = (load.back[:, owns] * (held - waiting)).sum(axis=2) / total
    in_blocks = np.minimum(load.cast, load.full - load.root)
    out["recast"] = (in_blocks[:, owns] * waiting).sum(axis=2)
    out["captured"] = np.where(at_end, load.captured[:, owns], 0.0).sum(axis=2)
    out["waits"] = (load.captured[:, owns] * waiting).sum(axis=2)
    return StageLoad(**out | {"half": half, "halves": np.broadcast_to(halves[:, None], half.shape)})


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
            }
            slot = (units.root[s], tuple(row))
            if slot not in known:
                known[slot] = _stage_seconds(pricer, layout, units, s, row, stage_zero, (shards, copies))
            sizes |= {name: getattr(known[slot], name) for name in _DATA}
        else:
            sizes = dict.fromkeys(out, 0.0)
        for name, value in sizes.items():
            out.setdefault(name, []).append(value)
    return out


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of a layout its memory depends on beside its stages, [layouts]; flags are 0 or 1.

    ``tokens`` are those of a micro-batch on one rank.
    """

    zero: Floats
    micro_batches: Floats
    tp: Floats
    tokens: Floats
    autocast: Floats
    chunked: Floats
    piped: Floats
    away: Floats


def stage_load(
    pricer: Pricer,
    sizes: Sizes,
    table: Mapping[str, Floats],
    per_stage: Callable[[str], Floats],
    worst: Callable[[str], Floats],
    in_flight: Floats,
    first: Floats,
    last: Floats,
) -> StageLoad:
    """Return what each stage holds, [layouts, stages].

    ``per_stage`` sums a figure of ``Work`` over a stage, ``worst`` takes its largest block's; ``first`` and ``last``
    are 1 on the stages with embedding and head.
    """
    shape = in_flight.shape

    def wide(column: Floats) -> Floats:
        return np.broadcast_to(column[:, None], shape)

    spec = pricer.spec
    m, chunked = sizes.micro_batches, sizes.chunked
    parts = sizes.tp * np.where(chunked > 0, np.ceil(LOSS_CHUNKS / sizes.tp), 1)
    message = sizes.tokens * spec.hidden_size * np.where(sizes.autocast > 0, 4.0, float(pricer.compute_bytes))
    # receive buffers of every micro-batch, and what is sent, which is held until the step ends
    one = wide(sizes.piped * message)
    boundary = one * 2.0 * wide(m) * ((1.0 - first) + (1.0 - last))
    return StageLoad(
        zero=wide(sizes.zero),
        resting=table["resting"],
        trainable_resting=table["trainable_resting"],
        micro_batches=wide(m),
        in_flight=in_flight,
        full=table["full"],
        trainable=table["trainable"],
        tensor=table["largest"],
        table=table["table"],
        foot=table["table"] * first,
        matrix=table["matrix"],
        root=table["root"],
        root_trainable=table["root_trainable"],
        block=table["block"],
        block_trainable=table["block_trainable"],
        cast=table["matmul"],
        # what a later stage's first block is given is in its receive buffer
        activations=per_stage("kept") - wide(sizes.piped) * (1.0 - first) * worst("entry"),
        recompute=worst("again"),
        transient=worst("transient"),
        inside=worst("inside"),
        gone=worst("gone"),
        whole=worst("whole"),
        norm=worst("norm"),
        grown=worst("grown"),
        boundary=boundary,
        back=one * (1.0 - first),
        steps=wide(m),
        stage=table["trainable"],
        final=per_stage("final"),
        kept_loss=per_stage("loss"),
        chunked=wide(chunked),
        logits=last * wide(sizes.tokens * spec.vocab_size / parts),
        losses=in_flight,
        storage=np.full(shape, float(STATE_BYTES[pricer.precision])),
        compute=np.full(shape, float(COMPUTE_BYTES[pricer.precision])),
        reduce=np.full(shape, float(STATE_BYTES[pricer.precision])),
        autocast=wide(sizes.autocast),
        vocab=np.full(shape, 1.0) * (wide(sizes.tp) > 1.0),
        copies=np.full(shape, 2.0 if pricer.cluster.device.is_cpu else 1.0),
        away=wide(sizes.away),
        recast=np.zeros(shape),
        noise=worst("noise"),
        captured=per_stage("captured"),
        waits=np.zeros(shape),
        half=np.zeros(shape),
        halves=np.zeros(shape),
        edge=worst("edge"),
    )


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


def message_seconds(pricer: Pricer, layout: Layout) -> float:
    """Return the seconds of one message between neighbouring stages: a micro-batch's residual stream on one rank."""
    if layout.pp < 2:
        return 0.0
    hop = group_shapes(layout, pricer.cluster.gpus_per_node)[2]
    wire = 4 if work_key(layout).autocast else pricer.compute_bytes
    num_bytes = layout.micro_batch * local_length(layout, pricer.seq_len) * pricer.spec.hidden_size * wire
    return float(pricer.times.seconds("send", float(num_bytes), hop))


def other_seconds(pricer: Pricer, world_size: int) -> float:
    """Return the seconds of the two small all-reduces over the world, and of what a step does beside."""
    world = strided_shape(world_size, 1, pricer.cluster.gpus_per_node)
    small = pricer.times.seconds("all_reduce", 8.0, world) + pricer.times.seconds("all_reduce", 24.0, world)
    return float(small) + pricer.cluster.measured.get("seconds_per_step_overhead", 0.0)


def _other(pricer: Pricer, layouts: Sequence[Layout]) -> Floats:
    sizes = {layout.world_size for layout in layouts}
    known = {size: other_seconds(pricer, size) for size in sizes}
    return np.array([known[layout.world_size] for layout in layouts])


def tied_seconds(pricer: Pricer, layout: Layout) -> float:
    """Return the seconds of summing a tied embedding's gradient between first and last stage."""
    if layout.pp < 2 or layout.schedule in V_SHAPED:
        return 0.0
    table = pricer.spec.vocab_size * pricer.spec.hidden_size / layout.tp / max(1, layout.dp_shard)
    shape = strided_shape(2, strides(layout)["pp"] * (layout.pp - 1), pricer.cluster.gpus_per_node)
    return float(pricer.times.seconds("all_reduce", table * pricer.state_bytes, shape))


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


def _shared(
    pricer: Pricer, layouts: Sequence[Layout], m: Floats, forward: Floats, backward: Floats, send: Floats
) -> Floats:
    out = np.ones(len(layouts))
    for r, layout in enumerate(layouts):
        if shares_cores(pricer.cluster, layout) and layout.schedule in ("gpipe", "1f1b"):
            schedule = generate(layout.schedule, layout.pp, int(m[r]))
            ahead = [float(x) for x in forward[r, : layout.pp]]
            behind = [float(x) for x in backward[r, : layout.pp]]
            clock = run_clock(schedule, ahead, behind, float(send[r]))
            out[r] = contention(clock, pricer.cluster, layout)
    return out
