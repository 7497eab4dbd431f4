"""``meshwright train``: from a resolved run file to a run folder with prediction and measurement side by side."""

from __future__ import annotations

import math
import os
import platform
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import meshwright
from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.records import Measurement, RankRecord, TimeSeconds, errors_pct
from meshwright.cluster.spec import ClusterSpec
from meshwright.mesh.env import cache_folder, torchrun_facts, torchrun_job
from meshwright.mesh.imports import MODEL_CODE
from meshwright.mesh.launch import run_local
from meshwright.model.adapters import without_adapter
from meshwright.model.counts import flops_per_token
from meshwright.model.quantised import is_quantised
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.data_rules import data_problems, last_step
from meshwright.orchestrate.elastic import goes_on, restart_notes, smaller_plan, survive, torchrun_restart
from meshwright.orchestrate.preparing import Prepared, Show, device_type, prepare, threads_of_rank
from meshwright.orchestrate.proving import write_json
from meshwright.orchestrate.record import Book, number_formats, recompute_record
from meshwright.orchestrate.run_folder import (
    folder_problems,
    locked,
    make_folder,
    offload_dir,
    offload_problems,
    read_record,
    records,
)
from meshwright.orchestrate.session import (
    beyond_horizon,
    checkpoint_to_resume,
    note_end,
    nothing_left,
    resume_problems,
)
from meshwright.parallel.build import build_model, config_problems
from meshwright.parallel.products import product_library
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.train.data import check_samples, prepare_data
from meshwright.train.deterministic import deterministic_settings
from meshwright.train.loop import RankSummary, TrainTask, train_rank
from meshwright.train.metrics import last_loss
from meshwright.train.weights import load_pretrained

PATIENCE_S = 30.0
"""A run that torchrun started again waits so long until the one before has left the folder."""


def _nothing(_: str) -> None:
    """Show nothing."""


def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    import safetensors
    import transformers

    return {
        "meshwright": meshwright.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "platform": platform.platform(),
    }


def train_command(
    run: Any,
    *,
    plan_path: str | None = None,
    layout: str | None = None,
    nproc: int | None = None,
    stop_at_step: int | None = None,
    resume: bool = False,
    dry_run: bool = False,
    json_output: bool = False,
    show: Show | None = None,
) -> dict[str, Any]:
    """Train as ``run`` says and return the last line of ``--json``.

    Nothing is written before everything is checked. Rank 0 (or the one local parent) writes the run folder.

    Raises:
        MeshwrightError: every Problem of the input, or the first error of a rank.
    """
    with ExitStack() as held:
        return _train(
            run,
            plan_path=plan_path,
            layout=layout,
            nproc=nproc,
            stop_at_step=stop_at_step,
            resume=resume,
            dry_run=dry_run,
            show=show or (lambda line: print(line, flush=True)),
            held=held,
        )


def _train(
    run: Any,
    *,
    plan_path: str | None,
    layout: str | None,
    nproc: int | None,
    stop_at_step: int | None,
    resume: bool,
    dry_run: bool,
    show: Show,
    held: ExitStack,
) -> dict[str, Any]:
    facts, job = torchrun_facts(), torchrun_job()
    if facts is not None and facts.rank != 0:
        show = _nothing  # every rank of torchrun is here; one of them tells
    folder = Path(run.run.dir)
    writes = facts is None or facts.rank == 0
    again = goes_on(folder, job, writes)
    ready = prepare(run, plan_path=plan_path, layout=layout, nproc=nproc, show=show)
    plan, spec, changed = ready.plan, ready.spec, ""
    if plan.world_size != ready.ranks:
        assert ready.cluster is not None
        plan, changed = smaller_plan(run, spec, plan, ready.cluster, ready.ranks, exactly=True)
    if writes:
        refuse(folder_problems(folder, plan, resume or again))
        refuse(offload_problems(run, plan, folder), ExitCode.ENVIRONMENT)
    asked = config_problems(plan.model_config)
    refuse(asked)
    for note in (
        *ready.warnings,
        *_data_notes(run, plan),
        *asked,
        *beyond_horizon(stop_at_step, run.run.steps),
        *restart_notes(run, job),
    ):
        show(note.text())
    task = _task(run, plan, spec, stop_at_step, resume=resume, again=again, show=show)
    task = replace(
        task,
        restarts=job.restarts if job is not None and again else 0,
        started=time.monotonic() if facts is None else None,
    )
    refuse(resume_problems(task))
    if dry_run:
        return {"run_dir": str(folder), "dry_run": True, "plan": plan_to_dict(plan)}
    record = _first_record(task)
    record |= {
        "job": job.job if job is not None else None,
        "restarts": read_record(folder).get("restarts", []) if resume or again else [],
    }
    before = records(folder) if resume else {}
    book = Book(folder, record, show) if writes else None
    if book is not None:
        make_folder(folder)
        held.enter_context(locked(folder, PATIENCE_S if again else 0.0))
        book.begin(plan, ready.probe)
        if again:
            book.told(torchrun_restart(job, task, changed), task)
        elif changed:
            book.plan_changed(changed, task)
    try:
        results, task = _run(task, ready, book, show)
    except MeshwrightError as error:
        if writes and error.exit_code == ExitCode.BAD_INPUT:
            for file, content in before.items():  # refused before its first step: the folder is as it was
                file.write_bytes(content)
        raise
    return _finish(task, results[0], ready.cluster, record, show if writes else None)


