"""``meshwright prove``: a layout against one device, from options to verdict."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.base.files import write_whole
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check, check_optimizer
from meshwright.layout.check_offload import precision_built
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.mesh import contract
from meshwright.mesh.env import RankFacts, check_local_ranks, torchrun_facts
from meshwright.mesh.imports import MODEL_CODE
from meshwright.mesh.launch import run_local
from meshwright.model.adapters import adapted, parse_adapter
from meshwright.model.randomness import draws_alike, layout_dependent
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.orchestrate.data_rules import packing_problems
from meshwright.parallel.adapters import missing_peft
from meshwright.parallel.quantised import missing_bitsandbytes
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.prove.ladder import climb
from meshwright.prove.parity import compare_references
from meshwright.prove.reference import Recipe, Reference, TokenBatch, run_reference
from meshwright.prove.simulate import simulate_tensor_axis
from meshwright.prove.verdict import simulated_verdict, tolerances, verdict
from meshwright.prove.worker import Fault, ProofTask, RankProof, prove_rank
from meshwright.train.data import synthetic_batch, synthetic_documents
from meshwright.train.data.packing import positions_of
from meshwright.train.optim import Rate

Show = Callable[[str], None]
Execute = Callable[[Callable[[RankFacts, Any], Any], int, Any], list[Any]]
"""Runs a function on a number of ranks with a payload and returns the results by rank."""
DEFAULT_SEQ_LEN = 32
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class ProofOptimizer:
    """Optimizer settings of a proof without a run file."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What the forked processes of a proof share."""

    recipe: Recipe | None
    task: ProofTask | None
    spec: ModelSpec
    batches: Sequence[TokenBatch]
    folder: str


def _reference_rank(facts: RankFacts, work: _Work) -> Reference:
    facts.at(step=0, action="one-device reference")
    assert work.recipe is not None
    return run_reference(work.recipe, work.spec, work.batches, work.folder)


def _proof_rank(facts: RankFacts, work: _Work) -> RankProof:
    assert work.task is not None
    return prove_rank(facts.rank, work.task, facts.at, facts.device.partition(":")[0])


def _simulated(facts: RankFacts, work: _Work) -> dict[str, Any]:
    facts.at(step=1, action="shards of the tensor axis in one process")
    task = work.task
    assert task is not None
    return simulate_tensor_axis(
        task.plan,
        task.spec,
        task.reference,
        work.batches[0],
        task.seed,
        fault=task.fault,
        matmul=task.matmul,
    )


def _on_local_ranks(worker: Callable[[RankFacts, Any], Any], nproc: int, work: Any) -> list[Any]:
    return run_local(worker, nproc, work, timeout_s=TIMEOUT_S, preload=MODEL_CODE)


def _on_local_gpus(worker: Callable[[RankFacts, Any], Any], nproc: int, work: Any) -> list[Any]:
    return run_local(worker, nproc, work, timeout_s=TIMEOUT_S, device="cuda")


def proof_device(asked: str, num_ranks: int) -> str:
    """Return where the ranks of a proof run: "cuda" where it is asked for, or each rank can have a GPU; else "cpu".

    Under torchrun the ranks of this node are counted. Too few GPUs for "cuda" are refused when the ranks start (E502).
    """
    if asked != "auto":
        return asked
    facts = torchrun_facts()
    here = num_ranks if facts is None else facts.local_world_size
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= here else "cpu"


def proof_plan(
    spec: ModelSpec,
    layout: Layout,
    *,
    model_path: str,
    seq_len: int,
    global_batch: int | None,
    freeze: tuple[str, ...],
) -> Plan:
    """Return the plan that a proof runs; the default batch is 2 x dp x pp x micro_batch sequences.

    Raises:
        MeshwrightError: everything that is illegal or not built, at once.
    """
    size = global_batch if global_batch is not None else 2 * layout.dp * layout.pp * layout.micro_batch
    batch = derive_batch(layout, size, seq_len)
    refuse(check(spec, layout, batch, for_run=True))
    return make_plan(spec, layout, size, seq_len, model_path, frozen=freeze)


