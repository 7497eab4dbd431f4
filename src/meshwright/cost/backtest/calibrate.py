"""Predictions of held-out rows by a fit of the others, for time and for memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from meshwright.cost.backtest import memory_model, model
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.fit import DEVICE_SPREAD, NOISE, common_part, fit_all, fit_stack, source_weights
from meshwright.cost.backtest.folds import Index, picked
from meshwright.cost.backtest.memory_model import Sides, peak_bytes, solve_memory
from meshwright.cost.backtest.terms import Terms
from meshwright.cost.collective import Floats

LEAST_STACK_ROWS: Final = 3
"""Rows from which a stack has coefficients of its own."""


@dataclass(frozen=True)
class Profile:
    """Fitted coefficients: those that all stacks share, and each stack's own, with their covariances."""

    common: Floats
    common_covariance: Floats
    stacks: Mapping[str, Floats]
    covariances: Mapping[str, Floats]
    offsets: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shrunken mean residual of a stack on one device, keyed "stack/device"."""


def fit_profile(
    t: Terms,
    logs: Floats,
    cases: Sequence[Case],
    train: Index,
    start: Floats | None = None,
    only: frozenset[str] | None = None,
) -> Profile:
    """Return the profile fitted on rows ``train`` (its stacks limited to ``only``)."""
    seen = t.take(train)
    mine = picked(cases, train)
    shared = np.array([k for k, case in enumerate(mine) if not case.composed], dtype=np.intp)
    shared = shared if len(shared) else np.arange(len(mine))
    common, covariance = fit_all(
        seen.take(shared), logs[train[shared]], [case.source for case in picked(mine, shared)], start
    )
    stacks: dict[str, Floats] = {}
    covariances: dict[str, Floats] = {}
    offsets: dict[str, float] = {}
    for name in sorted({case.stack for case in mine}):
        rows = np.array([k for k, case in enumerate(mine) if case.stack == name], dtype=np.intp)
        if len(rows) < LEAST_STACK_ROWS or (only is not None and name not in only):
            continue
        part = seen.take(rows)
        weight = source_weights([case.source for case in picked(mine, rows)], 0.25)
        stacks[name], covariances[name] = fit_stack(part, logs[train[rows]], weight, common)
        left = logs[train[rows]] - np.log(model.seconds(part, stacks[name]))
        offsets |= _offsets(name, picked(mine, rows), left)
    return Profile(common, covariance, stacks, covariances, offsets)


def _offsets(stack: str, cases: Sequence[Case], left: Floats) -> dict[str, float]:
    """Return what a device's rows of a stack have in common, shrunk by the number of their sweeps."""
    out: dict[str, float] = {}
    for gpu in sorted({case.gpu for case in cases}):
        sweeps: dict[tuple[str, ...], list[float]] = {}
        for case, value in zip(cases, left, strict=True):
            if case.gpu == gpu:
                sweeps.setdefault(case.sweep, []).append(float(np.clip(value, -0.15, 0.15)))
        means = [-common_part(-np.array(values)) for values in sweeps.values()]
        trust = len(means) / (len(means) + (NOISE / DEVICE_SPREAD) ** 2 + 1.0)
        out[f"{stack}/{gpu}"] = trust * float(np.mean(means))
    return out


def predict_logs(profile: Profile, t: Terms, cases: Sequence[Case], rows: Index) -> Floats:
    """Return the logarithm of predicted seconds of rows: by their stack's coefficients, else by the common ones."""
    mine = picked(cases, rows)
    theta = np.array([profile.stacks.get(case.stack, profile.common) for case in mine])
    offset = np.array([profile.offsets.get(f"{case.stack}/{case.gpu}", 0.0) for case in mine])
    return np.log(model.seconds(t.take(rows), theta)) + offset


def held_out(
    t: Terms, logs: Floats, cases: Sequence[Case], parts: Sequence[Index], start: Floats
) -> tuple[Floats, Index]:
    """Return (log(predicted / measured), rows) of each part, predicted by a fit that saw none of its rows."""
    out: list[Floats] = []
    for part in parts:
        mask = np.ones(len(cases), dtype=bool)
        mask[part] = False
        wanted = frozenset(case.stack for case in picked(cases, part))
        profile = fit_profile(t, logs, cases, np.flatnonzero(mask), start, wanted)
        out.append(predict_logs(profile, t, cases, part) - logs[part])
    rows = np.concatenate(list(parts)) if parts else np.zeros(0, dtype=np.intp)
    return (np.concatenate(out) if out else np.zeros(0)), rows


@dataclass(frozen=True)
class MemoryProfile:
    """Fitted memory coefficients: common ones, and each stack's own."""

    common: Floats
    stacks: Mapping[str, Floats]


def fit_memory(
    t: Terms,
    cases: Sequence[Case],
    train: Index,
    known: Terms,
    known_cases: Sequence[Case],
    sign: Floats,
    start: Floats,
) -> MemoryProfile:
    """Return memory coefficients fitted on peaks of ``train`` and on layouts known to run (+1) or not (-1)."""
    logs = np.log(np.array([case.memory for case in picked(cases, train)], dtype=np.float64))
    mine = picked(cases, train)
    zero = np.zeros(len(memory_model.MEMORY_NAMES))
    seen = t.take(train) if len(train) else None
    common, _ = solve_memory(
        seen, logs, source_weights([c.source for c in mine]), None, zero, memory_model.SPREADS
    )
    stacks: dict[str, Floats] = {}
    for name in sorted({case.stack for case in [*mine, *known_cases]}):
        rows = np.array([k for k, case in enumerate(mine) if case.stack == name], dtype=np.intp)
        sides = np.array([k for k, case in enumerate(known_cases) if case.stack == name], dtype=np.intp)
        told = Sides(known.take(sides), sign[sides]) if len(sides) and (sign[sides] < 0).any() else None
        if len(rows) < LEAST_STACK_ROWS and told is None:
            continue
        part = t.take(train[rows]) if len(rows) else None
        stacks[name], _ = solve_memory(
            part, logs[rows], np.ones(len(rows)), told, common, memory_model.STACK_SPREADS
        )
    return MemoryProfile(common, stacks)


def memory_theta(profile: MemoryProfile, cases: Sequence[Case], rows: Index) -> Floats:
    """Return [rows, coefficients] of rows."""
    return np.array([profile.stacks.get(case.stack, profile.common) for case in picked(cases, rows)]).reshape(
        len(rows), len(memory_model.MEMORY_NAMES)
    )


def memory_logs(profile: MemoryProfile, t: Terms, cases: Sequence[Case], rows: Index) -> Floats:
    """Return log(predicted / measured) peaks of rows."""
    measured = np.array([case.memory for case in picked(cases, rows)], dtype=np.float64)
    return np.log(peak_bytes(t.take(rows), memory_theta(profile, cases, rows)) / measured)
