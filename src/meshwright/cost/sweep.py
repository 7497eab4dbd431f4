"""The fast tier: what every layout of a slot holds and costs, as columns, without a Python step per layout.

One formula serves this tier and a single prediction (``cost.fast``): here stages that are alike are one column, and
the makespan is an admissible bound (``cost.bounds``) instead of rows played on the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from meshwright.cost.bounds import chunks_held, least_seconds, split_moments
from meshwright.cost.collective import Floats
from meshwright.cost.data_parallel import data_waits
from meshwright.cost.fast import ALL_SPLIT, SUMMED, optimizer_seconds, other_seconds
from meshwright.cost.loads import Sizes, owned, stage_load
from meshwright.cost.memory import StageLoad, outside_allocator, peak_bytes
from meshwright.cost.offload import is_away
from meshwright.cost.offloaded import away_codes, away_seconds
from meshwright.cost.pieces import Pricer
from meshwright.cost.replay import Moment
from meshwright.cost.rows import Index, Rows
from meshwright.cost.slots import Slot
from meshwright.cost.tables import EDGES, SECONDS, SIZES, WORK, Tables
from meshwright.schedule.generate import SPLIT

MOVED: Final = (*SECONDS, *EDGES, "trainable_resting", "trainable_tensors")
"""Figures of a stage's units that a row's seconds are made of; ``HELD`` those of its bytes."""
HELD: Final = (
    *("full", "trainable", "resting", "trainable_resting", "matmul", "largest"),
    *("root", "root_trainable", "block", "block_trainable", "table", "matrix"),
    *("packed", "packed_block", "unpacked"),
)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What each row takes.

    Attributes:
        forward, backward: [rows, stage runs] seconds of one micro-batch, exposed communication in it included;
            ``weight`` those of the weight half of a split backward.
        send: [rows] seconds of one message between stages.
        rest: [rows] seconds of a step beside the pipeline: data once a step, optimizer, other.
        least: [rows] seconds of a step that the clock cannot undercut.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    send: Floats
    rest: Floats
    least: Floats

    def take(self, index: Index) -> Timed:
        """Return some of the rows, in the order of ``index``."""
        return Timed(**{f.name: getattr(self, f.name)[index] for f in fields(Timed)})


@dataclass(frozen=True, kw_only=True)
class Swept(Timed):
    """What each row takes and holds.

    Attributes:
        load: [rows, stage runs] what stages hold.
        outside: [rows, 1] bytes beside the allocator.
        peak: [rows] bytes of the fullest rank.
    """

    load: StageLoad
    outside: Floats
    peak: Floats


TIME: Final = ("forward", "backward", "recompute", "tensor", "context", "expert", "split", "weight")
"""Figures of Work that a row's seconds are made of; ``MEMORY`` those of its bytes."""
WORST: Final = ("again", "transient", "inside", "gone", "whole", "norm", "grown", "entry", "noise", "edge")
"""Figures of Work of which a stage has its largest block's."""
MEMORY: Final = ("kept", "final", "loss", "captured", *WORST)


def sweep(
    tables: Tables, rows: Rows, slot: Slot, timed: Timed | None = None, limit: float = math.inf
) -> Swept:
    """Return what every row takes and holds; ``slot`` describes the stages that all rows share.

    ``timed`` are their seconds where they are known. Of a row that holds more than ``limit`` bytes at one moment no
    other moment is looked at.
    """
    pricer = tables.pricer
    times = step_seconds(tables, rows, slot) if timed is None else timed
    work, table = _work(tables, rows, slot, MEMORY), _units(tables, rows, slot, HELD)
    m, zero = rows.column("accumulation"), rows.column("stage")
    load = _load(pricer, rows, slot, work, table, m, zero)
    outside = _outside(pricer, rows, slot)[:, None]
    peak = _peak(rows, slot, load, m, outside, limit)
    held = {f.name: getattr(times, f.name) for f in fields(Timed)}
    return Swept(**held, load=load, outside=outside, peak=peak)


