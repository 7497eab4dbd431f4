"""Predictions for people: a line a layout, and a layout in full with its memory as a bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.base.units import format_bytes, format_seconds
from meshwright.cli.output import table

BAR_WIDTH = 30
LETTERS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "logits": "L",
    "working": "W",
    "outside_allocator": "x",
}
"""The letter of each memory category in a bar."""


def memory_bar(memory_bytes: dict[str, int], capacity_bytes: float, width: int = BAR_WIDTH) -> str:
    """Return memory against the device's capacity: one letter a category, dots for what is free.

    A category that is not zero has at least one letter; what is beyond the capacity stands behind a "!".
    """
    cells = ""
    for name, letter in LETTERS.items():
        size = memory_bytes.get(name, 0)
        if size:
            cells += letter * max(1, round(width * size / capacity_bytes))
    if sum(memory_bytes.values()) > capacity_bytes:
        return f"[{cells[:width]}!{cells[width : 2 * width] or cells[-1:]}"
    return f"[{cells[:width].ljust(width, '.')}]"


def plans_table(items: Sequence[dict[str, Any]], capacity_bytes: float) -> str:
    """Return one line for each plan, best first."""
    rows = [
        (
            str(i + 1),
            item["layout_text"],
            format_seconds(p["step_time_s"]),
            f"{p['tokens_per_s_per_gpu']:,.0f}",
            f"{p['mfu_pct']:.1f}" if p["mfu_pct"] is not None else "-",
            f"{100 * p['bubble_share_of_total']:.1f}",
            format_bytes(p["peak_memory_bytes"]),
            memory_bar(p["memory_bytes"], capacity_bytes),
            item["binds"],
        )
        for i, item in enumerate(items)
        if (p := item["predicted"]) is not None
    ]
    header = (
        "#",
        "layout",
        "step",
        "tokens/s a GPU",
        "MFU %",
        "bubble %",
        "peak",
        f"of {_gib(capacity_bytes)}",
        "binds",
    )
    legend = "memory: " + ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
    return (
        f"{table(header, rows, right=(2, 3, 4, 5, 6))}\n{legend}; MFU with causal attention, bubble of total"
    )


def describe_item(item: dict[str, Any], capacity_bytes: float) -> str:
    """Return one layout in full: time by cause, memory by category, and why."""
    p = item["predicted"]
    lines = [
        item["layout_text"],
        f"  step       {format_seconds(p['step_time_s'])} (80 % within {format_seconds(p['step_time_low_s'])} "
        f"and {format_seconds(p['step_time_high_s'])}), {p['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU",
        "  time       " + ", ".join(f"{k} {format_seconds(v)}" for k, v in p["time_s"].items() if v),
        f"  peak       {format_bytes(p['peak_memory_bytes'])} of {_gib(capacity_bytes)}, "
        f"out of memory with probability {p['oom_probability']:.2g}",
        "  memory     " + ", ".join(f"{k} {format_bytes(v)}" for k, v in p["memory_bytes"].items() if v),
        f"             {memory_bar(p['memory_bytes'], capacity_bytes)}",
        f"  binds      {item['binds']}",
    ]
    return "\n".join([*lines, *(f"  why        {sentence}" for sentence in item["why"])])


def _gib(num_bytes: float) -> str:
    return format_bytes(num_bytes)
