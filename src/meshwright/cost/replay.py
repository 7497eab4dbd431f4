"""The clock for many layouts at once: one schedule's rows played with columns of stage times.

The same rules as ``schedule.clock``: a rank does its actions in order, an action starts when the rank is free and
what it needs has arrived, a send runs beside compute, a split backward's weight half takes what is said of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import GENERATORS, generate

State: TypeAlias = tuple[int, ...]
"""Of a rank: 1 in a half of a backward, else 0; of each of its stages the micro-batches that are held, those of them that
wait, and 1 where one has been through its whole backward already."""

ROUNDS: Final = 3
"""Micro-batches per stage after which a schedule is periodic: further ones add the same cycle."""


def played_micro_batches(ranks: int, chunks: int, m: int) -> int:
    """Return how many micro-batches are played for a step of ``m``; rounds of ``ranks`` are kept whole."""
    enough = ROUNDS * ranks * chunks
    return m if m <= enough + ranks else enough + m % ranks


PLAYED_CELLS: Final = 4096
"""Micro-batches times stages of a step above which a single prediction plays a part of its schedule."""


def part_of(name: str, ranks: int, chunks: int, m: int) -> int:
    """Return how many micro-batches of a named schedule a single prediction plays: all, or whole rounds of many.

    Far beyond its first rounds a schedule repeats itself, so that every further round takes the same time. GPipe holds
    every micro-batch of a step: it is played whole.
    """
    stages = ranks * chunks
    if m * stages <= PLAYED_CELLS or name not in GENERATORS or name == "gpipe":
        return m
    enough = max(played_micro_batches(ranks, chunks, m), PLAYED_CELLS // stages // ranks * ranks)
    return min(m, enough + m % ranks)


def makespans(
    name: str,
    ranks: int,
    chunks: int,
    m: int,
    forward: Floats,
    backward: Floats,
    send: Floats,
    weight: Floats | None = None,
) -> tuple[Floats, Schedule]:
    """Return [layouts] makespans of a step of ``m`` micro-batches, and the (perhaps shorter) schedule that was played.

    Args:
        name: a schedule with a generator.
        ranks: pipeline ranks.
        chunks: stages on each.
        m: micro-batches of the step.
        forward: [stages, layouts] seconds of one micro-batch.
        backward: the same of its backward.
        send: [layouts] seconds of one message.
        weight: [stages, layouts] seconds of the weight half of a split backward; half of the backward without it.
    """
    halves = 0.5 * backward if weight is None else weight
    short = played_micro_batches(ranks, chunks, m)
    schedule = _first_rounds(name, ranks, short, chunks)
    length = _play(schedule, forward, backward, halves, send)
    if short < m:
        less = _play(_first_rounds(name, ranks, short - ranks, chunks), forward, backward, halves, send)
        length = length + (m - short) / ranks * (length - less)
    return length, schedule


@lru_cache(maxsize=16)
def _first_rounds(name: str, ranks: int, m: int, chunks: int) -> Schedule:
    """Return a schedule of few micro-batches: a search and its reasons play the same ones again."""
    return generate(name, ranks, m, chunks)


def _play(schedule: Schedule, forward: Floats, backward: Floats, weight: Floats, send: Floats) -> Floats:
    """Return the makespans, [layouts], of rows that can be played through."""
    if len(send) == 1:
        one = [[float(x) for x in column[:, 0]] for column in (forward, backward, weight)]
        return np.array([run_clock(schedule, one[0], one[1], float(send[0]), one[2]).makespan_s])
    inputs = backward - weight
    # what each cell produces is known by (gradient?, stage, micro-batch)
    done: dict[tuple[bool, int, int], Floats] = {}
    cells = [_cells(row) for row in schedule.rows]
    at = [0] * len(cells)
    free = [np.zeros_like(send) for _ in cells]
    last, home = schedule.num_stages - 1, schedule.stage_ranks
    left = sum(len(row) for row in cells)
    while left:
        before = left
        for rank, row in enumerate(cells):
            i = at[rank]
            while i < len(row):
                kind, stage, k = row[i]
                start = free[rank]
                if kind is ActionKind.WEIGHT_GRAD:
                    free[rank] = start + weight[stage]
                    i += 1
                    continue
                ahead = kind is ActionKind.FORWARD
                needed = stage - 1 if ahead else stage + 1
                if 0 <= needed <= last:
                    arrived = done.get((not ahead, needed, k))
                    if arrived is None:
                        break
                    start = np.maximum(start, arrived + send if home[needed] != rank else arrived)
                whole = kind is ActionKind.BACKWARD
                end = start + (forward[stage] if ahead else backward[stage] if whole else inputs[stage])
                free[rank] = done[not ahead, stage, k] = end
                i += 1
            left -= i - at[rank]
            at[rank] = i
        if left == before:
            raise ValueError(f"{schedule.name}: rows that cannot be played through")
    return np.max(np.stack(free), axis=0)


def _cells(row: Sequence[object]) -> list[tuple[ActionKind, int, int]]:
    return [(a.kind, a.stage, a.micro_batch or 0) for a in row]  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment at which each rank may be fullest.

    Attributes:
        half: [ranks] 1 where the rank is in a half of a split backward, else 0.
        held: [ranks, chunks] micro-batches of each of its stages that are held.
        waiting: [ranks, chunks] those of them whose input half is done (the one that ends now too).
        graded: [ranks, chunks] 1 where a micro-batch has left its gradients already, else 0.
    """

    half: Floats
    held: Floats
    waiting: Floats
    graded: Floats

    def take(self, index: NDArray[np.intp] | np.intp) -> Moment:
        """Return the moments of some layouts, of arrays that are [layouts, ranks, ...]."""
        return Moment(**{f.name: getattr(self, f.name)[index] for f in fields(Moment)})