def run_proof(
    plan: Plan,
    spec: ModelSpec,
    *,
    steps: int,
    seed: int,
    valid: str,
    optimizer: Any,
    max_norm: float | None,
    show: Show,
    packed: bool = False,
    fault: Fault | None = None,
    batches: Sequence[TokenBatch] | None = None,
    execute: Execute | None = None,
    simulated: bool = False,
    device: str = "cpu",
    matmul: str = "machine",
) -> dict[str, Any]:
    """Run the reference and then the plan on local ranks, and return the verdict.

    ``packed``: rows of several documents that do not see each other.
    ``simulated``: the plan has a tensor axis alone, whose shards all run in one process, for the first step.
    ``device``: of the ranks, and of the one device whose own error in a low precision bounds theirs. The float64
    reference is always computed on the CPU. ``matmul``: who multiplies float32 matrices on a CPU, as ``run.matmul``.
    ``execute`` runs the ranks in another way than as new local processes.

    Raises:
        MeshwrightError: when a rank fails.
    """
    rate = Rate(name="constant", peak=optimizer.lr, warmup_steps=0, total_steps=steps)
    batch = plan.batch
    data = list(batches) if batches is not None else synthetic_batches(plan, spec, steps, seed, valid, packed)
    folder = tempfile.mkdtemp(prefix="meshwright-prove-")
    try:
        recipe = Recipe(
            config=plan.model_config,
            seed=seed,
            precision="fp64",
            frozen=plan.frozen,
            optimizer=optimizer,
            rates=tuple(rate.rate(k + 1) for k in range(steps)),
            max_norm=max_norm,
            adapter=plan.adapter,
            rows_at_once=batch.micro_batch,
            matmul=matmul,
        )

        def reference(name: str, recipe: Recipe) -> Reference:
            work = _Work(recipe=recipe, task=None, spec=spec, batches=data, folder=str(Path(folder) / name))
            return run_ranks(_reference_rank, 1, work, recipe.device)[0]

        def run_ranks(worker: Callable[[RankFacts, Any], Any], nproc: int, work: _Work, on: str) -> list[Any]:
            local = _on_local_ranks if on == "cpu" else _on_local_gpus
            return (execute or local)(worker, nproc, work)

        show(f"one device, float64: {steps} steps of {batch.global_batch} x {batch.seq_len} tokens")
        truth = reference("fp64", recipe)
        own_error: dict[str, float] | None = None
        precision = plan.layout.precision
        if precision != "fp64":
            own_error = {}
            for reverse in (False, True):
                show(f"one device, {precision}, rows {'reversed' if reverse else 'in order'}: its own error")
                changed = replace(recipe, precision=precision, reverse_rows=reverse, device=device)
                own = reference(f"own-{reverse}", changed)
                for key, value in compare_references(own, truth, steps).items():
                    own_error[key] = max(own_error.get(key, 0.0), value)
        if not simulated:
            what = f"{plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'}"
            show(f"{what}{'' if device == 'cpu' else ' on GPUs'}: {plan.layout.text()}")
        task = ProofTask(
            plan=plan,
            spec=spec,
            reference=truth,
            batches=data,
            optimizer=optimizer,
            rate=rate,
            max_norm=max_norm,
            seed=seed,
            fault=fault,
            matmul=matmul,
        )
        work = _Work(recipe=None, task=task, spec=spec, batches=data, folder=folder)
        bounds = tolerances(precision, own_error, max(truth.losses))
        if simulated:
            return simulated_verdict(plan, run_ranks(_simulated, 1, work, "cpu")[0], bounds)
        proofs: list[RankProof] = run_ranks(_proof_rank, plan.world_size, work, device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tied = {t.name: t.tied_to for t in spec.tensors() if t.tied_to is not None}
    result = verdict(plan, truth, proofs, bounds, tied) | {"device": device}
    notes = [f"{what} rests during a proof" for what in layout_dependent(spec)]
    if draws_alike(spec):
        notes = [f"dropout {spec.dropout:g} is on: the same masks in every layout"]
    if any(b.positions_GT is not None for b in data):
        notes.append("rows are packed: documents do not see each other")
    if notes:
        result["notes"] = notes
    return result


def synthetic_batches(
    plan: Plan, spec: ModelSpec, steps: int, seed: int, valid: str, packed: bool
) -> list[TokenBatch]:
    """Return a proof's global batches, [G, T] each; ``packed``: with the positions of several documents in a row."""
    batch = plan.batch
    out: list[TokenBatch] = []
    for k in range(steps):
        ids, labels = synthetic_batch(
            k,
            spec.vocab_size,
            batch.global_batch,
            batch.seq_len,
            seed,
            "all" if valid == "all" else "unequal",
            micro_batch=batch.micro_batch,
            dp=batch.dp,
        )
        positions = None
        if packed:
            documents, labels = synthetic_documents(k, labels, seed)
            positions = torch.from_numpy(positions_of(documents))
        out.append(TokenBatch(torch.from_numpy(ids), torch.from_numpy(labels), positions))
    return out


def prove_command(
    run: Any | None,
    *,
    model: str | None,
    layout: str,
    steps: int = 3,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    freeze: Sequence[str] = (),
    adapter: str | None = None,
    tie: bool = False,
    valid: str = "unequal",
    packed: bool = False,
    ladder: bool = False,
    resume: bool = False,
    resume_layout: str | None = None,
    device: str = "auto",
    json_output: bool = False,
    out: str | None = None,
    show: Show | None = None,
) -> dict[str, Any]:
    """Return the verdict of a proof from a run file or a model; writes it to ``out`` when given.

    ``device``: "cpu", "cuda" or "auto", which takes GPUs where each rank of the layout can have one.

    Raises:
        MeshwrightError: every Problem of the input; E900 for what later work brings.
    """
    show = show or (lambda line: None)
    asked = parse_layout(layout)
    if precision is None:  # a proof's own precision must not hide this; one that was asked for may
        refuse(precision_built(asked))
    wanted = replace(asked, precision=precision or "fp64")
    problems = contract.missing(pipeline=wanted.pp > 1)
    if resume and ladder:
        found, do = "--resume with --ladder", "prove them one after the other"
        problems.append(problem("E864", where="meshwright prove", found=found, do=do))
    packed = packed or (run is not None and run.data.rows == "pack")
    if packed and resume:
        found, do = "packed rows with --resume", "prove them one after the other"
        problems.append(problem("E864", where="meshwright prove", found=found, do=do))
    refuse(problems)
    assert model is not None or run is not None
    target = model if model is not None else run.model.config  # pyright: ignore[reportOptionalMemberAccess]
    spec = read_model(target)
    if tie and not spec.tied_embeddings:
        spec = spec_from_config({**spec.config, "tie_word_embeddings": True}, spec.name, spec.source)
    if adapter is not None:
        spec = adapted(spec, parse_adapter(adapter))
    elif run is not None:
        spec = adapted(spec, run.adapter.spec())
    refuse(packing_problems(spec, "packed rows") if packed else [])
    refuse(missing_peft() if spec.adapter is not None else [], ExitCode.ENVIRONMENT)
    refuse(
        missing_bitsandbytes(spec, "cpu")
    )  # where the reference is computed; ranks on GPUs are asked below
    length = seq_len or min(DEFAULT_SEQ_LEN, spec.max_position_embeddings)
    optimizer = run.optimizer if run is not None else ProofOptimizer()
    max_norm = run.clip.max_norm if run is not None else 1.0
    patterns = tuple(freeze) + (tuple(run.freeze) if run is not None else ())
    seed = run.run.seed if run is not None else 0
    settings: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "valid": valid,
        "packed": packed,
        "optimizer": optimizer,
        "max_norm": max_norm,
        "matmul": run.run.matmul if run is not None else "machine",
        "show": show,
    }

    def plan_for(layout: Layout, batch: int | None, simulated: bool = False) -> Plan:
        refuse(check_optimizer(layout, optimizer.name))
        plan = proof_plan(
            spec, layout, model_path=target, seq_len=length, global_batch=batch, freeze=patterns
        )
        if torchrun_facts() is None and not simulated:
            refuse(check_local_ranks(plan.world_size, os.cpu_count() or 1), ExitCode.ENVIRONMENT)
        return plan

    def prove(layout: Layout, simulated: bool = False) -> dict[str, Any]:
        plan = plan_for(layout, global_batch, simulated)
        ranks_on = "cpu" if simulated else proof_device(device, plan.world_size)
        refuse(missing_bitsandbytes(spec, ranks_on))
        return run_proof(plan, spec, simulated=simulated, device=ranks_on, **settings)

    if resume:
        result = _prove_resume(
            wanted, resume_layout, plan_for, spec, settings | {"global_batch": global_batch}
        )
    elif ladder:
        result = climb(wanted, lambda rung: prove(rung.layout, rung.simulated), show)
    else:
        result = prove(wanted)
    if out is not None:
        write_json(out, result)
    return result


def _prove_resume(
    layout: Layout,
    other: str | None,
    plan_for: Callable[[Layout, int | None], Plan],
    spec: ModelSpec,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the verdict of a run that is killed under ``layout`` and goes on under ``other`` (None: the same)."""
    from meshwright.orchestrate.proving_resume import prove_resume

    plan = plan_for(layout, settings.pop("global_batch"))
    resumed = plan
    if other is not None:
        target = replace(parse_layout(other), precision=layout.precision)
        resumed = plan_for(target, plan.batch.global_batch)
    settings.pop("valid")
    settings.pop("packed")
    return prove_resume(plan, resumed, spec, **settings)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON: to a temporary name, synced, then renamed.

    Raises:
        MeshwrightError: E813 when the folder cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, json.dumps(value, indent=1, allow_nan=True))
    except OSError as error:
        raise MeshwrightError(
            problem("E813", where=str(target), found=f"{type(error).__name__}: {error}"), ExitCode.ENVIRONMENT
        ) from error
