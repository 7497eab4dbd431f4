"""Training on one rank: the loop around ``train_step``, with evaluation, checkpoints, memory and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.base.records import MemoryBytes
from meshwright.checkpoint.pieces import in_pieces
from meshwright.checkpoint.state import Place
from meshwright.layout.ranks import EXPERT_REPLICATE
from meshwright.mesh.beats import watched
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts, local_address, torchrun_job
from meshwright.model.quantised import is_quantised
from meshwright.parallel.apply import ParallelModel, apply_plan, needs_tied_group
from meshwright.parallel.placement import check_placement
from meshwright.parallel.quantised import base_digest
from meshwright.parallel.tied import local
from meshwright.train.data import RankBatch, eval_batches, rank_batch
from meshwright.train.deterministic import deterministic
from meshwright.train.guards import (
    Heartbeat,
    Spikes,
    Stragglers,
    drift_problem,
    drifted,
    locate,
    nonfinite_problem,
    spike_problem,
)
from meshwright.train.keep import RESUMED, Keeper, check_resumed
from meshwright.train.links import Links
from meshwright.train.memory import begin_peak, resting_bytes, watch_step, with_allocator
from meshwright.train.metrics import RunLog, write_event
from meshwright.train.offload import close_optimizer, make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.randomness import StepRandom
from meshwright.train.scale import LossScale, loss_scale_for
from meshwright.train.step import StepResult, sum_over_world, train_step
from meshwright.train.stop import TIME, Watch
from meshwright.train.task import RankSummary, TrainTask

__all__ = ["RESUMED", "RankSummary", "TrainTask", "check_resumed", "evaluate", "train_rank"]

MEMORY_STEP = 3
"""The step of a run whose live bytes are traced: optimizer state exists and nothing is first any more."""

MAX_SKIPS = 5
"""A run stops after this many skipped steps in a row (fp16: after its scale has had room to fall)."""

MAX_SKIPS_FP16 = 20

Batch: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Input ids and labels, [accumulation, micro_batch, T] each, and positions of packed documents of the same shape."""


def train_rank(facts: RankFacts, task: TrainTask) -> list[RankSummary]:
    """Train this rank's part of the plan up to ``task.stop_at``; return what every rank measured, on each.

    Raises:
        MeshwrightError: E540 placement, E544/E545/E570 non-finite steps, E548 a parameter without gradient, E571
            replicas that differ, E572 a loss spike, and those of checkpoints.
    """
    started = task.started if task.started is not None else time.monotonic()
    watch = Watch(facts.rank, task.run.run.max_minutes, started)
    joined = torchrun_job() is not None and facts.world_size > 1

    def silent(found: Problem) -> None:
        write_event(
            task.run_dir, "silent", code=found.code, rank=facts.rank, where=found.where, found=found.found
        )

    with ExitStack() as stack:
        stack.enter_context(watch.signals())
        stack.enter_context(deterministic(task.run.run.deterministic))
        if joined:
            _same_start(facts, task)
        if joined and task.run.guards.silence_s:
            stack.enter_context(watched(facts, task.run.guards.silence_s, silent))
        mine = _Session(facts, task, watch).run()
        everyone: list[Any] = [mine]
        if task.plan.world_size > 1:
            everyone = [None] * task.plan.world_size
            dist.all_gather_object(everyone, mine)
        return everyone


