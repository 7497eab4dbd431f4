"""``estimate --exact``: the worst rank of each class of stages played, and its memory beside the closed form's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from meshwright.base.errors import Problem, problem, refuse
from meshwright.base.records import MemoryBytes
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.predict import OOM_GATE, oom_probability
from meshwright.exact.children import play_ranks
from meshwright.exact.rank import RankTask
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import rank_of
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.schedule.text import parse_schedule

OFFLOADS: Final = ("none", "optimizer", "optimizer-nvme")
"""Values of ``offload`` that a played rank follows."""

COMPARED: Final = ("parameters", "gradients", "optimizer", "activations", "working")
"""Categories of the comparison; the closed form's logits are among the activations, as a counter sees them."""

ASSUMPTIONS: Final = (
    "live tensor bytes of the CPU's operations; memory inside kernels and the allocator's rounding are not seen",
)


def play_problems(layout: Layout) -> list[Problem]:
    """Return E467 for each value of ``layout`` that no rank can play."""
    problems: list[Problem] = []
    if layout.compile != "off":
        problems.append(
            problem("E467", where="layout.compile", found=f"compile={layout.compile}", do="compile=off")
        )
    if layout.offload not in OFFLOADS:
        problems.append(
            problem(
                "E467",
                where="layout.offload",
                found=f"offload={layout.offload}",
                do="offload=" + " | ".join(OFFLOADS),
            )
        )
    return problems


def exact_answer(
    plan: Plan, spec: ModelSpec, cluster: ClusterSpec, closed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return ``exact``, ``closed_form`` and ``difference`` of a plan, and whether it ``fits``.

    ``closed``: the closed form's ``ranks`` (see ``cost.estimate``), or none where it does not know the model.

    Raises:
        MeshwrightError: E467 for what cannot be played, E470, E471, E472, and what the runtime refuses.
    """
    refuse(play_problems(plan.layout))
    begin = time.monotonic()
    by_stage = {int(r["stage"]): _memory(r["memory_bytes"]) for r in closed}
    tasks = _tasks(plan, spec, by_stage, gloo=cluster.device.is_cpu)
    ranks = play_ranks(tasks)
    places = [_pipeline_rank(plan.layout, rank.rank) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda k: ranks[k].memory.total)
    outside = max((m.outside_allocator for m in by_stage.values()), default=0)
    capacity = cluster.device.memory.value
    probability = oom_probability(ranks[worst].memory.total + outside, capacity)
    exact = _head(ranks[worst].memory) | {
        "moment": ranks[worst].moment,
        "outside_allocator_bytes": outside,
        "oom_probability": probability,
        "fits": probability <= OOM_GATE,
        "seconds": time.monotonic() - begin,
        "collectives": "gloo" if cluster.device.is_cpu else "nccl",
        "assumptions": [*ASSUMPTIONS, *_routing(spec)],
        "ranks": [rank.as_dict() for rank in ranks],
    }
    if not by_stage:
        return {"exact": exact, "closed_form": None, "difference": None, "fits": exact["fits"]}
    pairs = [(rank, by_stage[place]) for rank, place in zip(ranks, places, strict=True)]
    closed_form = _head(pairs[worst][1]) | {
        "ranks": [{"rank": rank.rank, "position": rank.position, **_head(memory)} for rank, memory in pairs]
    }
    difference = _difference(ranks[worst].memory, pairs[worst][1]) | {
        "ranks": [
            {"rank": rank.rank, "position": rank.position, **_difference(rank.memory, memory)}
            for rank, memory in pairs
        ]
    }
    return {"exact": exact, "closed_form": closed_form, "difference": difference, "fits": exact["fits"]}


def _tasks(plan: Plan, spec: ModelSpec, by_stage: Mapping[int, MemoryBytes], *, gloo: bool) -> list[RankTask]:
    """Return the worst rank of each class: the first and last ranks of a pipeline, and one of those between.

    On every other axis the first coordinate is the worst: it has the larger part of what does not divide, and counts.
    """
    layout = plan.layout
    places = {"only": 0} if layout.pp == 1 else {"first": 0, "last": layout.pp - 1}
    if layout.pp > 2:
        between = range(1, layout.pp - 1)
        places["middle"] = max(between, key=lambda p: (by_stage[p].total if p in by_stage else 0, -p))
    homes = parse_schedule(plan.schedule_text, name=layout.schedule).stage_ranks
    return [
        RankTask(
            position=position,
            rank=rank_of(layout, {"pp": place}),
            stages=tuple(stage for stage, home in enumerate(homes) if home == place),
            plan=plan,
            spec=spec,
            gloo=gloo,
        )
        for position, place in sorted(places.items(), key=lambda item: item[1])
    ]


def _pipeline_rank(layout: Layout, rank: int) -> int:
    from meshwright.layout.ranks import coordinates

    return coordinates(layout, rank)["pp"]


def _routing(spec: ModelSpec) -> tuple[str, ...]:
    if spec.moe is None:
        return ()
    return ("routing is balanced: every expert gets as many rows as any other, on every rank",)


def _memory(table: Mapping[str, int]) -> MemoryBytes:
    return MemoryBytes(**table)


def _head(memory: MemoryBytes) -> dict[str, Any]:
    return {"peak_memory_bytes": memory.total, "memory_bytes": memory.as_dict()}


def _difference(exact: MemoryBytes, closed: MemoryBytes) -> dict[str, Any]:
    """Return exact - closed form in bytes, and in percent of the exact peak; what no allocator holds is left out."""
    found = {name: _counted(exact, name) - _counted(closed, name) for name in COMPARED}
    peak = exact.total - (closed.total - closed.outside_allocator)
    total = max(1, exact.total)
    return {
        "peak_memory_bytes": peak,
        "memory_bytes": found,
        "peak_pct": 100.0 * peak / total,
        "memory_pct_of_peak": {name: 100.0 * size / total for name, size in found.items()},
    }


def _counted(memory: MemoryBytes, category: str) -> int:
    logits = memory.logits if category == "activations" else 0
    return getattr(memory, category) + logits
