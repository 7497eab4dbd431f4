"""Every legal layout priced or left out by a bound, the best played on the clock and explained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshwright.base.collector import uncollected
from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.base.records import Prediction
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.fast import columns
from meshwright.cost.offloaded import HOST_BYTES, away_bytes
from meshwright.cost.pieces import make_pricer
from meshwright.cost.predict import fits, predict_with
from meshwright.cost.reason import binding, memory_sentence, time_sentence
from meshwright.cost.replay import part_of
from meshwright.cost.tables import Tables, make_tables
from meshwright.layout.batch import MOST_SEQUENCES, MOST_TOKENS, Batch, derive_batch
from meshwright.layout.check import check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout, written_keys
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.schedule.actions import Schedule
from meshwright.schedule.generate import generate
from meshwright.search.best import (
    OBJECTIVES,
    Best,
    Candidate,
    Surveyed,
    fit_limit,
    nearest_misses,
    run,
    survey,
)
from meshwright.search.nothing import nothing_legal
from meshwright.search.reasons import Neighbours, change_that_fits, neighbours
from meshwright.search.space import Space, all_blocks

HOMES: Final = (("optimizer", "parameters"), ("optimizer-nvme", "parameters-nvme"))
"""Offload that is tried when nothing fits without it: host memory, then files, which free no more of a device."""
EXACT_MORE: Final = 4
"""Layouts predicted one by one beyond those that are returned."""
MOST_PLANS: Final = 1000
"""Plans that are returned at most; beyond the first few their reasons are their own time and memory only."""
WITH_NEIGHBOURS: Final = 10
LONG_STEP: Final = 4096
"""Actions of a step (stages times micro-batches) from which only the first plan says what its neighbours cost."""
MOST_GPUS: Final = 2**20
"""Devices up to which layouts are enumerated."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        plans: those that fit, best first.
        misses: when nothing fits, the nearest ones, whose first sentence says the cheapest change that would fit.
        front: the Pareto set over step time and peak memory, fastest first, when it was asked for.
        searched: layouts that were priced, with every term.
        bounded: layouts left out because a bound shows that they cannot be among the best, or cannot fit.
        legal: layouts that break no rule.
        fits: priced layouts that fit.
        played: layouts whose schedule was played on the clock.
        seconds: what the search took.
    """

    plans: tuple[Plan, ...]
    misses: tuple[Plan, ...]
    searched: int
    bounded: int
    legal: int
    fits: int
    seconds: float
    played: int = 0
    front: tuple[Plan, ...] = ()


@uncollected()
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
    pareto: bool = False,
) -> SearchResult:
    """Return the best plans for a model on a cluster.

    Args:
        spec: the model.
        cluster: where it runs; every device gets one rank.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step.
        fix: layout text whose keys are pinned.
        objective: "time" (fastest), "memory" (lowest peak), "cost" (cheapest step; needs a price).
        precision: of every layout; by default bf16, or what the device has instead (on a CPU the faster one). With
            "any" each that the device has is tried, fp8 too, whose plans can be priced and not run.
        top: how many plans.
        model_path: what the plans say the model was read from.
        include_unbuilt: also price what the runtime cannot run so far.
        pareto: also return every layout that none is both faster and smaller than.

    Raises:
        MeshwrightError: E405 a figure is not known, E409 nothing is legal, E410 a request that cannot be, E11x for
            a ``fix`` that cannot be read.
    """
    started = time.perf_counter()
    refuse(_check_request(cluster, seq_len, global_batch, objective, top))
    pins = _pins(fix)
    chosen = pins.get("precision") or precision
    open_ = (
        precisions(cluster, any_=True)
        if chosen == "any"
        else (str(chosen),)
        if chosen
        else precisions(cluster)
    )
    tables: dict[str, Tables] = {}
    counts = [0, 0, 0, 0]

    def one(homes: tuple[str, ...]) -> tuple[_Context, list[Surveyed]]:
        """Price every legal layout whose state rests in one of ``homes`` (empty: as pinned)."""
        best = Best(
            objective=objective,
            wanted=top + EXACT_MORE,
            limit=fit_limit(cluster.device.memory.value),
            pareto=pareto,
        )
        surveyed: list[Surveyed] = []
        for name in open_:
            for home in homes or ("",):
                wanted = pins | {"offload": home} if home else pins
                space = Space(
                    num_gpus=cluster.num_gpus,
                    gpus_per_node=cluster.gpus_per_node,
                    global_batch=global_batch,
                    seq_len=seq_len,
                    precision=name,
                    pins=wanted,
                    include_unbuilt=include_unbuilt,
                )
                blocks = list(all_blocks(spec, space))
                if blocks:
                    if name not in tables:
                        tables[name] = make_tables(make_pricer(spec, cluster, seq_len, name))
                    surveyed += [survey(tables[name], b) for b in blocks]
                elif name == open_[-1] and not surveyed and not homes:
                    raise MeshwrightError(nothing_legal(spec, cluster, space, fix))
        run(surveyed, best)
        legal = sum(int(s.blocks.count.sum()) for s in surveyed)
        for i, n in enumerate((legal, best.searched, best.fitting, best.played)):
            counts[i] += n
        context = _Context(
            spec, cluster, tables, best, seq_len, global_batch, model_path, include_unbuilt, pins
        )
        return context, surveyed

    context, surveyed = one(())
    plans = context.best(top)
    misses: list[Plan] = []
    for homes in HOMES if not plans and "offload" not in pins else ():
        away, _ = one(homes)
        plans = [replace(p, why=(away.price_of_offload(p), *p.why)) for p in away.best(top)]
        if plans:
            context = away
            break
    if not plans:
        nearest_misses(surveyed, context.found)
        misses = context.misses(top)
    front = context.front() if pareto else []
    legal, searched, fitting, played = counts
    return SearchResult(
        plans=tuple(plans),
        misses=tuple(misses),
        searched=searched,
        bounded=legal - searched,
        legal=legal,
        fits=fitting,
        seconds=time.perf_counter() - started,
        played=played,
        front=tuple(front),
    )


def default_precision(cluster: ClusterSpec) -> str:
    """Return bf16, or what the device has instead."""
    return precisions(cluster)[0]


def precisions(cluster: ClusterSpec, *, any_: bool = False) -> tuple[str, ...]:
    """Return the precisions that are tried when none is asked for, or with ``any_`` each that the device has.

    On a GPU that is one: bf16, or fp16 where there is no bf16, whose rates are above fp32's. On a CPU a 16-bit
    matmul can be slower than a 32-bit one, so both are priced.
    """
    known = cluster.device.matmul_flops
    if any_:
        return tuple(p for p in ("fp8", "bf16", "fp16", "fp32") if p in known) or ("bf16",)
    found = tuple(p for p in ("bf16", "fp16", "fp32") if p in known) or ("bf16",)
    return tuple(p for p in found if p != "fp16") or found if cluster.device.is_cpu else found[:1]


def _check_request(
    cluster: ClusterSpec, seq_len: int, global_batch: int, objective: str, top: int
) -> list[Problem]:
    sizes = (
        ("seq_len", seq_len, MOST_TOKENS),
        ("global_batch", global_batch, MOST_SEQUENCES),
        ("top", top, MOST_PLANS),
        ("gpus", cluster.num_gpus, MOST_GPUS),
    )
    problems = [
        problem(
            "E410",
            where=name,
            found=f"{value}",
            needs=f"{name} from 1 to {most}",
            do=f"{name} = {1 if value < 1 else most}, or the number that is meant",
        )
        for name, value, most in sizes
        if not 1 <= value <= most
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


@dataclass(frozen=True)
class _Context:
    spec: ModelSpec
    cluster: ClusterSpec
    tables: dict[str, Tables]
    found: Best
    seq_len: int
    global_batch: int
    model_path: str
    include_unbuilt: bool
    pins: dict[str, Any]
    schedules: dict[tuple[str, int, int, int], Schedule] = field(
        default_factory=dict[tuple[str, int, int, int], Schedule]
    )
    texts: dict[tuple[str, int, int, int], str] = field(default_factory=dict[tuple[str, int, int, int], str])

    def predicted(self, some: list[Candidate]) -> Iterator[tuple[Candidate, Prediction]]:
        """Yield candidates that ``layout.check`` finds legal, each with its prediction."""
        for c in some:
            layout, batch = self.layout(c)
            problems = check(self.spec, layout, batch, self.cluster, for_run=not self.include_unbuilt)
            # fp8 is only among them where it was asked for; it is priced, and what runs refuses it
            if not any(p.severity == "error" and p.code != "E291" for p in problems):
                pricer = self.tables[layout.precision].pricer
                yield c, predict_with(pricer, layout, batch, self.schedule(layout, batch))

    def schedule(self, layout: Layout, batch: Batch) -> Schedule:
        """Return as much of the layout's schedule as is played, generated once for all layouts that share it."""
        m = part_of(layout.schedule, layout.pp, layout.chunks, batch.accumulation)
        key = (layout.schedule, layout.pp, m, layout.chunks)
        if key not in self.schedules:
            self.schedules[key] = generate(*key)
        return self.schedules[key]

    def text(self, layout: Layout, batch: Batch) -> str:
        """Return the text of the layout's whole schedule, made once for all plans that share it."""
        key = (layout.schedule, layout.pp, batch.accumulation, layout.chunks)
        if key not in self.texts:
            short = self.schedule(layout, batch)
            whole = short if short.num_micro_batches == batch.accumulation else generate(*key)
            self.texts[key] = whole.text()
        return self.texts[key]

    def best(self, top: int) -> list[Plan]:
        """Return the best plans that fit, each predicted by itself."""
        exact: list[tuple[tuple[float, float], int, Candidate, Prediction]] = []
        for number, (c, p) in enumerate(self.predicted(self.found.found)):
            if fits(p) and self.has_host(*self.layout(c)):
                step, peak = p.step_time_s, float(p.peak_memory_bytes)
                exact.append(((peak, step) if self.found.by_memory else (step, peak), number, c, p))
            # a long step takes seconds to predict, and its played order differs by what is rounded away
            long = c.slot.num_stages * c.rows.accumulation(c.row) >= LONG_STEP
            if len(exact) >= top + (0 if long else EXACT_MORE):
                break
        exact.sort(key=lambda f: f[:2])
        return [
            self.plan(c, p, beside=i < WITH_NEIGHBOURS, first=i == 0)
            for i, (*_, c, p) in enumerate(exact[:top])
        ]

    def front(self) -> list[Plan]:
        """Return the Pareto set, fastest first: of the candidates, those that no prediction of another undercuts."""
        known = [(c, p) for c, p in self.predicted(self.found.front) if fits(p)]
        known.sort(key=lambda f: (f[1].step_time_s, f[1].peak_memory_bytes))
        out: list[Plan] = []
        least = float("inf")
        for c, p in known:
            if p.peak_memory_bytes < least:
                least = p.peak_memory_bytes
                out.append(self.plan(c, p, beside=False))
        return out

    def away(self, layout: Layout, batch: Batch) -> tuple[float, float]:
        """Return the bytes that a rank keeps in host memory and in files."""
        load = columns(self.tables[layout.precision].pricer, [layout], [batch]).load
        host, files = away_bytes(load, files=layout.offload.endswith("-nvme"))
        return float(host.max()) * layout.chunks, float(files.max()) * layout.chunks

    def has_host(self, layout: Layout, batch: Batch) -> bool:
        """Return whether host memory as it is assumed holds what is away, which a user who names offload knows."""
        if layout.offload == "none" or "offload" in self.pins:
            return True
        return self.away(layout, batch)[0] <= HOST_BYTES

    def price_of_offload(self, plan: Plan) -> str:
        """Return what a plan's offload costs, and what it asks of the host."""
        assert plan.prediction is not None
        layout, seconds = plan.layout, plan.prediction.time.offload
        host, files = self.away(layout, plan.batch)
        node = min(self.cluster.gpus_per_node, self.cluster.num_gpus)
        kept = f"{format_bytes(host)} in host memory ({format_bytes(node * host)} on a node)"
        if files:
            kept = (
                f"{format_bytes(files)} in files ({format_bytes(node * files)} on a node)"
                f"{f' and {kept}' if host else ''}"
            )
        return (
            f"Nothing fits without offload. offload={layout.offload} keeps of each rank {kept}; what the node has is "
            f"not known, {format_bytes(HOST_BYTES)} of host memory per device are assumed. It costs "
            f"{format_seconds(seconds)} a step, {100.0 * seconds / plan.prediction.step_time_s:.0f} % of it."
        )

    def misses(self, top: int) -> list[Plan]:
        """Return the layouts nearest to fitting, each with the cheapest change that would make it fit."""
        out: list[Plan] = []
        for c, p in self.predicted(self.found.smallest):
            layout, batch = self.layout(c)
            change = change_that_fits(self.tables[layout.precision].pricer, layout, batch)
            plan = self.plan(c, p)
            out.append(replace(plan, why=(change, *plan.why), binds="memory"))
            if len(out) == top:
                break
        return out

    def layout(self, c: Candidate) -> tuple[Layout, Batch]:
        layout = c.rows.layout(c.row).with_cut(c.slot.cut)
        return layout, derive_batch(layout, self.global_batch, self.seq_len)

    def plan(self, c: Candidate, prediction: Prediction, *, beside: bool = True, first: bool = True) -> Plan:
        layout, batch = self.layout(c)
        rivals = sorted(self.found.of_pp.values(), key=lambda o: o.seconds)
        others = [self.layout(o) for o in rivals if o.slot.pp != layout.pp]
        said = Neighbours((), faster_does_not_fit=False)
        if beside and (first or layout.num_stages * batch.accumulation < LONG_STEP):
            pricer = self.tables[layout.precision].pricer
            said = neighbours(pricer, layout, batch, prediction, [o for o, _ in others][:8])
        why = [time_sentence(prediction), memory_sentence(prediction, self.cluster), *said.sentences]
        return Plan(
            model_name=self.spec.name,
            model_path=self.model_path or self.spec.source or self.spec.name,
            model_config=dict(self.spec.config),
            layout=layout,
            batch=batch,
            schedule_text=self.text(layout, batch),
            cluster=self.cluster.name,
            prediction=prediction,
            why=tuple(why),
            binds=binding(prediction, layout, self.cluster, faster_does_not_fit=said.faster_does_not_fit),
        )
