"""Least seconds of a pipeline, and chunks in flight, by closed form for every schedule: columns of layouts at once.

The bounds are admissible: no play of the schedule's rows on the clock is shorter. They hold for uneven stages and
count sends. GPipe's is the makespan itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.cost.replay import ROUNDS, Moment, run_states, stacked
from meshwright.cost.rows import Rows
from meshwright.cost.slots import Slot


@dataclass(frozen=True, kw_only=True)
class Travel:
    """Sums along the stages of one slot, [layouts, stage runs] or [layouts]: ``before`` is up to a run's last stage.

    ``forward``, ``inputs`` and ``weight`` (the halves of a split backward) and ``total`` are those of one stage of it.
    """

    forward: Floats
    backward: Floats
    inputs: Floats
    weight: Floats
    total: Floats
    before_forward: Floats
    before_inputs: Floats
    before_total: Floats
    sum_forward: Floats
    sum_inputs: Floats
    sum_total: Floats


def travel(slot: Slot, forward: Floats, backward: Floats, weight: Floats) -> Travel:
    """Return the running sums of stage times, given [layouts, stage runs] seconds of one stage of each run."""
    total, inputs = forward + backward, backward - weight
    lengths = slot.length
    run_forward, run_total = forward * lengths, total * lengths
    ahead_forward, ahead_total = np.cumsum(run_forward, axis=1), np.cumsum(run_total, axis=1)
    ahead_inputs = np.cumsum(inputs * lengths, axis=1)
    return Travel(
        forward=forward,
        backward=backward,
        inputs=inputs,
        weight=weight,
        total=total,
        before_forward=ahead_forward - forward,
        before_inputs=ahead_inputs - inputs,
        before_total=ahead_total - total,
        sum_forward=ahead_forward[:, -1],
        sum_inputs=ahead_inputs[:, -1],
        sum_total=ahead_total[:, -1],
    )


def least_seconds(
    rows: Rows, slot: Slot, forward: Floats, backward: Floats, weight: Floats, send: Floats, m: Floats
) -> Floats:
    """Return [layouts] seconds that no play of the schedule is shorter than, from [layouts, stage runs] stage times.

    ``weight`` are those of the weight half of a split backward.
    """
    if slot.num_stages == 1:
        return m * (forward + backward)[:, 0]
    x = travel(slot, forward, backward, weight)
    if slot.chunks > 1:
        return _several(rows, slot, x, send, m)
    gpipe, split = rows.flag("schedule", "gpipe"), rows.flag("schedule", "zb-h1")
    out = _steady(slot, x, send, m, split=False)
    if gpipe.any():
        fill = x.sum_total + 2.0 * send * (slot.pp - 1.0)
        out = np.where(gpipe, fill + (m - 1.0) * (forward.max(axis=1) + backward.max(axis=1)), out)
    if split.any():
        out = np.where(split, _steady(slot, x, send, m, split=True), out)
    return out


def _steady(slot: Slot, x: Travel, send: Floats, m: Floats, *, split: bool) -> Floats:
    """Return the bound of 1F1B, or of ZB-H1 where a backward's second half waits for nothing.

    At stage i at most p - i forwards come before the first backward, so nothing is done there while the first
    micro-batch travels on; and a forward waits for the backward p - i micro-batches before it.
    """
    at = slot.last.astype(np.float64)[None, :]
    p, c, mm = float(slot.pp), send[:, None], m[:, None]
    ahead = np.minimum(p - at, mm)
    hops = 2.0 * send * (p - 1.0)
    if split:
        trip_sum = x.sum_forward + x.sum_inputs
        before = x.before_forward + at * c
        busy = before + mm * x.total
        after = x.forward + x.inputs
        trip = trip_sum[:, None] - x.before_forward - x.before_inputs
        path = trip_sum + hops + x.weight[:, 0]
    else:
        before = x.before_forward + at * c
        busy = x.before_total + 2.0 * at * c + mm * x.total
        after = x.total
        trip = x.sum_total[:, None] - x.before_total
        path = x.sum_total + hops
        first = hops[:, None] + x.sum_total[:, None] - x.total + x.forward
        busy = np.maximum(busy, first + (mm - ahead) * x.forward + mm * x.backward)
    trip = np.maximum(trip + 2.0 * c * (p - 1.0 - at), after)
    rounds = np.floor((mm - 1.0) / ahead)
    turned = before + (1.0 + rounds) * trip + (0.0 if split else x.before_total - x.before_forward + at * c)
    return np.maximum(np.maximum(busy, turned).max(axis=1), path)


def _several(rows: Rows, slot: Slot, x: Travel, send: Floats, m: Floats) -> Floats:
    """Return the bound of schedules with several stages per rank: the busiest rank after its first stage's arrival."""
    seconds = x.total[:, slot.owns].sum(axis=2)
    at = slot.ranks_last
    run = slot.run_of[at]
    inside = (slot.last[run] - at).astype(np.float64)[None, :]  # stages of the run behind this one
    before = x.before_forward[:, run] - inside * x.forward[:, run]
    whole = x.before_total[:, run] - inside * x.total[:, run]
    hops = at.astype(np.float64)[None, :] * send[:, None]
    away = slot.num_stages - 1.0
    if _is_v(rows):
        path = x.sum_forward + x.sum_inputs + 2.0 * send * (away - 1.0)
        path = path + (m - 1.0) * (x.forward[:, -1] + x.inputs[:, -1]) + x.weight[:, 0]
        return np.maximum((before + hops + m[:, None] * seconds).max(axis=1), path)
    # interleaved: the last backward of a rank's first chunk still goes through the ranks before it
    return np.maximum(
        (whole + 2.0 * hops + m[:, None] * seconds).max(axis=1), x.sum_total + 2.0 * send * away
    )