def moments(schedule: Schedule) -> tuple[Moment, ...]:
    """Return moments of which one is each rank's fullest, whatever its stages hold.

    Without split backwards that is the one of ``held_at_peak``. Else it may be any state in a backward that no other
    state of the rank in as much of a backward exceeds in held or waiting micro-batches.
    """
    if all(a.kind is not ActionKind.INPUT_GRAD for row in schedule.rows for a in row):
        held, _ = held_at_peak(schedule)
        none = np.zeros_like(held)
        return (Moment(half=np.zeros(len(held)), held=held, waiting=none, graded=none + 1.0),)
    found = [_outermost(_states(rank, schedule)) for rank in range(schedule.num_ranks)]
    alone = np.intp(0)
    return tuple(x.take(alone) for x in stacked([found]))


def stacked(found: Sequence[Sequence[Sequence[State]]]) -> tuple[Moment, ...]:
    """Return states, of layouts and their ranks, as moments whose arrays are [layouts, ranks, ...]."""
    most = max(len(states) for ranks in found for states in ranks)
    rows = np.array(
        [[[*states, *[states[0]] * (most - len(states))] for states in ranks] for ranks in found],
        dtype=np.float64,
    )
    v = (rows.shape[-1] - 1) // 3
    return tuple(
        Moment(
            half=x[..., 0],
            held=x[..., 1 : v + 1],
            waiting=x[..., v + 1 : 2 * v + 1],
            graded=x[..., 2 * v + 1 :],
        )
        for x in (rows[..., n, :] for n in range(most))
    )


@lru_cache(maxsize=256)
def run_states(name: str, ranks: int, m: int, chunks: int, first: int, last: int) -> tuple[State, ...]:
    """Return the states of ranks ``first`` to ``last`` of a named schedule that none of any of them exceeds.

    Beyond its first ``ROUNDS`` rounds a schedule repeats itself, and so do its states.
    """
    schedule = _first_rounds(name, ranks, m, chunks)
    return tuple(_outermost({x for rank in range(first, last + 1) for x in _states(rank, schedule)}))


def _outermost(found: Iterable[State]) -> list[State]:
    """Return the states, of equal halves, that no other one exceeds, nor two others taken half each; fullest first.

    What is held at a state is a sum over what it counts: it is largest at such a state.
    """
    left = np.array(sorted(found, key=sum, reverse=True), dtype=np.int32)
    front: list[NDArray[np.int32]] = []
    while len(left):
        front.append(left[0])
        left = left[~((left <= left[0]).all(axis=1) & (left[:, 0] == left[0, 0]))]
    table = np.array(front)
    others = ~np.eye(len(table), dtype=np.bool_)
    twice = table[:, None, :] + table[None, :, :]
    keep = [
        not ((twice >= 2 * x).all(axis=2) & (twice[:, :, 0] == 2 * x[0]) & own[:, None] & own[None, :]).any()
        for x, own in zip(table, others, strict=True)
    ]
    return [tuple(int(n) for n in x) for x, kept in zip(table, keep, strict=True) if kept]


def _states(rank: int, schedule: Schedule) -> set[State]:
    """Return the states of one rank's backwards.

    The first stage does its whole backward in its weight half: nothing of it waits.
    """
    owns = [stage for stage, home in enumerate(schedule.stage_ranks) if home == rank]
    held, waiting, graded = [0] * len(owns), [0] * len(owns), [0] * len(owns)
    found: set[State] = set()
    place = {stage: at for at, stage in enumerate(owns)}
    for action in schedule.rows[rank]:
        at = place[action.stage]
        if action.kind is ActionKind.FORWARD:
            held[at] += 1
        elif action.kind is ActionKind.INPUT_GRAD and action.stage == 0:
            continue
        elif action.kind is ActionKind.INPUT_GRAD:
            waiting[at] += 1
            found.add((1, *held, *waiting, *graded))
        else:
            split = action.kind is ActionKind.WEIGHT_GRAD and action.stage > 0
            found.add((int(split), *held, *waiting, *graded))
            held[at] -= 1
            waiting[at] -= split
            graded[at] = 1
    return found


def held_at_peak(schedule: Schedule) -> tuple[Floats, Floats]:
    """Return ([ranks, chunks] micro-batches of each stage held at a rank's fullest moment, [ranks] their sum).

    Which moment is fullest follows from the order of a rank's actions, not from their seconds.
    """
    owns: list[list[int]] = [[] for _ in schedule.rows]
    for stage, rank in enumerate(schedule.stage_ranks):
        owns[rank].append(stage)
    out = np.zeros((len(owns), len(owns[0])))
    for rank, row in enumerate(schedule.rows):
        now = dict.fromkeys(owns[rank], 0)
        best = total = 0
        for action in row:
            if action.kind is ActionKind.FORWARD:
                now[action.stage] += 1
                total += 1
                if total > best:
                    best = total
                    out[rank] = [now[s] for s in owns[rank]]
            elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
                now[action.stage] -= 1
                total -= 1
    return out, out.sum(axis=1)
