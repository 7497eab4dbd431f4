"""Generators: one function per schedule, from the numbers of ranks and micro-batches to compute rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.schedule.actions import Action, ActionKind, Schedule

Row = tuple[Action, ...]


def gpipe(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return all forwards, then all backwards, on every rank."""
    return tuple(
        tuple(_forward(rank, k) for k in range(num_micro_batches))
        + tuple(_backward(rank, k) for k in range(num_micro_batches))
        for rank in range(num_ranks)
    )


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return warm-up forwards, then forward and backward in turn, then the backwards that are left.

    Rank i warms up with min(m, p - 1 - i) forwards, so it holds at most min(m, p - i) micro-batches.
    """
    rows: list[Row] = []
    for rank in range(num_ranks):
        warm_up = min(num_micro_batches, num_ranks - 1 - rank)
        row = [_forward(rank, k) for k in range(warm_up)]
        for k in range(num_micro_batches):
            if warm_up + k < num_micro_batches:
                row.append(_forward(rank, warm_up + k))
            row.append(_backward(rank, k))
        rows.append(tuple(row))
    return tuple(rows)


GENERATORS: Final[Mapping[str, Callable[[int, int], tuple[Row, ...]]]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b}
)
"""Generators of schedules with one stage per rank, by name."""


def generate(name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule ``name`` for ``num_ranks`` pipeline ranks; fewer micro-batches than ranks run too.

    Raises:
        MeshwrightError: E301 for a schedule without a generator, E306 for a number below 1.
    """
    problems: list[Problem] = []
    if name not in GENERATORS:
        works = " | ".join(f"schedule={n}" for n in GENERATORS)
        problems.append(
            problem("E301", where="layout.schedule", found=f"schedule={name} has no generator", do=works)
        )
    if num_ranks < 1 or num_micro_batches < 1 or chunks < 1:
        problems.append(
            problem(
                "E306",
                where="schedule",
                found=f"{num_ranks} ranks with {chunks} stages each and {num_micro_batches} micro-batches",
            )
        )
    refuse(problems)
    if chunks != 1:
        raise MeshwrightError(
            problem(
                "E301",
                where="layout.chunks",
                found=f"schedule={name} has one stage per rank, not {chunks}",
                do="chunks=1",
            )
        )
    return Schedule(
        name=name,
        rows=GENERATORS[name](num_ranks, num_micro_batches),
        stage_ranks=tuple(range(num_ranks)),
        num_micro_batches=num_micro_batches,
    )


def _forward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.FORWARD, micro_batch)


def _backward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.BACKWARD, micro_batch)
