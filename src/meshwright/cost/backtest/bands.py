"""80 % bands from residuals of rows that a fit did not see.

What is new is a sweep (or a source, a model size, a generation of devices), not a row of it: its rows err together. So
every one of them that a stack has gets the same say, and one more is counted as missed, whatever its rows (hierarchical
conformal prediction: Lee, Barber and Willett 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.folds import Index, picked
from meshwright.cost.collective import Floats

BAND: Final = 0.80
ROUNDING: Final = 1e-9
"""What sums of weights may be off by."""
UNKNOWN_BAND: Final = 0.3
"""Half-width of the band of log time before any residual was seen."""
LEAST_BAND_UNITS: Final = 4
"""Sweeps from which a stack's band rests on its own, as 4 of 5 are 80 %; with fewer it rests on all stacks'."""

Unit: TypeAlias = Callable[[Case], tuple[str, ...]]
"""Names what a case belongs to of which another one is predicted."""


def sweep(case: Case) -> tuple[str, ...]:
    """Return the sweep of a case."""
    return case.sweep


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


def own_band(residuals: Floats, cases: Sequence[Case], unit: Unit = sweep) -> float | None:
    """Return the half-width of a stack's own band, from residuals of its rows; None for too few units."""
    names = [unit(case) for case in cases]
    if len(set(names)) < LEAST_BAND_UNITS:
        return None
    counts = Counter(names)
    return quantile(residuals, np.array([1.0 / counts[name] for name in names]))


def bands(cases: Sequence[Case], logs: Floats, parts: Sequence[Index], unit: Unit = sweep) -> Floats:
    """Return [cases] half-widths of 80 % bands, each part's from the others' residuals.

    By stack if it has enough of what is new in a part (``unit``), else by all stacks, every source having the same say.
    """
    out = np.zeros(len(cases))
    fold = np.zeros(len(cases), dtype=np.intp)
    sizes = Counter(case.label for case in cases)
    weight = np.array([0.0 if case.composed else 1.0 / sizes[case.label] for case in cases])
    for number, part in enumerate(parts):
        fold[part] = number
    stacks = np.array([case.stack for case in cases])
    for number, part in enumerate(parts):
        away = fold != number
        common = quantile(logs[away], weight[away])
        for stack in sorted(set(stacks[part])):
            mine = np.flatnonzero(away & (stacks == stack))
            own = own_band(logs[mine], picked(cases, mine), unit)
            out[part[stacks[part] == stack]] = common if own is None else own
    return out
