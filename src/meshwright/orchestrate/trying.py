"""``plan --try``: the best plans run for a few steps here, compared term by term, fed back, ranked anew."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.records import Measurement, Prediction, errors_pct
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.ledger import LedgerRow, add_rows, ledger_path
from meshwright.cost.machine_fit import calibrated, predict_plan
from meshwright.cost.machine_profile import MachineProfile
from meshwright.layout.layout import Layout
from meshwright.mesh.env import check_local_ranks, torchrun_facts
from meshwright.mesh.imports import MODEL_CODE
from meshwright.mesh.launch import run_local
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.machine import machine_fingerprint
from meshwright.orchestrate.told_apart import measured, stolen_share, terms
from meshwright.orchestrate.training import threads_of_rank
from meshwright.parallel.quantised import missing_bitsandbytes
from meshwright.probe.steps import WARM_STEPS, RankSteps, StepsTask, steps_rank
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan, plan_spec
from meshwright.search.tree import Step, measured_class

Show = Callable[[str], None]
TARGET_S: Final = 4.0
"""Seconds that the timed steps of one try may take."""
FEWEST: Final = 5
MOST: Final = 20
"""Timed steps of a try."""
START_S: Final = 120.0
SLACK: Final = 20.0
"""A try is given up after this many seconds, and after so many times its predicted steps."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One plan that was run, or whose run failed.

    Attributes:
        number: its place in the first ranking, from 1.
        plan: with the prediction that it was ranked by.
        measurement: None where it failed, for the reasons in ``problems``.
        processor_s: processor seconds of a step over all ranks.
        stolen_share: share of a step that ranks with a core each waited for one; None where that is not known.
        after: what is predicted of it with what was learnt.
    """

    number: int
    plan: Plan
    measurement: Measurement | None = None
    processor_s: float | None = None
    stolen_share: float | None = None
    problems: tuple[Problem, ...] = ()
    after: Prediction | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        before, measured = self.plan.prediction, self.measurement
        both = before is not None and measured is not None
        return {
            "number": self.number,
            "layout_text": self.plan.layout.text(),
            "world_size": self.plan.world_size,
            "plan_hash": self.plan.hash,
            "predicted": None if before is None else before.as_dict(),
            "measured": None if measured is None else measured.as_dict() | {"processor_s": self.processor_s},
            "errors_pct": errors_pct(before, measured) if both and before and measured else None,
            "terms": terms(before, measured) if before and measured else None,
            "predicted_after": None if self.after is None else self.after.as_dict(),
            "stolen_share": self.stolen_share,
            "disturbed": measured is not None and _row_of(self, "", "").disturbed,
            "problems": [p.as_dict() for p in self.problems],
        }


def check_here(cluster: ClusterSpec, nproc: int) -> None:
    """Refuse a cluster that is not a probe of this machine, or more ranks than can run here.

    Raises:
        MeshwrightError: E473, E474.
    """
    here = machine_fingerprint()
    if cluster.machine != here:
        found = f"{cluster.name} is of machine {cluster.machine}, this is {here}"
        if not cluster.machine:
            found = f"{cluster.name} is no probe of a machine ({cluster.source})"
        raise MeshwrightError(problem("E473", where="--try", found=found))
    if torchrun_facts() is not None:
        many = [
            f"{nproc} ranks as a rank of torchrun: plans are tried on ranks that the command starts itself"
        ]
    elif torch.cuda.is_available():
        devices = torch.cuda.device_count()
        many = [] if nproc <= devices else [f"{nproc} ranks on {devices} devices"]
    else:
        many = [p.found for p in check_local_ranks(nproc, os.cpu_count() or 1)]
    refuse([problem("E474", where="--try", found=text) for text in many], ExitCode.BAD_INPUT)


def run_steps(plan: Plan, steps: int, show: Show | None = None) -> list[RankSteps]:
    """Return what each rank measured of a few steps of ``plan`` on local ranks.

    Raises:
        MeshwrightError: what building or running it raises, E51x for lost ranks, E272 without bitsandbytes.
    """
    predicted = plan.prediction.step_time_s if plan.prediction is not None else 1.0
    spec = plan_spec(plan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refuse(missing_bitsandbytes(spec, device))
    with tempfile.TemporaryDirectory(prefix="meshwright-try-") as folder:
        task = StepsTask(plan=plan, spec=spec, steps=steps, offload_dir=Path(folder))
        results = run_local(
            steps_rank,
            plan.world_size,
            task,
            device=device,
            on_line=show,
            preload=MODEL_CODE if spec.adapter is None else (*MODEL_CODE, "peft"),
            threads=threads_of_rank(plan.world_size),
            timeout_s=START_S + SLACK * predicted * (steps + 4),
        )
    return results[0]


def class_by_steps(
    spec: ModelSpec, cluster: ClusterSpec, seq_len: int, precision: str
) -> tuple[Step, str] | tuple[Problem, ...]:
    """Return the decision tree's memory class from three real steps of the whole model with one sequence.

    Where the model does not run on one device the Problems say why.
    """
    try:
        plan = make_plan(spec, Layout(precision=precision), 1, seq_len, spec.source or spec.name)
        ranks = run_steps(plan, 0)
    except MeshwrightError as error:
        return error.problems
    return measured_class(ranks[0].memory, cluster.device.memory.value, WARM_STEPS + 1)


def timed_steps(prediction: Prediction | None) -> int:
    """Return how many steps are timed: as many as are predicted to take ``TARGET_S``, within limits."""
    if prediction is None:
        return FEWEST
    return max(FEWEST, min(MOST, round(TARGET_S / prediction.step_time_s)))


def try_plans(plans: Sequence[Plan], cluster: ClusterSpec, show: Show) -> list[Tried]:
    """Run each plan for a few steps; one that fails is a row with its error, and the others go on."""
    out: list[Tried] = []
    for number, plan in enumerate(plans, start=1):
        text = plan.layout.text()
        steps = timed_steps(plan.prediction)
        show(f"[{number}/{len(plans)}] {text}: {steps} timed steps on {plan.world_size} ranks")
        try:
            ranks = run_steps(plan, steps)
        except MeshwrightError as error:
            show(f"    failed: {error.problems[0].code} {error.problems[0].found}")
            out.append(Tried(number=number, plan=plan, problems=error.problems))
            continue
        tried = Tried(
            number=number,
            plan=plan,
            measurement=measured(plan, ranks, cluster),
            processor_s=sum(median(r.processor_s) for r in ranks),
            stolen_share=stolen_share(ranks, cluster),
        )
        show("    " + one_line(tried))
        out.append(tried)
    return out


def one_line(tried: Tried) -> str:
    """Return a try's step time and peak beside their predictions."""
    before, now = tried.plan.prediction, tried.measurement
    assert now is not None
    told = "" if before is None else f" (predicted {format_seconds(before.step_time_s)})"
    peak = "" if before is None else f" (predicted {format_bytes(before.peak_memory_bytes)})"
    return (
        f"step {format_seconds(now.step_time_s)}{told}, middle 80 % of steps within "
        f"{format_seconds(now.step_time_spread_s)}; peak {format_bytes(now.peak_memory_bytes)}{peak}"
    )