class _Session:
    """One rank from building the model to the last checkpoint."""

    def __init__(self, facts: RankFacts, task: TrainTask, watch: Watch) -> None:
        plan, run, spec = task.plan, task.run, task.spec
        self.facts, self.task, self.watch = facts, task, watch
        view = build_mesh(
            plan.layout, facts.rank, facts.device.partition(":")[0], tied=needs_tied_group(plan, spec)
        )
        self.random = StepRandom(run.run.seed, plan.layout.dp, view.dp_rank, (view.coords.get("cp", 0),))
        facts.at(coordinates=" ".join(f"{a}={c}" for a, c in view.coords.items()), step=0, action="build")
        self.model = apply_plan(
            plan,
            spec,
            view,
            seed=run.run.seed,
            weights=task.weights,
            on_action=self._on_action,
            offload_dir=task.offload_dir,
            matmul=run.run.matmul,
        )
        self.random.attach(self.model)
        self.placement = check_placement(spec, view, self.model.placeable(), self.model.stage_of)
        check_replicas(self.model)
        self.optimizer = make_optimizer(
            self.model.trainable(),
            self.model.decays,
            run.optimizer,
            offload=plan.layout.offload,
            folder=task.offload_dir,
            rank=facts.rank,
            on_updated=self.model.put_away,
        )
        self.rate = Rate(
            name=run.schedule.name,
            peak=run.optimizer.lr,
            warmup_steps=run.schedule.warmup_steps,
            total_steps=run.run.steps,
            min_ratio=run.schedule.min_lr_ratio,
        )
        self.scale = loss_scale_for(plan.layout.precision)
        self.log = RunLog(task.run_dir, writes=facts.rank == 0, total_steps=task.stop_at)
        self.keeper = Keeper(
            task=task,
            rank=facts.rank,
            params=self.model.params,
            optimizer=self.optimizer,
            tied=_tied_names(task, self.model),
            place=_placing(self.model),
            scale=self.scale,
            rate=self.rate,
            spikes=Spikes(run.guards.spike),
            base=base_digest(self.model.packed, plan.world_size) if is_quantised(spec) else "",
        )
        self.stragglers = Stragglers(run.guards.straggler)
        job = torchrun_job()
        self.links = Links(run.guards.slow_link, job.node if job is not None else 0, local_address(facts))
        self.heart = Heartbeat(task.run_dir, facts.rank, run.guards.heartbeat_s)
        rest = resting_bytes(self.model, self.optimizer)
        self.memory = MemoryBytes(**{name: size for name, size in rest.items() if name != "offloaded"})
        self.times: list[float] = []
        self.phases: dict[str, list[float]] = {}
        self.covered = False
        self.done = self._resume() if task.resume_from is not None else 0
        self.final_loss, self.eval_loss, self.first_eval = math.nan, None, None

    def _on_action(self, action: str) -> None:
        self.facts.at(action=action)
        self.random.at(action)

    def _resume(self) -> int:
        done, extra = self.keeper.resume()
        self.model.put_away()
        if extra["schedule"] != asdict(self.rate):
            self.log.event("schedule changed", step=done, saved=extra["schedule"], now=asdict(self.rate))
        return done

    def run(self) -> RankSummary:
        """Train; return what this rank measured."""
        task, run = self.task, self.task.run.run
        self.log.event("start", step=self.done, plan_hash=task.plan.hash, world_size=task.plan.world_size)
        if run.eval_every and self.done == 0:
            self.first_eval = self.eval_loss = evaluate(self.model, task)
            self.keeper.best.update(0, self.first_eval)
            self.log.event("eval", step=0, eval_loss=self.first_eval)
        step, stopped = self.done, ""
        while step < task.stop_at and not stopped:
            stopped = self._step(step + 1)
            step += not stopped
        if stopped:
            minutes = task.run.run.max_minutes
            self.log.event(
                "time limit" if stopped == TIME else "stopped", step=step, why=stopped, minutes=minutes
            )
            self.facts.at(action="checkpoint")
            self.model.verify_away()
            self.keeper.save(step, self.eval_loss if self._evaluated == step else None, wait=True)
            self._tell_saves()
        close_optimizer(self.optimizer)
        self.model.close()
        self.log.event("end", step=step, loss=self.final_loss)
        self.log.close()
        return RankSummary(
            rank=self.facts.rank,
            stage=self.model.view.pp_rank,
            memory=self.memory,
            step_times_s=self.times,
            phases_s={name: median(values) for name, values in self.phases.items()},
            steps=step,
            final_loss=self.final_loss,
            eval_loss=self.eval_loss,
            first_eval_loss=self.first_eval,
            placement=self.placement,
            stopped=stopped,
        )

    _evaluated = -1

    def _step(self, step: int) -> str:
        """Do update ``step`` with what belongs to it; return "", or why the run stops before it."""
        self.facts.at(step=step, action="data")
        self.heart.beat(step, "data")
        begin = time.perf_counter()
        batch = _batch(self.task, self.model, step)
        data_s = time.perf_counter() - begin
        traced = step == self.done + MEMORY_STEP or (
            step == self.task.stop_at and step < self.done + MEMORY_STEP
        )
        result = self._update(step, batch, traced)
        while result.asked:
            asked = self.watch.agree(self.model.view)
            if asked.stop:
                return asked.stop
            if asked.save:
                self._save(step - 1, wait=True)
            result = self._update(step, batch, traced)
        elapsed = time.perf_counter() - begin
        self.keeper.empty_in_row = self.keeper.empty_in_row + 1 if result.valid_tokens == 0 else 0
        if result.valid_tokens and not self.covered:
            _check_coverage(self.model)
            self.covered = True
        self._guard(step, result, batch, data_s)
        if (
            not traced and step > self.done + 1
        ):  # the first step warms up, the traced one is slowed by tracing
            self.times.append(elapsed)
            for name, seconds in (result.phases_s | {"data": data_s}).items():
                self.phases.setdefault(name, []).append(seconds)
        self.final_loss = result.loss
        record = _record(step, result, self.model, self.optimizer, elapsed, data_s, self.memory)
        if self.task.restarts:
            record["restarts"] = self.task.restarts
        self._after(step, record)
        return ""

    def _update(self, step: int, batch: Batch, traced: bool) -> StepResult:
        inputs, labels, positions = batch
        self.random.begin(step)
        arguments: dict[str, Any] = {
            "step": step,
            "rate": self.rate,
            "max_norm": self.task.run.clip.max_norm,
            "scale": self.scale,
            "positions_ABT": positions,
            "ask": self.watch.asks,
        }
        if not traced:
            return train_step(self.model, self.optimizer, inputs, labels, **arguments)
        device = self.model.view.device
        begin_peak(device)
        with watch_step(self.model, self.optimizer, (inputs, labels)) as counter:
            result = train_step(self.model, self.optimizer, inputs, labels, **arguments)
        if not result.asked:
            self.memory = with_allocator(counter.memory(), device)
        return result

    def _guard(self, step: int, result: StepResult, batch: Batch, data_s: float) -> None:
        """Judge the step by its numbers, and the ranks by theirs."""
        guards = self.task.run.guards
        if result.skipped:
            code = "W540" if result.valid_tokens else "W541"
            self.log.event("skip", step=step, why=result.skipped, code=code)
        # A scale that may still fall is no reason to look; one that has fallen as far as it may is.
        lost = not self.scale.dynamic or self.scale.skipped_in_row >= MAX_SKIPS_FP16
        if result.skipped and result.valid_tokens and (guards.nonfinite == "stop" or lost):

            def again() -> None:
                self.random.begin(step)
                self.model.zero_grad()
                inputs, labels, positions = batch
                scale = result.loss_scale / result.valid_tokens
                self.model.forward_backward(inputs, labels, scale, positions)
                self.model.finish_gradients()

            found = locate(self.model, again)
            texts = [f.text() for f in found]
            self.log.event("not finite", step=step, loss=result.loss, first=texts[:1], also=texts[1:])
            if guards.nonfinite == "stop":
                raise MeshwrightError(nonfinite_problem(step, found, f"loss {result.loss:g}"), ExitCode.NO)
            _judge(result, self.scale, step, self.keeper.empty_in_row, texts[:1])
        else:
            _judge(result, self.scale, step, self.keeper.empty_in_row, [])
        usual = self.keeper.spikes.check(result.loss)
        if usual is not None:
            self.log.event("loss spike", step=step, loss=result.loss, usual=usual, code="W544")
            if guards.on_spike == "stop":
                raise MeshwrightError(spike_problem(step, result.loss, usual), ExitCode.NO)
        if guards.replicas_every and step % guards.replicas_every == 0:
            self.facts.at(action="compare replicas")
            apart = drifted(self.model, self.keeper.place)
            if apart:
                raise MeshwrightError(drift_problem(step, apart), ExitCode.NO)
        self.stragglers.note(data_s + result.phases_s.get("forward_backward", 0.0))
        for rank, times in self.stragglers.check(self.model):
            self.log.event("straggler", step=step, rank=rank, times_slower=times, code="W545")
        for link in self.links.check(self.model.view):
            self.log.event("slow link", step=step, **asdict(link), times_slower=link.times, code="W576")
            if self.facts.rank == 0:
                print(link.text(), flush=True)

    def _after(self, step: int, record: dict[str, Any]) -> None:
        """Evaluate, write the step down, save."""
        run = self.task.run.run
        last = step == self.task.stop_at
        saves = last or bool(run.checkpoint_every and step % run.checkpoint_every == 0)
        if last or (run.eval_every and step % run.eval_every == 0) or (saves and run.keep_best):
            self.facts.at(action="evaluate")
            self.eval_loss = evaluate(self.model, self.task)
            self._evaluated = step
            self.keeper.best.update(step, self.eval_loss)
            if self.eval_loss is not None:
                record["eval_loss"] = self.eval_loss
                self.log.event("eval", step=step, eval_loss=self.eval_loss)
        self.log.step(record)
        if saves:
            self._save(step, wait=last)
        else:
            self._tell_saves()

    def _save(self, step: int, *, wait: bool) -> None:
        self.facts.at(action="checkpoint")
        self.model.verify_away()
        self.keeper.save(step, self.eval_loss if self._evaluated == step else None, wait=wait)
        self._tell_saves()

    def _tell_saves(self) -> None:
        for saved, removed in self.keeper.news():
            self.log.event("checkpoint", step=saved, stall_s=self.keeper.stall_s)
            if removed:
                self.log.event("checkpoints removed", steps=removed)


