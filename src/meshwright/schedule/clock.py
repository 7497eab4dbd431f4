"""The clock: a schedule's rows played on time, with uneven stages and the time of a send.

Each rank does its actions in order; an action starts when the rank is free and what it needs has arrived. A send
takes ``send_s`` and runs beside compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.base.errors import MeshwrightError
from meshwright.schedule.actions import Action, ActionKind, Schedule
from meshwright.schedule.invariants import check_schedule


@dataclass(frozen=True, kw_only=True)
class Span:
    """One action on the clock, in seconds from the start of the step."""

    rank: int
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A step on the clock.

    Attributes:
        schedule: whose rows were played.
        makespan_s: from the start to the end of the last action.
        busy_s: seconds that each rank computes.
        times: for each rank the start and the end of each action of its row.
    """

    schedule: Schedule
    makespan_s: float
    busy_s: tuple[float, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action, by rank, then by start."""
        return tuple(span for rank in range(len(self.times)) for span in self._of(rank))

    @cached_property
    def in_flight(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each rank (time, held micro-batches) after each change.

        A micro-batch is held from the start of its forward to the end of its (weight) backward, once per stage.
        """
        return tuple(_held(self._of(rank)) for rank in range(len(self.times)))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The highest number held, per rank."""
        return tuple(max((n for _, n in row), default=0) for row in self.in_flight)

    def _of(self, rank: int) -> list[Span]:
        row = zip(self.schedule.rows[rank], self.times[rank], strict=True)
        return [Span(rank=rank, start_s=start, end_s=end, action=action) for action, (start, end) in row]

    @property
    def bubble_share_of_total(self) -> float:
        """Idle time over total time, both summed over ranks: (p-1)/(m+p-1) for equal stages."""
        total = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / total if total else 0.0

    @property
    def bubble_share_of_ideal(self) -> float:
        """What the makespan has more than the busiest rank's compute, as a share of that: (p-1)/m."""
        ideal = max(self.busy_s)
        return self.makespan_s / ideal - 1.0 if ideal else 0.0

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """Each rank's idle time as a share of the makespan."""
        return tuple(1.0 - busy / self.makespan_s if self.makespan_s else 0.0 for busy in self.busy_s)


def run_clock(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    send_s: float = 0.0,
    weight_s: Sequence[float] | None = None,
) -> Clock:
    """Return the step of ``schedule`` on the clock.

    Args:
        schedule: compute rows.
        forward_s: seconds of one micro-batch's forward, one number or one per stage.
        backward_s: seconds of its full backward.
        send_s: seconds from the end of an action to its result's arrival on another rank.
        weight_s: seconds of the weight half of a backward in two, one per stage; half of the backward without it.

    Raises:
        MeshwrightError: E303, E304 or E305 for a schedule that cannot run.
    """
    num_stages = schedule.num_stages
    forward = _per_stage(forward_s, num_stages)
    backward = _per_stage(backward_s, num_stages)
    weight = tuple(b / 2 for b in backward) if weight_s is None else _per_stage(weight_s, num_stages)
    inputs = tuple(b - w for b, w in zip(backward, weight, strict=True))
    last, home = num_stages - 1, schedule.stage_ranks
    outputs: dict[tuple[int, int | None], float] = {}
    gradients: dict[tuple[int, int | None], float] = {}
    halves: set[tuple[int, int | None]] = set()
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]
    ahead, whole, late = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            done = times[rank]
            first = len(done)
            now, spent = free[rank], busy[rank]
            for i in range(first, len(row)):
                action = row[i]
                kind, stage, k = action.kind, action.stage, action.micro_batch
                start = now
                if kind is late:
                    if (stage, k) not in halves:
                        break
                    seconds = weight[stage]
                elif kind is ahead:
                    if stage:
                        arrived = outputs.get((stage - 1, k))
                        if arrived is None:
                            break
                        if home[stage - 1] != rank:
                            arrived += send_s
                        if arrived > start:
                            start = arrived
                    seconds = forward[stage]
                else:
                    if (stage, k) not in outputs:
                        break
                    if stage < last:
                        arrived = gradients.get((stage + 1, k))
                        if arrived is None:
                            break
                        if home[stage + 1] != rank:
                            arrived += send_s
                        if arrived > start:
                            start = arrived
                    seconds = backward[stage] if kind is whole else inputs[stage]
                now = start + seconds
                if kind is ahead:
                    outputs[stage, k] = now
                elif kind is not late:
                    gradients[stage, k] = now
                    if kind is not whole:
                        halves.add((stage, k))
                spent += seconds
                done.append((start, now))
            moved |= len(done) > first
            free[rank], busy[rank] = now, spent
    if any(len(done) < len(row) for done, row in zip(times, schedule.rows, strict=True)):
        raise MeshwrightError(check_schedule(schedule))
    return Clock(
        schedule=schedule,
        makespan_s=max(free),
        busy_s=tuple(busy),
        times=tuple(tuple(row) for row in times),
    )


def closed_form_1f1b(forward_s: Sequence[float], backward_s: Sequence[float], m: int, send_s: float) -> float:
    """Return about the makespan of 1F1B with m micro-batches, without playing it.

    sum T + 2C(p-1) + (m-1) * max(max T, max over i of [sum of T from i on + 2C(p-1-i)] / (p-i)), with T = forward +
    backward of a stage and C = one send: at most p - i micro-batches are in flight at stage i, so a hop is paid by
    every micro-batch.
    """
    times = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    p = len(times)
    cycles = [(sum(times[i:]) + 2 * send_s * (p - 1 - i)) / (p - i) for i in range(p)]
    return sum(times) + 2 * send_s * (p - 1) + (m - 1) * max(*times, *cycles)


def _per_stage(seconds: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    if isinstance(seconds, (int, float)):
        return (float(seconds),) * num_stages
    if len(seconds) != num_stages:
        raise ValueError(f"{len(seconds)} times for {num_stages} stages")
    return tuple(seconds)


def _held(spans: Sequence[Span]) -> tuple[tuple[float, int], ...]:
    """Return (time, held) steps of one rank; its spans do not overlap, so they are already in time order."""
    out: list[tuple[float, int]] = []
    held = 0
    for span in spans:
        if span.action.kind is ActionKind.FORWARD:
            held += 1
            out.append((span.start_s, held))
        elif span.action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            held -= 1
            out.append((span.end_s, held))
    return tuple(out)
