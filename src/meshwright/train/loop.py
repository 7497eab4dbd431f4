"""Training on one rank: the loop around ``train_step``, with evaluation, checkpoints, memory and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.axes import WORLD
from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.records import MemoryBytes
from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.pieces import in_pieces
from meshwright.checkpoint.save import save_checkpoint
from meshwright.checkpoint.state import Place
from meshwright.layout.ranks import EXPERT_REPLICATE
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.model.spec import ModelSpec
from meshwright.parallel.apply import ParallelModel, apply_plan, needs_tied_group
from meshwright.parallel.placement import check_placement
from meshwright.parallel.tied import local
from meshwright.program.plan import Plan
from meshwright.train.data import RankBatch, TokenData, eval_batches, rank_batch
from meshwright.train.memory import resting_bytes, watch_step
from meshwright.train.metrics import RunLog
from meshwright.train.offload import OffloadedAdamW, close_optimizer, make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import LossScale, loss_scale_for
from meshwright.train.step import StepResult, sum_over_world, train_step

MEMORY_STEP = 3
"""The step of a run whose live bytes are traced: optimizer state exists and nothing is first any more."""

MAX_SKIPS = 5
"""A run stops after this many skipped steps in a row (fp16: after its scale has had room to fall)."""

MAX_SKIPS_FP16 = 20

RESUMED = ("step", "seed", "seq_len", "loss_scale", "data_position", "data_hash", "plan_hash")
"""What a checkpoint's ``extra`` holds beside tensors; the learning rate is a function of the step alone."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What every rank of a training run is given.

    Attributes:
        run: the resolved run file.
        data: the corpus as tokens.
        weights: pretrained weights by logical name, or None for fresh ones drawn from the seed.
        stop_at: last global step of this session (the rate's horizon stays ``run.run.steps``).
        resume_from: checkpoint to start from, or None.
        offload_dir: where state that is offloaded to files goes.
        manifest: facts that a checkpoint's manifest keeps (plan, versions).
    """

    run: Any
    plan: Plan
    spec: ModelSpec
    data: TokenData
    run_dir: Path
    stop_at: int
    resume_from: Path | None = None
    weights: Mapping[str, Tensor] | None = None
    offload_dir: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """What one rank measured over its run."""

    rank: int
    stage: int
    memory: MemoryBytes
    step_times_s: list[float]
    phases_s: dict[str, float]
    steps: int
    final_loss: float
    eval_loss: float | None
    first_eval_loss: float | None
    placement: dict[str, Any]


def train_rank(facts: RankFacts, task: TrainTask) -> list[RankSummary]:
    """Train this rank's part of the plan up to ``task.stop_at``; return what every rank measured, on each.

    Raises:
        MeshwrightError: E540 placement, E544/E545 non-finite steps, E548 a parameter without gradient.
    """
    plan, run, spec = task.plan, task.run, task.spec
    device_type = facts.device.partition(":")[0]
    view = build_mesh(plan.layout, facts.rank, device_type, tied=needs_tied_group(plan, spec))
    facts.at(coordinates=" ".join(f"{a}={c}" for a, c in view.coords.items()), step=0, action="build")
    model = apply_plan(
        plan,
        spec,
        view,
        seed=run.run.seed,
        weights=task.weights,
        on_action=lambda action: facts.at(action=action),
    )
    placement = check_placement(spec, view, model.params, model.stage_of)
    check_replicas(model)
    optimizer = make_optimizer(
        model.trainable(),
        model.decays,
        run.optimizer,
        offload=plan.layout.offload,
        folder=task.offload_dir,
        rank=facts.rank,
    )
    rate = Rate(
        name=run.schedule.name,
        peak=run.optimizer.lr,
        warmup_steps=run.schedule.warmup_steps,
        total_steps=run.run.steps,
        min_ratio=run.schedule.min_lr_ratio,
    )
    scale = loss_scale_for(plan.layout.precision)
    log = RunLog(task.run_dir, writes=facts.rank == 0, total_steps=task.stop_at)
    done = 0
    if task.resume_from is not None:
        done = _resume(task, model, optimizer, scale)
    log.event("start", step=done, plan_hash=plan.hash, world_size=plan.world_size)
    started = time.monotonic()
    rest = resting_bytes(model, optimizer)
    memory = MemoryBytes(**{name: size for name, size in rest.items() if name != "offloaded"})
    times: list[float] = []
    phases: dict[str, list[float]] = {}
    final_loss, eval_loss, first_eval = math.nan, None, None
    if run.run.eval_every and done == 0:
        first_eval = eval_loss = evaluate(model, task)
        log.event("eval", step=0, eval_loss=first_eval)
    step, covered, empty_in_row = done, False, 0
    while step < task.stop_at:
        step += 1
        facts.at(step=step, action="data")
        begin = time.perf_counter()
        inputs, labels, positions = _batch(task, model, step)
        data_s = time.perf_counter() - begin
        arguments: dict[str, Any] = {
            "step": step,
            "rate": rate,
            "max_norm": run.clip.max_norm,
            "scale": scale,
            "positions_ABT": positions,
        }
        traced = step == done + MEMORY_STEP or (step == task.stop_at and step < done + MEMORY_STEP)
        if traced:
            with watch_step(model, optimizer, (inputs, labels)) as counter:
                result = train_step(model, optimizer, inputs, labels, **arguments)
            memory = counter.memory()
        else:
            result = train_step(model, optimizer, inputs, labels, **arguments)
        elapsed = time.perf_counter() - begin
        empty_in_row = empty_in_row + 1 if result.valid_tokens == 0 else 0
        if result.valid_tokens and not covered:
            _check_coverage(model)
            covered = True
        _judge(result, scale, model, step, empty_in_row)
        if not traced and step > done + 1:  # the first step warms up, the traced one is slowed by tracing
            times.append(elapsed)
            for name, seconds in (result.phases_s | {"data": data_s}).items():
                phases.setdefault(name, []).append(seconds)
        final_loss = result.loss
        record = _record(step, result, model, optimizer, elapsed, data_s, memory)
        if result.skipped:
            log.event("skip", step=step, why=result.skipped, code="W540" if result.valid_tokens else "W541")
        last = step == task.stop_at
        if (run.run.eval_every and step % run.run.eval_every == 0) or last:
            facts.at(action="evaluate")
            eval_loss = evaluate(model, task)
            if eval_loss is not None:
                record["eval_loss"] = eval_loss
                log.event("eval", step=step, eval_loss=eval_loss)
        log.step(record)
        if not last and _out_of_time(run.run.max_minutes, started, model):
            log.event("time limit", step=step, minutes=run.run.max_minutes)
            last = True
        if (run.run.checkpoint_every and step % run.run.checkpoint_every == 0) or last:
            facts.at(action="checkpoint")
            _save(task, model, optimizer, scale, step, facts.rank)
            log.event("checkpoint", step=step)
        if last:
            break
    close_optimizer(optimizer)
    log.event("end", step=step, loss=final_loss)
    log.close()
    mine = RankSummary(
        rank=facts.rank,
        stage=view.pp_rank,
        memory=memory,
        step_times_s=times,
        phases_s={name: median(values) for name, values in phases.items()},
        steps=step,
        final_loss=final_loss,
        eval_loss=eval_loss,
        first_eval_loss=first_eval,
        placement=placement,
    )
    everyone: list[Any] = [mine]
    if plan.world_size > 1:
        everyone = [None] * plan.world_size
        dist.all_gather_object(everyone, mine)
    return everyone


def _batch(task: TrainTask, model: ParallelModel, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return this rank's input ids, labels and, for packed documents, positions of one step."""
    batch, layout = task.plan.batch, task.plan.layout
    rows = rank_batch(
        task.data.train,
        step=step - 1,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        dp=layout.dp,
        dp_rank=model.view.dp_rank,
        seed=task.run.run.seed,
        end=task.data.end,
    )
    return _on_device(rows, model)


def _on_device(rows: RankBatch, model: ParallelModel) -> tuple[Tensor, Tensor, Tensor | None]:
    device, positions = model.view.device, rows.positions
    return (
        torch.from_numpy(rows.input_ids).to(device),
        torch.from_numpy(rows.labels).to(device),
        None if positions is None else torch.from_numpy(positions).to(device),
    )


def evaluate(model: ParallelModel, task: TrainTask) -> float | None:
    """Return the mean loss per valid token of held-out text, each sample once; None without held-out text.

    Communication: the forward's, and one all_reduce of two sums on ``world``.
    """
    batch, layout = task.plan.batch, task.plan.layout
    if task.data.eval.num_samples == 0:
        return None
    total = torch.zeros(2, dtype=torch.float64, device=model.view.device)
    rows = eval_batches(
        task.data.eval,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        dp=layout.dp,
        dp_rank=model.view.dp_rank,
        max_samples=task.run.run.eval_batches * batch.global_batch,
    )
    for part in rows:
        total[0] += model.evaluate(*_on_device(part, model))
        if model.view.counts_batch:
            total[1] += part.valid_tokens
    loss_sum, valid = sum_over_world(total, model).tolist()
    return loss_sum / valid if valid else None


def _record(
    step: int,
    result: StepResult,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    elapsed: float,
    data_s: float,
    memory: MemoryBytes,
) -> dict[str, Any]:
    batch = model.plan.batch
    rest = resting_bytes(model, optimizer)
    peak = memory.total
    if model.view.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(model.view.device)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": batch.tokens,
        "valid_tokens": result.valid_tokens,
        "step_time_s": elapsed,
        "tokens_per_s": batch.tokens / elapsed,
        "memory_bytes": rest | {"activations": memory.activations, "other": memory.working, "peak": peak},
        "phases_s": {"data": data_s, **result.phases_s},
        "loss_scale": result.loss_scale,
        "skipped": result.skipped,
    }


