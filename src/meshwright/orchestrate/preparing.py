"""From a resolved run file to a plan that is checked: nothing is written, and no rank is started, before that."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.machine_fit import calibrated
from meshwright.cost.predict import predict
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import check, check_optimizer
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.mesh import contract
from meshwright.mesh.env import cache_folder, check_local_ranks, check_world_size, torchrun_facts
from meshwright.model.adapters import adapted
from meshwright.model.read_hf import read_model
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.data_rules import data_problems
from meshwright.orchestrate.machine import machine_probe
from meshwright.orchestrate.run_folder import unwritable
from meshwright.parallel.adapters import missing_peft
from meshwright.parallel.compiled import missing_compiler
from meshwright.parallel.quantised import missing_bitsandbytes
from meshwright.program.make import check_frozen, make_plan
from meshwright.program.plan import Plan
from meshwright.program.plan_file import load_plan
from meshwright.schedule.text import parse_schedule
from meshwright.search.search import SearchResult, search
from meshwright.train.data import check_data

Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is checked and planned, before anything is written."""

    run: Any
    spec: ModelSpec
    plan: Plan
    cluster: ClusterSpec | None
    probe: dict[str, Any] | None
    ranks: int
    warnings: tuple[Problem, ...]


def prepare(
    run: Any, *, plan_path: str | None, layout: str | None, nproc: int | None, show: Show
) -> Prepared:
    """Return the plan of a run: from a file, from a layout text, or from the planner (``auto``).

    Under torchrun an elastic run may find fewer (or more) ranks than its layout has: then the plan that is returned is
    that of the layout, without a prediction, and ``Prepared.ranks`` says how many ranks there are.

    Raises:
        MeshwrightError: everything that is illegal, not built or does not match, at once.
    """
    refuse(contract.missing(pipeline=False), ExitCode.ENVIRONMENT)
    text = layout if layout is not None else run.layout_text
    spec = _readable(run, plan_path, text)
    facts = torchrun_facts()
    ranks = facts.world_size if facts is not None else nproc
    if plan_path is not None:
        plan = load_plan(plan_path)
        wanted = plan.layout
    elif text == "auto":
        wanted = None
        plan = None
    else:
        wanted = parse_layout(text)
        plan = None
    if wanted is not None:
        ranks = ranks if ranks is not None else wanted.world_size
        refuse([] if run.run.elastic and facts is not None else check_world_size(wanted.world_size, ranks))
    elif ranks is None:
        ranks = max(1, os.cpu_count() or 1)
    if facts is None and not torch.cuda.is_available():
        refuse(check_local_ranks(ranks, os.cpu_count() or 1), ExitCode.ENVIRONMENT)
    cluster, probe = _cluster(run, ranks, show)
    as_planned = wanted is None or wanted.world_size == ranks
    warnings: tuple[Problem, ...] = ()
    if wanted is None:
        assert cluster is not None
        found = search(
            spec,
            cluster,
            run.data.seq_len,
            run.batch.sequences,
            fix=_fixed(check_data(run.data) == "pack"),
            top=1,
            model_path=run.model.config,
        )
        if not found.plans:
            raise MeshwrightError(nothing_fits(found, cluster), ExitCode.NO)
        wanted = found.plans[0].layout
        show(f"planned {wanted.text()} out of {found.searched} layouts in {found.seconds:.2f} s")
        plan = make_plan(
            spec,
            wanted,
            run.batch.sequences,
            run.data.seq_len,
            run.model.config,
            frozen=tuple(run.freeze),
            cluster_name=cluster.name,
        )
        plan = replace(plan, why=found.plans[0].why, binds=found.plans[0].binds)
    elif plan is None:
        batch = derive_batch(wanted, run.batch.sequences, run.data.seq_len)
        problems = check(spec, wanted, batch, cluster if as_planned else None, for_run=True)
        refuse(problems)
        warnings = tuple(problems)
        plan = make_plan(
            spec,
            wanted,
            run.batch.sequences,
            run.data.seq_len,
            run.model.config,
            frozen=tuple(run.freeze),
            cluster_name=cluster.name if cluster is not None else "",
        )
    assert plan is not None
    refuse(contract.missing(pipeline=plan.layout.pp > 1), ExitCode.ENVIRONMENT)
    if plan.prediction is None and cluster is not None and as_planned:
        plan, unpriced = priced(plan, spec, cluster)
        warnings += unpriced
    return Prepared(
        run=run, spec=spec, plan=plan, cluster=cluster, probe=probe, ranks=ranks, warnings=warnings
    )


