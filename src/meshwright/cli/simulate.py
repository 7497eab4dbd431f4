"""``meshwright simulate``: one step on the clock, as figures, a drawing and a trace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cli.options import Json, MaybeGlobalBatch, MaybeLayout, MaybeSeqLen
from meshwright.cli.output import check_writable, finite, show_json, table, write_new_text
from meshwright.cli.target import plan_of

if TYPE_CHECKING:
    from meshwright.program.plan import Plan
    from meshwright.schedule.actions import Schedule
    from meshwright.schedule.clock import Clock

FORWARD_UNITS = 1.0
BACKWARD_UNITS = 2.0
"""Without a cluster: a forward takes 1 and a backward 2, the ratio of their matrix products."""


def simulate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="(plan.json | MODEL)", help="A plan, or a model with --layout.", show_default=False
        ),
    ],
    layout: MaybeLayout = None,
    seq_len: MaybeSeqLen = None,
    global_batch: MaybeGlobalBatch = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="CLUSTER", help="For times in seconds; without it, those of the plan."
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome/Perfetto trace (JSON).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play one step: makespan, bubble, memory over time, a drawing.

    Example: meshwright simulate llama-2-7b --layout "pp=4,dp=2" --global-batch 32 --cluster a100-40gb-x8
    """
    from meshwright.schedule.draw import draw_text
    from meshwright.schedule.text import parse_schedule

    if trace is not None:
        check_writable(trace, "--trace")
    plan = plan_of(target, layout, seq_len, global_batch)
    schedule = parse_schedule(plan.schedule_text, plan.layout.schedule)
    clock, priced = _clock(plan, schedule, cluster)
    result = _result(plan, clock, priced)
    if trace is not None:
        write_new_text(
            trace, json.dumps(finite(chrome_trace(clock, priced is not None)), allow_nan=False), "--trace"
        )
        result["trace"] = trace
    if as_json:
        show_json({**result, "drawing": draw_text(schedule, clock).splitlines()})
        return
    print(draw_text(schedule, clock))
    print(_text(result))
    if trace is not None:
        print(f"trace in {trace}: open it in ui.perfetto.dev or chrome://tracing")


def _clock(plan: Plan, schedule: Schedule, cluster: str | None) -> tuple[Clock, dict[str, Any] | None]:
    """Return the step on the clock, and the stages' memory where a cluster gives seconds."""
    from meshwright.schedule.clock import run_clock

    name = cluster or plan.cluster
    if not name:
        return run_clock(schedule, FORWARD_UNITS, BACKWARD_UNITS), None
    from meshwright.cluster.load import read_cluster

    try:
        machine = read_cluster(name, plan.world_size)
    except MeshwrightError:
        if cluster is not None:
            raise
        return run_clock(schedule, FORWARD_UNITS, BACKWARD_UNITS), None  # the plan's cluster file is not here
    from meshwright.cost.fast import columns
    from meshwright.cost.pieces import make_pricer
    from meshwright.cost.predict import check_world, rank_memory
    from meshwright.program.plan import plan_spec

    check_world(plan.layout, machine)
    spec = plan_spec(plan)
    pricer = make_pricer(spec, machine, plan.batch.seq_len, plan.layout.precision, plan.frozen)
    costs = columns(pricer, [plan.layout], [plan.batch])
    stages = schedule.num_stages
    forward = [float(x) for x in costs.forward[0, :stages]]
    backward = [float(x) for x in costs.backward[0, :stages]]
    weight = [float(x) for x in costs.weight[0, :stages]]
    clock = run_clock(schedule, forward, backward, float(costs.send[0]), weight)
    memory = [m.as_dict() for m in rank_memory(costs, schedule)]
    return clock, {
        "cluster": machine.name,
        "memory_bytes": memory,
        "capacity_bytes": machine.device.memory.value,
    }


def _result(plan: Plan, clock: Clock, priced: dict[str, Any] | None) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    for rank, busy in enumerate(clock.busy_s):
        row: dict[str, Any] = {
            "pipeline_rank": rank,
            ("busy_s" if priced else "busy_forwards"): busy,
            "bubble_share_of_total": clock.bubble_shares[rank],
            "peak_in_flight": clock.peak_in_flight[rank],
            "in_flight": [list(point) for point in clock.in_flight[rank]],
        }
        if priced:
            memory = priced["memory_bytes"][rank]
            row["peak_memory_bytes"] = sum(memory.values())
            row["memory_bytes"] = memory
            row["memory_curve_bytes"] = memory_curve(
                memory, clock.in_flight[rank], clock.peak_in_flight[rank]
            )
        ranks.append(row)
    unit = "seconds" if priced else "forwards of one stage (no cluster is named; a backward takes 2)"
    return {
        "plan_hash": plan.hash,
        "cluster": priced["cluster"] if priced else None,
        "time_unit": unit,
        ("makespan_s" if priced else "makespan_forwards"): clock.makespan_s,
        "bubble_share_of_total": clock.bubble_share_of_total,
        "bubble_share_of_ideal": clock.bubble_share_of_ideal,
        "ranks": ranks,
    }


def memory_curve(memory: dict[str, int], in_flight: Any, peak: int) -> list[list[float]]:
    """Return (time, bytes): what always rests on the rank, plus activations by held micro-batches.

    Logits and working memory come and go within one action and are not in the curve.
    """
    resting = sum(memory[name] for name in ("parameters", "gradients", "optimizer", "outside_allocator"))
    each = memory["activations"] / peak if peak else 0.0
    return [[time, resting + held * each] for time, held in in_flight]


def chrome_trace(clock: Clock, seconds: bool) -> dict[str, Any]:
    """Return the step as a Chrome trace: one thread for each pipeline rank; held micro-batches as counters.

    Times are microseconds; without a cluster one forward is drawn as a millisecond.
    """
    scale = 1e6 if seconds else 1e3
    events: list[dict[str, Any]] = []
    for rank, points in enumerate(clock.in_flight):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        events += [
            {
                "name": f"in flight on rank {rank}",
                "ph": "C",
                "pid": 0,
                "ts": time * scale,
                "args": {"micro-batches": held},
            }
            for time, held in points
        ]
    events += [
        {
            "name": str(span.action),
            "cat": span.action.kind.name.lower(),
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": span.start_s * scale,
            "dur": (span.end_s - span.start_s) * scale,
            "args": {"stage": span.action.stage, "micro_batch": span.action.micro_batch},
        }
        for span in clock.spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _text(result: dict[str, Any]) -> str:
    priced = result["cluster"] is not None
    whole = format_seconds(result["makespan_s"]) if priced else f"{result['makespan_forwards']:g} forwards"
    lines = [
        f"makespan {whole}, without data-parallel reduction and optimizer"
        + (f", on {result['cluster']}" if priced else " (no cluster: a forward takes 1, a backward 2)")
    ]
    header = ["pipeline rank", "busy", "bubble % of total", "peak in flight"]
    rows: list[list[str]] = []
    for row in result["ranks"]:
        busy = format_seconds(row["busy_s"]) if priced else f"{row['busy_forwards']:g}"
        cells = [
            str(row["pipeline_rank"]),
            busy,
            f"{100 * row['bubble_share_of_total']:.1f}",
            str(row["peak_in_flight"]),
        ]
        rows.append([*cells, format_bytes(row["peak_memory_bytes"])] if priced else cells)
    lines.append(table([*header, "peak memory"] if priced else header, rows, right=range(5)))
    return "\n".join(lines)