def _task(
    run: Any, plan: Plan, spec: ModelSpec, stop_at_step: int | None, *, resume: bool, again: bool, show: Show
) -> TrainTask:
    """Return what the ranks are given, after weights and data were read; nothing is written into the run folder."""
    folder = Path(run.run.dir)
    stop_at = min(stop_at_step or run.run.steps, run.run.steps)
    resume_from = checkpoint_to_resume(folder, show) if resume or again else None
    refuse(nothing_left(resume_from, stop_at) if resume_from is not None and not again else [])
    for line in _announce(plan, spec):
        show(line)
    build_model(plan.model_config, seed=0, device="meta")  # refused here, before anything is written
    cache = cache_folder()
    weights = (
        load_pretrained(run.model.weights, without_adapter(spec), cache, show) if run.model.weights else None
    )
    tokenizer = run.data.tokenizer
    if tokenizer is None and weights is not None:
        tokenizer = str(weights.tokenizer_folder) if weights.tokenizer_folder is not None else None
    data = prepare_data(
        run.data,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        seed=run.run.seed,
        cache_dir=cache,
        show=show,
        jobs=os.cpu_count() or 1,
    )
    refuse(check_samples(data, run.batch.sequences))
    stop_at, data_ends = last_step(data, run.batch.sequences, stop_at)
    if data_ends:
        show(data_ends)
        refuse(nothing_left(resume_from, stop_at) if resume_from is not None and not again else [])
    return TrainTask(
        run=run,
        plan=plan,
        spec=spec,
        data=data,
        run_dir=folder,
        stop_at=stop_at,
        resume_from=resume_from,
        weights=weights,
        offload_dir=offload_dir(run, folder),
        manifest={
            "plan": plan_to_dict(plan),
            "versions": versions(),
            "tokenizer": str(data.tokenizer_file),
        },
    )


def _first_record(task: TrainTask) -> dict[str, Any]:
    """Return what ``run.json`` says before the first step."""
    run, plan, data = task.run, task.plan, task.data
    return {
        "meshwright": meshwright.__version__,
        "plan": plan_to_dict(plan),
        "plan_hash": plan.hash,
        "resolved": run.as_dict(),
        "origins": dict(run.origins),
        "versions": versions(),
        **number_formats(plan, task),
        "recompute": recompute_record(plan),
        "data": {"hash": data.hash, "report": data.report, "tokenizer": str(data.tokenizer_file)},
        "prediction": plan.prediction.as_dict() if plan.prediction else None,
        "measurement": None,
        "errors_pct": None,
        "matmul": product_library(run.run.matmul, device_type()),
        "deterministic": deterministic_settings() if run.run.deterministic else None,
    }


def _finish(
    task: TrainTask,
    summaries: list[RankSummary],
    cluster: ClusterSpec | None,
    record: dict[str, Any],
    show: Show | None,
) -> dict[str, Any]:
    """Return the last line of ``--json``; with ``show`` (on rank 0) also complete ``run.json``."""
    plan, folder, first = task.plan, task.run_dir, summaries[0]
    measurement = measure(plan, task.spec, summaries, cluster)
    final_loss = first.final_loss if math.isfinite(first.final_loss) else last_loss(folder, first.steps)
    record |= {
        "measurement": measurement.as_dict() if measurement else None,
        "errors_pct": errors_pct(plan.prediction, measurement) if plan.prediction and measurement else None,
        "placement": first.placement,
        "eval": {"first": first.first_eval_loss, "last": first.eval_loss},
    }
    if show is not None:
        write_json(folder / "run.json", record)
        if note_end(folder, first, task.stop_at):
            show(f"stopped after step {first.steps} ({first.stopped}); --resume goes on from there")
    return {
        "run_dir": str(folder),
        "steps": first.steps,
        "stopped": first.stopped or None,
        "final_loss": final_loss,
        "eval_loss": first.eval_loss,
        "first_eval_loss": first.first_eval_loss,
        "plan_hash": plan.hash,
        "layout": plan.layout.text(),
        "restarts": task.restarts,
        "prediction": record["prediction"],
        "measurement": record["measurement"],
        "errors_pct": record["errors_pct"],
    }


