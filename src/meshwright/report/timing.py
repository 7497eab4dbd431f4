"""Step time by cause: what the cost model predicted beside what the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup

from meshwright.base.units import format_seconds
from meshwright.report.blocks import Block, Grid, Note, Picture
from meshwright.report.source import Source, median, number, table
from meshwright.report.svg import Bar, Part, bars, legend, plain, series

CAUSES: Final[tuple[tuple[str, str, str], ...]] = (
    ("compute", "compute", "s0"),
    ("recompute", "recompute", "s6"),
    ("tensor", "tensor parallel", "s7"),
    ("sequence", "sequence parallel", "s7"),
    ("pipeline", "pipeline send/recv", "s2"),
    ("context", "context parallel", "s6"),
    ("expert", "expert parallel", "s7"),
    ("data", "data parallel", "s1"),
    ("offload", "offload", "s6"),
    ("bubble", "bubble", "s5"),
    ("optimizer", "optimizer", "s4"),
    ("other", "other", "s3"),
)
"""(key of TimeSeconds, its name, its colour), in the order of the bars."""

WARM_UP = 3
"""Measured steps that are left out of medians, where there are at least three times as many."""


def settled(metrics: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """Return the steps after warm-up: all but the first three when there are at least nine."""
    return metrics[WARM_UP:] if len(metrics) >= 3 * WARM_UP else metrics


def phase_medians(metrics: tuple[Mapping[str, Any], ...]) -> dict[str, float]:
    """Return the median seconds of each phase over the settled steps, in the order the phases first appear."""
    values: dict[str, list[float]] = {}
    for row in settled(metrics):
        for phase, raw in table(row.get("phases_s")).items():
            seconds = number(raw)
            if seconds is not None:
                values.setdefault(phase, []).append(seconds)
    return {phase: median(v) or 0.0 for phase, v in values.items()}


def median_step_s(source: Source) -> float | None:
    """Return the measured step time: the measurement's, else the median of the settled steps."""
    measured = number(source.measurement.get("step_time_s"))
    if measured is not None:
        return measured
    times = [number(row.get("step_time_s")) for row in settled(source.metrics)]
    return median([t for t in times if t is not None])


