"""One optimizer step on the clock: the pipeline's schedule as a time chart, or one rank's step in order.

Both are drawn from the rows that run: the plan's schedule text through the schedule clock, and the step program
derived from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.units import format_bytes, format_seconds
from meshwright.layout.ranks import coordinates
from meshwright.model.spec import ModelSpec
from meshwright.program.derive import derive
from meshwright.program.plan import Plan
from meshwright.program.step import Collective, Compute, StepProgram
from meshwright.report.blocks import Block, Grid, Note, Picture
from meshwright.report.derived import Derived
from meshwright.report.source import Source, number, table
from meshwright.report.svg import Format, Span, gantt, legend, plain
from meshwright.report.timing import second_unit
from meshwright.schedule.actions import ActionKind, Schedule
from meshwright.schedule.clock import Clock, run_clock

MAX_DRAWN = 4000
"""Boxes of one picture; a longer step is drawn up to the micro-batch that fits."""

_KINDS = {
    ActionKind.FORWARD: ("s0", "F: forward of a micro-batch"),
    ActionKind.BACKWARD: ("s1", "B: backward of a micro-batch"),
    ActionKind.INPUT_GRAD: ("s1", "I: backward, gradients of inputs"),
    ActionKind.WEIGHT_GRAD: ("s2", "W: backward, gradients of weights"),
}


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Forward and backward of one micro-batch per stage; ``unit`` is "s" or "x" (multiples of the longest forward)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    unit: str


def stage_times(plan: Plan, spec: ModelSpec, schedule: Schedule, compute_s: float | None) -> StageTimes:
    """Return what each stage's forward and backward take, in proportion to the step program's FLOPs.

    The busiest pipeline rank's actions sum to ``compute_s`` (the predicted compute of a step); without it, times
    are multiples of the longest forward.
    """
    num_stages = schedule.num_stages
    forward, backward = [0.0] * num_stages, [0.0] * num_stages
    busy = [0.0] * schedule.num_ranks
    for pp_rank, rank in enumerate(_first_ranks(plan, schedule.num_ranks)):
        program = derive(spec, plan.layout, plan.batch, schedule, rank, plan.frozen)
        for op in program.ops:
            if isinstance(op, Compute) and op.what != "optimizer":
                per_stage = forward if op.what == "forward" else backward
                per_stage[op.stage] = op.flops
                busy[pp_rank] += op.flops
    scale = compute_s / max(busy) if compute_s and max(busy) > 0 else 1.0 / (max(forward) or 1.0)
    return StageTimes(
        forward=tuple(f * scale for f in forward),
        backward=tuple(b * scale for b in backward),
        unit="s" if compute_s else "x",
    )


def _first_ranks(plan: Plan, num_ranks: int) -> tuple[int, ...]:
    """Return the lowest rank of each pipeline coordinate."""
    found: dict[int, int] = {}
    for rank in range(plan.world_size):
        found.setdefault(coordinates(plan.layout, rank)["pp"], rank)
        if len(found) == num_ranks:
            break
    return tuple(found[i] for i in range(num_ranks))


def timeline_blocks(source: Source, derived: Derived) -> tuple[Block, ...]:
    """Return the timeline section: a pipeline's time chart, or the order of one rank's step."""
    if derived.plan is None or derived.spec is None or derived.schedule is None:
        return (Note(text=f"The step cannot be drawn: {derived.trouble}.", tone="missing"),)
    compute_s = number(table(source.prediction.get("time_s")).get("compute"))
    if derived.plan.layout.pp > 1:
        return _pipeline(source, derived.plan, derived.spec, derived.schedule, compute_s)
    return _one_rank(source, derived.plan, derived.spec, derived.schedule)


def _pipeline(
    source: Source, plan: Plan, spec: ModelSpec, schedule: Schedule, compute_s: float | None
) -> tuple[Block, ...]:
    times = stage_times(plan, spec, schedule, compute_s)
    clock = run_clock(schedule, times.forward, times.backward)
    unit, unit_name = (
        second_unit(clock.makespan_s) if times.unit == "s" else (1.0, "forwards of the longest stage")
    )
    of_total, of_ideal = clock.bubble_share_of_total, clock.bubble_share_of_ideal

    def show(value: float) -> str:
        return format_seconds(value) if times.unit == "s" else f"{value:.2f} forwards"

    many = schedule.num_stages > schedule.num_ranks
    spans: list[Span] = []
    limit = MAX_DRAWN
    for item in sorted(clock.spans, key=lambda s: s.start_s)[:limit]:
        css, _ = _KINDS[item.action.kind]
        second_chunk = many and item.action.stage >= schedule.num_ranks
        spans.append(
            Span(
                row=item.rank,
                start=item.start_s,
                end=item.end_s,
                css=f"{css} later" if second_chunk else css,
                label=f"{item.action.kind.value}{item.action.micro_batch}",
                tip=f"{item.action} on pipeline rank {item.rank}: {show(item.start_s)} to {show(item.end_s)}",
            )
        )
    end = clock.makespan_s if len(spans) == len(clock.spans) else max(s.end for s in spans)
    kinds = sorted({a.kind for row in schedule.rows for a in row}, key=list(_KINDS).index)
    name = plan.layout.schedule
    title = (
        f"{name} on {schedule.num_ranks} pipeline ranks with {schedule.num_micro_batches} micro-batches: the bubble is "
        f"{100 * of_total:.1f} % of the total, {100 * of_ideal:.1f} % of the ideal"
    )
    caption = (
        "A row is one pipeline rank, a box one action of one micro-batch (its number), the shade behind the boxes is "
        "waiting: the bubble. Read left to right: later stages wait until the first micro-batch reaches them. The share "
        "of the total is waiting over the whole time of all ranks; the share of the ideal is how much longer the step "
        "is than the busiest rank's own work. "
    )
    caption += (
        "Box lengths share the predicted compute time out by FLOPs; sends are drawn as taking no time."
        if times.unit == "s"
        else "Box lengths are in proportion to FLOPs, in multiples of the longest forward; no time was predicted."
    )
    if min(clock.busy_s) < 0.99 * max(clock.busy_s):
        caption += (
            " The stages are unequal here: that shorter stages wait for the longest counts in the share of the total, "
            "not in the share of the ideal."
        )
    if len(spans) < len(clock.spans):
        caption += f" The first {len(spans)} of {len(clock.spans)} actions are drawn."
    if many:
        caption += " Paler boxes belong to a rank's later chunks."
    measured = number(source.measurement.get("bubble_share_of_total"))
    if measured is not None:
        caption += f" Measured bubble: {100 * measured:.1f} % of the total."
    picture = Picture(
        svg=gantt(
            [f"rank pp {i}" for i in range(schedule.num_ranks)],
            spans,
            name="timeline",
            title=title,
            end=end,
            x_label=f"time since the start of the step ({unit_name})",
            format_tick=plain,
            tick_unit=unit,
        ),
        title=title,
        caption=caption,
        legend=legend([*[_KINDS[k] for k in kinds], ("idle", "waiting (bubble)")]),
    )
    return (picture, _stage_table(plan, schedule, clock, times, show))


def _stage_table(plan: Plan, schedule: Schedule, clock: Clock, times: StageTimes, show: Format) -> Grid:
    layers = plan.layout.cut_layers
    rows: list[tuple[str, ...]] = []
    for stage, rank in enumerate(schedule.stage_ranks):
        rows.append(
            (
                str(stage),
                str(rank),
                str(layers[stage]) if stage < len(layers) else "-",
                show(times.forward[stage]),
                show(times.backward[stage]),
                show(clock.busy_s[rank]),
                str(clock.peak_in_flight[rank]),
            )
        )
    return Grid(
        title="Stages",
        head=(
            "stage",
            "pipeline rank",
            "layers",
            "forward",
            "backward",
            "rank's busy time",
            "most in flight",
        ),
        rows=tuple(rows),
        caption=(
            "Forward and backward are of one micro-batch. In flight: micro-batches whose activations the rank holds; "
            "their highest number sets the memory for activations."
        ),
        numeric=frozenset(range(7)),
    )


def _one_rank(source: Source, plan: Plan, spec: ModelSpec, schedule: Schedule) -> tuple[Block, ...]:
    program = derive(spec, plan.layout, plan.batch, schedule, 0, plan.frozen)
    time_s, hidden = table(source.prediction.get("time_s")), table(source.prediction.get("hidden_s"))

    def seconds(*names: str) -> float:
        return sum(number(time_s.get(n)) or 0.0 for n in names)

    hidden_total = sum(number(v) or 0.0 for v in hidden.values())
    spans = step_spans(
        program,
        compute_s=seconds("compute", "recompute"),
        send_s=seconds("data", "tensor", "sequence", "context", "expert", "pipeline") + hidden_total,
        optimizer_s=seconds("optimizer"),
    )
    end = max((s.end for s in spans), default=1.0)
    timed = seconds("compute") > 0
    unit, unit_name = second_unit(end) if timed else (1.0, "shares of one forward")
    collectives = program.collectives
    drawn = spans[:MAX_DRAWN]
    volume = sum(c.volume_bytes for c in collectives)
    title = f"Rank 0's step in order: {len(collectives)} collectives, {format_bytes(volume)} sent"
    caption = (
        "The upper row is compute, the lower row communication, in the order of the step program. "
        + (
            "Lengths share the predicted compute time out by FLOPs and the predicted communication time, hidden or "
            "exposed, by bytes. "
            if timed
            else "No time was predicted: lengths are FLOPs and bytes, each scaled so that a forward is 1. "
        )
        + "Overlap is not drawn: where communication hides behind compute, the real step is shorter. Without a pipeline "
        "there is no bubble."
    )
    return (
        Picture(
            svg=gantt(
                ("compute", "collectives"),
                drawn,
                name="timeline",
                title=title,
                end=max((s.end for s in drawn), default=1.0),
                x_label=f"time since the start of the step ({unit_name})",
                format_tick=plain,
                tick_unit=unit,
            ),
            title=title,
            caption=caption,
            legend=legend(
                [("s0", "forward"), ("s1", "backward"), ("s4", "optimizer"), *_used_collectives(collectives)]
            ),
        ),
        _volume_table(collectives),
    )


_COLLECTIVES = {
    "all_gather": ("s2", "all-gather"),
    "reduce_scatter": ("s3", "reduce-scatter"),
    "all_reduce": ("s6", "all-reduce"),
    "all_to_all": ("s7", "all-to-all"),
    "broadcast": ("s7", "broadcast"),
    "send": ("s7", "send or receive"),
    "recv": ("s7", "send or receive"),
}


def _used_collectives(collectives: Sequence[Collective]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(_COLLECTIVES[c.kind] for c in collectives))


def step_spans(
    program: StepProgram, *, compute_s: float, send_s: float, optimizer_s: float
) -> tuple[Span, ...]:
    """Return the step's operations one after the other: computes on row 0, collectives on row 1.

    ``compute_s`` is shared out by FLOPs and ``send_s`` by volume; where they are 0, the longest forward and the
    largest collective are each 1 long.
    """
    flops = [op.flops for op in program.ops if isinstance(op, Compute) and op.what != "optimizer"]
    volumes = [c.volume_bytes for c in program.collectives]
    per_flop = compute_s / sum(flops) if compute_s and sum(flops) else 1.0 / (max(flops, default=0.0) or 1.0)
    per_byte = send_s / sum(volumes) if send_s and sum(volumes) else 0.0
    if not compute_s:
        per_byte = 1.0 / (max(volumes, default=0.0) or 1.0)
        optimizer_s = 1.0
    spans: list[Span] = []
    now = 0.0
    for op in program.ops:
        if isinstance(op, Compute):
            length = optimizer_s if op.what == "optimizer" else op.flops * per_flop
            css = {"forward": "s0", "backward": "s1", "optimizer": "s4"}[op.what]
            mark = "" if op.micro_batch is None else str(op.micro_batch)
            label = {"forward": "F", "backward": "B", "optimizer": "step"}[op.what] + mark
            tip = op.what if op.micro_batch is None else f"{op.what} of micro-batch {op.micro_batch}"
            spans.append(Span(row=0, start=now, end=now + length, css=css, label=label, tip=tip))
        else:
            length = op.volume_bytes * per_byte
            spans.append(
                Span(
                    row=1,
                    start=now,
                    end=now + length,
                    css=_COLLECTIVES[op.kind][0],
                    tip=f"{_COLLECTIVES[op.kind][1]} on {op.axis}: {op.what}, payload {format_bytes(op.num_bytes)}",
                )
            )
        now += length
    return tuple(spans)


def _volume_table(collectives: Sequence[Collective]) -> Block:
    if not collectives:
        return Note(text="This rank sends nothing: it is alone.")
    rows: dict[tuple[str, str, int], tuple[int, int, float]] = {}
    for c in collectives:
        count, payload, volume = rows.get((c.kind, c.axis, c.group_size), (0, 0, 0.0))
        rows[c.kind, c.axis, c.group_size] = (count + 1, payload + c.num_bytes, volume + c.volume_bytes)
    return Grid(
        title="What rank 0 exchanges in one step",
        head=("collective", "axis", "group", "count", "payload", "volume"),
        rows=tuple(
            (
                kind.replace("_", "-"),
                axis,
                f"{size} ranks",
                str(n),
                format_bytes(payload),
                format_bytes(volume),
            )
            for (kind, axis, size), (n, payload, volume) in sorted(rows.items())
        ),
        caption=(
            "Payload is the full tensor, padding included. Volume is what the rank sends with ring algorithms: 2(N-1)/N "
            "of the payload for an all-reduce, (N-1)/N for an all-gather or a reduce-scatter."
        ),
        numeric=frozenset({2, 3, 4, 5}),
    )