def _same_start(facts: RankFacts, task: TrainTask) -> None:
    """Refuse ranks that read another plan, checkpoint or corpus than rank 0 did.

    Communication: one all_gather of four values on ``world``.

    Raises:
        MeshwrightError: E578, on all ranks alike.
    """
    begin = task.resume_from.name if task.resume_from is not None else "step 1"
    mine = {
        "plan": task.plan.hash,
        "begins at": begin,
        "ends after step": task.stop_at,
        "data": task.data.hash,
    }
    everyone: list[Any] = [None] * facts.world_size
    dist.all_gather_object(everyone, mine)
    found = [
        f"rank {rank} has {name} {theirs[name]}, rank 0 {value}"
        for rank, theirs in enumerate(everyone)
        for name, value in everyone[0].items()
        if theirs[name] != value
    ]
    if found:
        raise MeshwrightError(
            problem("E578", where=f"run.dir={task.run_dir}", found="; ".join(found[:4])), ExitCode.ENVIRONMENT
        )


def _batch(task: TrainTask, model: ParallelModel, step: int) -> Batch:
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


def _on_device(rows: RankBatch, model: ParallelModel) -> Batch:
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


def _judge(result: StepResult, scale: LossScale, step: int, empty_in_row: int, origin: list[str]) -> None:
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
    raise MeshwrightError(
        problem(
            "E544" if scale.dynamic else "E545",
            where=f"step {step}",
            found=f"{scale.skipped_in_row} steps in a row were not finite; loss scale {scale.value:g}"
            + (f"; first: {origin[0]}" if origin else ""),
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
        params: dict[str, Tensor] = {
            n: p for n, p in model.params.items() if (n in spread) == (axis == EXPERT_REPLICATE)
        }
        if axis != EXPERT_REPLICATE:
            params |= {n: p.held for n, p in model.packed.items()}
        if axis in model.view.groups and params:
            _refuse_unequal(params, model.view.groups[axis], axis, model.view.device)


def _refuse_unequal(
    params: Mapping[str, Tensor], group: dist.ProcessGroup, axis: str, device: torch.device
) -> None:
    sums = torch.stack([local(p.detach()).double().sum() for p in params.values()]).to(device)
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