def step_seconds(tables: Tables, rows: Rows, slot: Slot) -> Timed:
    """Return what every row takes."""
    pricer = tables.pricer
    homes = rows.values["offload"]
    away = any(is_away(home) for home in homes)
    work, table = _work(tables, rows, slot, TIME), _units(tables, rows, slot, () if away else MOVED)
    splits = rows.flag("schedule", *ALL_SPLIT)[:, None] & (slot.first > 0)
    work["forward"] = work["forward"] + pricer.rates.pass_s[0]
    work["backward"] = work["backward"] + np.where(splits, work["split"], 0.0) + pricer.rates.pass_s[1]
    m, zero = rows.column("accumulation"), rows.column("stage")
    behind = work["backward"] + work["recompute"]
    waits = data_waits(
        pricer.rates.overlaps,
        zero[:, None],
        m[:, None],
        work["forward"],
        behind,
        table,
        pricer.placed.meetings,
        slot.counts.sum(axis=1)[None, :] + 1.0,
    )
    half = 0.5 * (work["tensor"] + work["context"] + work["expert"])
    forward = work["forward"] + half + waits.forward
    backward = behind + half + waits.backward
    send = _gathered(tables, "sends", rows, slot)
    once = _over(slot, waits.once).max(axis=1)
    update = optimizer_seconds(pricer, table)
    rest = once + _over(slot, update).max(axis=1)
    if away:
        windows = (m[:, None], zero[:, None], work["forward"], behind, update)
        waited = away_seconds(pricer, homes, rows.codes["offload"].astype(np.intp), table, *windows)
        rest = rest + _over(slot, waited).max(axis=1)
    rest = rest + other_seconds(pricer, rows.layout(0).world_size)
    if pricer.spec.tied_embeddings and slot.pp > 1:
        rest = rest + _gathered(tables, "tied", rows, slot)
    weight = work["weight"] + np.where(splits, 0.5 * work["split"], 0.0) + waits.backward
    weight = np.where(slot.first > 0, np.minimum(weight, backward), backward)
    length = least_seconds(rows, slot, forward, backward, weight, send, m)
    if pricer.cluster.device.is_cpu and slot.pp > 1:
        # ranks that wait leave their cores to others: never shorter than the work of all over all ranks
        mean = ((forward + backward) * slot.length).sum(axis=1) / slot.pp
        length = np.minimum(length, m * mean)
    return Timed(forward=forward, backward=backward, weight=weight, send=send, rest=rest, least=length + rest)


def _peak(rows: Rows, slot: Slot, load: StageLoad, m: Floats, outside: Floats, limit: float) -> Floats:
    """Return [rows] bytes of the fullest rank; rows whose schedule splits backwards at each moment that may be it."""
    peak = np.zeros(len(rows))
    split = rows.flag("schedule", *SPLIT) if slot.pp > 1 else np.zeros(len(rows), dtype=np.bool_)
    for names in (("zb-h1", "zbv"), ("dualpipev",), None):
        some = np.flatnonzero(~split if names is None else split & rows.flag("schedule", *names))
        if not len(some):
            continue
        all_rows = len(some) == len(rows)
        part, one = rows, load
        if not all_rows:
            part = rows.take(some)
            one = replace(load, **{f.name: getattr(load, f.name)[some] for f in fields(StageLoad)})
        if names is None:
            peak[some] = _peaks(part, slot, one, m[some], outside[some])
        else:
            peak[some] = _split_peaks(part, slot, one, m[some], outside[some], limit)
    return peak


def _peaks(rows: Rows, slot: Slot, load: StageLoad, m: Floats, outside: Floats) -> Floats:
    """Return [rows] bytes of the fullest rank of rows whose schedules have whole backwards."""
    in_flight, held = chunks_held(rows, slot, m)
    ranks = replace(load, in_flight=in_flight, losses=in_flight)
    if slot.chunks > 1:
        none = np.zeros_like(held)
        whole = Moment(half=none[:, :, 0], held=held, waiting=none, graded=none + 1.0)
        ranks = owned(load, slot.owns, slot.turn, np.zeros(len(rows))).at(whole)
    return peak_bytes(ranks, outside).max(axis=1)


def _split_peaks(rows: Rows, slot: Slot, load: StageLoad, m: Floats, outside: Floats, limit: float) -> Floats:
    """Return [rows] bytes of the fullest rank of rows whose schedules split backwards; see ``sweep`` for ``limit``."""
    first, *others = split_moments(rows, slot, m)
    ranks = owned(load, slot.owns, slot.turn, np.ones(len(rows)))
    peak = peak_bytes(ranks.at(first), outside).max(axis=1)
    left = np.flatnonzero(peak <= limit)
    if not others or not len(left):
        return peak
    if len(left) < len(rows):
        part = replace(load, **{f.name: getattr(load, f.name)[left] for f in fields(StageLoad)})
        ranks = owned(part, slot.owns, slot.turn, np.ones(len(left)))
    found = [peak_bytes(ranks.at(x.take(left)), outside[left]).max(axis=1) for x in others]
    peak[left] = np.maximum(peak[left], np.max(np.stack(found), axis=0))
    return peak


def _over(slot: Slot, values: Floats) -> Floats:
    """Return sums over each rank's stages, [rows, rank runs], of [rows, stage runs] values."""
    return values if slot.chunks == 1 else values[:, slot.owns].sum(axis=2)


