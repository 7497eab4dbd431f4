"""``meshwright train``: from a resolved run file to a run folder with prediction and measurement side by side."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

import torch

import meshwright
from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.records import Measurement, RankRecord, TimeSeconds, errors_pct
from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.machine_fit import calibrated
from meshwright.cost.predict import predict
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import check, check_optimizer
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import precision_table
from meshwright.mesh import contract
from meshwright.mesh.env import cache_folder, check_local_ranks, check_world_size, torchrun_facts
from meshwright.mesh.launch import run_local
from meshwright.model.adapters import adapted, without_adapter
from meshwright.model.counts import flops_per_token
from meshwright.model.read_hf import read_model
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.data_rules import data_problems, last_step
from meshwright.orchestrate.machine import machine_probe
from meshwright.orchestrate.proving import write_json
from meshwright.orchestrate.session import checkpoint_to_resume, note_end
from meshwright.parallel.adapters import missing_peft
from meshwright.parallel.build import build_model, config_problems
from meshwright.parallel.compiled import missing_compiler
from meshwright.program.make import check_frozen, make_plan
from meshwright.program.plan import Plan
from meshwright.program.plan_file import load_plan, plan_to_dict, save_plan
from meshwright.schedule.text import parse_schedule
from meshwright.search.search import SearchResult, search
from meshwright.train.data import check_data, check_samples, prepare_data
from meshwright.train.deterministic import deterministic_settings
from meshwright.train.loop import RankSummary, TrainTask, train_rank
from meshwright.train.weights import load_pretrained

Show = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is checked and planned, before anything is written."""

    run: Any
    spec: ModelSpec
    plan: Plan
    cluster: ClusterSpec | None
    probe: dict[str, Any] | None
    warnings: tuple[Problem, ...]


def prepare(
    run: Any, *, plan_path: str | None, layout: str | None, nproc: int | None, show: Show
) -> Prepared:
    """Return the plan of a run: from a file, from a layout text, or from the planner (``auto``).

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
        refuse(check_world_size(wanted.world_size, ranks))
    elif ranks is None:
        ranks = max(1, os.cpu_count() or 1)
    if facts is None and not torch.cuda.is_available():
        refuse(check_local_ranks(ranks, os.cpu_count() or 1), ExitCode.ENVIRONMENT)
    cluster, probe = _cluster(run, ranks, show)
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
        problems = check(spec, wanted, batch, cluster, for_run=True)
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
    if plan.prediction is None and cluster is not None:
        plan, unpriced = _priced(plan, spec, cluster)
        warnings += unpriced
    refuse(check_world_size(plan.world_size, ranks))
    return Prepared(run=run, spec=spec, plan=plan, cluster=cluster, probe=probe, warnings=warnings)


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
        problems += check_frozen(spec, tuple(run.freeze))
        if layout is not None:
            problems += check(spec, layout, batch, None, for_run=True)
            problems += check_optimizer(layout, run.optimizer.name)
            problems += missing_compiler(device_type()) if layout.compile == "blocks" else []
    if run.cluster is not None:
        held(lambda: read_cluster(run.cluster, None))
    problems += held(lambda: data_problems(run.data, spec, layout)) or []
    problems += _unwritable(Path(run.run.dir))
    refuse(problems)
    assert spec is not None
    return spec


def _unwritable(folder: Path) -> list[Problem]:
    """Return E813 when the run folder, or the nearest folder above it that exists, cannot take files."""
    try:
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not there.is_dir():
            return [problem("E813", where=f"run.dir={folder}", found=f"{there} is a file, not a folder")]
        if not os.access(there, os.W_OK | os.X_OK):
            return [problem("E813", where=f"run.dir={folder}", found=f"no permission to write in {there}")]
    except (OSError, ValueError) as error:
        return [problem("E813", where=f"run.dir={folder}", found=str(error))]
    return []


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"the folder cannot be made: {error.strerror or error}"
        raise MeshwrightError(
            problem("E813", where=f"run.dir={folder}", found=found), ExitCode.ENVIRONMENT
        ) from error


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


def _nothing(_: str) -> None:
    """Show nothing."""


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


def _priced(plan: Plan, spec: ModelSpec, cluster: ClusterSpec) -> tuple[Plan, tuple[Problem, ...]]:
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
    """Return the cluster with what this machine's runs have taught of it, and the probe that it was measured by."""
    if run.cluster is not None:
        return calibrated(read_cluster(run.cluster, ranks), cache_folder())[0], None
    probe = machine_probe(ranks, show)
    return calibrated(cluster_from_probe(probe), cache_folder())[0], probe


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


