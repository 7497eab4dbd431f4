"""A machine's own factors on what its probe measured: one joint robust fit on whole steps.

A probe times pieces; a step has them side by side, in other cache states and with waiting between. The factors on
the probe's figures are fitted together, on the logarithm of whole step times, around 1 (the probe is the prior). They
are never fitted on single terms: parts that lean on each other would then be bent apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from meshwright.base.errors import MeshwrightError
from meshwright.base.files import write_whole
from meshwright.base.records import Prediction
from meshwright.cluster.load import with_gpus
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import Floats
from meshwright.cost.ledger import LedgerRow, ledger_path, read_ledger
from meshwright.cost.machine_profile import (
    FORMAT,
    NAMES,
    MachineProfile,
    adjusted,
    profile_from_dict,
    scaled_by,
)
from meshwright.cost.predict import PROBED_SPREAD, predict
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan, plan_spec
from meshwright.schedule.actions import Schedule
from meshwright.schedule.text import parse_schedule

SPREADS: Final = np.array([0.25, 0.5, 0.5, 0.7, 0.5])
"""How far each factor may lie from the probe: deviations of its logarithm. Collectives lie farthest: a step's ranks
are never as much in step as a benchmark's."""
NOISE: Final = 0.03
"""Deviation of one run's log time beside its own spread."""
MOST_ROWS: Final = 40
"""Newest rows that a fit uses."""
LEAST_SPREAD: Final = 0.03
"""Deviation of a prediction's log time that a fit on few runs claims at least."""
STEP: Final = 0.02
"""Step of the numeric derivative, in logarithms."""


def predict_plan(plan: Plan, cluster: ClusterSpec) -> Prediction:
    """Return what a plan costs on a cluster that has its number of devices or more.

    Raises:
        MeshwrightError: what ``cost.predict`` raises.
    """
    if cluster.num_gpus != plan.world_size:
        cluster = with_gpus(cluster, plan.world_size)
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    return predict(plan_spec(plan), plan.layout, plan.batch, schedule, cluster, plan.frozen)


def usable(rows: Sequence[LedgerRow], cluster: ClusterSpec) -> list[LedgerRow]:
    """Return the rows that a fit on this probe may use, newest ``MOST_ROWS``.

    On a CPU a rank's rates depend on how many ranks share the cores, so there only runs of as many ranks count.
    """

    def fits_world(row: LedgerRow) -> bool:
        world = row.plan.world_size
        return world == cluster.num_gpus or (not cluster.device.is_cpu and world < cluster.num_gpus)

    def predicted(row: LedgerRow) -> bool:
        try:
            predict_plan(row.plan, cluster)
        except MeshwrightError:
            return False
        return True

    fine = [r for r in rows if r.machine == cluster.machine and fits_world(r) and not r.disturbed]
    return [r for r in fine if predicted(r)][-MOST_ROWS:]


def fit_machine(
    rows: Sequence[LedgerRow], cluster: ClusterSpec, today: str | None = None
) -> MachineProfile | None:
    """Return the joint fit of ``rows`` on a probe's cluster; None where no row can be used.

    Residuals are log(predicted / measured) over each run's own noise, soft beyond it; the prior is Gaussian around
    the probe. ``cluster`` must hold the probe's own figures, not fitted ones.
    """
    used = usable(rows, cluster)
    if not used:
        return None
    logs = np.log([r.step_time_s for r in used])
    noise = np.array([_noise(r) for r in used])
    cases = [_case(r.plan) for r in used]
    theta, jacobian = _solve(cases, logs, noise, cluster)
    factors = cast("list[float]", theta.tolist())
    start = _logs(cases, cluster, np.zeros(len(NAMES))) - logs
    left = _logs(cases, cluster, theta) - logs
    information = jacobian.T @ jacobian + np.diag(1.0 / SPREADS**2)
    covariance: Floats = np.asarray(np.linalg.inv(information), dtype=np.float64)
    leverage: Floats = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)
    alone: Floats = left / np.maximum(1.0 - leverage, 0.05)
    held_out = None if len(used) < 2 else _percent(alone)
    # with few runs the spread is what was assumed, more and more what was found
    trust = len(used) / (len(used) + 4.0)
    variance = trust * float(np.mean(alone**2)) + (1.0 - trust) * PROBED_SPREAD**2
    return MachineProfile(
        factors=dict(zip(NAMES, factors, strict=True)),
        covariance=cast("list[list[float]]", covariance.tolist()),
        runs=len(used),
        left_out=sum(1 for r in rows if r.machine == cluster.machine) - len(used),
        before_pct=_percent(start),
        after_pct=_percent(left),
        held_out_pct=held_out,
        spread=max(LEAST_SPREAD, math.sqrt(variance)),
        date=today or datetime.now(UTC).date().isoformat(),
    )


