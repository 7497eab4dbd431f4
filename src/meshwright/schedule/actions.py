"""Actions and schedules: the text that the clock, the drawing and the runtime all read.

An action's text is ``<stage><kind><micro-batch>``: ``0F3`` is stage 0's forward of micro-batch 3. It is the
grammar of torch's pipelining runtime, so a lowered row runs as it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """What one cell of a schedule does."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: gradients of inputs and weights."""
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    """End of the stage's gradient accumulation: what data parallelism still owes is reduced."""


COMPUTE = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD})

_TEXT = re.compile(r"^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B|I|W)(\d*)$")


@dataclass(frozen=True)
class Action:
    """One cell: ``stage`` and ``micro_batch`` count from 0; ``micro_batch`` is None for REDUCE_GRAD."""

    stage: int
    kind: ActionKind
    micro_batch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"


def parse_action(text: str) -> Action:
    """Return the action written as ``text``.

    Raises:
        ValueError: when it is not an action.
    """
    match = _TEXT.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 0F3 or 1SEND_B0")
    kind = ActionKind(match.group(2))
    if (kind is ActionKind.REDUCE_GRAD) == bool(match.group(3)):
        raise ValueError(f"{text!r}: REDUCE_GRAD has no micro-batch, every other action has one")
    return Action(int(match.group(1)), kind, int(match.group(3)) if match.group(3) else None)


@dataclass(frozen=True)
class Schedule:
    """For each pipeline rank the ordered actions of one optimizer step.

    Attributes:
        name: "gpipe", "1f1b", ...
        rows: one row per pipeline rank, compute actions only.
        stage_ranks: the pipeline rank of each stage.
        num_micro_batches: micro-batches per step on each replica.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    def text(self) -> str:
        """Return the schedule as text: one line per pipeline rank, actions separated by commas."""
        kinds = {kind: kind.value for kind in ActionKind}
        cells = ([f"{a.stage}{kinds[a.kind]}{a.micro_batch}" for a in row] for row in self.rows)
        return "\n".join(",".join(row) for row in cells)