def _row_of(tried: Tried, machine: str, when: str) -> LedgerRow:
    now, before = tried.measurement, tried.plan.prediction
    assert now is not None
    return LedgerRow(
        machine=machine,
        when=when,
        source="try",
        plan=replace(tried.plan, prediction=None, why=(), binds=""),
        step_time_s=now.step_time_s,
        spread_s=now.step_time_spread_s,
        steps=now.steps,
        peak_memory_bytes=now.peak_memory_bytes,
        predicted_s=None if before is None else before.step_time_s,
        predicted_bytes=None if before is None else before.peak_memory_bytes,
        processor_s=tried.processor_s,
        time_s=now.time.as_dict(),
        memory_bytes=now.memory.as_dict(),
        stolen_share=tried.stolen_share,
    )


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What the tries taught: the refitted cluster, its profile (None where no row could be used), and the tries."""

    cluster: ClusterSpec
    profile: MachineProfile | None
    tried: tuple[Tried, ...]
    ledger: Path


def learn(tried: Sequence[Tried], probed: ClusterSpec, cache: Path) -> Learnt:
    """Add the tries to the machine's ledger, refit, and predict each of them again.

    ``probed`` has the probe's own figures.

    Raises:
        MeshwrightError: E477 the ledger cannot be read, E478 no plan ran, E813 it cannot be written.
    """
    ran = [t for t in tried if t.measurement is not None]
    if not ran:
        found = "; ".join(f"{t.plan.layout.text()}: {t.problems[0].code}" for t in tried)
        raise MeshwrightError(problem("E478", where="--try", found=found), ExitCode.ENVIRONMENT)
    path = ledger_path(cache, probed.machine)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    add_rows(path, [_row_of(t, probed.machine, when) for t in ran])
    cluster, profile = calibrated(probed, cache)
    after = [replace(t, after=predict_plan(t.plan, cluster)) if t.measurement else t for t in tried]
    return Learnt(cluster=cluster, profile=profile, tried=tuple(after), ledger=path)


def ranked(
    again: Sequence[Plan], tried: Sequence[Tried], objective: str
) -> list[tuple[Plan, Measurement | None]]:
    """Return the plans of the new search and those that ran, best first; what was measured counts before a prediction.

    ``objective`` is that of the search: memory ranks by peak, everything else by step time.
    """
    known: dict[Layout, Measurement] = {t.plan.layout: t.measurement for t in tried if t.measurement}
    plans = {p.layout: p for p in again}
    for t in tried:
        if t.measurement and t.plan.layout not in plans:
            plans[t.plan.layout] = replace(t.plan, prediction=t.after)
    failed = {t.plan.layout for t in tried if not t.measurement}

    def key(plan: Plan) -> float:
        record = known.get(plan.layout) or plan.prediction
        assert record is not None
        return float(record.peak_memory_bytes) if objective == "memory" else record.step_time_s

    listed = [p for layout, p in plans.items() if layout not in failed]
    return [(p, known.get(p.layout)) for p in sorted(listed, key=key)]
