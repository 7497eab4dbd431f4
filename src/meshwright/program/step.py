"""StepProgram: for one rank, the ordered computes and collectives of one optimizer step.

It is derived, never written by hand; the simulator prices it, ``explain`` tells it and the ledger compares it
with what a real step did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv"
]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A forward or backward of one micro-batch through one stage, or the optimizer step.

    Attributes:
        what: "forward", "backward", "optimizer".
        half: of a backward in two parts "input" or "weight", else empty.
        flops: floating-point operations of this rank (model convention, causal attention).
    """

    what: Literal["forward", "backward", "optimizer"]
    stage: int
    micro_batch: int | None
    flops: float
    half: Literal["", "input", "weight"] = ""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective or point-to-point message of this rank.

    Attributes:
        kind: what it does.
        axis: the mesh axis (or "world", "tied") whose group it runs over.
        group_size: ranks in that group.
        num_bytes: the payload. all_reduce, broadcast, send, recv: bytes of the tensor; all_gather: bytes of the
            gathered output; reduce_scatter: bytes of the unreduced input; padding included.
        what: what it carries, for people ("parameters of layer 3", "gradient of the tied embedding").
        peer: the other coordinate on ``axis`` of a send or recv.
    """

    kind: CollectiveKind
    axis: str
    group_size: int
    num_bytes: int
    what: str
    stage: int | None = None
    micro_batch: int | None = None
    peer: int | None = None

    @property
    def volume_bytes(self) -> float:
        """Bytes this rank sends with ring algorithms: 2(N-1)/N for all_reduce, (N-1)/N for gather and scatter."""
        n = self.group_size
        if self.kind == "all_reduce":
            return 2 * (n - 1) / n * self.num_bytes
        if self.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            return (n - 1) / n * self.num_bytes
        return 0.0 if self.kind == "recv" else float(self.num_bytes)


Op: TypeAlias = Compute | Collective


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The ordered operations of one rank in one optimizer step."""

    rank: int
    ops: tuple[Op, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in order."""
        return tuple(op for op in self.ops if isinstance(op, Collective))


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """How often one kind of collective ran on one axis, and with how many payload bytes in all."""

    kind: str
    axis: str
    count: int
    num_bytes: int


def ledger(collectives: Iterable[tuple[str, str, int]]) -> tuple[LedgerLine, ...]:
    """Return the ledger of (kind, axis, payload bytes) records: sums by kind and axis, in a fixed order."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, axis, num_bytes in collectives:
        count, total = sums.get((kind, axis), (0, 0))
        sums[kind, axis] = (count + 1, total + num_bytes)
    return tuple(
        LedgerLine(kind=kind, axis=axis, count=count, num_bytes=total)
        for (kind, axis), (count, total) in sorted(sums.items())
    )
