"""How much a probe measures: windows, budgets, sizes and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.base.units import KIB, MIB


@dataclass(frozen=True, kw_only=True)
class Request:
    """How much to measure, on ranks of ``device`` ("cpu" or "cuda").

    ``show`` takes progress lines where the rank is this process, else they are printed.
    """

    quick: bool
    device: str = "cpu"
    show: Callable[[str], None] | None = None

    @property
    def window_s(self) -> float:
        """Seconds of one compute measurement; several time slices of the operating system."""
        return 0.04 if self.quick else 0.2

    @property
    def windows(self) -> int:
        """Windows per measurement; their median counts."""
        return 2 if self.quick else 3

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the collectives, ascending."""
        if self.quick:
            return (KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB)
        return (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)

    @property
    def link_budget_s(self) -> float:
        """Seconds that one collective on one group may take; a full probe leaves larger sizes out after that."""
        return 0.4 if self.quick else 1.5

    @property
    def place_budget_s(self) -> float:
        """Seconds that one comparison of what is measured in its place may take."""
        return 0.4 if self.quick else 1.0

    @property
    def stretches_s(self) -> tuple[float, ...]:
        """Seconds of work, about, between two collectives when meetings are measured."""
        return (0.00025, 0.001, 0.004) if self.quick else (0.00025, 0.001, 0.004, 0.016)

    @property
    def meeting_budget_s(self) -> float:
        """Seconds that meetings after one length of work may take."""
        return 0.2 if self.quick else 1.0

    @property
    def matmul_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(m tokens, k, n) of the projections of blocks: small to medium ones on a CPU, 0.5B to 70B on a GPU."""
        if self.device == "cuda":
            small = ((512, 1024, 1024), (2048, 2048, 2048), (4096, 2048, 8192), (8192, 4096, 4096))
            large = (
                (8192, 8192, 2048),
                (8192, 4096, 14336),
                (8192, 14336, 4096),
                (16384, 8192, 8192),
                (4096, 4096, 65536),
            )
            return small if self.quick else (*small, *large)
        shapes = (
            (128, 64, 64),
            (256, 64, 256),
            (512, 128, 512),
            (512, 256, 1024),
            (512, 256, 8192),
            (1024, 512, 2048),
        )
        return shapes if self.quick else (*shapes, (1024, 1024, 1024), (2048, 1024, 4096), (2048, 4096, 1024))

    @property
    def copied_bytes(self) -> int:
        """Bytes of one operand of the memory measurement: beyond every cache of the device."""
        if self.device == "cuda":
            return (256 if self.quick else 1024) * MIB
        return (4 if self.quick else 16) * MIB

    @property
    def updated_elements(self) -> int:
        """Elements of each of two tensors that the optimizer measurement updates."""
        if self.device == "cuda":
            return (16 if self.quick else 64) * MIB
        return (1 if self.quick else 4) * MIB

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """(m, k, n) of each product that is timed: a linear layer's forward, its input's and its weight's gradient."""
        return tuple(p for m, k, n in self.matmul_shapes for p in ((m, k, n), (m, n, k), (n, m, k)))

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(batch, heads, seq, head_dim)."""
        if self.device == "cuda":
            usual = ((4, 16, 2048, 64), (1, 32, 4096, 128))
            return usual if self.quick else (*usual, (4, 32, 2048, 128), (1, 32, 16384, 128))
        shapes = ((2, 4, 128, 16), (2, 4, 256, 64))
        return shapes if self.quick else (*shapes, (1, 8, 1024, 64))
