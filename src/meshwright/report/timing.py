"""Step time by cause: what the cost model predicted beside what the run measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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


def second_unit(highest: float) -> tuple[float, str]:
    """Return the unit (seconds, name) in which ``highest`` reads well."""
    if highest >= 1.0:
        return 1.0, "s"
    return (1e-3, "ms") if highest >= 1e-3 else (1e-6, "us")


def time_blocks(source: Source) -> tuple[Block, ...]:
    """Return the step-time section: predicted causes, measured causes and measured phases on one axis."""
    prediction = source.prediction
    rows: list[Bar] = []
    predicted = cause_parts(table(prediction.get("time_s")))
    if predicted:
        rows.append(
            Bar(
                label="predicted, by cause",
                parts=predicted,
                css="predicted",
                low=number(prediction.get("step_time_low_s")),
                high=number(prediction.get("step_time_high_s")),
            )
        )
    measured = cause_parts(table(source.measurement.get("time_s")))
    if measured:
        rows.append(Bar(label="measured, by cause", parts=measured))
    phases = phase_medians(source.metrics)
    phase_parts = tuple(
        Part(label=phase.replace("_", " "), value=seconds, css=series(i + 2))
        for i, (phase, seconds) in enumerate(phases.items())
    )
    step = median_step_s(source)
    if step is not None and phase_parts:
        rest = step - sum(phases.values())
        if rest > 0.005 * step:
            phase_parts = (*phase_parts, Part(label="not in a phase", value=rest, css="s5"))
    if phase_parts:
        rows.append(Bar(label="measured, by phase", parts=phase_parts))
    elif step is not None and not measured:
        rows.append(Bar(label="measured", parts=(Part(label="whole step", value=step, css="s5"),)))
    if not rows:
        return (
            Note(
                text="No step time: neither a prediction nor a measured step is recorded here.",
                tone="missing",
            ),
        )
    blocks: list[Block] = []
    if not predicted:
        blocks.append(Note(text="No prediction is recorded.", tone="missing"))
    if not measured and not phase_parts and step is None:
        blocks.append(Note(text="No step was measured.", tone="missing"))
    unit, unit_name = second_unit(max(b.total for b in rows))
    caption = (
        "One bar is one optimizer step. Causes are exposed seconds: communication that runs behind compute costs "
        "nothing and is not in the bar. Phases are what the training loop's clock saw, so a phase such as forward "
        "and backward holds compute, communication and waiting together."
    )
    if predicted and rows[0].low is not None:
        caption += " The whisker on the prediction is its 80 % band."
    if source.metrics:
        used = len(settled(source.metrics))
        caption += f" Phases are medians over {used} of {len(source.metrics)} steps" + (
            " (the first three are warm-up)." if used < len(source.metrics) else "."
        )
    named: dict[str, str] = {}
    for bar in rows:
        for part in bar.parts:
            named.setdefault(part.label, part.css)
    blocks.append(
        Picture(
            svg=bars(
                rows,
                name="step-time",
                title="Seconds of one optimizer step, predicted and measured",
                x_label=f"time of one optimizer step ({unit_name})",
                format_value=format_seconds,
                format_tick=plain,
                tick_unit=unit,
            ),
            title="Where the time of a step goes",
            caption=caption,
            legend=legend([(css, label) for label, css in named.items()]),
        )
    )
    if predicted and measured:
        p, m = table(prediction.get("time_s")), table(source.measurement.get("time_s"))
        table_rows = [
            (name, format_seconds(a), format_seconds(b), f"{100 * (a - b) / b:+.1f} %" if b else "-")
            for key, name, _ in CAUSES
            for a, b in [(number(p.get(key)) or 0.0, number(m.get(key)) or 0.0)]
            if a or b
        ]
        total_p, total_m = number(prediction.get("step_time_s")), step
        if total_p is not None and total_m:
            table_rows.append(
                (
                    "step",
                    format_seconds(total_p),
                    format_seconds(total_m),
                    f"{100 * (total_p - total_m) / total_m:+.1f} %",
                )
            )
        blocks.append(
            Grid(
                title="Seconds by cause",
                head=("cause", "predicted", "measured", "error"),
                rows=tuple(table_rows),
                caption="Exposed seconds of one step. Error = (predicted - measured) / measured.",
                numeric=frozenset({1, 2, 3}),
            )
        )
    hidden = {k: v for k, v in ((k, number(v)) for k, v in table(prediction.get("hidden_s")).items()) if v}
    if hidden:
        text = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in hidden.items())
        blocks.append(
            Note(text=f"Predicted communication that hides behind compute, not in the bars: {text}.")
        )
    return tuple(blocks)
