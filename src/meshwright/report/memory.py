"""Memory by category and rank, predicted beside measured: the rows of the picture and of the terminal bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshwright.base.units import GIB, KIB, MIB, format_bytes
from meshwright.report.blocks import Block, Grid, Note, Picture
from meshwright.report.source import Source, number, table, tables
from meshwright.report.svg import Bar, Part, bars, legend, plain

CATEGORIES: Final[tuple[tuple[str, str, str], ...]] = (
    ("parameters", "parameters", "s0"),
    ("gradients", "gradients", "s1"),
    ("optimizer", "optimizer state", "s2"),
    ("activations", "activations", "s3"),
    ("logits", "logits and loss", "s4"),
    ("working", "working", "s5"),
    ("outside_allocator", "outside the allocator", "s6"),
)
"""(key of MemoryBytes, its name, its colour), in the order of the bars."""

MAX_RANK_BARS = 64


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's bytes by category."""

    rank: int
    stage: int
    parts: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Bytes at the peak: the sum of all categories."""
        return sum(self.parts.values())


def memory_parts(memory: Mapping[str, Any]) -> dict[str, float]:
    """Return the categories of a ``memory_bytes`` mapping that are numbers, in bytes, in our order."""
    found = {key: number(memory.get(key)) for key, _, _ in CATEGORIES}
    return {key: value for key, value in found.items() if value is not None}


def rank_memory(record: Mapping[str, Any]) -> tuple[RankMemory, ...]:
    """Return the per-rank memory of a prediction's or measurement's dict; one rank (its highest) if none is listed."""
    rows: list[RankMemory] = []
    for item in tables(record.get("ranks")):
        parts = memory_parts(table(item.get("memory_bytes")))
        rank, stage = number(item.get("rank")), number(item.get("stage"))
        if parts and rank is not None:
            rows.append(RankMemory(rank=int(rank), stage=int(stage or 0), parts=parts))
    if not rows:
        parts = memory_parts(table(record.get("memory_bytes")))
        if parts:
            rows.append(RankMemory(rank=-1, stage=-1, parts=parts))
    return tuple(sorted(rows, key=lambda r: r.rank))


def highest_per_stage(rows: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
    """Return, for each stage, its rank with the highest peak."""
    best: dict[int, RankMemory] = {}
    for row in rows:
        if row.stage not in best or row.peak > best[row.stage].peak:
            best[row.stage] = row
    return tuple(best[s] for s in sorted(best))


def byte_unit(highest: float) -> tuple[float, str]:
    """Return the binary unit (bytes, name) in which ``highest`` reads well."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if highest >= size:
            return float(size), name
    return 1.0, "bytes"


def _bar(row: RankMemory, label: str, css: str, *, show_total: bool = True) -> Bar:
    return Bar(
        show_total=show_total,
        label=label,
        css=css,
        parts=tuple(
            Part(label=name, value=row.parts.get(key, 0.0), css=colour) for key, name, colour in CATEGORIES
        ),
    )


