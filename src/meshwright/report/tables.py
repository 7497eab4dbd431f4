"""Terminal tables: plans, memory, catalogues and the last screen of a run.

Each function takes JSON forms and returns a rich renderable; ``console`` prints it with colour on a terminal
and as plain text elsewhere. Text from outside is never read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.base.units import format_bytes, format_count, format_seconds
from meshwright.report.facts import error_pct, peak_bytes
from meshwright.report.memory import CATEGORIES, comparable, memory_parts
from meshwright.report.proof import scientific, worst_name
from meshwright.report.ranks import layout_text
from meshwright.report.source import listed, number, table, tables
from meshwright.report.timing import compare_causes

PLAIN_WIDTH = 160

_STYLES: Final[Mapping[str, str]] = {
    "parameters": "blue",
    "gradients": "yellow",
    "optimizer": "green",
    "activations": "red",
    "logits": "magenta",
    "working": "bright_black",
    "outside_allocator": "cyan",
}
_LETTERS: Final[Mapping[str, str]] = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "logits": "L",
    "working": "W",
    "outside_allocator": "X",
}


def console(file: IO[str] | None = None) -> Console:
    """Return a console: coloured on a terminal; elsewhere plain text, 160 wide, so that no cell is cut short."""
    plain = Console(file=file)
    if plain.is_terminal:
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, no_color=True, width=PLAIN_WIDTH, force_terminal=False)


def as_text(renderable: RenderableType, width: int = PLAIN_WIDTH) -> str:
    """Return ``renderable`` as plain text without colour, as it prints where there is no terminal."""
    file = io.StringIO()
    Console(file=file, highlight=False, no_color=True, width=width, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def _grid(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    """Return an empty table; a column is (head, is a number)."""
    out = Table(box=SIMPLE_HEAD, title=Text(title, style="bold"), title_justify="left", pad_edge=False)
    for index, (head, numeric) in enumerate(columns):
        out.add_column(
            Text(head), justify="right" if numeric else "left", no_wrap=numeric or index == 0, overflow="fold"
        )
    return out


def _add(out: Table, cells: Sequence[str | Text]) -> None:
    out.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def _percent(value: Any, digits: int = 1) -> str:
    found = number(value)
    return "-" if found is None else f"{found:.{digits}f} %"


def plan_table(items: Sequence[Mapping[str, Any]], title: str = "Plans, best first") -> RenderableType:
    """Return plans (the ITEMs of ``meshwright plan --json``), best first, with units and conventions below.

    Units: time in seconds with its 80 % band, memory in GiB of the rank with the highest peak.
    """
    out = _grid(
        title,
        (
            ("#", True),
            ("layout", False),
            ("ranks", True),
            ("step time", True),
            ("80 % band", True),
            ("tokens/s/rank", True),
            ("MFU", True),
            ("bubble", True),
            ("peak memory", True),
            ("P(OOM)", True),
            ("limit", False),
        ),
    )
    conventions: set[str] = set()
    for index, item in enumerate(items, 1):
        said = table(item.get("predicted")) or table(item)
        step, low, high = (
            number(said.get(k)) for k in ("step_time_s", "step_time_low_s", "step_time_high_s")
        )
        speed, bubble, risk = (
            number(said.get(k)) for k in ("tokens_per_s_per_gpu", "bubble_share_of_total", "oom_probability")
        )
        peak = peak_bytes(said)
        if said.get("flops_convention"):
            conventions.add(str(said["flops_convention"]))
        _add(
            out,
            (
                str(index),
                layout_text(table(item.get("layout"))),
                str(item.get("world_size", "-")),
                "-" if step is None else format_seconds(step),
                "-" if low is None or high is None else f"{format_seconds(low)} - {format_seconds(high)}",
                "-" if speed is None else f"{speed:,.0f}",
                _percent(said.get("mfu_pct")),
                "-" if bubble is None else f"{100 * bubble:.1f} %",
                "-" if peak is None else format_bytes(peak),
                "-" if risk is None else f"{100 * risk:.0f} %",
                str(item.get("binds") or said.get("binds") or "-"),
            ),
        )
    flavour = f" ({', '.join(sorted(conventions))} attention, recompute not counted)" if conventions else ""
    return Group(
        out,
        Text(
            f"MFU of the device's peak{flavour}; bubble as a share of the total step; 1 GiB = 2^30 bytes",
            style="dim",
        ),
    )


def memory_bar(memory_bytes: Mapping[str, Any], capacity_bytes: float | None = None, width: int = 60) -> Text:
    """Return one rank's memory as a bar of letters and colours with its legend, against its capacity if known."""
    parts = memory_parts(memory_bytes)
    total = sum(parts.values())
    full = max(total, capacity_bytes or 0.0) or 1.0
    out = Text("[")
    drawn, so_far = 0, 0.0
    for key, _, _ in CATEGORIES:
        so_far += parts.get(key, 0.0)
        end = round(width * so_far / full)
        out.append(_LETTERS[key] * (end - drawn), style=_STYLES[key])
        drawn = end
    out.append("." * (width - drawn) + "] ")
    out.append(format_bytes(total))
    if capacity_bytes:
        out.append(f" of {format_bytes(capacity_bytes)} ({100 * total / capacity_bytes:.1f} %)")
    for key, name, _ in CATEGORIES:
        if parts.get(key):
            out.append("\n  ")
            out.append(_LETTERS[key], style=_STYLES[key])
            out.append(f" {name} {format_bytes(parts[key])}")
    return out