def _readable(run: Any, plan_path: str | None, text: str) -> ModelSpec:
    """Return the model, after everything that can be refused without measuring or starting ranks was looked at.

    Raises:
        MeshwrightError: what is wrong with model, freeze patterns, layout or plan, cluster, data and run folder,
            all at once.
    """
    problems: list[Problem] = []

    def held(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except MeshwrightError as error:
            problems.extend(error.problems)
            return None

    spec: ModelSpec | None = held(lambda: adapted(read_model(run.model.config), run.adapter.spec()))
    layout: Layout | None = None
    batch: Batch | None = None
    if plan_path is not None:
        plan: Plan | None = held(lambda: load_plan(plan_path))
        if plan is not None:
            layout, batch = plan.layout, plan.batch
            if spec is not None:
                problems += _differences(plan, spec, run)
                spec_differs = dict(spec.config) != plan.model_config
                layout = None if spec_differs else layout  # rules of another model say nothing more
    elif text != "auto":
        layout = held(lambda: parse_layout(text))
        if layout is not None:
            batch = held(lambda: derive_batch(layout, run.batch.sequences, run.data.seq_len))
    if spec is not None:
        problems += missing_peft() if spec.adapter is not None else []
        problems += missing_bitsandbytes(spec, device_type())
        problems += check_frozen(spec, tuple(run.freeze))
        if layout is not None:
            problems += check(spec, layout, batch, None, for_run=True)
            problems += check_optimizer(layout, run.optimizer.name)
            problems += missing_compiler(device_type()) if layout.compile == "blocks" else []
    if run.cluster is not None:
        held(lambda: read_cluster(run.cluster, None))
    problems += held(lambda: data_problems(run.data, spec, layout)) or []
    problems += unwritable(Path(run.run.dir))
    refuse(problems)
    assert spec is not None
    return spec


def nothing_fits(found: SearchResult, cluster: ClusterSpec) -> Problem:
    """Return E555 with the nearest miss and the cheapest change that would make it fit."""
    miss = found.misses[0] if found.misses else None
    near = f"; nearest: {miss.layout.text()}" if miss is not None else ""
    return problem(
        "E555",
        where="layout",
        found=f"none of {found.legal} legal layouts fits on {cluster.num_gpus} x {cluster.device.name}{near}",
        do=miss.why[0] if miss is not None and miss.why else "",
    )


def device_type() -> str:
    """Return where ranks run: "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def threads_of_rank(num_ranks: int) -> int:
    """Return torch's threads of a local rank: one on a CPU, whose cores are shared; its part of them beside a GPU."""
    return 1 if device_type() == "cpu" else max(1, (os.cpu_count() or 1) // num_ranks)


def _fixed(packed: bool) -> str:
    """Return what the planner must keep: a CPU trains in float32, packed documents without a context axis."""
    kept = [] if torch.cuda.is_available() else ["precision=fp32"]
    return ",".join([*kept, "cp=1"] if packed else kept)


_NO_PRICE = frozenset({"E402", "E405", "E406", "E407"})
"""What a prediction may lack, and a run on these very ranks does not need: a node size, a rate, a network."""


def priced(plan: Plan, spec: ModelSpec, cluster: ClusterSpec) -> tuple[Plan, tuple[Problem, ...]]:
    """Return the plan with its prediction; without one, and W542, where the cluster cannot give one."""
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    try:
        prediction = predict(spec, plan.layout, plan.batch, schedule, cluster, frozen=plan.frozen)
    except MeshwrightError as error:
        if any(p.code not in _NO_PRICE for p in error.problems):
            raise
        return plan, tuple(
            problem("W542", where=p.where, found=f"{p.found}, so nothing is predicted", do=p.do)
            for p in error.problems
        )
    return replace(plan, prediction=prediction), ()


def _cluster(run: Any, ranks: int, show: Show) -> tuple[ClusterSpec | None, dict[str, Any] | None]:
    if run.cluster is not None:
        return calibrated(read_cluster(run.cluster, ranks), cache_folder())[0], None
    kept = _kept_probe(run) if run.run.elastic and torchrun_facts() is not None else None
    probe = kept if kept is not None else machine_probe(ranks, show)
    return calibrated(cluster_from_probe(probe), cache_folder())[0], probe


def _kept_probe(run: Any) -> dict[str, Any] | None:
    """Return what this run measured when it began: after a fault nothing is measured again."""
    try:
        return json.loads((Path(run.run.dir) / "probe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _differences(plan: Plan, spec: ModelSpec, run: Any) -> list[Problem]:
    """Return what in a plan file contradicts the run file."""
    pairs = [
        ("model", plan.model_config, dict(spec.config)),
        ("data.seq_len", plan.batch.seq_len, run.data.seq_len),
        ("batch.sequences", plan.batch.global_batch, run.batch.sequences),
        ("freeze", tuple(plan.frozen), tuple(run.freeze)),
        ("adapter", plan.adapter, spec.adapter),
    ]
    return [
        problem(
            "E552",
            where=name,
            found="the plan was made for another model"
            if name == "model"
            else f"the plan has {planned!r}, the run file {written!r}",
        )
        for name, planned, written in pairs
        if planned != written
    ]