def memory_blocks(source: Source, capacity: float | None, capacity_from: str) -> tuple[Block, ...]:
    """Return the memory section: the picture by rank and a table of categories with the error.

    Args:
        source: what was read.
        capacity: bytes that one rank may use, when known.
        capacity_from: where that figure comes from.
    """
    predicted, measured = rank_memory(source.prediction), rank_memory(source.measurement)
    notes: list[Block] = []
    if not predicted and not measured:
        return (
            Note(
                text="No memory figures: neither a prediction nor a measurement is recorded here.",
                tone="missing",
            ),
        )
    if not measured:
        notes.append(
            Note(text="Nothing was measured yet: the bars are the prediction alone.", tone="missing")
        )
    if not predicted:
        notes.append(
            Note(text="No prediction is recorded: the bars are the measurement alone.", tone="missing")
        )
    everyone = {r.rank for r in predicted} | {r.rank for r in measured}
    by_stage = len(everyone) > MAX_RANK_BARS
    shown_p, shown_m = (
        (highest_per_stage(predicted), highest_per_stage(measured)) if by_stage else (predicted, measured)
    )

    def key(row: RankMemory) -> int:
        return row.stage if by_stage else row.rank

    def name(row: RankMemory) -> str:
        if row.rank < 0:
            return "highest rank"
        if by_stage:
            return f"stage {row.stage}"
        return f"rank {row.rank} (stage {row.stage})"

    lookup_p, lookup_m = {key(r): r for r in shown_p}, {key(r): r for r in shown_m}
    dense = len(lookup_p | lookup_m) > 16
    rows: list[Bar] = []
    for k in sorted(lookup_p | lookup_m):
        label = name((lookup_p | lookup_m)[k])
        if k in lookup_p:
            rows.append(
                _bar(
                    lookup_p[k],
                    label if dense else f"{label}, predicted",
                    "predicted",
                    show_total=not dense or k not in lookup_m,
                )
            )
            label = "" if dense else label
        if k in lookup_m:
            rows.append(_bar(lookup_m[k], label if dense else f"{label}, measured", "measured"))
    highest = max(b.total for b in rows)
    unit, unit_name = byte_unit(highest)
    near = capacity is not None and capacity <= 4 * highest
    used = [c for c in CATEGORIES if any(p.value > 0 and p.label == c[1] for b in rows for p in b.parts)]
    caption = (
        "Each bar is one rank at its peak; the colours are what fills it. A lighter bar is the prediction, the solid "
        "bar below it is what the run measured: equal lengths mean a good prediction. On a GPU these are bytes "
        "allocated by the caching allocator (not reserved); on a CPU, bytes of live tensors."
    )
    if any(not r.parts.get("logits") for r in measured):
        caption += " The measurement counts logits inside activations."
    if dense and measured:
        caption += " The figure on the right is the measured peak."
    if by_stage:
        caption += f" There are {len(everyone)} ranks, so each stage shows its highest rank only."
    if capacity is not None and not near:
        caption += (
            f" The capacity, {format_bytes(capacity)} ({capacity_from}), is {capacity / highest:.0f} times the highest"
            " bar and lies beyond this axis."
        )
    elif capacity is None:
        caption += " The device's capacity is not known here, so no capacity line is drawn."
    picture = Picture(
        svg=bars(
            rows,
            name="memory",
            title="Memory at the peak of a step, by rank and category",
            x_label=f"memory of one rank at its peak ({unit_name})",
            format_value=format_bytes,
            format_tick=plain,
            tick_unit=unit,
            marker=capacity if near else None,
            marker_label=f"capacity {format_bytes(capacity)} ({capacity_from})" if capacity and near else "",
            dense=dense,
        ),
        title="Memory by rank",
        caption=caption,
        legend=legend([(colour, label) for _, label, colour in used]),
    )
    blocks: list[Block] = [*notes, picture]
    if predicted and measured:
        blocks.append(_table(predicted, measured))
    return tuple(blocks)


def comparable(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> tuple[tuple[str, float, float], ...]:
    """Return (category, predicted, measured) bytes; logits join activations where a measurement cannot part them."""
    joined = bool(measured) and not measured.get("logits") and bool(predicted.get("logits"))
    rows: list[tuple[str, float, float]] = []
    for key, label, _ in CATEGORIES:
        a, b = predicted.get(key, 0.0), measured.get(key, 0.0)
        if joined and key == "logits":
            continue
        if joined and key == "activations":
            label, a = "activations and logits", a + predicted.get("logits", 0.0)
        if a or b:
            rows.append((label, a, b))
    return tuple(rows)


def _table(predicted: tuple[RankMemory, ...], measured: tuple[RankMemory, ...]) -> Grid:
    p, m = max(predicted, key=lambda r: r.peak), max(measured, key=lambda r: r.peak)
    rows = [
        (label, format_bytes(a), format_bytes(b), _error(a, b))
        for label, a, b in comparable(p.parts, m.parts)
    ]
    rows.append(("peak", format_bytes(p.peak), format_bytes(m.peak), _error(p.peak, m.peak)))
    return Grid(
        title="The rank with the highest peak",
        head=("category", "predicted", "measured", "error"),
        rows=tuple(rows),
        caption="Error = (predicted - measured) / measured. KiB, MiB and GiB are powers of 1024.",
        numeric=frozenset({1, 2, 3}),
    )


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "-"
