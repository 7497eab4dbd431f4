"""What one played step leaves: the highest live bytes of each part of the step, as values (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshwright.base.records import MemoryBytes

PHASES: Final = ("begin", "forward", "backward", "input half", "weight half", "reduce", "norm", "update")
"""Parts of a step in order; forwards and backwards of a schedule interleave."""


@dataclass(frozen=True, order=True)
class Place:
    """A part of a step on one rank.

    Attributes:
        phase: one of ``PHASES``.
        stage: pipeline stage; -1 where the part belongs to none.
        micro_batch: number of the micro-batch; -1 where the part belongs to none.
        part: "embedding" (what is before the blocks), "block", "head" (what is after them), or "".
        block: number of the block among those of the stage; -1 outside the blocks.
    """

    phase: str
    stage: int = -1
    micro_batch: int = -1
    part: str = ""
    block: int = -1

    def text(self, micro_batches: int, first_block: int, stages: int) -> str:
        """Return the place in words; ``first_block`` is the stage's first block, counted over the whole model."""
        if self.stage < 0:
            return {
                "begin": "start of the step",
                "reduce": "completing the gradients after the last backward",
                "norm": "gradient norm",
                "update": "optimizer update",
            }[self.phase]
        words = f"{self.phase} of micro-batch {self.micro_batch} of {micro_batches}"
        if self.part == "block":
            words += f", block {first_block + self.block}"
        elif self.part:
            words += ", before the blocks" if self.part == "embedding" else ", norm, head and loss"
        return words + (f", stage {self.stage} of {stages}" if stages > 1 else "")


@dataclass(frozen=True)
class Segment:
    """The moment of the most live bytes in one place; ``order`` counts places as they were entered."""

    order: int
    live_bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Live bytes in all."""
        return sum(self.live_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of a played rank: with ``blocks`` blocks in each of its stages and ``micro_batches`` of them."""

    blocks: int
    micro_batches: int
    segments: Mapping[Place, Segment]
    rest_bytes: Mapping[str, int]

    def peak(self) -> tuple[Place, Segment]:
        """Return the moment of the most live bytes; the last of equal ones, as the counter has it."""
        return max(self.segments.items(), key=lambda item: (item[1].total, item[1].order))


def memory_of(live_bytes: Mapping[str, int]) -> MemoryBytes:
    """Return live bytes by category as a record, the batch with what is working (as the counter of a run does)."""
    return MemoryBytes(
        parameters=live_bytes.get("parameters", 0),
        gradients=live_bytes.get("gradients", 0),
        optimizer=live_bytes.get("optimizer", 0),
        activations=live_bytes.get("activations", 0),
        working=live_bytes.get("working", 0) + live_bytes.get("batch", 0),
    )
