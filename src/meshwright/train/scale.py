"""Dynamic loss scaling for fp16: one scale for all ranks and stages, changed by an agreed overflow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor on the loss. Grows after ``window`` good steps in a row, halves after an overflow.

    A scale of 1.0 with ``dynamic=False`` is no scaling (fp32, bf16, fp64).
    """

    value: float = 1.0
    dynamic: bool = False
    window: int = 200
    good_steps: int = 0
    skipped_in_row: int = 0

    def update(self, overflow: bool) -> None:
        """Take the verdict of a step, the same on every rank."""
        self.skipped_in_row = self.skipped_in_row + 1 if overflow else 0
        if not self.dynamic:
            return
        if overflow:
            self.value = max(1.0, self.value / 2.0)
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.window:
                self.value *= 2.0
                self.good_steps = 0


def loss_scale_for(precision: str) -> LossScale:
    """Return the loss scale a precision starts with: 2^16 and dynamic for fp16, none otherwise."""
    return LossScale(value=2.0**16, dynamic=True) if precision == "fp16" else LossScale()
