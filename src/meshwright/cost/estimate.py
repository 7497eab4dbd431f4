"""One layout's answer as the command line prints it: the ITEM of ``plan --json`` and ``estimate --json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.base.errors import Kind, MeshwrightError, Problem, problem
from meshwright.base.records import Prediction
from meshwright.base.units import format_bytes
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.host import assumed_rates, host_bytes, host_seconds
from meshwright.cost.predict import fits, predict
from meshwright.cost.reason import binding, memory_sentence, time_sentence
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.cut import resolve
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.schedule.generate import GENERATORS, generate
from meshwright.schedule.text import parse_schedule


def can_price(layout: Layout, schedule_text: str = "") -> bool:
    """Return whether the cost model knows the layout's schedule: one with a generator, or given rows."""
    return bool(schedule_text) or layout.schedule in GENERATORS


def item(plan: Plan) -> dict[str, Any]:
    """Return the ITEM of a plan: layout, world_size, predicted, hidden_s, why, binds."""
    return _item(plan.layout, plan.prediction, plan.why, plan.binds)


def _almost_full(prediction: Prediction, cluster: ClusterSpec) -> list[Problem]:
    capacity = cluster.device.memory.value
    if fits(prediction) or prediction.peak_memory_bytes > capacity:
        return []
    return [
        problem(
            "W411",
            where=f"device {cluster.device.name}",
            found=f"the peak is {format_bytes(prediction.peak_memory_bytes)} of {format_bytes(capacity)}: "
            f"it runs out of memory with a probability of {100 * prediction.oom_probability:.0f} %",
        )
    ]


def _item(layout: Layout, prediction: Prediction | None, why: Sequence[str], binds: str) -> dict[str, Any]:
    predicted = None if prediction is None else prediction.as_dict()
    return {
        "layout": layout.as_dict(),
        "layout_text": layout.text(),
        "world_size": layout.world_size,
        "predicted": predicted,
        "hidden_s": None if prediction is None else dict(prediction.hidden_s),
        "why": list(why),
        "binds": binds,
    }


def estimate(
    spec: ModelSpec,
    layout: Layout,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    frozen: Sequence[str] = (),
    schedule_text: str = "",
) -> dict[str, Any]:
    """Return one ITEM with ``legal``, ``problems``, ``fits``, ``ranks``, ``host_bytes`` and ``host_seconds``.

    A layout that breaks a rule of arithmetic has ``predicted: null``; one that only is not built yet is priced, and
    its problem says what runs instead. ``schedule_text`` holds the rows of a schedule that was read from a file.

    Raises:
        MeshwrightError: E405 when a figure that the prediction needs is not known, E408 above the peak.
    """
    problems: list[Problem] = []
    batch = None
    try:
        batch = derive_batch(layout, global_batch, seq_len)
    except MeshwrightError as error:
        problems += error.problems
    problems += check(spec, layout, batch, cluster)
    errors = [p for p in problems if p.severity == "error"]
    prediction: Prediction | None = None
    why: list[str] = []
    host: dict[str, float] = {}
    beside: dict[str, float] = {}
    binds = ""
    if batch is not None and all(p.kind is Kind.CODE for p in errors) and can_price(layout, schedule_text):
        resolved = resolve(spec, layout, seq_len)
        if schedule_text:
            schedule = parse_schedule(schedule_text, layout.schedule)
        else:
            schedule = generate(layout.schedule, layout.pp, batch.accumulation, layout.chunks)
        layout = resolved
        prediction = predict(spec, layout, batch, schedule, cluster, frozen)
        why = [time_sentence(prediction), memory_sentence(prediction, cluster)]
        binds = binding(prediction, layout, cluster)
        host = host_bytes(spec, layout, batch, cluster, prediction)
        beside = host_seconds(spec, layout, batch, cluster, prediction, schedule.stage_ranks, frozen)
        problems += _almost_full(prediction, cluster)
    return _item(layout, prediction, why, binds) | {
        "legal": not errors,
        "problems": [p.as_dict() for p in problems],
        "fits": prediction is not None and fits(prediction),
        "ranks": [] if prediction is None else [r.as_dict() for r in prediction.ranks],
        "host_bytes": host,
        "host_seconds": beside,
        "host_assumptions": assumed_rates(cluster) if beside else [],
    }
