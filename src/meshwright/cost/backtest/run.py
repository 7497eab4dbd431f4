"""``backtest``: predict every measured run that can be predicted, and say how far off the predictions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cost.backtest.case import Case, Skipped
from meshwright.cost.backtest.folds import picked
from meshwright.cost.backtest.profile import shipped
from meshwright.cost.backtest.resolve import resolve
from meshwright.cost.backtest.score import errors, oom_scores, over_sources, time_scores
from meshwright.cost.backtest.scorers import ByProfile, Calibrated, Sets, make_sets
from meshwright.cost.backtest.table import Row
from meshwright.cost.collective import Floats

OOM_GATE: Final = 0.6
"""Probability from which a layout is said to run out of memory."""


@dataclass(frozen=True)
class Predicted:
    """One row's prediction beside its measurement; seconds and bytes, None where the row has none."""

    case: Case
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    peak_bytes: float | None = None
    oom_probability: float | None = None
    ran_out: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "id": self.case.id,
            "source": self.case.source,
            "stack": self.case.stack,
            "step_time_s": self.step_s,
            "step_time_low_s": self.low_s,
            "step_time_high_s": self.high_s,
            "measured_step_time_s": self.case.step_s,
            "peak_memory_bytes": self.peak_bytes,
            "measured_peak_memory_bytes": self.case.memory,
            "oom_probability": self.oom_probability,
            "ran_out": self.ran_out,
        }


@dataclass(frozen=True)
class Report:
    """The scores as the contract's JSON, with every prediction."""

    scores: dict[str, Any]
    predictions: tuple[Predicted, ...]
    skipped: tuple[Skipped, ...]


def backtest(
    rows: Sequence[Row], out_of_memory: Sequence[Row] = (), *, calibrate: bool = False, folds: int = 5
) -> Report:
    """Return the report on the rows of a table, ``out_of_memory`` being layouts that are known to run out.

    With ``calibrate`` every row is predicted by a fit that saw no row of its sweep; without, by the shipped profile.

    Raises:
        MeshwrightError: E462 units, E464 folds, E465 no row can be scored.
    """
    cases, skipped = resolve(rows)
    out, skipped_out = resolve(out_of_memory, needs_measurement=False)
    if not cases:
        raise MeshwrightError(_nothing(skipped))
    sets = make_sets(cases, out)
    scorer = Calibrated(sets, folds) if calibrate else ByProfile(sets, shipped())
    time_logs, band = scorer.time()
    peak_logs = scorer.memory()
    probability = scorer.oom()
    scores: dict[str, Any] = {
        "rows": len(rows),
        "scored": len(cases),
        "skipped": [{"id": s.id, "why": s.why} for s in [*skipped, *skipped_out]],
        "calibrated": calibrate,
        "folds": folds if calibrate else None,
    }
    scores |= _scores(sets, time_logs, band, peak_logs, probability)
    scores |= scorer.beside()
    predictions = _predictions(sets, time_logs, band, peak_logs, probability)
    return Report(scores, predictions, (*skipped, *skipped_out))


def _nothing(skipped: Sequence[Skipped]) -> Any:
    counts: dict[str, int] = {}
    for row in skipped:
        counts[row.why] = counts.get(row.why, 0) + 1
    worst = sorted(counts.items(), key=lambda kv: -kv[1])[:5]
    found = "; ".join(f"{n} x {why}" for why, n in worst)
    return problem("E465", where="table", found=f"{len(skipped)} rows, all skipped: {found}")


def _scores(
    s: Sets, time_logs: Floats, band: Floats, peak_logs: Floats, probability: Floats
) -> dict[str, Any]:
    by: dict[str, dict[str, Any]] = {}
    labels = sorted({case.label for case in [*s.timed, *s.sized]})
    for label in labels:
        at = np.array([k for k, case in enumerate(s.timed) if case.label == label], dtype=np.intp)
        size = np.array([k for k, case in enumerate(s.sized) if case.label == label], dtype=np.intp)
        mine = {case.id for case in [*s.timed, *s.sized] if case.label == label}
        entry: dict[str, Any] = {
            "rows": len(mine),
            "composed": any(case.composed for case in picked(s.timed, at)),
        }
        none: dict[str, Any] = {"rows": 0}
        entry["time"] = time_scores(picked(s.timed, at), time_logs[at], band[at]) if len(at) else none
        entry["memory"] = errors(peak_logs[size]) if len(size) else none
        by[label] = entry
    real = {k: v for k, v in by.items() if not v["composed"]}
    time = over_sources({k: v["time"] for k, v in real.items() if v["time"]["rows"]})
    memory = over_sources({k: v["memory"] for k, v in real.items() if v["memory"]["rows"]})
    memory = {k: v for k, v in memory.items() if "regret" not in k and k not in ("spearman", "coverage_pct")}
    worst = [v["memory"]["worst_pct"] for v in real.values() if v["memory"]["rows"]]
    memory["worst_pct"] = max(worst, key=abs) if worst else None
    memory |= oom_scores(probability, s.sign < 0, OOM_GATE)
    return {"time": time, "memory": memory, "by_source": by}


def _predictions(
    s: Sets, time_logs: Floats, band: Floats, peak_logs: Floats, probability: Floats
) -> tuple[Predicted, ...]:
    found: dict[str, Predicted] = {}
    for case, error, half in zip(s.timed, time_logs, band, strict=True):
        assert case.step_s is not None
        step = case.step_s * float(np.exp(error))
        wide = float(np.exp(half))
        found[case.id] = Predicted(case, step, step / wide, step * wide)
    for case, error in zip(s.sized, peak_logs, strict=True):
        assert case.memory is not None
        old = found.get(case.id, Predicted(case))
        peak = case.memory * float(np.exp(error))
        found[case.id] = Predicted(case, old.step_s, old.low_s, old.high_s, peak)
    for case, chance, sign in zip(s.sided, probability, s.sign, strict=True):
        old = found.get(case.id, Predicted(case))
        found[case.id] = Predicted(
            case, old.step_s, old.low_s, old.high_s, old.peak_bytes, float(chance), bool(sign < 0)
        )
    return tuple(found.values())
