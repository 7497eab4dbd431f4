"""Schedule text: one line per pipeline rank, actions separated by commas; blank cells are idle slots."""

from __future__ import annotations

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.schedule.actions import COMPUTE, Action, Schedule, parse_action
from meshwright.schedule.invariants import check_schedule

LONGEST = 24
"""Characters of a wrong cell that are shown."""


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """Return the schedule written as ``text``; stages and micro-batches are those that occur in it.

    Raises:
        MeshwrightError: E302 a cell that is not a computing action, E303 an action missing or doubled, E304 a stage
            on two ranks, E305 rows that cannot finish, E306 an empty text.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    problems: list[Problem] = []
    rows: list[tuple[Action, ...]] = []
    for rank, line in enumerate(lines):
        rows.append(_row(rank, line, problems))
    refuse(problems)
    actions = [action for row in rows for action in row]
    if not actions:
        raise MeshwrightError(
            problem(
                "E306",
                where="schedule",
                found="the text has no action",
                do="write actions such as 0F0, 0B0, one line per rank",
            )
        )
    homes: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, rank)
    gap = next(stage for stage in range(len(homes) + 1) if stage not in homes)
    if gap < max(homes):
        raise MeshwrightError(
            problem(
                "E304",
                where="schedule",
                found=f"stage {max(homes)} occurs, but stage {gap} does not",
            )
        )
    schedule = Schedule(
        name=name,
        rows=tuple(rows),
        stage_ranks=tuple(homes[stage] for stage in range(len(homes))),
        num_micro_batches=1 + max(a.micro_batch for a in actions if a.micro_batch is not None),
    )
    refuse(check_schedule(schedule))
    return schedule


def _row(rank: int, line: str, problems: list[Problem]) -> tuple[Action, ...]:
    row: list[Action] = []
    offset = 0
    for cell in line.split(","):
        word = cell.strip()
        if word:
            try:
                action = parse_action(word)
            except ValueError:
                action = None
            if action is None or action.kind not in COMPUTE:
                lead = len(cell) - len(cell.lstrip())
                shown = line[max(0, offset - 30) :][:72]
                spaces = " " * (min(offset, 30) + lead)
                problems.append(
                    problem(
                        "E302",
                        where=f"schedule row {rank}",
                        found=f"{word[:LONGEST]!r} is not a computing action\n{shown}\n{spaces}^",
                    )
                )
            else:
                row.append(action)
        offset += len(cell) + 1
    return tuple(row)