def cause_parts(time_s: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the causes of a ``time_s`` mapping as parts of a bar, in seconds."""
    return tuple(
        Part(label=name, value=number(time_s.get(key)) or 0.0, css=colour)
        for key, name, colour in CAUSES
        if number(time_s.get(key))
    )


OWN_PHASES: Final = frozenset({"compute", "data", "optimizer", "other"})
"""Causes that a training loop's clock can time; the others happen inside its forward and backward."""


def measured_by_phases(measured: Mapping[str, Any]) -> bool:
    """Return whether a measurement's ``time_s`` has nothing but what a training loop's clock can time."""
    used = {key for key, _, _ in CAUSES if number(measured.get(key))}
    return bool(used) and used <= OWN_PHASES


def compare_causes(
    predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> tuple[tuple[str, float | None, float | None], ...]:
    """Return (cause, predicted, measured) seconds, None where a side cannot tell.

    A measurement by phases cannot part compute from communication and waiting inside forward and backward: there,
    these causes are compared as one sum, and the prediction's parts of it are listed below it.
    """
    p = {key: number(predicted.get(key)) or 0.0 for key, _, _ in CAUSES}
    m = {key: number(measured.get(key)) or 0.0 for key, _, _ in CAUSES}
    names = {key: name for key, name, _ in CAUSES}
    used = [key for key in names if p[key] or m[key]]
    inner = [key for key in used if key not in ("optimizer", "other")]
    if not (measured_by_phases(measured) and len(inner) > 1 and any(p.values())):
        return tuple(
            (names[key], p[key] if any(p.values()) else None, m[key] if any(m.values()) else None)
            for key in used
        )
    rows: list[tuple[str, float | None, float | None]] = [
        ("compute, communication and waiting", sum(p[k] for k in inner), sum(m[k] for k in inner))
    ]
    rows += [(f"- of it {names[key]}", p[key], None) for key in inner if p[key]]
    rows += [(names[key], p[key], m[key]) for key in used if key not in inner]
    return tuple(rows)


def second_unit(highest: float) -> tuple[float, str]:
    """Return the unit (seconds, name) in which ``highest`` reads well."""
    if highest >= 1.0:
        return 1.0, "s"
    return (1e-3, "ms") if highest >= 1e-3 else (1e-6, "us")


PHASES: Final[Mapping[str, str]] = {
    "count": "agreeing on the token count",
    "data": "loading data",
    "forward_backward": "forward and backward",
    "reduce": "reducing gradients and norm",
    "optimizer": "optimizer step",
}
"""Names of the training loop's phases; another phase keeps its key."""


def time_blocks(source: Source) -> tuple[Block, ...]:
    """Return the step-time section: causes, predicted beside measured, and the phases that the loop's clock saw."""
    prediction, measurement = source.prediction, source.measurement
    predicted, measured = (
        cause_parts(table(prediction.get("time_s"))),
        cause_parts(table(measurement.get("time_s"))),
    )
    step = median_step_s(source)
    phases = _phase_picture(source, step)
    if not predicted and not measured and step is None:
        return (
            Note(
                text="No step time: neither a prediction nor a measured step is recorded here.",
                tone="missing",
            ),
        )
    blocks: list[Block] = []
    if not predicted:
        blocks.append(Note(text="No prediction is recorded.", tone="missing"))
    if step is None:
        blocks.append(Note(text="No step was measured.", tone="missing"))
    rows: list[Bar] = []
    if predicted:
        low, high = number(prediction.get("step_time_low_s")), number(prediction.get("step_time_high_s"))
        rows.append(Bar(label="predicted", parts=predicted, css="predicted", low=low, high=high))
    if measured:
        rows.append(Bar(label="measured", parts=measured))
    elif step is not None:
        rows.append(Bar(label="measured", parts=(Part(label="whole step", value=step, css="s5"),)))
    blocks.append(
        _cause_picture(
            rows, by_phases=bool(measured) and measured_by_phases(table(measurement.get("time_s")))
        )
    )
    if predicted and measured:
        blocks.append(_cause_table(source, step))
    hidden = {k: v for k, v in ((k, number(v)) for k, v in table(prediction.get("hidden_s")).items()) if v}
    if hidden:
        text = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in hidden.items())
        blocks.append(
            Note(text=f"Predicted communication that hides behind compute, not in the bars: {text}.")
        )
    return (*blocks, *phases)


def _legend(rows: Sequence[Bar]) -> Markup:
    named: dict[str, str] = {}
    for bar in rows:
        for part in bar.parts:
            named.setdefault(part.label, part.css)
    return legend([(css, label) for label, css in named.items()])


def _cause_picture(rows: Sequence[Bar], *, by_phases: bool) -> Picture:
    unit, unit_name = second_unit(max(b.total for b in rows))
    caption = (
        "One bar is one optimizer step, cut by what makes it wait. The seconds are exposed: communication that runs "
        "behind compute costs nothing and is not in the bar."
    )
    if by_phases:
        caption += (
            " The measurement knows phases only: its compute holds the communication and waiting inside forward and "
            "backward."
        )
    if any(b.low is not None and b.high is not None for b in rows):
        caption += " The whisker on the prediction is its 80 % band: the measured bar should end inside it."
    return Picture(
        svg=bars(
            rows,
            name="step-time",
            title="Seconds of one optimizer step by cause, predicted and measured",
            x_label=f"time of one optimizer step ({unit_name})",
            format_value=format_seconds,
            format_tick=plain,
            tick_unit=unit,
        ),
        title="Where the time of a step goes",
        caption=caption,
        legend=_legend(rows),
    )


def _cause_table(source: Source, step: float | None) -> Grid:
    p, m = table(source.prediction.get("time_s")), table(source.measurement.get("time_s"))
    rows = [
        (
            name,
            "-" if a is None else format_seconds(a),
            "-" if b is None else format_seconds(b),
            f"{100 * (a - b) / b:+.1f} %" if a is not None and b else "-",
        )
        for name, a, b in compare_causes(p, m)
    ]
    total = number(source.prediction.get("step_time_s"))
    if total is not None and step:
        rows.append(
            ("step", format_seconds(total), format_seconds(step), f"{100 * (total - step) / step:+.1f} %")
        )
    return Grid(
        title="Seconds by cause",
        head=("cause", "predicted", "measured", "error"),
        rows=tuple(rows),
        caption=(
            "Exposed seconds of one step. Error = (predicted - measured) / measured. A measurement by the loop's "
            "phases cannot part compute from the communication and waiting inside it; these are then compared as one sum."
        ),
        numeric=frozenset({1, 2, 3}),
    )


def _phase_picture(source: Source, step: float | None) -> tuple[Block, ...]:
    phases = phase_medians(source.metrics)
    parts = tuple(
        Part(label=PHASES.get(phase, phase.replace("_", " ")), value=seconds, css=series(i))
        for i, (phase, seconds) in enumerate(phases.items())
    )
    if not parts:
        return ()
    rest = (step or 0.0) - sum(phases.values())
    if step and rest > 0.005 * step:
        parts = (*parts, Part(label="in no phase", value=rest, css="s5"))
    row = Bar(label="measured", parts=parts)
    unit, unit_name = second_unit(row.total)
    used = len(settled(source.metrics))
    return (
        Picture(
            svg=bars(
                [row],
                name="phases",
                title="Phases of one optimizer step as measured",
                x_label=f"time of one optimizer step ({unit_name})",
                format_value=format_seconds,
                format_tick=plain,
                tick_unit=unit,
            ),
            title="What the training loop was doing",
            caption=(
                "The same step by the loop's own clock. A phase such as forward and backward holds compute, "
                f"communication and waiting together. Medians over {used} of {len(source.metrics)} steps"
                + (" (the first three are warm-up)." if used < len(source.metrics) else ".")
            ),
            legend=_legend([row]),
        ),
    )
