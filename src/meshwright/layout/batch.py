"""Batch arithmetic: the user states sequences per step, the rest is derived."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch arithmetic of one step: ``global_batch = dp * micro_batch * accumulation`` sequences.

    ``accumulation`` is also the number of micro-batches that flow through a pipeline.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over the whole job."""
        return self.global_batch * self.seq_len
