"""The clock for many layouts at once: one schedule's rows played with columns of stage times.

The same rules as ``schedule.clock``: a rank does its actions in order, an action starts when the rank is free and
what it needs has arrived, a send runs beside compute, each half of a backward takes half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.generate import generate

ROUNDS: Final = 3
"""Micro-batches per stage after which a schedule is periodic: further ones add the same cycle."""


def played_micro_batches(ranks: int, chunks: int, m: int) -> int:
    """Return how many micro-batches are played for a step of ``m``; rounds of ``ranks`` are kept whole."""
    enough = ROUNDS * ranks * chunks
    return m if m <= enough + ranks else enough + m % ranks


def makespans(
    name: str, ranks: int, chunks: int, m: int, forward: Floats, backward: Floats, send: Floats
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
    """
    short = played_micro_batches(ranks, chunks, m)
    schedule = generate(name, ranks, short, chunks)
    length = _play(schedule, forward, backward, send)
    if short < m:
        less = _play(generate(name, ranks, short - ranks, chunks), forward, backward, send)
        length = length + (m - short) / ranks * (length - less)
    return length, schedule


def _play(schedule: Schedule, forward: Floats, backward: Floats, send: Floats) -> Floats:
    """Return the makespans, [layouts], of rows that can be played through."""
    half = 0.5 * backward
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
                    free[rank] = start + half[stage]
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
                end = start + (forward[stage] if ahead else backward[stage] if whole else half[stage])
                free[rank] = done[not ahead, stage, k] = end
                i += 1
            left -= i - at[rank]
            at[rank] = i
        if left == before:
            raise ValueError(f"{schedule.name}: rows that cannot be played through")
    return np.max(np.stack(free), axis=0)


def _cells(row: Sequence[object]) -> list[tuple[ActionKind, int, int]]:
    return [(a.kind, a.stage, a.micro_batch or 0) for a in row]  # type: ignore[attr-defined]


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
