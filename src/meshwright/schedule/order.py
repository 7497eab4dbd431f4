"""What an action waits for, and rows played through in an order that respects it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedule.actions import Action, ActionKind

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_INPUT, _WEIGHT = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True)
class Played:
    """Rows played through, one action per rank and round.

    Attributes:
        order: (rank, action) in an order in which each action comes after all it waits for.
        stuck: the first cell of each rank that could never start: rank -> (position, what it waits for).
    """

    order: tuple[tuple[int, Action], ...]
    stuck: dict[int, tuple[int, tuple[Action, ...]]]


def waits_for(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return what must be done before ``action``: one of the alternatives in each part.

    A forward waits for the forward of the stage before; a backward for its own forward and the (input) backward of
    the stage after; a weight gradient for its input gradient.
    """
    stage, k = action.stage, action.micro_batch
    if action.kind is _F:
        return ((Action(stage - 1, _F, k),),) if stage > 0 else ()
    if action.kind in (_B, _INPUT):
        own = (Action(stage, _F, k),)
        if stage == num_stages - 1:
            return (own,)
        return (own, (Action(stage + 1, _B, k), Action(stage + 1, _INPUT, k)))
    if action.kind is _WEIGHT:
        return ((Action(stage, _INPUT, k),),)
    return ()


def missing(action: Action, num_stages: int, done: set[Action]) -> tuple[Action, ...]:
    """Return what ``action`` still waits for (the first alternative of each part); empty when it can start."""
    return tuple(
        alternatives[0]
        for alternatives in waits_for(action, num_stages)
        if not any(a in done for a in alternatives)
    )


def play(rows: Sequence[Sequence[Action]], num_stages: int) -> Played:
    """Return compute rows played through, each rank doing its next action in every round if it can start."""
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    at = [0] * len(rows)
    while True:
        ready: list[tuple[int, Action]] = []
        for rank, row in enumerate(rows):
            if at[rank] < len(row) and not missing(row[at[rank]], num_stages, done):
                ready.append((rank, row[at[rank]]))
        if not ready:
            break
        for rank, action in ready:
            at[rank] += 1
            done.add(action)
        order.extend(ready)
    stuck = {
        rank: (at[rank], missing(row[at[rank]], num_stages, done))
        for rank, row in enumerate(rows)
        if at[rank] < len(row)
    }
    return Played(tuple(order), stuck)
