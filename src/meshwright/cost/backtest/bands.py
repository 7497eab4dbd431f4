"""80 % bands from residuals of rows that a fit did not see.

What is new is a sweep, not a row of it: rows of one sweep err together. So every sweep of a stack has the same say, and
one more sweep is counted as missed, whatever its rows (hierarchical conformal prediction: Lee, Barber and Willett 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.folds import Index, picked
from meshwright.cost.collective import Floats

BAND: Final = 0.80
ROUNDING: Final = 1e-9
"""What sums of weights may be off by."""
UNKNOWN_BAND: Final = 0.3
"""Half-width of the band of log time before any residual was seen."""
LEAST_BAND_SWEEPS: Final = 4
"""Sweeps from which a stack's band rests on its own, as 4 of 5 are 80 %; with fewer it rests on all stacks'."""


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
    place = min(len(size) - 1, int(np.searchsorted(reached, BAND - ROUNDING)))
    return float(size[order][place])


def sweep_weights(cases: Sequence[Case]) -> Floats:
    """Return weights of rows that give every sweep the same say."""
    sizes: dict[tuple[str, ...], int] = {}
    for case in cases:
        sizes[case.sweep] = sizes.get(case.sweep, 0) + 1
    return np.array([1.0 / sizes[case.sweep] for case in cases])


def own_band(residuals: Floats, cases: Sequence[Case]) -> float | None:
    """Return the half-width of a stack's own band, from residuals of its rows; None for too few sweeps."""
    if len({case.sweep for case in cases}) < LEAST_BAND_SWEEPS:
        return None
    return quantile(residuals, sweep_weights(cases))


def bands(cases: Sequence[Case], logs: Floats, parts: Sequence[Index]) -> Floats:
    """Return [cases] half-widths of 80 % bands, each part's from the others' residuals, by stack if sweeps suffice."""
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
            mine = np.flatnonzero(away & (stacks == stack))
            own = own_band(logs[mine], picked(cases, mine))
            out[part[stacks[part] == stack]] = common if own is None else own
    return out
