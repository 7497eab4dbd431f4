"""Header, verdict cards and the plain tables of a report: reasons, precision, events, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from meshwright.base.units import format_bytes, format_seconds
from meshwright.layout.layout import Layout
from meshwright.layout.precision import precision_table
from meshwright.report.blocks import Block, Card, Grid, Items, Note
from meshwright.report.proof import scientific, worst_name
from meshwright.report.ranks import layout_text
from meshwright.report.source import Source, listed, median, number, table
from meshwright.report.svg import plain
from meshwright.report.timing import median_step_s, settled
from meshwright.report.training import curve, held_out_curve

MAX_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Header:
    """The head of the page: title and (label, value) facts."""

    title: str
    kind: str
    facts: tuple[tuple[str, str], ...]


def model_name(source: Source) -> str:
    """Return what the user called the model, or where the page's figures come from."""
    name = source.plan.get("model_name")
    return str(name) if name else source.path.name


def world_size(source: Source) -> int | None:
    """Return the world size: the plan's, or the product of the layout's degrees."""
    found = number(source.plan.get("world_size"))
    if found is None and source.layout:
        degrees = [number(source.layout.get(k, 1)) or 1.0 for k in ("dp", "tp", "pp", "cp")]
        found = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    return int(found) if found is not None else None


def header(source: Source) -> Header:
    """Return the title and facts that head the page."""
    facts: list[tuple[str, str]] = []
    if source.layout:
        facts.append(("layout", layout_text(source.layout)))
    batch = table(source.plan.get("batch"))
    if number(batch.get("global_batch")) is not None:
        sequences, length = batch["global_batch"], batch.get("seq_len")
        facts.append(("global batch", f"{sequences} sequences of {length} tokens per step"))
    world = world_size(source)
    if world is not None:
        facts.append(("world size", f"{world} {'rank' if world == 1 else 'ranks'}"))
    cluster = source.plan.get("cluster")
    if cluster:
        facts.append(("cluster", str(cluster)))
    digest = source.run.get("plan_hash") or source.plan.get("hash") or source.plan.get("plan_hash")
    facts.append(("plan hash", str(digest) if digest else "not recorded"))
    versions = table(source.run.get("versions"))
    if versions:
        facts.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    elif source.run.get("meshwright"):
        facts.append(("versions", f"meshwright {source.run['meshwright']}"))
    facts.append(("source", str(source.path)))
    return Header(
        title=model_name(source), kind="run" if source.is_run else "plan, not run yet", facts=tuple(facts)
    )


def error_pct(predicted: float | None, measured: float | None) -> float | None:
    """Return 100 * (predicted - measured) / measured, or None when either is unknown or measured is 0."""
    return 100 * (predicted - measured) / measured if predicted is not None and measured else None


def peak_bytes(record: Mapping[str, Any]) -> float | None:
    """Return the highest peak of a prediction or measurement, in bytes."""
    peak = number(record.get("peak_memory_bytes"))
    if peak is None:
        parts = [number(v) for v in table(record.get("memory_bytes")).values()]
        known = [p for p in parts if p is not None]
        peak = sum(known) if known else None
    return peak


