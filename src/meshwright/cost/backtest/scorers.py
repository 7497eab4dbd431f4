"""Predictions of a table's rows: by fits of the other folds, or by the profile that the package ships."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost.backtest import memory_model
from meshwright.cost.backtest.bands import bands, quantile
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
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.folds import Index, by_key, picked, sweep_folds
from meshwright.cost.backtest.memory_model import oom_probability
from meshwright.cost.backtest.memory_terms import memory_terms
from meshwright.cost.backtest.profile import Shipped
from meshwright.cost.backtest.score import over_sources, time_scores
from meshwright.cost.backtest.terms import Terms, terms
from meshwright.cost.collective import Floats


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


class Calibrated:
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
        """Return (log(predicted / measured), half-width of the band) of every row with a time."""
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
        """Return log(predicted / measured) of every peak."""
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
        """Return the probability of running out of every layout known to run or not."""
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
            band = bands(self.s.timed, logs, parts, key) if len(parts) > 1 else np.full(len(logs), np.nan)
            real = [k for k, case in enumerate(self.s.timed) if not case.composed]
            by: dict[str, Any] = {}
            for label in sorted({self.s.timed[k].label for k in real}):
                at = np.array([k for k in real if self.s.timed[k].label == label], dtype=np.intp)
                by[label] = time_scores(picked(self.s.timed, at), logs[at], band[at])
            at = np.array(real, dtype=np.intp)
            out[name] = over_sources(by) | {"band_80": self._band(logs, at), "by_source": by}
        return {"left_out": out}


class ByProfile:
    """Scores by the profile that the package ships."""

    def __init__(self, sets: Sets, profile: Shipped) -> None:
        self.s = sets
        self.p = profile

    def time(self) -> tuple[Floats, Floats]:
        """Return (log(predicted / measured), half-width of the band) of every row with a time."""
        rows = np.arange(len(self.s.timed))
        if not len(rows):
            return np.zeros(0), np.zeros(0)
        logs = predict_logs(self.p.time, self.s.time, self.s.timed, rows) - self.s.logs
        return logs, np.array([self.p.band(case.stack) for case in self.s.timed])

    def memory(self) -> Floats:
        """Return log(predicted / measured) of every peak."""
        rows = np.arange(len(self.s.sized))
        if not len(rows):
            return np.zeros(0)
        return memory_logs(self.p.memory, self.s.size, self.s.sized, rows)

    def oom(self) -> Floats:
        """Return the probability of running out of every layout known to run or not."""
        rows = np.arange(len(self.s.sided))
        if not len(rows):
            return np.zeros(0)
        return oom_probability(self.s.side, memory_theta(self.p.memory, self.s.sided, rows))

    def beside(self) -> dict[str, Any]:
        """Return which of the scored rows the profile was fitted on."""
        ids = {case.id for case in [*self.s.timed, *self.s.sized]}
        return {"profile": {"fitted": self.p.date, "scored_rows_it_was_fitted_on": len(ids & self.p.rows)}}
