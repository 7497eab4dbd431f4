"""Layouts as columns: small integer codes into tables of values, so that a million of them are a few arrays.

All rows of one ``Rows`` have the same pipeline degree, stages per rank and cut: what they differ in are codes. A
figure that depends on few keys of a layout is worked out once per distinct combination of these keys, on a ``Layout``
that stands for it, and gathered by index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout

Codes: TypeAlias = NDArray[np.int16]
Index: TypeAlias = NDArray[np.intp]

KEYS: Final = (
    *("dp", "zero", "shard", "tp", "sp", "order", "loss", "kv_heads", "compile", "schedule"),
    *("cp", "cp_style", "ep", "micro_batch", "recompute", "offload"),
)
"""Keys of the layout text that differ from row to row."""
DENSE: Final = 8
"""Combinations are numbered in a table while it has at most this many cells per row."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Layouts of one pipeline degree, number of stages per rank and cut; one row each.

    Attributes:
        values: the table of each column, by name: the keys of the layout text, ``accumulation`` (micro-batches of a
            step) and ``stage`` (the ZeRO stage that has something to shard).
        codes: [rows] indices into the table of each column.
    """

    pp: int
    chunks: int
    cut: str
    precision: str
    values: Mapping[str, tuple[Any, ...]]
    codes: Mapping[str, Codes]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.codes["dp"])

    def column(self, name: str) -> Floats:
        """Return a column of numbers, [rows]."""
        return np.asarray(self.values[name], dtype=np.float64)[self.codes[name]]

    def flag(self, name: str, *wanted: Any) -> NDArray[np.bool_]:
        """Return which rows have one of the wanted values in a column."""
        return np.asarray([v in wanted for v in self.values[name]], dtype=np.bool_)[self.codes[name]]

    def layout(self, row: int) -> Layout:
        """Return one row as a layout."""
        held = {name: self.values[name][self.codes[name][row]] for name in KEYS}
        return Layout(pp=self.pp, chunks=self.chunks, cut=self.cut, precision=self.precision, **held)

    def accumulation(self, row: int) -> int:
        """Return the micro-batches of one row's step."""
        return int(self.values["accumulation"][self.codes["accumulation"][row]])

    def take(self, index: Index | NDArray[np.bool_]) -> Rows:
        """Return some of the rows, in the order of ``index``."""
        codes = {name: column[index] for name, column in self.codes.items()}
        return Rows(
            pp=self.pp,
            chunks=self.chunks,
            cut=self.cut,
            precision=self.precision,
            values=self.values,
            codes=codes,
        )

    def distinct(self, names: Sequence[str]) -> tuple[Index, Index]:
        """Return ([rows] number of each row's combination of these columns, [combinations] a row that has it)."""
        code = np.zeros(len(self), dtype=np.int64)
        cells = 1
        for name in names:
            size = len(self.values[name])
            if size > 1:
                code *= size
                code += self.codes[name]
                cells *= size
        if cells > max(DENSE * len(self), 1024):
            _, first, at = np.unique(code, return_index=True, return_inverse=True)
            return at.reshape(-1), first
        table = np.full(cells, -1, dtype=np.intp)
        table[code] = np.arange(len(self))
        used = np.flatnonzero(table >= 0)
        number = np.zeros(cells, dtype=np.intp)
        number[used] = np.arange(len(used))
        return number[code], table[used]


def rows_of(layouts: Sequence[Layout], batches: Sequence[Batch]) -> Rows:
    """Return layouts that share pp, chunks, cut and precision as rows."""
    one = layouts[0]
    held: dict[str, list[Any]] = {name: [getattr(x, name) for x in layouts] for name in KEYS}
    held["accumulation"] = [b.accumulation for b in batches]
    held["stage"] = [x.zero if x.shard > 1 else 0 for x in layouts]
    held["plain"] = [x.zero == 0 or x.shard == 1 for x in layouts]
    values: dict[str, tuple[Any, ...]] = {}
    codes: dict[str, Codes] = {}
    for name, column in held.items():
        number = {value: i for i, value in enumerate(dict.fromkeys(column))}
        values[name] = tuple(number)
        codes[name] = np.asarray([number[value] for value in column], dtype=np.int16)
    return Rows(
        pp=one.pp, chunks=one.chunks, cut=one.cut, precision=one.precision, values=values, codes=codes
    )
