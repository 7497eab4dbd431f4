"""Lowering: compute rows to rows with sends, receives and gradient reductions.

The rows are played through once for all ranks. When an action's result is needed on another rank, the send and the
matching receive are added to both rows at that moment. So the messages between two ranks stand in the same order in
both rows, a receive is posted before the action that needs it, and nobody waits for a message that its sender can
only send later than the waiter's own next step: the rows are free of deadlock by construction. It is the order that
torch's pipelining runtime expects: sends and receives are posted asynchronously, one batch each.
"""

from __future__ import annotations

from meshwright.base.errors import refuse
from meshwright.schedule.actions import Action, ActionKind, Schedule
from meshwright.schedule.invariants import check_schedule
from meshwright.schedule.order import play

_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRAD})
_ENDS = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD})


def lower(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return ``schedule``'s rows with SEND_F/RECV_F, SEND_B/RECV_B and REDUCE_GRAD (after a stage's last backward).

    Raises:
        MeshwrightError: E303, E304 or E305 for a schedule that cannot run.
    """
    refuse(check_schedule(schedule))
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    left = [schedule.num_micro_batches] * schedule.num_stages
    for rank, action in play(schedule.rows, schedule.num_stages).order:
        rows[rank].append(action)
        message = message_of(action, schedule)
        if message is not None:
            send, recv, peer = message
            rows[rank].append(send)
            rows[peer].append(recv)
        if action.kind in _ENDS:
            left[action.stage] -= 1
            if left[action.stage] == 0:
                rows[rank].append(Action(action.stage, ActionKind.REDUCE_GRAD, None))
    return tuple(tuple(row) for row in rows)


def lower_forward(schedule: Schedule, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the forwards of the first micro-batches of ``schedule`` with SEND_F/RECV_F, for an evaluation."""
    forwards = tuple(
        tuple(
            a
            for a in row
            if a.kind is ActionKind.FORWARD
            and a.micro_batch is not None
            and a.micro_batch < num_micro_batches
        )
        for row in schedule.rows
    )
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for rank, action in play(forwards, schedule.num_stages).order:
        rows[rank].append(action)
        message = message_of(action, schedule)
        if message is not None:
            send, recv, peer = message
            rows[rank].append(send)
            rows[peer].append(recv)
    return tuple(tuple(row) for row in rows)


def message_of(action: Action, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """Return (send, receive, receiving rank) that follow ``action``, or None when its result stays on the rank."""
    if action.kind is ActionKind.FORWARD:
        to, send, recv = action.stage + 1, ActionKind.SEND_F, ActionKind.RECV_F
    elif action.kind in _BACKWARDS:
        to, send, recv = action.stage - 1, ActionKind.SEND_B, ActionKind.RECV_B
    else:
        return None
    if not 0 <= to < schedule.num_stages:
        return None
    peer = schedule.stage_ranks[to]
    if peer == schedule.stage_ranks[action.stage]:
        return None
    k = action.micro_batch
    return Action(action.stage, send, k), Action(to, recv, k), peer