def _judge(result: StepResult, scale: LossScale, model: ParallelModel, step: int, empty_in_row: int) -> None:
    """Stop a run whose steps are empty or not finite; all ranks see the same result and stop alike."""
    if empty_in_row >= MAX_SKIPS:
        raise MeshwrightError(
            problem("E543", where=f"step {step}", found=f"{empty_in_row} steps in a row had no valid token"),
            ExitCode.NO,
        )
    if not result.skipped:
        return
    limit = MAX_SKIPS_FP16 if scale.dynamic else MAX_SKIPS
    if result.valid_tokens == 0 or scale.skipped_in_row < limit:
        return
    bad = [n for n, g in model.gradients().items() if not bool(torch.isfinite(local(g)).all())]
    raise MeshwrightError(
        problem(
            "E544" if scale.dynamic else "E545",
            where=f"step {step}",
            found=f"{scale.skipped_in_row} steps in a row were not finite; loss scale {scale.value:g}; "
            f"first tensor on this rank: {bad[0] if bad else 'none (another rank or the loss)'}",
        ),
        ExitCode.NO,
    )


def _check_coverage(model: ParallelModel) -> None:
    """Refuse a run in which a trainable parameter got no gradient at all."""
    missing = model.without_gradient()
    if missing:
        raise MeshwrightError(
            problem(
                "E548",
                where="step 1",
                found=f"{len(missing)} trainable tensors without gradient: " + ", ".join(missing[:5]),
            )
        )


