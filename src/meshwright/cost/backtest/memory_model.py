"""Peak bytes from memory terms and coefficients, the probability of running out, and the fit of both.

The fit sees measured peaks and, where a stack has them, layouts that ran out and layouts that ran: each is one
observation of which side of the device's memory the peak lies on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from scipy.optimize import least_squares  # pyright: ignore
from scipy.special import log_ndtr  # pyright: ignore

from meshwright.cost.backtest.memory_terms import PARTS
from meshwright.cost.backtest.model import Coefficient
from meshwright.cost.backtest.terms import Terms
from meshwright.cost.collective import Floats

GIB: Final = 2.0**30
MEMORY_COEFFICIENTS: Final[tuple[Coefficient, ...]] = (
    Coefficient("activations", 1.0, 0.10, 0.08, "kept activations over the operations' list"),
    Coefficient("recompute", 1.0, 0.3, 0.2, "bytes alive while a layer is recomputed"),
    Coefficient("logits", 1.0, 0.3, 0.2, "bytes per logit over the loss's list"),
    Coefficient("working", 1.0, 0.4, 0.3, "gathered units and reduction buffers of stage 3"),
    Coefficient("fixed", 0.8, 0.5, 0.4, "GiB beside what is counted"),
    Coefficient("slack", 0.04, 0.5, 0.4, "reserved beside allocated"),
    Coefficient(
        "cached", 0.25, 0.5, 0.4, "share that an allocator keeps beyond its peak, as a device reading shows"
    ),
)
MEMORY_NAMES: Final = tuple(c.name for c in MEMORY_COEFFICIENTS)
PRIORS: Final = np.array([c.prior for c in MEMORY_COEFFICIENTS])
SPREADS: Final = np.array([c.spread for c in MEMORY_COEFFICIENTS])
STACK_SPREADS: Final = np.array([c.stack_spread for c in MEMORY_COEFFICIENTS])
OUTSIDE: Final = 1.0 * GIB
"""Bytes that a device holds beside the allocator: context, libraries, communicators."""
NOISE: Final = 0.02
SIDE_NOISE: Final = 0.04
"""Deviation of the logarithm of a peak around its prediction, for measured peaks and for layouts that ran (or not)."""


@dataclass(frozen=True)
class Sides:
    """Layouts known to run (+1) or to run out (-1)."""

    terms: Terms
    sign: Floats


def peak_bytes(t: Terms, theta: Floats) -> Floats:
    """Return [cases] bytes at the peak, in the meaning of the case's reading."""
    x = PRIORS * np.exp(np.clip(theta, -4.0, 4.0))
    k = {name: x[..., i] for i, name in enumerate(MEMORY_NAMES)}

    ones = np.ones_like(t["capacity"])

    def stage(name: str) -> Floats:
        part = {p: t[f"{name}_{p}"] * k.get(p, ones) for p in PARTS}
        # the logits are gone before the last layer is computed again
        either = np.maximum(part["logits"] + t["beside"] * part["recompute"], part["recompute"])
        return part["state"] + part["activations"] + either + part["working"]

    first = np.where(t["first_counts"] > 0, np.maximum(stage("first"), stage("second")), 0.0)
    peak = np.maximum(first, stage("last")) + k["fixed"] * GIB
    reserved = peak * (1.0 + t["slack"] * k["slack"])
    cached = np.minimum(reserved * (1.0 + t["device"] * k["cached"]) + t["device"] * OUTSIDE, t["capacity"])
    return np.where(t["device"] > 0, np.maximum(cached, np.minimum(reserved, t["capacity"])), reserved)


def resident_bytes(t: Terms, theta: Floats) -> Floats:
    """Return [cases] bytes that the device must have: reserved and outside the allocator, whatever was printed."""
    ones = np.ones_like(t["capacity"])
    whole = Terms({**t.columns, "slack": ones, "device": 0.0 * ones, "first_counts": ones})
    return peak_bytes(whole, theta) + OUTSIDE


def oom_probability(t: Terms, theta: Floats, spread: float = SIDE_NOISE) -> Floats:
    """Return [cases] probabilities of running out of memory."""
    z = np.log(resident_bytes(t, theta) / t["capacity"]) / spread
    return np.exp(log_ndtr(z))


def solve_memory(
    t: Terms | None, logs: Floats, weight: Floats, sides: Sides | None, centre: Floats, spread: Floats
) -> tuple[Floats, Floats]:
    """Return (theta, covariance) of the fit around ``centre``."""

    def residuals(theta: Floats) -> Floats:
        parts = [(theta - centre) / spread]
        if t is not None and len(logs):
            data = (np.log(peak_bytes(t, theta)) - logs) / NOISE
            parts.append(weight * np.sign(data) * np.sqrt(2.0 * (np.sqrt(1.0 + data**2) - 1.0)))
        if sides is not None and len(sides.sign):
            z = np.log(sides.terms["capacity"] / resident_bytes(sides.terms, theta)) / SIDE_NOISE
            told = np.maximum(log_ndtr(np.clip(sides.sign * z, -8.0, 8.0)), -8.0)
            parts.append(0.7 * np.sqrt(-2.0 * told))
        return np.concatenate(parts)

    found = cast(Any, least_squares(residuals, centre, method="trf", max_nfev=25, x_scale=spread))  # pyright: ignore
    jacobian: Floats = np.asarray(found.jac, dtype=np.float64)
    solved: Floats = np.asarray(found.x, dtype=np.float64)
    return solved, np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)