def _is_v(rows: Rows) -> bool:
    return any(name in ("zbv", "dualpipev") for name in rows.values["schedule"])


def chunks_held(rows: Rows, slot: Slot, m: Floats) -> tuple[Floats, Floats]:
    """Return ([layouts, rank runs] chunks in flight, [layouts, rank runs, chunks] of which stage) at the fullest moment.

    ZB-V keeps p of each of its two stages; DualPipeV on rank r 2p - r of the first and r + 1 of the second.
    """
    p, v = float(slot.pp), slot.chunks
    rank = slot.ranks_first.astype(np.float64)[None, :]
    mm = m[:, None]
    if v == 1:
        held = np.minimum(mm, p - rank)
        held = np.where(rows.flag("schedule", "zb-h1")[:, None], np.minimum(mm, p), held)
        held = np.where(rows.flag("schedule", "gpipe")[:, None], mm, held)
        return held, held[:, :, None]
    if _is_v(rows):
        dual = rows.flag("schedule", "dualpipev")[:, None]
        near = np.minimum(mm, np.where(dual, 2.0 * p - rank, p))
        far = np.minimum(mm, np.where(dual, rank + 1.0, p))
        return near + far, np.stack((near, far), axis=2)
    total = np.minimum(mm * v, 2.0 * (p - 1.0 - rank) + (v - 1.0) * p + 1.0)
    chunk = np.arange(v, dtype=np.float64)
    turns = np.floor(total / (p * v))
    split = turns[:, :, None] * p + np.clip((total - turns * p * v)[:, :, None] - chunk * p, 0.0, p)
    return total, split


def split_moments(rows: Rows, slot: Slot, m: Floats) -> tuple[Moment, ...]:
    """Return moments of schedules with split backwards, of which one is a rank's fullest; arrays are [layouts, ...].

    ZB-H1 on rank r > 0 holds p micro-batches, r + 1 of them between their halves, when others have left gradients; with
    no more than p in a step none has, or one is gone. The first stage's backward is whole. What ranks of a V hold is
    read off their rows.
    """
    if slot.chunks > 1:
        names, runs = rows.values["schedule"], list(zip(slot.ranks_first, slot.ranks_last, strict=True))
        played = np.minimum(m, float(ROUNDS * slot.pp))
        kinds, at = np.unique(np.stack((rows.codes["schedule"], played)), axis=1, return_inverse=True)
        told = stacked(
            [
                [run_states(names[int(n)], slot.pp, int(k), slot.chunks, int(a), int(b)) for a, b in runs]
                for n, k in kinds.T
            ]
        )
        return tuple(x.take(at.reshape(-1)) for x in told)
    p = float(slot.pp)
    rank = slot.ranks_last.astype(np.float64)[None, :]
    mm = m[:, None]
    later = np.broadcast_to(slot.ranks_first > 0, (len(rows), len(slot.ranks_first))).astype(np.float64)
    held = np.broadcast_to(np.minimum(mm, p), later.shape)
    late = np.minimum(mm, rank + 1.0) * later
    few = np.broadcast_to(mm <= p, later.shape)

    def held_by(count: Floats, graded: Floats) -> Moment:
        waiting = np.minimum(late, count)
        return Moment(
            half=later, held=count[:, :, None], waiting=waiting[:, :, None], graded=graded[:, :, None]
        )

    full = held_by(held, np.where(few, 0.0, 1.0))
    return (full, held_by(held - few, np.ones_like(later))) if few.any() else (full,)
