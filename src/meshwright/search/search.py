"""Every legal layout priced at once, the best priced exactly and explained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.base.records import Prediction
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.fast import Columns, columns
from meshwright.cost.offload import is_away
from meshwright.cost.pieces import STATE_BYTES, Pricer, make_pricer
from meshwright.cost.predict import OOM_GATE, fits, oom_probability, predict_with
from meshwright.cost.reason import binding, memory_sentence, time_sentence
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import caps_logits, check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout, written_keys
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.schedule.generate import generate
from meshwright.search.reasons import change_that_fits, neighbours
from meshwright.search.space import Space, enumerate_layouts

OBJECTIVES: Final = ("time", "memory", "cost")
EXACT_PER_PLAN: Final = 3
"""Layouts priced exactly for each plan that is returned."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        plans: those that fit, best first.
        misses: when nothing fits, the nearest ones, whose first sentence says the cheapest change that would fit.
        searched: layouts that were priced.
        bounded: layouts left out because their model state alone exceeds the memory.
        legal: layouts that break no rule.
        fits: priced layouts that fit.
        seconds: what the search took.
    """

    plans: tuple[Plan, ...]
    misses: tuple[Plan, ...]
    searched: int
    bounded: int
    legal: int
    fits: int
    seconds: float


def search(
    spec: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    fix: str = "",
    objective: str = "time",
    precision: str | None = None,
    top: int = 5,
    model_path: str = "",
    include_unbuilt: bool = False,
) -> SearchResult:
    """Return the best plans for a model on a cluster.

    Args:
        spec: the model.
        cluster: where it runs; every device gets one rank.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step.
        fix: layout text whose keys are pinned.
        objective: "time" (fastest), "memory" (lowest peak), "cost" (cheapest step; needs a price).
        precision: of every layout; by default bf16, or fp16 on a device without bf16.
        top: how many plans.
        model_path: what the plans say the model was read from.
        include_unbuilt: also price what the runtime cannot run so far.

    Raises:
        MeshwrightError: E405 a figure is not known, E409 nothing is legal, E410 a request that cannot be, E11x for
            a ``fix`` that cannot be read.
    """
    started = time.perf_counter()
    refuse(_check_request(cluster, seq_len, global_batch, objective, top))
    pins = _pins(fix)
    chosen = str(pins.get("precision") or precision or default_precision(cluster))
    space = Space(
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=chosen,
        pins=pins,
        include_unbuilt=include_unbuilt,
    )
    layouts, batches, refused = _legal(spec, cluster, seq_len, space)
    if not layouts:
        raise MeshwrightError([_nothing_legal(cluster, global_batch, fix), *refused])
    pricer = make_pricer(spec, cluster, seq_len, chosen)
    kept = _within_bound(spec, cluster, layouts)
    bounded = len(layouts) - len(kept)
    if not kept:  # the nearest misses are still wanted
        kept, bounded = list(range(len(layouts))), 0
    priced = columns(pricer, [layouts[i] for i in kept], [batches[i] for i in kept])
    capacity = cluster.device.memory.value
    fitting = np.array([oom_probability(float(p), capacity) <= OOM_GATE for p in priced.peak])
    if not fitting.any() and "loss" not in pins and not caps_logits(spec):
        found = search(
            spec,
            cluster,
            seq_len,
            global_batch,
            ",".join(x for x in (fix.strip(), "loss=chunked") if x),
            objective,
            precision,
            top,
            model_path,
            include_unbuilt,
        )
        if found.plans:  # the loss alone decides it
            return replace(
                found,
                searched=found.searched + len(kept),
                bounded=found.bounded + bounded,
                legal=found.legal + len(layouts),
                seconds=time.perf_counter() - started,
            )
    batches = [batches[i] for i in kept]
    context = _Context(spec, cluster, pricer, priced, batches, fitting, objective, model_path)
    plans: list[Plan] = []
    if fitting.any():
        plans = context.best(top)
    misses = [] if plans else context.misses(top)
    return SearchResult(
        plans=tuple(plans),
        misses=tuple(misses),
        searched=len(kept),
        bounded=bounded,
        legal=len(layouts),
        fits=int(fitting.sum()),
        seconds=time.perf_counter() - started,
    )


def default_precision(cluster: ClusterSpec) -> str:
    """Return bf16, or what the device has instead."""
    known = cluster.device.matmul_flops
    return next((p for p in ("bf16", "fp16", "fp32") if p in known), "bf16")


def _check_request(
    cluster: ClusterSpec, seq_len: int, global_batch: int, objective: str, top: int
) -> list[Problem]:
    problems = [
        problem("E410", where=name, found=f"{value}", needs=f"{name} >= 1", do=f"{name} = 1 or more")
        for name, value in (("seq_len", seq_len), ("global_batch", global_batch), ("top", top))
        if value < 1
    ]
    if objective not in OBJECTIVES:
        problems.append(problem("E410", where="objective", found=f"{objective!r}", do=" | ".join(OBJECTIVES)))
    if objective == "cost" and cluster.price_per_device_hour is None:
        problems.append(
            problem(
                "E410",
                where="objective",
                found=f"cost, but no price is known for {cluster.name}",
                do="add price_per_device_hour to the cluster file, or use objective time",
            )
        )
    return problems


def _pins(fix: str) -> dict[str, Any]:
    if not fix.strip():
        return {}
    parsed = parse_layout(fix, "fix")
    return {key: getattr(parsed, key) for key in written_keys(fix)}


def _legal(
    spec: ModelSpec, cluster: ClusterSpec, seq_len: int, space: Space
) -> tuple[list[Layout], list[Batch], list[Problem]]:
    """Return the layouts that break no rule, with their batches; and what was wrong with the first that does."""
    layouts: list[Layout] = []
    batches: list[Batch] = []
    refused: list[Problem] = []
    for layout in enumerate_layouts(spec, space):
        batch = derive_batch(layout, space.global_batch, seq_len)
        errors = [
            p
            for p in check(spec, layout, batch, cluster, for_run=not space.include_unbuilt)
            if p.severity == "error"
        ]
        if errors:
            refused = refused or errors
            continue
        layouts.append(layout)
        batches.append(batch)
    return layouts, batches, refused


def _nothing_legal(cluster: ClusterSpec, global_batch: int, fix: str) -> Problem:
    pinned = f" with {fix}" if fix else ""
    return problem(
        "E409",
        where="plan",
        found=f"no layout of {cluster.num_gpus} GPUs{pinned} is legal for a global batch of {global_batch}",
    )


def _within_bound(spec: ModelSpec, cluster: ClusterSpec, layouts: Sequence[Layout]) -> list[int]:
    """Return the indices of layouts whose model state alone could fit.

    The bound is admissible: the largest stage holds at least the mean, and at least a third of that is sharded away.
    """
    capacity = cluster.device.memory.value
    trained = spec.num_parameters
    if spec.adapter is not None:
        trained = sum(t.numel for t in spec.tensors() if t.role == "adapter")
    state = np.array(
        [
            (spec.num_parameters + (0.0 if is_away(x) else 2.0 * trained))
            * STATE_BYTES[x.precision]
            / (x.tp * x.pp * x.ep * (x.shard if x.zero else 1))
            for x in layouts
        ]
    )
    return [int(i) for i in np.flatnonzero(state <= capacity)]


@dataclass(frozen=True)
class _Context:
    spec: ModelSpec
    cluster: ClusterSpec
    pricer: Pricer
    priced: Columns
    batches: Sequence[Batch]
    fitting: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    objective: str
    model_path: str

    def best(self, top: int) -> list[Plan]:
        """Return the best plans that fit, the best few priced exactly."""
        score = self.priced.peak if self.objective == "memory" else self.priced.step
        order = np.lexsort((self.priced.peak, np.where(self.fitting, score, np.inf)))
        found: list[tuple[float, int, Prediction]] = []
        for i in order[: top * EXACT_PER_PLAN + 4]:
            index = int(i)
            if not self.fitting[index]:
                break
            prediction = self.exact(index)
            if fits(prediction):
                key = prediction.peak_memory_bytes if self.objective == "memory" else prediction.step_time_s
                found.append((float(key), index, prediction))
        found.sort(key=lambda f: (f[0], f[2].peak_memory_bytes, f[1]))
        return [self.plan(index, prediction) for _, index, prediction in found[:top]]

    def misses(self, top: int) -> list[Plan]:
        """Return the layouts nearest to fitting, each with the cheapest change that would make it fit."""
        order = np.lexsort((self.priced.step, self.priced.peak))
        out: list[Plan] = []
        for i in order[:top]:
            index = int(i)
            prediction = self.exact(index)
            change = change_that_fits(self.pricer, self.layout(index), self.batches[index])
            plan = self.plan(index, prediction)
            out.append(replace(plan, why=(change, *plan.why), binds="memory"))
        return out

    def layout(self, index: int) -> Layout:
        return self.priced.layouts[index].with_cut(self.priced.cuts[index])

    def exact(self, index: int) -> Prediction:
        layout, batch = self.layout(index), self.batches[index]
        schedule = generate(layout.schedule, layout.pp, batch.accumulation)
        return predict_with(self.pricer, layout, batch, schedule)

    def plan(self, index: int, prediction: Prediction) -> Plan:
        layout, batch = self.layout(index), self.batches[index]
        beside = neighbours(self.priced, self.fitting, index, self.cluster)
        why = [time_sentence(prediction), memory_sentence(prediction, self.cluster), *beside.sentences]
        return Plan(
            model_name=self.spec.name,
            model_path=self.model_path or self.spec.source or self.spec.name,
            model_config=dict(self.spec.config),
            layout=layout,
            batch=batch,
            schedule_text=generate(layout.schedule, layout.pp, batch.accumulation).text(),
            cluster=self.cluster.name,
            prediction=prediction,
            why=tuple(why),
            binds=binding(prediction, layout, self.cluster, faster_does_not_fit=beside.faster_does_not_fit),
        )