def _compared(title: str, rows: Sequence[tuple[str, float | None, float | None]], show: Any) -> Table:
    out = _grid(title, (("", False), ("predicted", True), ("measured", True), ("error", True)))
    for name, predicted, measured in rows:
        error = error_pct(predicted, measured)
        _add(
            out,
            (
                name,
                "-" if predicted is None else show(predicted),
                "-" if measured is None else show(measured),
                "-" if error is None else f"{error:+.1f} %",
            ),
        )
    return out


def final_screen(
    run: Mapping[str, Any],
    prove: Mapping[str, Any],
    page: str | Path | None,
    next_commands: Sequence[str],
) -> RenderableType:
    """Return the last screen: predicted beside measured time and memory, parity, the page, what to try next.

    Args:
        run: content of run.json.
        prove: content of prove.json ({} when parity was not checked).
        page: where the report is.
        next_commands: commands to try, best first.
    """
    prediction, measurement = table(run.get("prediction")), table(run.get("measurement"))
    plan = table(run.get("plan"))
    prediction = prediction or table(plan.get("prediction"))
    shown: list[RenderableType] = [
        Text(f"{plan.get('model_name', 'run')}: {layout_text(table(plan.get('layout')))}", style="bold")
    ]
    if not prediction:
        shown.append(Text("No prediction was recorded."))
    if not measurement:
        shown.append(Text("No measurement was recorded."))
    if prediction or measurement:
        rows = list(compare_causes(table(prediction.get("time_s")), table(measurement.get("time_s"))))
        rows.append(("step", number(prediction.get("step_time_s")), number(measurement.get("step_time_s"))))
        shown.append(_compared("Step time, exposed seconds by cause", rows, format_seconds))
        rows = [
            (name, a if prediction else None, b if measurement else None)
            for name, a, b in comparable(
                memory_parts(table(prediction.get("memory_bytes"))),
                memory_parts(table(measurement.get("memory_bytes"))),
            )
        ]
        rows.append(("peak", peak_bytes(prediction), peak_bytes(measurement)))
        shown.append(_compared("Memory at the peak, rank with the highest peak", rows, format_bytes))
    shown.append(_parity(prove))
    if page is not None:
        shown.append(Text(f"Report   {page}"))
    if next_commands:
        shown.append(Text("Try next", style="bold"))
        shown += [Text(f"  {command}") for command in next_commands]
    return Group(*shown)