def _folder_problems(folder: Path, plan: Plan, resume: bool) -> list[Problem]:
    record = folder / "run.json"
    if not record.exists():
        if resume:
            return [problem("E542", where=str(folder), found="there is no run.json")]
        return []
    if not resume:
        try:
            held = json.loads(record.read_text(encoding="utf-8")).get("plan_hash", "?")
        except (OSError, ValueError):
            held = "unreadable"
        same = "this very plan" if held == plan.hash else f"another plan ({held}, not {plan.hash})"
        return [problem("E541", where=str(folder), found=f"it holds a run of {same}")]
    return []


def _offload_problems(run: Any, plan: Plan, folder: Path) -> list[Problem]:
    """Return E278 when the files of offloaded state could not be made, before a run folder is claimed."""
    if not plan.layout.offload.endswith("-nvme"):
        return []
    target = _offload_dir(run, folder)
    nearest = next((p for p in (target, *target.parents) if p.exists()), Path("/"))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    what = "cannot be written" if nearest.is_dir() else "is no folder"
    return [problem("E278", where="run.offload_dir", found=f"{target}: {nearest} {what}")]


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
    facts = torchrun_facts()
    if facts is not None and facts.rank != 0:
        show = _nothing  # every rank of torchrun is here; one of them tells
    ready = prepare(run, plan_path=plan_path, layout=layout, nproc=nproc, show=show)
    plan, spec = ready.plan, ready.spec
    folder = Path(run.run.dir)
    writes = facts is None or facts.rank == 0
    if writes:
        refuse(_folder_problems(folder, plan, resume))
        refuse(_offload_problems(run, plan, folder), ExitCode.ENVIRONMENT)
    stop_at = min(stop_at_step or run.run.steps, run.run.steps)
    resume_from: Path | None = None
    if resume:
        resume_from = checkpoint_to_resume(folder, show)
        refuse(_nothing_left(resume_from, stop_at) if resume_from is not None else [])
    asked = config_problems(plan.model_config)
    refuse(asked)
    for note in (
        *ready.warnings,
        *_data_notes(run, plan),
        *asked,
        *_beyond_horizon(stop_at_step, run.run.steps),
    ):
        show(note.text())
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
        refuse(_nothing_left(resume_from, stop_at) if resume_from is not None else [])
    if dry_run:
        return {"run_dir": str(folder), "dry_run": True, "plan": plan_to_dict(plan)}
    record = {
        "meshwright": meshwright.__version__,
        "plan": plan_to_dict(plan),
        "plan_hash": plan.hash,
        "resolved": run.as_dict(),
        "origins": dict(run.origins),
        "versions": versions(),
        "precision_table": precision_table(plan.layout).rows(),
        "data": {"hash": data.hash, "report": data.report, "tokenizer": str(data.tokenizer_file)},
        "prediction": plan.prediction.as_dict() if plan.prediction else None,
        "measurement": None,
        "errors_pct": None,
        "deterministic": deterministic_settings() if run.run.deterministic else None,
    }
    before = _records(folder) if resume else {}
    if writes:
        _make_folder(folder)
        held.enter_context(_locked(folder))
        write_json(folder / "run.json", record)
        save_plan(plan, str(folder / "plan.json"))
        if ready.probe is not None:
            write_json(folder / "probe.json", ready.probe)
    task = TrainTask(
        run=run,
        plan=plan,
        spec=spec,
        data=data,
        run_dir=folder,
        stop_at=stop_at,
        resume_from=resume_from,
        weights=weights,
        offload_dir=_offload_dir(run, folder),
        manifest={
            "plan": plan_to_dict(plan),
            "versions": versions(),
            "tokenizer": str(data.tokenizer_file),
        },
    )
    try:
        results: list[list[RankSummary]] = run_local(
            train_rank,
            plan.world_size,
            task,
            device=device_type(),
            on_line=show,
            log_dir=folder / "logs",
            preload=("transformers",) if spec.adapter is None else ("transformers", "peft"),
            threads=threads_of_rank(plan.world_size),
            stop_grace_s=run.run.grace_s,
        )
    except MeshwrightError as error:
        if writes and error.exit_code == ExitCode.BAD_INPUT:
            for (
                file,
                content,
            ) in before.items():  # refused before its first step: the folder stays what it was
                file.write_bytes(content)
        raise
    summaries = results[0]
    measurement = measure(plan, spec, summaries, ready.cluster)
    prediction = plan.prediction
    first = summaries[0]
    record |= {
        "measurement": measurement.as_dict() if measurement else None,
        "errors_pct": errors_pct(prediction, measurement) if prediction and measurement else None,
        "placement": first.placement,
        "eval": {"first": first.first_eval_loss, "last": first.eval_loss},
    }
    if writes:
        write_json(folder / "run.json", record)
        if note_end(folder, first, stop_at):
            show(f"stopped after step {first.steps} ({first.stopped}); --resume goes on from there")
    return {
        "run_dir": str(folder),
        "steps": first.steps,
        "stopped": first.stopped or None,
        "final_loss": first.final_loss,
        "eval_loss": first.eval_loss,
        "first_eval_loss": first.first_eval_loss,
        "plan_hash": plan.hash,
        "layout": plan.layout.text(),
        "prediction": record["prediction"],
        "measurement": record["measurement"],
        "errors_pct": record["errors_pct"],
    }