def _percent(logs: Floats) -> float:
    """Return the mean error in per cent of logarithms of predicted over measured."""
    return float(100.0 * np.mean(np.abs(np.expm1(logs))))


def _noise(row: LedgerRow) -> float:
    """Return the deviation of a run's median log step time, from the middle 80 % of its steps."""
    own = row.spread_s / row.step_time_s / 2.563
    return math.sqrt(NOISE**2 + own**2 / max(1.0, row.steps / 2.0))


@dataclass(frozen=True)
class _Case:
    """A row ready to be predicted many times."""

    plan: Plan
    spec: ModelSpec
    schedule: Schedule

    def seconds(self, cluster: ClusterSpec) -> float:
        """Return its predicted step on a cluster with its number of devices or more."""
        plan = self.plan
        there = cluster if cluster.num_gpus == plan.world_size else with_gpus(cluster, plan.world_size)
        return predict(self.spec, plan.layout, plan.batch, self.schedule, there, plan.frozen).step_time_s


def _case(plan: Plan) -> _Case:
    return _Case(plan, plan_spec(plan), parse_schedule(plan.schedule_text, name=plan.layout.schedule))


def _logs(cases: Sequence[_Case], cluster: ClusterSpec, theta: Floats) -> Floats:
    changed = scaled_by(cluster, theta)
    return np.log([case.seconds(changed) for case in cases])


def _solve(
    cases: Sequence[_Case], logs: Floats, noise: Floats, cluster: ClusterSpec
) -> tuple[Floats, Floats]:
    """Return (theta, whitened Jacobian of the data at it)."""
    from scipy.optimize import least_squares  # pyright: ignore  # not for a plan without runs

    def plain(theta: Floats) -> Floats:
        return (_logs(cases, cluster, theta) - logs) / noise

    def soft(data: Floats) -> Floats:
        return np.sign(data) * np.sqrt(2.0 * (np.sqrt(1.0 + data**2) - 1.0))

    def residuals(theta: Floats) -> Floats:
        return np.concatenate([soft(plain(theta)), theta / SPREADS])

    def slopes(function: Any, theta: Floats) -> Floats:
        base = function(theta)
        columns = [(function(theta + STEP * np.eye(len(NAMES))[i]) - base) / STEP for i in range(len(NAMES))]
        return np.stack(columns, axis=1)

    found = cast(
        Any,
        least_squares(  # pyright: ignore
            residuals,
            np.zeros(len(NAMES)),
            jac=lambda theta: slopes(residuals, theta),  # pyright: ignore
            method="trf",
            max_nfev=15,
            x_scale=SPREADS,
            ftol=1e-4,
        ),
    )
    theta: Floats = np.asarray(found.x, dtype=np.float64)
    return theta, slopes(plain, theta)


def probe_key(cluster: ClusterSpec, rows: Sequence[LedgerRow]) -> str:
    """Return what a stored profile is good for: these figures of a probe and these rows."""
    facts = [
        FORMAT,
        cluster.num_gpus,
        sorted(cluster.measured.items()),
        [[r.plan.hash, r.source, r.step_time_s] for r in rows],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def machine_profile(cluster: ClusterSpec, cache: Path) -> MachineProfile | None:
    """Return the profile of a probe's machine by its ledger below ``cache``; None for no ledger or no usable row.

    A profile that was fitted on these very figures and rows is read, else it is fitted and kept beside the ledger.

    Raises:
        MeshwrightError: E477 for a ledger that cannot be read.
    """
    if not cluster.machine or not cluster.measured:
        return None
    path = ledger_path(cache, cluster.machine)
    rows = read_ledger(path)
    if not rows:
        return None
    file = path.with_name(f"profile-{cluster.num_gpus}-{probe_key(cluster, rows)}.json")
    try:
        return profile_from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not fitted yet, or by another version
    found = fit_machine(rows, cluster)
    if found is not None:
        try:
            for old in path.parent.glob(f"profile-{cluster.num_gpus}-*.json"):
                old.unlink(missing_ok=True)
            write_whole(file, json.dumps(found.as_dict(), indent=1) + "\n")
        except OSError:
            pass  # a cache that cannot be written costs a second at the next call
    return found


def calibrated(cluster: ClusterSpec, cache: Path) -> tuple[ClusterSpec, MachineProfile | None]:
    """Return the cluster with its machine's profile where there is one, and that profile.

    Raises:
        MeshwrightError: E477 for a ledger that cannot be read.
    """
    profile = machine_profile(cluster, cache)
    return (cluster, None) if profile is None else (adjusted(cluster, profile), profile)
