"""One rank's exact memory: which steps of it are played, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.records import MemoryBytes
from meshwright.exact.compose import (
    FEWEST_BLOCKS,
    FEWEST_BY_TURNS,
    FEWEST_IN_PIPELINE,
    FEWEST_IN_V,
    FEWEST_MICRO_BATCHES,
    Axis,
    Grid,
    Size,
    axis,
    compose,
    disagreement,
)
from meshwright.exact.model import reduced, uniform
from meshwright.exact.trace import PHASES, Trace, memory_of
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.schedule.generate import V_SHAPED


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What is asked of one rank.

    Attributes:
        position: place of the rank in its pipeline: "first", "middle", "last" or "only".
        plan: the plan whose step is asked for.
        gloo: whether collectives are gloo's (a CPU) or nccl's.
    """

    position: str
    rank: int
    stages: tuple[int, ...]
    plan: Plan
    spec: ModelSpec
    gloo: bool


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most live bytes of one phase of the step, and where."""

    phase: str
    live_bytes: int
    where: str


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The exact memory of one rank of a layout.

    Attributes:
        memory: live bytes by category at the peak; logits are among the activations.
        moment: where in the step the peak is, in words.
        moments: the highest moment of each phase.
        rest_bytes: what rests between steps, by category; "offloaded" is not on the device.
        method: "whole step", or what it was composed of.
    """

    position: str
    rank: int
    stages: tuple[int, ...]
    memory: MemoryBytes
    moment: str
    moments: tuple[Moment, ...]
    rest_bytes: Mapping[str, int]
    method: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "position": self.position,
            "rank": self.rank,
            "stages": list(self.stages),
            "peak_memory_bytes": self.memory.total,
            "memory_bytes": self.memory.as_dict(),
            "moment": self.moment,
            "moments": [
                {"phase": m.phase, "live_bytes": m.live_bytes, "where": m.where} for m in self.moments
            ],
            "rest_bytes": dict(self.rest_bytes),
            "method": self.method,
        }


def rank_memory(task: RankTask, trace: Callable[[Plan, ModelSpec], Trace]) -> RankMemory:
    """Return the exact memory of ``task``; ``trace`` plays a plan's step on its rank.

    Raises:
        MeshwrightError: what the runtime refuses.
    """
    grid = _grid(task)
    layout, batch = task.plan.layout, task.plan.batch
    size = (layout.cut_layers[task.stages[0]], batch.accumulation)
    why_not = ""
    if len(grid.corners()) > 1:
        traces: dict[Size, Trace] = {}
        for at in (*grid.corners(), *grid.checks()):
            traces[at] = trace(*_plan_of(task, at))
        why_not = disagreement(grid, traces)
        if not why_not:
            return _summary(task, compose(grid, traces, size), _method(grid, size))
    whole = trace(task.plan, task.spec)
    return _summary(task, whole, "whole step" + (f" ({why_not})" if why_not else ""))


def _grid(task: RankTask) -> Grid:
    """Return the sizes to play: small ones where blocks (or micro-batches) are alike, else the plan's own."""
    layout = task.plan.layout
    held = {layout.cut_layers[stage] for stage in task.stages}
    alike = len(held) == 1 and uniform(task.spec, task.plan.frozen)
    blocks = axis(layout.cut_layers[task.stages[0]], FEWEST_BLOCKS, 1, alike=alike)
    return Grid(blocks, _micro_batches(layout, task.plan.batch.accumulation))


def _micro_batches(layout: Layout, m: int) -> Axis:
    """Return the micro-batches of the steps to play; where stages take turns ``m`` itself if three are more work."""
    p, named = layout.pp, not layout.schedule.startswith("@")
    if p == 1:
        return axis(m, FEWEST_MICRO_BATCHES, 1, alike=True)
    if layout.chunks == 1:
        return axis(m, FEWEST_IN_PIPELINE * p, 1, alike=named)
    if layout.schedule in V_SHAPED:
        found = axis(m, FEWEST_IN_V * p, 1, alike=named)
    else:
        found = axis(m, FEWEST_BY_TURNS * p, p, alike=named, parts=FEWEST_BY_TURNS)
    return found if sum(found.sizes) < m else Axis((m,))


def _plan_of(task: RankTask, size: Size) -> tuple[Plan, ModelSpec]:
    """Return the plan and model of a step with ``size[0]`` blocks in every stage and ``size[1]`` micro-batches."""
    plan, layout = task.plan, task.plan.layout
    spec = task.spec
    if size[0] != layout.cut_layers[task.stages[0]]:
        spec = reduced(spec, size[0] * layout.num_stages)
        layout = layout.with_cut((size[0],) * layout.num_stages)
    sequences = size[1] * layout.dp * layout.micro_batch
    made = make_plan(spec, layout, sequences, plan.batch.seq_len, plan.model_path, frozen=plan.frozen)
    return made, spec


def _method(grid: Grid, size: Size) -> str:
    parts: list[str] = []
    for axis_, whole, what in (
        (grid.blocks, size[0], "blocks a stage"),
        (grid.micro_batches, size[1], "micro-batches"),
    ):
        sizes = axis_.sizes
        if len(sizes) > 1:
            parts.append(f"{whole} {what} from {sizes[0]} and {sizes[1]}, {sizes[2]} on the line")
    return "composed: " + "; ".join(parts)


def _summary(task: RankTask, trace: Trace, method: str) -> RankMemory:
    layout = task.plan.layout
    starts = [sum(layout.cut_layers[:stage]) for stage in range(layout.num_stages)]

    def text(place: Any) -> str:
        first = starts[place.stage] if place.stage >= 0 else 0
        return place.text(trace.micro_batches, first, layout.num_stages)

    moments: list[Moment] = []
    for phase in PHASES:
        found = [(s.total, s.order, p) for p, s in trace.segments.items() if p.phase == phase]
        if found:
            total, _, place = max(found, key=lambda f: f[:2])
            moments.append(Moment(phase=phase, live_bytes=total, where=text(place)))
    place, segment = trace.peak()
    return RankMemory(
        position=task.position,
        rank=task.rank,
        stages=task.stages,
        memory=memory_of(segment.live_bytes),
        moment=text(place),
        moments=tuple(moments),
        rest_bytes=trace.rest_bytes,
        method=method,
    )