def _gathered(tables: Tables, kind: str, rows: Rows, slot: Slot) -> Floats:
    numbered = tables.of_pipeline(kind, slot.pp, slot.num_stages)
    at = numbered.look(rows)
    assert numbered.figures is not None
    return numbered.figures[at]


def block_floors(tables: Tables, rows: Rows, slot: Slot) -> tuple[Floats, Floats]:
    """Return ([blocks] seconds, [blocks] bytes) that no layout of a block undercuts.

    Time: the work and the communication inside blocks, the update and the small all-reduces of a step, without data
    parallelism or messages. Memory: model
    state and moments cut over all of dp * cp, the activations in flight, and what is outside the allocator.
    """
    pricer = tables.pricer
    names = ("forward", "backward", "weight", "recompute", "tensor", "context", "expert", "kept")
    work = _work(tables, rows, slot, names)
    m = rows.column("accumulation")
    half = 0.5 * (work["tensor"] + work["context"] + work["expert"])
    forward, backward = work["forward"] + half, work["backward"] + work["recompute"] + half
    weight = np.where(slot.first > 0, np.minimum(work["weight"], backward), backward)
    least = least_seconds(rows, slot, forward, backward, weight, np.zeros(len(rows)), m)
    if pricer.cluster.device.is_cpu and slot.pp > 1:
        least = np.minimum(least, m * ((forward + backward) * slot.length).sum(axis=1) / slot.pp)
    units = tables.of_pipeline("units", slot.pp, slot.num_stages)
    at = units.look(rows)
    assert units.figures is not None
    # of the sparsest layout: units are padded to equal rows, so a larger group never holds more on a rank
    names = ("resting", "trainable_resting", "trainable_tensors", "packed")
    figures = {n: _sums(slot, units.figures[:, SIZES.index(n)]) for n in names}
    full, trained, packed = (_over(slot, figures[n])[at] for n in (*names[:2], "packed"))
    packed = packed / (rows.column("dp") * rows.column("cp"))[:, None]
    least = least + _over(slot, optimizer_seconds(pricer, figures)).max(axis=1)[at]
    least = least + other_seconds(pricer, rows.layout(0).world_size)
    away = _codes(rows)[:, None]
    state = pricer.state_bytes * np.where(away > 1, 0.0, full + np.where(away > 0, 0.0, 2.0) * trained)
    _, held = chunks_held(rows, slot, m)
    kept = (work["kept"][:, slot.owns] * held).sum(axis=2)
    return least, (state + packed + kept).max(axis=1) + _outside(pricer, rows, slot)


def _codes(rows: Rows) -> Floats:
    """Return [rows] what of a rank's state is away (see ``away_codes``)."""
    return away_codes(rows.values["offload"], rows.codes["offload"].astype(np.intp), rows.column("dp"))


def _work(tables: Tables, rows: Rows, slot: Slot, names: tuple[str, ...] = WORK) -> dict[str, Floats]:
    """Return [rows, stage runs] of each figure of Work, and ``worst_`` of what a block has at a time."""
    at = [n.look(rows) for n in (tables.blocks, tables.embeddings, tables.heads)]
    blocks, embeddings, heads = tables.blocks.figures, tables.embeddings.figures, tables.heads.figures
    assert blocks is not None
    assert embeddings is not None
    assert heads is not None
    blocks, at[0] = _used(blocks, at[0])
    out: dict[str, Floats] = {}
    for name in names:
        i = WORK.index(name)
        column = (blocks[:, i] @ slot.counts.T)[at[0]]
        column[:, 0] += embeddings[:, i][at[1]]
        column[:, -1] += heads[:, i][at[2]]
        if name == "tensor":
            column += embeddings[:, WORK.index("each")][at[1]][:, None]
        out[name] = column
        if name in WORST:
            most = np.zeros((len(blocks), len(slot.length)))
            for kind in range(slot.counts.shape[1]):
                np.maximum(most, np.where(slot.counts[:, kind] > 0, blocks[:, i, kind, None], 0.0), out=most)
            out[f"worst_{name}"] = most[at[0]]
    return out


def _used(figures: Floats, at: Index) -> tuple[Floats, Index]:
    """Return the rows of ``figures`` that ``at`` names, and where each is among them."""
    named = np.zeros(len(figures), dtype=np.bool_)
    named[at] = True
    return figures[named], (np.cumsum(named) - 1)[at]