def _offload_dir(run: Any, folder: Path) -> Path:
    """Return the folder of this run's offloaded state: in the run folder, or its own one in ``run.offload_dir``."""
    if run.run.offload_dir is None:
        return folder / "offload"
    own = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
    return Path(run.run.offload_dir) / f"{folder.name}-{own}"


def _locked(folder: Path) -> IO[str]:
    """Return the folder's lock file, held until it is closed or this process ends.

    Raises:
        MeshwrightError: E541 when another process trains in the folder at this moment.
    """
    lock = (folder / ".lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise MeshwrightError(
            problem(
                "E541",
                where=str(folder),
                found="another process trains in it at this moment",
                do="wait for it or stop it, or choose another folder with --set run.dir=...",
            )
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def _records(folder: Path) -> dict[Path, bytes]:
    """Return the files about the run that a resumed run writes anew, as they are."""
    files = [folder / name for name in ("run.json", "plan.json", "probe.json")]
    return {file: file.read_bytes() for file in files if file.is_file()}


def _nothing_left(checkpoint: Path, stop_at: int) -> list[Problem]:
    """Return E559 when the checkpoint is at, or after, the last step of this session."""
    step = int(checkpoint.name.split("-")[1])
    if step < stop_at:
        return []
    return [
        problem(
            "E559",
            where="--resume",
            found=f"{checkpoint.name} is at step {step}, and this session ends after step {stop_at}",
            needs=f"a last step above {step}",
            do=f"--set run.steps=N with N above {step}, and --steps likewise where it is given",
        )
    ]


def _beyond_horizon(steps: int | None, horizon: int) -> list[Problem]:
    """Return W101 for --steps behind run.steps."""
    if steps is None or steps <= horizon:
        return []
    return [
        problem(
            "W101",
            where="--steps",
            found=f"--steps {steps} has no effect: the run ends after run.steps = {horizon}",
            why="run.steps is the horizon of the learning-rate schedule, and no run goes beyond it",
            do=f"--set run.steps={steps}",
        )
    ]


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
