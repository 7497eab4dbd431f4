"""The curves of a run: loss, gradient norm, learning rate and throughput over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.base.units import format_bytes
from meshwright.report.blocks import Block, Note, Picture
from meshwright.report.memory import byte_unit
from meshwright.report.source import Source, number, table
from meshwright.report.svg import Line, legend, lines, plain

MAX_POINTS = 400
HALF_WIDTH = 380.0


def thin(points: tuple[tuple[float, float], ...], count: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """Return at most about ``count`` points: of each run of steps its lowest and highest, so spikes stay."""
    if len(points) <= count:
        return points
    size = math.ceil(2 * len(points) / count)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        piece = points[start : start + size]
        finite = [p for p in piece if math.isfinite(p[1])]
        if not finite:
            kept.append(piece[0])
            continue
        low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
        kept += sorted({low, high})
    return tuple(kept)


def curve(metrics: tuple[Mapping[str, Any], ...], key: str) -> tuple[tuple[float, float], ...]:
    """Return (step, value) of every record that has ``key``; a value that is not finite stays as NaN."""
    points: list[tuple[float, float]] = []
    for row in metrics:
        if key not in row or row[key] is None:
            continue
        step, value = number(row.get("step")), number(row[key])
        if step is not None:
            points.append((step, math.nan if value is None else value))
    return tuple(points)


def held_out_curve(source: Source) -> tuple[tuple[float, float], ...]:
    """Return (step, held-out loss), with the evaluation before the first step, which only the events have."""
    before = [row for row in source.events if row.get("event") == "eval" and row.get("step") == 0]
    return curve(tuple(before), "eval_loss") + curve(source.metrics, "eval_loss")


def training_blocks(source: Source) -> tuple[Block, ...]:
    """Return the curves of the run, and what was wrong with the lines they come from."""
    if not source.is_run:
        return (Note(text="This is a plan: no step has run yet.", tone="missing"),)
    blocks: list[Block] = []
    if "metrics.jsonl" in source.missing:
        blocks.append(Note(text="There is no metrics.jsonl: no step was recorded.", tone="missing"))
    bad = source.damaged.get("metrics.jsonl", 0)
    if bad:
        blocks.append(
            Note(
                text=f"{bad} damaged {'line' if bad == 1 else 'lines'} of metrics.jsonl could not be read and "
                f"{'is' if bad == 1 else 'are'} left out of every figure on this page.",
                tone="bad",
            )
        )
    if source.repeated_steps:
        blocks.append(
            Note(
                text=f"{source.repeated_steps} records were replaced by a later record of the same step, as happens "
                "when a run resumes from a checkpoint."
            )
        )
    if not source.metrics:
        if not blocks:
            blocks.append(Note(text="metrics.jsonl holds no step.", tone="missing"))
        return tuple(blocks)
    loss, eval_loss = curve(source.metrics, "loss"), held_out_curve(source)
    broken = sum(not math.isfinite(y) for _, y in loss)
    if broken:
        blocks.append(
            Note(
                text=f"The loss of {broken} steps is not a finite number; the curve has gaps there.",
                tone="bad",
            )
        )
    if loss or eval_loss:
        curves = [Line(label="training loss", points=thin(loss), css="s0")]
        shown = [("s0", "training loss, one point a step")]
        if eval_loss:
            curves.append(
                Line(label="held-out loss", points=thin(eval_loss), css="s1", dots=len(eval_loss) <= 80)
            )
            shown.append(("s1", "held-out loss, text the model does not train on"))
        blocks.append(
            Picture(
                svg=lines(
                    curves,
                    name="loss",
                    title="Loss over steps",
                    x_label="optimizer step",
                    y_label="loss (nats per token)",
                ),
                title="Loss",
                caption=(
                    "Mean cross-entropy per valid token of the step's global batch, in nats. A falling curve is "
                    "learning; held-out loss that rises while training loss falls is memorising."
                ),
                legend=legend(shown),
            )
        )
    blocks += _small(source)
    return tuple(blocks)


def _small(source: Source) -> list[Block]:
    blocks: list[Block] = []
    for key, title, label, caption, css in (
        (
            "grad_norm",
            "Gradient norm",
            "gradient norm (L2)",
            "Length of the whole gradient before clipping, every parameter counted once. Sudden peaks warn of trouble.",
            "s3",
        ),
        ("lr", "Learning rate", "learning rate", "What the scheduler gave the optimizer at each step.", "s2"),
        (
            "tokens_per_s",
            "Throughput",
            "tokens per second",
            "Valid and padded tokens of the whole job over the step's wall time. The first steps pay for warming up.",
            "s0",
        ),
    ):
        points = curve(source.metrics, key)
        if points:
            blocks.append(
                Picture(
                    svg=lines(
                        [Line(label=title, points=thin(points, 200), css=css)],
                        name=key.replace("_", "-"),
                        title=f"{title} over steps",
                        x_label="optimizer step",
                        y_label=label,
                        from_zero=True,
                        height=210,
                        width=HALF_WIDTH,
                    ),
                    title=title,
                    caption=caption,
                    half=True,
                )
            )
    peaks = tuple(
        (step, peak)
        for step, peak in (
            (number(r.get("step")), number(table(r.get("memory_bytes")).get("peak"))) for r in source.metrics
        )
        if step is not None and peak is not None
    )
    if peaks:
        unit, unit_name = byte_unit(max(y for _, y in peaks))
        blocks.append(
            Picture(
                svg=lines(
                    [Line(label="Peak memory", points=thin(peaks, 200), css="s4")],
                    name="peak-memory",
                    title="Peak memory over steps",
                    x_label="optimizer step",
                    y_label=f"peak of the step ({unit_name})",
                    from_zero=True,
                    height=210,
                    width=HALF_WIDTH,
                    y_unit=unit,
                    format_y=lambda y: plain(y / unit),
                ),
                title="Peak memory",
                caption=(
                    f"Highest memory of the recording rank in each step (last step: {format_bytes(peaks[-1][1])}). A "
                    "line that keeps climbing is a leak."
                ),
                half=True,
            )
        )
    return blocks