def cards(source: Source) -> tuple[Card, ...]:
    """Return the verdicts: loss, step time, memory, parity, tokens per second."""
    shown: list[Card] = []
    loss = [y for _, y in curve(source.metrics, "loss") if y == y]
    if loss:
        held_out = [y for _, y in held_out_curve(source) if y == y]
        detail = f"training loss, first to last of {len(loss)} steps"
        if held_out:
            detail += f"; held-out {held_out[0]:.3f} to {held_out[-1]:.3f}"
        falls = loss[-1] < loss[0]
        shown.append(
            Card(
                title="Loss",
                figure=f"{loss[0]:.3f} → {loss[-1]:.3f}",
                detail=detail,
                tone="good" if falls else "bad" if len(loss) > 1 else "plain",
            )
        )
    predicted_s, measured_s = number(source.prediction.get("step_time_s")), median_step_s(source)
    shown += _pair("Step time", predicted_s, measured_s, format_seconds, "median of the settled steps", 30.0)
    shown += _pair(
        "Peak memory",
        peak_bytes(source.prediction),
        peak_bytes(source.measurement),
        format_bytes,
        "rank with the highest peak",
        10.0,
    )
    if source.prove:
        passed = bool(source.prove.get("passed"))
        gradients = table(source.prove.get("gradients"))
        worst = worst_name(gradients.get("worst"))
        detail = f"gradients differ from one device by at most {scientific(gradients.get('max_rel_diff'))} (relative)"
        if worst:
            detail += f"; worst: {worst}"
        shown.append(
            Card(
                title="Parity",
                figure="passed" if passed else "failed",
                detail=detail,
                tone="good" if passed else "bad",
            )
        )
    speeds = [number(r.get("tokens_per_s")) for r in settled(source.metrics)]
    speed = median([s for s in speeds if s is not None])
    per_rank = number(source.prediction.get("tokens_per_s_per_gpu"))
    world = world_size(source)
    if speed is not None:
        detail = "tokens per second of the whole job, median of the settled steps"
        shown.append(
            Card(title="Throughput", figure=f"{plain(speed)} tokens/s", detail=detail + _mfu(source))
        )
    elif per_rank is not None and world:
        shown.append(
            Card(
                title="Throughput",
                figure=f"{plain(per_rank * world)} tokens/s",
                detail=f"predicted, {plain(per_rank)} per rank{_mfu(source)}",
            )
        )
    return tuple(shown)


def _mfu(source: Source) -> str:
    for word, record in (("measured", source.measurement), ("predicted", source.prediction)):
        mfu = number(record.get("mfu_pct"))
        if mfu is not None:
            convention = record.get("flops_convention", "?")
            return f"; {word} MFU {mfu:.1f} % ({convention} attention, recompute not counted)"
    return ""


def _pair(
    title: str, predicted: float | None, measured: float | None, show: Any, detail: str, good_pct: float
) -> list[Card]:
    if predicted is None and measured is None:
        return []
    error = error_pct(predicted, measured)
    if error is not None:
        return [
            Card(
                title=title,
                figure=show(measured),
                detail=f"measured, {detail}; predicted {show(predicted)}, error {error:+.1f} %",
                tone="good" if abs(error) <= good_pct else "bad",
            )
        ]
    if measured is not None:
        return [Card(title=title, figure=show(measured), detail=f"measured, {detail}; nothing was predicted")]
    return [Card(title=title, figure=show(predicted), detail=f"predicted, {detail}; nothing was measured")]


def why_blocks(source: Source) -> tuple[Block, ...]:
    """Return why this plan was chosen, what binds it, and its warnings."""
    why = [str(w) for w in listed(source.plan.get("why"))]
    blocks: list[Block] = []
    if why:
        blocks.append(Items(sentences=tuple(why)))
    else:
        blocks.append(
            Note(
                text="No reasons are recorded: the layout was written by hand, not found by search.",
                tone="missing",
            )
        )
    binds = source.plan.get("binds")
    if binds:
        blocks.append(Note(text=f"What limits this plan: {binds}."))
    warnings = [str(w) for w in listed(source.plan.get("warnings"))]
    blocks += [Note(text=f"Warning: {w}", tone="bad") for w in warnings]
    return tuple(blocks)


