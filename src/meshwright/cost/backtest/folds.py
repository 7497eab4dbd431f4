"""What is left out: whole sweeps by fold, a whole source, one model size of a source, one generation of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cost.backtest.case import Case

Index: TypeAlias = NDArray[np.intp]


def sweep_folds(cases: Sequence[Case], folds: int) -> list[Index]:
    """Return ``folds`` sets of rows: the sweeps of each source dealt out in order, so that every source is in most folds.

    Raises:
        MeshwrightError: E464 for fewer than 2 folds, or more folds than sweeps.
    """
    sweeps = sorted({case.sweep for case in cases})
    if not 2 <= folds <= len(sweeps):
        found = f"{folds} folds of {len(sweeps)} sweeps"
        needs = f"2 <= folds <= {len(sweeps)}" if len(sweeps) > 1 else "a table with at least two sweeps"
        raise MeshwrightError(problem("E464", where="--folds", found=found, needs=needs))
    of: dict[tuple[str, ...], int] = {}
    offset = 0
    for source in sorted({sweep[0] for sweep in sweeps}):
        mine = [sweep for sweep in sweeps if sweep[0] == source]
        for position, sweep in enumerate(mine):
            of[sweep] = (position + offset) % folds
        offset += len(mine)
    fold = np.array([of[case.sweep] for case in cases])
    return [np.flatnonzero(fold == k) for k in range(folds)]


def by_key(cases: Sequence[Case], key: Callable[[Case], tuple[str, ...]], *, least: int = 1) -> list[Index]:
    """Return the rows of each value of ``key`` that has at least ``least`` rows."""
    found: dict[tuple[str, ...], list[int]] = {}
    for place, case in enumerate(cases):
        found.setdefault(key(case), []).append(place)
    return [np.array(rows, dtype=np.intp) for _, rows in sorted(found.items()) if len(rows) >= least]


def rest(total: int, held: Index) -> Index:
    """Return the rows that are not held out."""
    out = np.ones(total, dtype=bool)
    out[held] = False
    return np.flatnonzero(out)


def picked(cases: Sequence[Case], rows: Index) -> list[Case]:
    """Return the cases at ``rows``."""
    places: list[int] = rows.tolist()
    return [cases[place] for place in places]
