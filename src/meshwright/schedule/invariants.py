"""What every schedule must hold: each action once, on its stage's rank, in an order that can finish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.base.errors import Problem, problem
from meshwright.schedule.actions import COMPUTE, Action, ActionKind, Schedule
from meshwright.schedule.order import play

MOST_CELLS = 1_000_000
"""Schedules that would need more cells, and have fewer than half of them, are not looked at cell by cell."""

SHOWN = 5
"""Cells that a problem names before it only counts the others."""


def check_schedule(schedule: Schedule) -> list[Problem]:
    """Return what is wrong with ``schedule``: E303 (each action once), E304 (right rank), E305 (deadlock)."""
    problems = _check_ranks(schedule) + _check_complete(schedule)
    if problems:
        return problems
    return _check_order(schedule)


def arrow(rows: Sequence[Sequence[Action]], rank: int, position: int, width: int = 72) -> str:
    """Return the row as text with an arrow under the cell at ``position``, cut to about ``width`` characters."""
    cells = [str(a) for a in rows[rank]]
    start = position
    while start > 0 and len(",".join(cells[start - 1 : position + 1])) < width // 2:
        start -= 1
    line = ("..." if start else "") + ",".join(cells[start:])
    before = ("..." if start else "") + "".join(c + "," for c in cells[start:position])
    if len(line) > width:
        line = line[:width] + "..."
    return f"{line}\n{' ' * len(before)}^"


def _named(actions: Sequence[Action]) -> str:
    text = ", ".join(str(a) for a in actions[:SHOWN])
    return text + (f" and {len(actions) - SHOWN} more" if len(actions) > SHOWN else "")


def _check_ranks(schedule: Schedule) -> list[Problem]:
    problems: list[Problem] = []
    for rank, row in enumerate(schedule.rows):
        wrong = [
            (position, action)
            for position, action in enumerate(row)
            if not 0 <= action.stage < schedule.num_stages or schedule.stage_ranks[action.stage] != rank
        ]
        if wrong:
            position, action = wrong[0]
            home = (
                f"stage {action.stage} lives on rank {schedule.stage_ranks[action.stage]}"
                if action.stage < schedule.num_stages
                else f"there are {schedule.num_stages} stages"
            )
            problems.append(
                problem(
                    "E304",
                    where=f"schedule row {rank}",
                    found=f"{_named([a for _, a in wrong])}: {home}\n{arrow(schedule.rows, rank, position)}",
                )
            )
    return problems


def _check_complete(schedule: Schedule) -> list[Problem]:
    counts = Counter(action for row in schedule.rows for action in row)
    needed = 2 * schedule.num_stages * schedule.num_micro_batches
    if needed > 2 * MOST_CELLS and needed > 2 * counts.total():  # a slip of the pen, such as 0F10000000
        found = f"{schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches need {needed:,} cells at least"
        return [problem("E303", where="schedule", found=f"{found}; there are {counts.total():,}")]
    missing: list[Action] = []
    surplus = [a for a, n in counts.items() if n > 1 or a.kind not in COMPUTE]
    micro_batches = range(schedule.num_micro_batches)
    surplus += [a for a in counts if a.micro_batch is not None and a.micro_batch not in micro_batches]
    for stage in range(schedule.num_stages):
        for k in micro_batches:
            forward, full, first, second = (
                Action(stage, kind, k)
                for kind in (
                    ActionKind.FORWARD,
                    ActionKind.BACKWARD,
                    ActionKind.INPUT_GRAD,
                    ActionKind.WEIGHT_GRAD,
                )
            )
            if not counts[forward]:
                missing.append(forward)
            if counts[full]:
                surplus += [a for a in (first, second) if counts[a]]
            elif counts[first] or counts[second]:
                missing += [a for a in (first, second) if not counts[a]]
            else:
                missing.append(full)
    if not missing and not surplus:
        return []
    parts = [
        f"{name}: {_named(cells)}" for name, cells in (("missing", missing), ("too many", surplus)) if cells
    ]
    return [
        problem(
            "E303",
            where="schedule",
            found=f"{schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches; "
            + "; ".join(parts)
            + _pointed(schedule, missing, surplus),
        )
    ]


def _pointed(schedule: Schedule, missing: Sequence[Action], surplus: Sequence[Action]) -> str:
    """Return a row with an arrow: at the last cell too many, or at one that lacks its partner, or at the row's end."""

    def at(rank: int, partner: Action) -> int | None:
        row = schedule.rows[rank]
        wanted = partner.stage, partner.micro_batch
        found = [
            i for i, a in enumerate(row) if (a == partner if surplus else (a.stage, a.micro_batch) == wanted)
        ]
        return found[-1] if found else None

    for action in surplus[:1]:
        rank = next(r for r, row in enumerate(schedule.rows) if action in row)
        position = at(rank, action)
        assert position is not None
        return f"; row {rank}\n{arrow(schedule.rows, rank, position)}"
    rank = schedule.stage_ranks[missing[0].stage]
    position = at(rank, missing[0])
    if position is None:
        position = len(schedule.rows[rank]) - 1
    return f"; row {rank}\n{arrow(schedule.rows, rank, position)}"


def _check_order(schedule: Schedule) -> list[Problem]:
    stuck = play(schedule.rows, schedule.num_stages).stuck
    if not stuck:
        return []
    # Blame the rank that waits for itself, if there is one: its cell stands before what it needs.
    own = [
        rank
        for rank, (_, needs) in stuck.items()
        if any(schedule.stage_ranks[a.stage] == rank for a in needs)
    ]
    rank = (own or sorted(stuck))[0]
    position, needs = stuck[rank]
    return [
        problem(
            "E305",
            where=f"schedule row {rank}",
            found=f"{schedule.rows[rank][position]} can never start: it waits for {_named(needs)}\n"
            + arrow(schedule.rows, rank, position),
            do=f"move {schedule.rows[rank][position]} behind {_named(needs)}",
        )
    ]