def check_replicas(model: ParallelModel) -> None:
    """Refuse replicas that do not start equal.

    Communication: two all_reduces of one sum per parameter on ``dp_replicate``, and of one per tensor of experts on
    ``expert_replicate``.
    """
    spread = model.experts.tensors if model.experts is not None else {}
    for axis in ("dp_replicate", EXPERT_REPLICATE):
        params = {n: p for n, p in model.params.items() if (n in spread) == (axis == EXPERT_REPLICATE)}
        if axis in model.view.groups and params:
            _refuse_unequal(params, model.view.groups[axis], axis)


def _refuse_unequal(params: Mapping[str, Tensor], group: dist.ProcessGroup, axis: str) -> None:
    sums = torch.stack([local(p.detach()).double().sum() for p in params.values()])
    high, low = sums.clone(), sums.clone()
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    differ = [n for n, a, b in zip(params, high.tolist(), low.tolist(), strict=True) if a != b]
    if differ:
        raise MeshwrightError(
            problem(
                "E550",
                where="start",
                found=f"{len(differ)} tensors differ over {axis}: " + ", ".join(differ[:5]),
            )
        )


def _out_of_time(max_minutes: float | None, started: float, model: ParallelModel) -> bool:
    """Return whether the time limit is over, agreed by all ranks (rank 0's clock counts)."""
    if max_minutes is None:
        return False
    over = time.monotonic() - started >= 60 * max_minutes
    flag = torch.tensor(int(over and model.view.rank == 0), device=model.view.device)
    group = model.view.groups.get(WORLD)
    if group is not None:
        dist.all_reduce(flag, group=group)
    return bool(flag.item())


