"""A profile of all rows of a table, for storing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.cost.backtest import memory_model
from meshwright.cost.backtest.bands import own_band
from meshwright.cost.backtest.calibrate import fit_memory, fit_profile
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.profile import profile_dict
from meshwright.cost.backtest.resolve import resolve
from meshwright.cost.backtest.scorers import make_sets
from meshwright.cost.backtest.table import Row

if TYPE_CHECKING:
    from meshwright.cost.backtest.run import Report


def profile_of(rows: Sequence[Row], out_of_memory: Sequence[Row], report: Report) -> dict[str, Any]:
    """Return the profile fitted on every row, with the bands that the report's held-out residuals give."""
    cases, _ = resolve(rows)
    out, _ = resolve(out_of_memory, needs_measurement=False)
    sets = make_sets(cases, out)
    time = fit_profile(sets.time, sets.logs, sets.timed, np.arange(len(sets.timed)))
    zero = np.zeros(len(memory_model.MEMORY_NAMES))
    memory = fit_memory(
        sets.size, sets.sized, np.arange(len(sets.sized)), sets.side, sets.sided, sets.sign, zero
    )
    residuals: dict[str, list[tuple[float, Case]]] = {}
    for row in report.predictions:
        if row.step_s is not None and row.case.step_s is not None:
            left = float(np.log(row.step_s / row.case.step_s))
            residuals.setdefault(row.case.stack, []).append((left, row.case))
    left_out: dict[str, Any] = report.scores["left_out"]["source"]
    cold = float(left_out["band_80"])
    found = {
        name: own_band(np.array([left for left, _ in values]), [case for _, case in values])
        for name, values in residuals.items()
    }
    bands = {name: band for name, band in found.items() if band is not None}
    return profile_dict("2026-11", time, memory, bands, cold, cases)


def profile_text(profile: Mapping[str, Any]) -> str:
    """Return the profile as JSON text, one line per stack and per key, so that a change shows where it is."""
    lines: list[str] = []
    for key, value in profile.items():
        if key != "stacks":
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    stacks = [f"    {json.dumps(name)}: {json.dumps(stack)}" for name, stack in profile["stacks"].items()]
    lines.append('  "stacks": {\n' + ",\n".join(stacks) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"