def _run(
    task: TrainTask, ready: Prepared, book: Book | None, show: Show
) -> tuple[list[list[RankSummary]], TrainTask]:
    """Start the ranks and return what they return; an elastic run of our own launcher starts them again."""

    def attempt(task: TrainTask) -> list[list[RankSummary]]:
        return run_local(
            train_rank,
            task.plan.world_size,
            task,
            device=device_type(),
            on_line=show,
            log_dir=task.run_dir / "logs",
            preload=MODEL_CODE if task.spec.adapter is None else (*MODEL_CODE, "peft"),
            threads=threads_of_rank(task.plan.world_size),
            stop_grace_s=task.run.run.grace_s,
            silence_s=task.run.guards.silence_s,
        )

    def smaller(plan: Plan, ranks: int) -> tuple[Plan, str]:
        assert ready.cluster is not None
        return smaller_plan(task.run, task.spec, plan, ready.cluster, ranks, exactly=False)

    if not task.run.run.elastic or torchrun_facts() is not None or book is None:
        return attempt(task), task
    return survive(attempt, task, smaller=smaller, told=book.told, show=show)


def _data_notes(run: Any, plan: Plan) -> list[Problem]:
    """Return what the chosen layout makes of packed documents (the planner may have chosen it after the first look)."""
    found = data_problems(run.data, None, plan.layout)
    refuse(found)
    if run.run.offload_dir is not None and not plan.layout.offload.endswith("-nvme"):
        why = f"offload={plan.layout.offload} makes no files"
        what = f"run.offload_dir = {run.run.offload_dir} has no effect"
        found.append(problem("W101", where="run.offload_dir", found=what, why=why))
    return found


def _announce(plan: Plan, spec: ModelSpec) -> list[str]:
    batch = plan.batch
    trained = ""
    if spec.adapter is not None:
        count = sum(t.numel for t in spec.tensors() if t.role == "adapter")
        trained = f"; {count:,} of them train: LoRA of rank {spec.adapter.rank}"
        trained += f" beside matrices in 4 bits ({spec.adapter.levels})" if is_quantised(spec) else ""
    return [
        f"{spec.name}: {spec.num_parameters:,} parameters on {plan.world_size} ranks, {plan.layout.text()}, "
        f"plan {plan.hash}{trained}",
        f"batch {batch.global_batch} sequences = dp {batch.dp} x micro-batch {batch.micro_batch} x accumulation "
        f"{batch.accumulation}; {batch.tokens:,} tokens per step",
    ]


def measure(
    plan: Plan, spec: ModelSpec, summaries: list[RankSummary], cluster: ClusterSpec | None
) -> Measurement | None:
    """Return the run's Measurement, or None when no step was timed (a run of one or two steps).

    Its MFU is against the peak of the cluster's device in the layout's precision, where that is known.
    """
    times = summaries[0].step_times_s
    if not times:
        return None
    step_time = median(times)
    phases = summaries[0].phases_s
    known = {
        "compute": phases.get("forward_backward", 0.0),
        "data": phases.get("reduce", 0.0) + phases.get("count", 0.0),
        "optimizer": phases.get("optimizer", 0.0),
    }
    tokens = plan.batch.tokens
    flops = flops_per_token(spec, plan.batch.seq_len).causal * tokens
    ranks = tuple(RankRecord(rank=s.rank, stage=s.stage, memory=s.memory) for s in summaries)
    worst = max(ranks, key=lambda r: r.peak_memory_bytes)
    achieved = flops / step_time / plan.world_size
    peak = cluster.device.peak_flops.get(plan.layout.precision) if cluster is not None else None
    spread = quantiles(times, n=10)[-1] - quantiles(times, n=10)[0] if len(times) > 1 else 0.0
    return Measurement(
        step_time_s=step_time,
        tokens_per_s_per_gpu=tokens / step_time / plan.world_size,
        model_tflops_per_gpu=achieved / 1e12,
        mfu_pct=100.0 * achieved / peak.value if peak is not None else None,
        flops_convention="causal",
        bubble_share_of_total=0.0 if plan.layout.pp == 1 else None,
        memory=worst.memory,
        time=TimeSeconds(**known, other=max(0.0, step_time - sum(known.values()))),
        ranks=ranks,
        steps=len(times),
        step_time_spread_s=spread,
    )
