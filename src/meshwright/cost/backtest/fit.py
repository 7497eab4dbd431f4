"""Joint robust fits: coefficients over all stacks, then each stack around them, both with priors.

Residuals are log(predicted / measured). What disturbs a run (a slow device, a shared link, a throttled node) makes its
steps longer and never shorter, so the two sides have losses of their own: soft-L1 where a row is faster than predicted,
Cauchy's where it is slower. The covariance is that of the linearised problem at the solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from scipy.optimize import least_squares  # pyright: ignore

from meshwright.cost.backtest.model import NAMES, SPREADS, STACK_SPREADS, seconds
from meshwright.cost.backtest.terms import Terms
from meshwright.cost.collective import Floats

NOISE: Final = 0.03
"""Deviation of one measurement that a fit assumes; the soft-L1 loss turns linear beyond it."""
SLOW: Final = 1.5
"""Deviations at which Cauchy's loss has bent. Chosen on held-out sweeps: vTrain, with most of the slow runs, is 7.0, 7.0
and 7.5 % off at 1, 1.5 and 2.4, a source left out 10.3, 10.3 and 10.6 %, its mean absolute bias 8.0, 7.1 and 7.2 %."""
DEVICE_SPREAD: Final = 0.05
"""How far the matmul rate of one device may lie from its stack's."""


@dataclass(frozen=True)
class Fitted:
    """Coefficients of one stack: ``theta`` with its covariance, and the deviation of each device's matmul rate."""

    theta: Floats
    covariance: Floats
    devices: dict[str, float]
    rows: tuple[str, ...]


def rooted_losses(deviations: Floats) -> Floats:
    """Return roots of losses, signed: of soft-L1 for positive (predicted as slower), of Cauchy's for negative ones."""
    fast = np.sqrt(2.0 * (np.sqrt(1.0 + deviations**2) - 1.0))
    slow = -SLOW * np.sqrt(np.log1p((deviations / SLOW) ** 2))
    return np.where(deviations < 0, slow, fast)


def loss_weights(deviations: Floats) -> Floats:
    """Return the weights with which a weighted mean minimises these losses: 1 for small deviations, less for large."""
    fast = 1.0 / np.sqrt(1.0 + deviations**2)
    return np.where(deviations < 0, 1.0 / (1.0 + (deviations / SLOW) ** 2), fast)


def common_part(residuals: Floats) -> float:
    """Return what residuals of log(predicted / measured) have in common: the shift that minimises their losses."""
    shift = float(np.median(residuals))
    for _ in range(20):
        weight = loss_weights((residuals - shift) / NOISE)
        shift = float((weight * residuals).sum() / weight.sum())
    return shift


def solve(
    t: Terms, logs: Floats, weight: Floats, centre: Floats, spread: Floats, start: Floats
) -> tuple[Floats, Floats]:
    """Return (theta, covariance) of the fit of ``log seconds`` to ``logs`` around ``centre``."""

    def residuals(theta: Floats) -> Floats:
        data = (np.log(seconds(t, theta)) - logs) / NOISE
        # on the data only; the prior is Gaussian
        return np.concatenate([weight * rooted_losses(data), (theta - centre) / spread])

    found = cast(Any, least_squares(residuals, start, method="trf", max_nfev=25, x_scale=spread))  # pyright: ignore
    jacobian: Floats = np.asarray(found.jac, dtype=np.float64)
    solved: Floats = np.asarray(found.x, dtype=np.float64)
    return solved, np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)


def source_weights(sources: Sequence[str], power: float = 0.5) -> Floats:
    """Return weights of rows: a source's influence grows with the root of its size, so that none drowns the others."""
    counts: dict[str, int] = {}
    for name in sources:
        counts[name] = counts.get(name, 0) + 1
    return np.array([counts[name] ** -power for name in sources]) ** 0.5


def fit_all(
    t: Terms, logs: Floats, sources: Sequence[str], start: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return (theta, covariance) over every stack: what is known of a stack that was never measured."""
    zero = np.zeros(len(NAMES))
    weight = source_weights(sources)
    return solve(t, logs, weight, zero, SPREADS, zero if start is None else start)


def fit_stack(t: Terms, logs: Floats, weight: Floats, centre: Floats) -> tuple[Floats, Floats]:
    """Return (theta, covariance) of one stack around what all stacks have in common."""
    return solve(t, logs, weight, centre, STACK_SPREADS, centre)