def _units(tables: Tables, rows: Rows, slot: Slot, names: tuple[str, ...] = ()) -> dict[str, Floats]:
    """Return [rows, stage runs] sizes and data-parallel seconds of each stage, by the names of ``fast``'s table.

    With ``names`` only those.
    """
    units = tables.of_pipeline("units", slot.pp, slot.num_stages)
    at = units.look(rows)
    assert units.figures is not None
    used, at = np.unique(at, return_inverse=True) if len(units.figures) > 4 * len(rows) else (slice(None), at)
    figures = units.figures[used]
    sizes = {name: figures[:, i] for i, name in enumerate(SIZES)}
    seconds = {name: figures[:, len(SIZES) + i] for i, name in enumerate((*SECONDS, *EDGES))}
    found = _per_stage(slot, sizes, seconds)
    return {name: found[name][at] for name in names or found}


def _per_stage(slot: Slot, sizes: Mapping[str, Floats], seconds: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return [tables, stage runs] of sums and largest units, from [tables, units] figures of single units."""
    root = _roots(slot)
    present = slot.counts > 0

    def total(column: Floats) -> Floats:
        return _sums(slot, column)

    def largest(column: Floats) -> Floats:
        return np.where(present[None], column[:, None, 3:], 0.0).max(axis=2)

    out = {name: total(sizes[name]) for name in SUMMED}
    out["largest"] = np.maximum(sizes["largest"][:, root], largest(sizes["largest"]))
    out["table"], out["matrix"] = sizes["largest"][:, root], largest(sizes["largest"])
    out["root"], out["root_trainable"] = sizes["full"][:, root], sizes["trainable"][:, root]
    out["block"], out["block_trainable"] = largest(sizes["full"]), largest(sizes["trainable"])
    out["packed_block"], out["unpacked"] = largest(sizes["packed"]), largest(sizes["unpacked"])
    some = np.argmax(present, axis=1)
    for name in SECONDS:
        out[name] = total(seconds[name])
        # what cannot be hidden is the root unit's, or the first block's where there is none
        column = seconds[f"{name}_edge"]
        edge = column[:, root]
        out[f"{name}_edge"] = np.where(sizes["full"][:, root] > 0, edge, column[:, 3 + some])
    return out


def _roots(slot: Slot) -> Index:
    """Return [stage runs] which root unit a stage has: 0 the first stage's, 1 an inner one's, 2 the last one's."""
    root = np.ones(len(slot.length), dtype=np.intp)
    root[0] = 0
    if len(root) > 1:
        root[-1] = 2
    return root


def _sums(slot: Slot, column: Floats) -> Floats:
    """Return [tables, stage runs] of a figure summed over the units of a stage, from [tables, units]."""
    return column[:, _roots(slot)] + column[:, 3:] @ slot.counts.T


def _load(
    pricer: Pricer,
    rows: Rows,
    slot: Slot,
    work: Mapping[str, Floats],
    table: Mapping[str, Floats],
    m: Floats,
    zero: Floats,
) -> StageLoad:
    shape = (len(rows), len(slot.length))
    first, last = np.zeros(shape), np.zeros(shape)
    first[:, 0] = 1.0
    last[:, -1] = 1.0
    plain = rows.flag("plain", True)
    sizes = Sizes(
        zero=zero,
        micro_batches=m,
        tp=rows.column("tp"),
        tokens=rows.column("micro_batch") * pricer.seq_len / rows.column("cp"),
        autocast=(plain & (pricer.compute_bytes == 2)).astype(np.float64),
        chunked=rows.flag("loss", "chunked").astype(np.float64),
        piped=np.full(len(rows), float(slot.pp > 1)),
        away=_codes(rows),
    )
    if slot.chunks > 1:  # several stages per rank: what is in flight depends on the rank
        stage_held = np.zeros(shape)
    else:
        late = rows.flag("schedule", "zb-h1")[:, None]
        stage_held = np.minimum(
            m[:, None], slot.pp - np.where(late, 0.0, slot.first.astype(np.float64)[None, :])
        )
        stage_held = np.where(rows.flag("schedule", "gpipe")[:, None], m[:, None], stage_held)
    return stage_load(
        pricer,
        sizes,
        table,
        lambda name: work[name],
        lambda name: work[f"worst_{name}"],
        stage_held,
        first,
        last,
    )


def _outside(pricer: Pricer, rows: Rows, slot: Slot) -> Floats:
    groups = 1.0 + float(slot.pp > 1)
    shard = np.where(rows.column("zero") > 0, np.maximum(1.0, rows.column("shard") // rows.column("cp")), 1.0)
    groups = groups + (rows.column("dp") // shard > 1) + (shard > 1)
    for name in ("tp", "cp", "ep"):
        groups = groups + (rows.column(name) > 1)
    return outside_allocator(np.asarray(groups, dtype=np.float64), is_cpu=pricer.cluster.device.is_cpu)
