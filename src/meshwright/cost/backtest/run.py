"""``backtest``: predict every measured run that can be predicted, and say how far off the predictions are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cost.backtest import memory_model
from meshwright.cost.backtest.calibrate import (
    MemoryProfile,
    Profile,
    fit_memory,
    fit_profile,
    held_out,
    memory_logs,
    memory_theta,
    predict_logs,
)
from meshwright.cost.backtest.case import Case, Skipped, resolve
from meshwright.cost.backtest.folds import Index, by_key, picked, sweep_folds
from meshwright.cost.backtest.memory_model import oom_probability
from meshwright.cost.backtest.memory_terms import memory_terms
from meshwright.cost.backtest.profile import Shipped, shipped
from meshwright.cost.backtest.score import errors, oom_scores, over_sources, time_scores
from meshwright.cost.backtest.table import Row
from meshwright.cost.backtest.terms import Terms, terms
from meshwright.cost.collective import Floats

OOM_GATE: Final = 0.6
"""Probability from which a layout is said to run out of memory."""
BAND: Final = 0.80
UNKNOWN_BAND: Final = 0.3
"""Half-width of the band of log time before any residual was seen."""
LEAST_BAND_ROWS: Final = 8
"""Residuals from which a stack's band rests on its own; with fewer it rests on all stacks'."""


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


@dataclass(frozen=True)
class Sets:
    """The rows to score: those with a time, those with a peak, those that ran or ran out, each with its terms."""

    timed: list[Case]
    time: Terms
    logs: Floats
    sized: list[Case]
    size: Terms
    sided: list[Case]
    side: Terms
    sign: Floats


def make_sets(cases: Sequence[Case], out: Sequence[Case]) -> Sets:
    """Return the sets of ``cases`` (they ran) and ``out`` (they ran out of memory)."""
    timed = [case for case in cases if case.step_s is not None]
    sized = [case for case in cases if case.memory is not None]
    stacks = {case.stack for case in out}
    ran = [case for case in cases if case.stack in stacks or case.memory is not None] if out else []
    sided = [*out, *ran]
    logs = np.log(np.array([case.step_s for case in timed], dtype=np.float64))
    sign = np.array([-1.0] * len(out) + [1.0] * len(ran))
    return Sets(timed, terms(timed), logs, sized, memory_terms(sized), sided, memory_terms(sided), sign)


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
    scorer = _Calibrated(sets, folds) if calibrate else _Shipped(sets, shipped())
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


class _Calibrated:
    """Scores by fits of the other folds."""

    def __init__(self, sets: Sets, folds: int) -> None:
        self.s = sets
        self.folds = folds
        every = np.arange(len(sets.timed))
        self.profile: Profile | None = (
            fit_profile(sets.time, sets.logs, sets.timed, every) if len(every) else None
        )
        self.cases = list({c.id: c for c in [*sets.timed, *sets.sized, *sets.sided]}.values())
        parts = sweep_folds(self.cases, folds)
        self.fold = {
            case.id: number for number, part in enumerate(parts) for case in picked(self.cases, part)
        }

    def _parts(self, cases: Sequence[Case]) -> list[Index]:
        number = np.array([self.fold[case.id] for case in cases], dtype=np.intp)
        return [part for k in range(self.folds) if len(part := np.flatnonzero(number == k))]

    def _held(self, parts: Sequence[Index]) -> Floats:
        assert self.profile is not None
        s = self.s
        values, rows = held_out(s.time, s.logs, s.timed, parts, self.profile.common)
        out = np.zeros(len(s.timed))
        out[rows] = values
        return out

    def time(self) -> tuple[Floats, Floats]:
        if self.profile is None:
            return np.zeros(0), np.zeros(0)
        parts = self._parts(self.s.timed)
        logs = self._held(parts)
        return logs, bands(self.s.timed, logs, parts)

    def _memory(self, number: int, cases: Sequence[Case]) -> MemoryProfile:
        s = self.s
        train = np.array([k for k, case in enumerate(s.sized) if self.fold[case.id] != number], dtype=np.intp)
        known = np.array([k for k, case in enumerate(s.sided) if self.fold[case.id] != number], dtype=np.intp)
        zero = np.zeros(len(memory_model.MEMORY_NAMES))
        return fit_memory(
            s.size, s.sized, train, s.side.take(known), picked(s.sided, known), s.sign[known], zero
        )

    def _profiles(self) -> list[MemoryProfile]:
        return [self._memory(number, self.cases) for number in range(self.folds)]

    def memory(self) -> Floats:
        self.memories = self._profiles() if self.s.sized else []
        out = np.zeros(len(self.s.sized))
        for number, profile in enumerate(self.memories):
            rows = np.array(
                [k for k, c in enumerate(self.s.sized) if self.fold[c.id] == number], dtype=np.intp
            )
            if len(rows):
                out[rows] = memory_logs(profile, self.s.size, self.s.sized, rows)
        return out

    def oom(self) -> Floats:
        out = np.zeros(len(self.s.sided))
        for number, profile in enumerate(self.memories):
            rows = np.array(
                [k for k, c in enumerate(self.s.sided) if self.fold[c.id] == number], dtype=np.intp
            )
            if len(rows):
                theta = memory_theta(profile, self.s.sided, rows)
                out[rows] = oom_probability(self.s.side.take(rows), theta)
        return out

    def _band(self, logs: Floats, rows: Index) -> float:
        """Return the half-width of log time that covers 80 % of rows, every source counting once."""
        labels = [case.label for case in picked(self.s.timed, rows)]
        weight = np.array([1.0 / labels.count(label) for label in labels])
        return quantile(logs[rows], weight)

    def beside(self) -> dict[str, Any]:
        """Return the scores with more left out than a sweep."""
        if self.profile is None:
            return {}
        ways: dict[str, Callable[[Case], tuple[str, ...]]] = {
            "source": lambda c: (c.source,),
            "model_size": lambda c: (c.source, str(c.hidden)),
            "gpu_generation": lambda c: (c.generation,),
        }
        out: dict[str, Any] = {}
        for name, key in ways.items():
            parts = by_key(self.s.timed, key)
            logs = self._held(parts)
            band = bands(self.s.timed, logs, parts) if len(parts) > 1 else np.full(len(logs), np.nan)
            real = [k for k, case in enumerate(self.s.timed) if not case.composed]
            by: dict[str, Any] = {}
            for label in sorted({self.s.timed[k].label for k in real}):
                at = np.array([k for k in real if self.s.timed[k].label == label], dtype=np.intp)
                by[label] = time_scores(picked(self.s.timed, at), logs[at], band[at])
            at = np.array(real, dtype=np.intp)
            out[name] = over_sources(by) | {"band_80": self._band(logs, at), "by_source": by}
        return {"left_out": out}


class _Shipped:
    """Scores by the profile that the package ships."""

    def __init__(self, sets: Sets, profile: Shipped) -> None:
        self.s = sets
        self.p = profile

    def time(self) -> tuple[Floats, Floats]:
        rows = np.arange(len(self.s.timed))
        if not len(rows):
            return np.zeros(0), np.zeros(0)
        logs = predict_logs(self.p.time, self.s.time, self.s.timed, rows) - self.s.logs
        return logs, np.array([self.p.band(case.stack) for case in self.s.timed])

    def memory(self) -> Floats:
        rows = np.arange(len(self.s.sized))
        if not len(rows):
            return np.zeros(0)
        return memory_logs(self.p.memory, self.s.size, self.s.sized, rows)

    def oom(self) -> Floats:
        rows = np.arange(len(self.s.sided))
        if not len(rows):
            return np.zeros(0)
        return oom_probability(self.s.side, memory_theta(self.p.memory, self.s.sided, rows))

    def beside(self) -> dict[str, Any]:
        """Return which of the scored rows the profile was fitted on."""
        ids = {case.id for case in [*self.s.timed, *self.s.sized]}
        return {"profile": {"fitted": self.p.date, "scored_rows_it_was_fitted_on": len(ids & self.p.rows)}}