def _parity(prove: Mapping[str, Any]) -> Text:
    if not prove:
        return Text("Parity   not checked")
    passed = bool(prove.get("passed"))
    out = Text("Parity   ")
    out.append("passed" if passed else "FAILED", style="bold green" if passed else "bold red")
    figures = (
        ("loss", "loss", "max_abs_diff", "max abs diff"),
        ("gradients", "gradients", "max_rel_diff", "max rel diff"),
        ("grad_norm", "gradient norm", "max_rel_diff", "max rel diff"),
        ("weights", "weights", "max_rel_diff", "max rel diff"),
    )
    for key, name, figure, words in figures:
        found = table(prove.get(key))
        if found:
            worst = worst_name(found.get("worst"))
            out.append(f"\n  {name}: {words} {scientific(found.get(figure))}")
            if worst:
                out.append(f" (worst: {worst})")
    ledger = table(prove.get("ledger"))
    if ledger:
        out.append(f"\n  collectives: {'as expected' if ledger.get('matches') else 'NOT as expected'}")
    sentinel = table(prove.get("sentinel"))
    if sentinel:
        out.append(f"\n  sentinel: factor {sentinel.get('factor')}, {sentinel.get('cause')}")
    return out


def models_table(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the model catalogue; keys as in ``meshwright inspect --json``, and ``source``."""
    out = _grid(
        f"{len(entries)} known models",
        (
            ("name", False),
            ("family", False),
            ("parameters", True),
            ("active", True),
            ("layers", True),
            ("hidden", True),
            ("heads", True),
            ("kv heads", True),
            ("vocab", True),
            ("context", True),
            ("source", False),
        ),
    )
    for entry in entries:
        counts = [number(entry.get(k)) for k in ("num_parameters", "num_active_parameters")]
        _add(
            out,
            (
                str(entry.get("name", "-")),
                str(entry.get("family", "-")),
                *("-" if c is None else format_count(c) for c in counts),
                *(
                    str(entry.get(k, "-"))
                    for k in (
                        "num_layers",
                        "hidden_size",
                        "num_attention_heads",
                        "num_key_value_heads",
                        "vocab_size",
                        "max_position_embeddings",
                    )
                ),
                str(entry.get("source", "-")),
            ),
        )
    return Group(
        out,
        Text(
            "parameters: a tied tensor counted once; active: used by one token (mixture of experts)",
            style="dim",
        ),
    )


def clusters_table(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the cluster catalogue: the rows of ``meshwright clusters --json``; a figure no source prints is "-"."""
    out = _grid(
        f"{len(entries)} known clusters",
        (
            ("name", False),
            ("device", False),
            ("per node", True),
            ("memory", True),
            ("bf16 peak", True),
            ("inside a node", True),
            ("between nodes", True),
            ("source", False),
        ),
    )
    for entry in entries:
        figures = table(entry.get("figures"))
        sources = dict.fromkeys(
            str(f.get("source", "")) for f in map(table, figures.values()) if f.get("kind") == "datasheet"
        )
        _add(
            out,
            (
                str(entry.get("name") or "-"),
                str(entry.get("device") or "-"),
                str(entry.get("gpus_per_node") or "-"),
                _figure(figures, "memory", 1e9, "GB"),
                _figure(figures, "peak_flops_bf16", 1e12, "TFLOP/s"),
                _figure(figures, "intra_rate", 1e9, "GB/s"),
                _figure(figures, "inter_rate", 1e9, "GB/s"),
                "; ".join(sources) or str(entry.get("notes") or "-"),
            ),
        )
    return Group(
        out,
        Text("peak: dense, no sparsity; links: one direction of one device; 1 GB = 10^9 bytes", style="dim"),
    )


def _figure(figures: Mapping[str, Any], name: str, scale: float, unit: str) -> str:
    value = number(table(figures.get(name)).get("value"))
    return "-" if value is None else f"{value / scale:,.4g} {unit}"


def ranks_table(ranks: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the memory of each rank (``ranks`` of ``meshwright estimate --json``)."""
    out = _grid(
        "Memory by rank",
        (("rank", True), ("stage", True), *((name, True) for _, name, _ in CATEGORIES), ("peak", True)),
    )
    for item in tables(listed(ranks)):
        parts = memory_parts(table(item.get("memory_bytes")))
        peak = peak_bytes(item)
        _add(
            out,
            (
                str(item.get("rank", "-")),
                str(item.get("stage", "-")),
                *(format_bytes(parts[key]) if key in parts else "-" for key, _, _ in CATEGORIES),
                "-" if peak is None else format_bytes(peak),
            ),
        )
    return out
