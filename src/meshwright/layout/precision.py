"""The precision table: per tensor class the dtype and its bytes, from ``precision`` and ``zero``.

With nothing sharded (zero = 0, or one rank to shard over) a low precision is autocast: parameters stay fp32, matrix
products run in bf16 or fp16 and the residual stream is fp32. With a shard group FSDP's policy casts: parameters are
gathered in the compute dtype and activations follow.

fp8 is bf16 everywhere but in the products of the blocks' linear layers, whose operands are cast to 8 bits for each
product; how they are scaled is the recipe: one factor per tensor (``fp8``), per row (``fp8-rowwise``), or per block of
128 (``fp8-blockwise``). It is priced and not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.layout.layout import Layout

_BYTES: Final = (("fp64", 8), ("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1))

FP8: Final = ("fp8", "fp8-rowwise", "fp8-blockwise")
"""Precisions whose linear layers multiply in 8 bits, by recipe."""


def wide_precision(precision: str) -> str:
    """Return the precision of everything but the linear layers: bf16 under fp8, else ``precision`` itself."""
    return "bf16" if precision in FP8 else precision


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    """Dtype names ("fp64", "fp32", "bf16", "fp16", "fp8") per tensor class.

    Attributes:
        storage: parameters at rest.
        compute: matrix products.
        gather: parameters on the wire of an all-gather, and gathered (equal to storage where nothing is gathered).
        reduce: gradients on the wire of a reduction.
        gradient: gradients at rest.
        master: the copy that the optimizer updates (it is the storage itself).
        optimizer: optimizer state.
        wire: activations between pipeline stages, which is the dtype of the residual stream.
        autocast: low precision by autocast, not by FSDP's policy.
        linear: operands of the products of the blocks' linear layers.
    """

    storage: str
    compute: str
    gather: str
    reduce: str
    gradient: str
    master: str
    optimizer: str
    wire: str
    autocast: bool
    linear: str

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one element of tensor class ``name`` ("storage", "wire", ...)."""
        return dict(_BYTES)[getattr(self, name)]

    def rows(self) -> tuple[tuple[str, str, int, str], ...]:
        """Return printable rows: tensor class, dtype, bytes per element, note."""
        low = self.compute in ("bf16", "fp16")
        how = "by autocast, parameters are cast for each use" if self.autocast else "by FSDP's policy"
        notes = {
            "storage": "parameters at rest, sharded or whole",
            "compute": f"matrix products{', ' + how if low else ''}",
            "gather": "parameters on the wire of an all-gather",
            "reduce": "gradients on the wire of an all-reduce or reduce-scatter",
            "gradient": "gradients at rest",
            "master": "what the optimizer updates: the storage itself",
            "optimizer": "optimizer state (two moments for AdamW)",
            "wire": "activations between stages, and the residual stream",
        }
        if self.linear != self.compute:
            notes["linear"] = "operands of the blocks' linear layers, cast for each product"
        return tuple((n, getattr(self, n), self.bytes_of(n), note) for n, note in notes.items())


def precision_table(layout: Layout) -> PrecisionTable:
    """Return the dtypes of every tensor class under ``layout``."""
    full = "fp64" if layout.precision == "fp64" else "fp32"
    compute = wide_precision(layout.precision)
    sharded = layout.zero >= 1 and layout.shard > 1
    return PrecisionTable(
        storage=full,
        compute=compute,
        gather=compute if sharded else full,
        reduce=full,
        gradient=full,
        master=full,
        optimizer=full,
        wire=compute if sharded else full,
        autocast=compute != full and not sharded,
        linear="fp8" if layout.precision in FP8 else compute,
    )
