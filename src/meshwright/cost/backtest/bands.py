"""80 % bands from residuals of rows that a fit did not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.folds import Index
from meshwright.cost.collective import Floats

BAND: Final = 0.80
UNKNOWN_BAND: Final = 0.3
"""Half-width of the band of log time before any residual was seen."""
LEAST_BAND_ROWS: Final = 8
"""Residuals from which a stack's band rests on its own; with fewer it rests on all stacks'."""


def quantile(residuals: Floats, weight: Floats | None = None) -> float:
    """Return the half-width of an 80 % band: the residual at that share, one more counted as missed.

    ``weight`` gives every source the same say, however many rows it has; its sum is the number of sources, of which then
    one more is counted as missed.
    """
    size = np.abs(residuals)
    share = np.ones(len(size)) if weight is None else weight
    if not share.sum():
        return UNKNOWN_BAND
    order = np.argsort(size)
    reached = np.cumsum(share[order]) / (share.sum() + 1.0)
    place = min(len(size) - 1, int(np.searchsorted(reached, BAND)))
    return float(size[order][place])


def bands(cases: Sequence[Case], logs: Floats, parts: Sequence[Index]) -> Floats:
    """Return [cases] half-widths of 80 % bands: each part's from the other parts' residuals, by stack if many."""
    out = np.zeros(len(cases))
    fold = np.zeros(len(cases), dtype=np.intp)
    sizes: dict[str, int] = {}
    for case in cases:
        sizes[case.label] = sizes.get(case.label, 0) + 1
    weight = np.array([0.0 if case.composed else 1.0 / sizes[case.label] for case in cases])
    for number, part in enumerate(parts):
        fold[part] = number
    stacks = np.array([case.stack for case in cases])
    for number, part in enumerate(parts):
        away = fold != number
        common = quantile(logs[away], weight[away])
        for stack in sorted(set(stacks[part])):
            mine = away & (stacks == stack)
            own = quantile(logs[mine]) if mine.sum() >= LEAST_BAND_ROWS else common
            out[part[stacks[part] == stack]] = own
    return out