def precision_blocks(source: Source, layout: Layout | None) -> tuple[Block, ...]:
    """Return which number format is used where: the layout's table, checked against what the run recorded."""
    found = source.run.get("precision_table")
    recorded = table(found) or {str(r[0]): r[1] for r in map(listed, listed(found)) if len(r) > 1}
    if layout is None:
        if not recorded:
            return (
                Note(
                    text="No precision table is recorded here, and no layout to derive it from.",
                    tone="missing",
                ),
            )
        rows = tuple((key.replace("_", " "), _shown(value)) for key, value in recorded.items())
        return (Grid(title="Which number format is used where", head=("use", "format"), rows=rows),)
    derived = precision_table(layout)
    grid = Grid(
        title="Which number format is used where",
        head=("use", "format", "bytes a value", "what it is"),
        rows=tuple((name, dtype, str(size), note) for name, dtype, size, note in derived.rows()),
        caption="Derived from the layout's precision and ZeRO stage.",
        numeric=frozenset({2}),
    )
    differs = [
        f"{name} {recorded[name]} (derived: {dtype})"
        for name, dtype, _, _ in derived.rows()
        if isinstance(recorded.get(name), str) and recorded[name] != dtype
    ]
    grids = (grid, *_classes(source))
    if differs:
        return (Note(text=f"The run recorded other formats: {', '.join(differs)}.", tone="bad"), *grids)
    return grids


def _classes(source: Source) -> tuple[Grid, ...]:
    """Return the recorded classes of tensors with their formats and bytes; none where a run has none."""
    found = [table(row) for row in listed(source.run.get("tensor_classes"))]
    if not found:
        return ()
    formats = ("storage", "compute", "reduction", "master")
    sizes = ("storage_bytes", "gradient_bytes", "optimizer_bytes")
    return (
        Grid(
            title="Classes of tensors",
            head=("class", "parameters", *formats, "parameters at rest", "gradients", "optimizer state"),
            rows=tuple(
                (
                    str(row.get("name", "-")),
                    f"{number(row.get('elements')) or 0:,.0f}",
                    *(str(row.get(key, "-")) for key in formats),
                    *(format_bytes(number(row.get(key)) or 0) for key in sizes),
                )
                for row in found
            ),
            caption="Bytes of one copy of the whole model; what a rank holds of it follows from the layout.",
            numeric=frozenset({1, 6, 7, 8}),
        ),
    )


def event_blocks(source: Source) -> tuple[Block, ...]:
    """Return what happened during the run, in order; the last 200 events when there are more."""
    blocks: list[Block] = []
    bad = source.damaged.get("events.jsonl", 0)
    if bad:
        blocks.append(Note(text=f"{bad} damaged lines of events.jsonl are left out.", tone="bad"))
    if not source.events:
        blocks.append(Note(text="No event is recorded here.", tone="missing"))
        return tuple(blocks)
    kept = source.events[-MAX_EVENTS:]
    rows = [
        (
            _time(e.get("time")),
            str(e.get("event", "")),
            ", ".join(f"{k} {_shown(v)}" for k, v in e.items() if k not in ("time", "event")),
        )
        for e in kept
    ]
    more = (
        f" The last {len(kept)} of {len(source.events)} are shown." if len(kept) < len(source.events) else ""
    )
    blocks.append(
        Grid(
            title="Events",
            head=("time", "event", "what"),
            rows=tuple(rows),
            caption="Times are UTC where they were recorded as numbers." + more,
        )
    )
    return tuple(blocks)


def _time(value: Any) -> str:
    seconds = number(value)
    if seconds is None:
        return str(value if value is not None else "-")
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OSError, OverflowError):
        return str(value)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else text[:400] + " ..."


def flatten(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings as ``section.field`` to value; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{above}.{key}" if above else key
        if isinstance(inner, Mapping) and inner:
            flat.update(flatten(table(inner), name))
        else:
            flat[name] = inner
    return flat


def setting_blocks(source: Source) -> tuple[Block, ...]:
    """Return every resolved setting with where its value came from."""
    resolved = flatten(table(source.run.get("resolved")))
    origins = flatten(table(source.run.get("origins")))
    if not resolved and source.layout:
        resolved = flatten(source.layout, "layout")
    if not resolved:
        return (Note(text="No resolved settings are recorded here.", tone="missing"),)
    rows = tuple((name, _shown(value), _shown(origins.get(name, "-"))) for name, value in resolved.items())
    return (
        Grid(
            title="Resolved settings",
            head=("setting", "value", "origin"),
            rows=rows,
            caption="Every value that the run used. Origin says who set it: the run file, the command line or a default.",
        ),
    )