def _tied_names(task: TrainTask, model: ParallelModel) -> dict[str, str]:
    return {
        t.name: t.tied_to for t in task.spec.tensors() if t.tied_to is not None and t.name in model.params
    }


def _placing(model: ParallelModel) -> Place | None:
    """Return how a checkpoint places what the tensor and expert axes cut, or None where they cut nothing."""
    if model.tensor is None and model.experts is None:
        return None

    def place(name: str, tensor: Tensor) -> Tensor:
        where = model.place_of(name)
        return tensor if where is None else in_pieces(tensor, *where[0], row=where[1])

    return place


def _save(
    task: TrainTask,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    step: int,
    rank: int,
) -> None:
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.verify()
    save_checkpoint(
        folder=task.run_dir / "checkpoints",
        step=step,
        params=model.params,
        optimizer=optimizer,
        tied=_tied_names(task, model),
        extra={
            "step": step,
            "seed": task.run.run.seed,
            "seq_len": task.plan.batch.seq_len,
            "loss_scale": {
                "value": scale.value,
                "good_steps": scale.good_steps,
                "skipped_in_row": scale.skipped_in_row,
            },
            "data_position": step * task.plan.batch.global_batch,
            "data_hash": task.data.hash,
            "plan_hash": task.plan.hash,
        },
        manifest=task.manifest,
        world_size=task.plan.world_size,
        rank=rank,
        place=_placing(model),
    )


def check_resumed(extra: Mapping[str, Any], task: TrainTask) -> list[Problem]:
    """Return what a checkpoint lacks (E556), and where its data would not go on in this run (E551)."""
    missing = [name for name in RESUMED if name not in extra]
    if missing:
        return [
            problem(
                "E556",
                where=str(task.resume_from),
                found=f"{len(missing)} of {len(RESUMED)} parts are not in it: " + ", ".join(missing),
            )
        ]
    batch, step = task.plan.batch, extra["step"]
    pairs = [
        ("data.path", "data", extra["data_hash"], task.data.hash),
        ("run.seed", "the order of seed", extra["seed"], task.run.run.seed),
        ("data.seq_len", "sequences of", extra["seq_len"], batch.seq_len),
        (
            "batch.sequences",
            f"after step {step}, position",
            extra["data_position"],
            step * batch.global_batch,
        ),
    ]
    return [
        problem("E551", where=where, found=f"the checkpoint has {what} {saved}, this run {now}")
        for where, what, saved, now in pairs
        if saved != now
    ]


def _resume(task: TrainTask, model: ParallelModel, optimizer: torch.optim.Optimizer, scale: LossScale) -> int:
    """Load the checkpoint into this rank's part; Returns the step it was saved after."""
    assert task.resume_from is not None
    extra = load_checkpoint(
        path=task.resume_from,
        params=model.params,
        optimizer=optimizer,
        tied=_tied_names(task, model),
        place=_placing(model),
    )
    refuse(check_resumed(extra, task))
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.seal()
    saved = extra["loss_scale"]
    scale.value, scale.good_steps, scale.skipped_in_row = (
        saved["value"],
        saved["good_steps"],
        saved["skipped_in_row"],
    )
    return int(extra["step"])
