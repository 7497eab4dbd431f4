"""A few real training steps of a plan on random tokens: what each rank measured of time, work and memory.

The first steps warm up, one is traced for its live bytes (which slows it), the rest are timed. Nothing is read or
written but what the plan offloads to files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.records import MemoryBytes
from meshwright.config.schema import OptimizerSection
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.model.spec import ModelSpec
from meshwright.parallel.apply import ParallelModel, apply_plan, needs_tied_group
from meshwright.program.plan import Plan
from meshwright.train.data import rank_rows
from meshwright.train.memory import begin_peak, watch_step, with_allocator
from meshwright.train.offload import close_optimizer, make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import loss_scale_for
from meshwright.train.step import StepResult, train_step

WARM_STEPS: Final = 2
"""Steps before the traced one: the optimizer's state exists and nothing is first any more."""
MAX_NORM: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class StepsTask:
    """What every rank is given: the plan, its model, how many steps are timed, and where offloaded files go.

    With no timed step the run is the three steps that show the live bytes.
    """

    plan: Plan
    spec: ModelSpec
    steps: int
    seed: int = 0
    offload_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured over the timed steps; seconds are of one step, medians but for the lists.

    Attributes:
        stage: its (first) pipeline stage.
        memory: live bytes at the peak of the traced step; on a GPU up to the allocator's peak.
        wall_s: wall seconds of each step.
        processor_s: processor seconds of each step, of all threads of the rank.
        phases_s: wall seconds by part of the step (count, forward_backward, reduce, optimizer).
        busy_s: processor seconds of the rank's own thread up to the last backward: compute without waiting.
        actions_s: the same by action ("0F3", "0B3"), from its start to the next action's.
        queued_s: seconds that the rank's own thread could run and had no core; None where the system does not tell.
    """

    rank: int
    stage: int
    memory: MemoryBytes
    wall_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    phases_s: Mapping[str, float]
    busy_s: float
    actions_s: Mapping[str, float]
    queued_s: float | None = None


def queued_seconds() -> float | None:
    """Return how long this thread has waited for a core since it began, by Linux's scheduler; None elsewhere."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


@dataclass
class _Thread:
    """Processor seconds of the rank's own thread at the start of each action of a step."""

    marks: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])

    def note(self, action: str) -> None:
        self.marks.append((action, time.thread_time()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each action and forget them; the last mark ends the last action."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        found = {action: after - before for (action, before), (_, after) in pairs}
        self.marks.clear()
        return found


def steps_rank(facts: RankFacts, task: StepsTask) -> list[RankSteps]:
    """Run the plan's steps on this rank; return what every rank measured, by rank, on each.

    Communication: that of the steps, and one all_gather of the findings on "world".

    Raises:
        MeshwrightError: what building or running the plan raises.
    """
    plan = task.plan
    view = build_mesh(
        plan.layout, facts.rank, facts.device.partition(":")[0], tied=needs_tied_group(plan, task.spec)
    )
    facts.at(coordinates=" ".join(f"{a}={c}" for a, c in view.coords.items()), step=0, action="build")
    thread = _Thread()

    def on_action(action: str) -> None:
        facts.at(action=action)
        thread.note(action)

    model = apply_plan(plan, task.spec, view, seed=task.seed, on_action=on_action)
    optimizer = make_optimizer(
        model.trainable(),
        model.decays,
        OptimizerSection(),
        offload=plan.layout.offload,
        folder=task.offload_dir,
        rank=facts.rank,
    )
    mine = _Session(facts, task, model, optimizer, thread).run()
    close_optimizer(optimizer)
    everyone: list[Any] = [mine]
    if plan.world_size > 1:
        everyone = [None] * plan.world_size
        dist.all_gather_object(everyone, mine)
    return everyone


class _Session:
    """One rank's steps."""

    def __init__(
        self,
        facts: RankFacts,
        task: StepsTask,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        thread: _Thread,
    ) -> None:
        self.facts, self.task, self.model, self.optimizer, self.thread = facts, task, model, optimizer, thread
        self.inputs, self.labels = random_batch(task, model)
        self.rate = Rate(name="constant", peak=1e-4, warmup_steps=0, total_steps=1000, min_ratio=1.0)
        self.scale = loss_scale_for(task.plan.layout.precision)
        self.busy: list[float] = []
        self.actions: dict[str, list[float]] = {}

    def run(self) -> RankSteps:
        """Warm up, trace one step, time the others."""
        number = 0
        for _ in range(WARM_STEPS):
            number += 1
            self._step(number)
        number += 1
        device = self.model.view.device
        begin_peak(device)
        with watch_step(self.model, self.optimizer, (self.inputs, self.labels)) as counter:
            self._step(number)
        memory = with_allocator(counter.memory(), device)
        self.busy.clear()
        self.actions.clear()
        wall: list[float] = []
        processor: list[float] = []
        queued: list[float] = []
        phases: dict[str, list[float]] = {}
        for _ in range(self.task.steps):
            number += 1
            waited = queued_seconds()
            begin, used = time.perf_counter(), time.process_time()
            result = self._step(number)
            wall.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
            after = queued_seconds()
            if waited is not None and after is not None:
                queued.append(after - waited)
            for name, seconds in result.phases_s.items():
                phases.setdefault(name, []).append(seconds)
        return RankSteps(
            rank=self.facts.rank,
            stage=self.model.view.pp_rank,
            memory=memory,
            wall_s=tuple(wall),
            processor_s=tuple(processor),
            phases_s={name: median(values) for name, values in phases.items()},
            busy_s=median(self.busy or [0.0]),
            actions_s={name: median(values) for name, values in self.actions.items()},
            queued_s=median(queued) if queued else None,
        )

    def _step(self, number: int) -> StepResult:
        self.facts.at(step=number)
        begin = time.thread_time()

        def on_gradients(_: ParallelModel) -> None:
            self.thread.note("end")
            self.busy.append(time.thread_time() - begin)

        result = train_step(
            self.model,
            self.optimizer,
            self.inputs,
            self.labels,
            step=number,
            rate=self.rate,
            max_norm=MAX_NORM,
            scale=self.scale,
            on_gradients=on_gradients,
        )
        for action, seconds in self.thread.take().items():
            self.actions.setdefault(action, []).append(seconds)
        if self.model.view.device.type == "cuda":
            torch.cuda.synchronize(self.model.view.device)
        return result


def random_batch(task: StepsTask, model: ParallelModel) -> tuple[Tensor, Tensor]:
    """Return this rank's input ids and labels, [accumulation, micro_batch, T]: a row's tokens follow from its number."""
    b = task.plan.batch
    rows_AB = rank_rows(b.global_batch, b.micro_batch, b.accumulation, b.dp, model.view.dp_rank)
    shape = (b.accumulation, b.micro_batch, b.seq_len + 1)
    tokens = torch.empty(shape, dtype=torch.int64)
    for a, row in enumerate(rows_AB.tolist()):
        for k, number in enumerate(row):
            generator = torch.Generator().manual_seed(task.seed * 1_000_003 + number)
            tokens[a, k] = torch.randint(0, task.spec.vocab_size, (shape[-1],), generator=generator)
    device = model.view.device
    return tokens[..., :-1].contiguous().to(device), tokens[..., 1:].contiguous().to(device)
