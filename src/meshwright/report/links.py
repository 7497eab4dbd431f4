"""The links that `meshwright probe` measured: bus bandwidth over message size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.units import GIB, KIB, MIB, format_seconds
from meshwright.report.blocks import Block, Grid, Items, Note, Picture
from meshwright.report.source import Source, listed, number, table, tables
from meshwright.report.svg import Line, legend, lines, series

MAX_CURVES = 8


def size_label(num_bytes: float) -> str:
    """Return a message size on a power-of-two axis: 64 KiB, 1 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def rate_label(bytes_per_s: float) -> str:
    """Return a rate in decimal units: 1.2 GB/s."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s:.3g} B/s"


def _group(ranks: Any) -> str:
    numbers = [int(r) for r in listed(ranks) if number(r) is not None]
    if not numbers:
        size = number(ranks)
        return f"{int(size)} ranks" if size else "unknown ranks"
    if len(numbers) > 4 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return (
        "ranks "
        + ", ".join(map(str, numbers[:6]))
        + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")
    )


def link_blocks(source: Source) -> tuple[Block, ...]:
    """Return the links section: curves of the largest group, a table of all, matmul rates and advice."""
    probe = source.probe
    if not probe:
        why = source.unreadable.get("probe.json")
        return (
            Note(
                text=f"probe.json cannot be read: {why}"
                if why
                else "The links were not measured: there is no probe.json here. `meshwright probe` measures them.",
                tone="missing",
            ),
        )
    links = tables(probe.get("links"))
    blocks: list[Block] = []
    if links:
        blocks += _curves(links, probe)
        blocks.append(_table(links))
    else:
        blocks.append(Note(text="The probe measured no link (one rank has none).", tone="missing"))
    matmul = tables(probe.get("matmul"))
    if matmul:
        blocks.append(
            Grid(
                title="Matrix multiplication while all ranks compute",
                head=("precision", "m", "k", "n", "time", "rate"),
                rows=tuple(
                    (
                        str(m.get("precision", "-")),
                        *(str(m.get(k, "-")) for k in ("m", "k", "n")),
                        format_seconds(number(m.get("time_s")) or 0.0),
                        f"{(number(m.get('flops_per_s')) or 0.0) / 1e9:.4g} GFLOP/s",
                    )
                    for m in matmul[:24]
                ),
                caption="Rate of one rank, 2 m k n floating-point operations over the measured time.",
                numeric=frozenset({1, 2, 3, 4, 5}),
            )
        )
    advice = [str(a) for a in listed(probe.get("advice"))]
    if advice:
        blocks.append(Items(sentences=tuple(advice)))
    return tuple(blocks)


def _points(link: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    found = ((number(p.get("bytes")), number(p.get("busbw_bytes_per_s"))) for p in tables(link.get("points")))
    return tuple(sorted((x, y) for x, y in found if x and y and x > 0 and y > 0))


def _curves(links: list[dict[str, Any]], probe: Mapping[str, Any]) -> list[Block]:
    largest = max(len(listed(link.get("ranks"))) for link in links)
    chosen = [link for link in links if len(listed(link.get("ranks"))) == largest and _points(link)][
        :MAX_CURVES
    ]
    if not chosen:
        return []
    names = [str(link.get("collective", "?")).replace("_", "-") for link in chosen]
    labels = [
        f"{name}, {_group(link.get('ranks'))}" if names.count(name) > 1 else name
        for name, link in zip(names, chosen, strict=True)
    ]
    return [
        Picture(
            svg=lines(
                [
                    Line(label=label, points=_points(link), css=series(i), dots=True)
                    for i, (label, link) in enumerate(zip(labels, chosen, strict=True))
                ],
                name="links",
                title="Bus bandwidth over message size",
                x_label="payload of the collective (powers of 1024)",
                y_label="bus bandwidth (log)",
                format_x=size_label,
                format_y=rate_label,
                x_log=2,
                y_log=10,
                height=300,
            ),
            title="How fast messages travel",
            caption=(
                f"Measured on {probe.get('device', 'this machine')} with {probe.get('backend', '?')}, over the largest "
                f"group, {_group(chosen[0].get('ranks'))}. Bus bandwidth is bytes over time, corrected by what a ring "
                "sends (2(N-1)/N for all-reduce), so that collectives compare. Small messages pay latency: the curve "
                "climbs until the link itself is the limit. 1 GB/s = 10^9 bytes/s."
            ),
            legend=legend([(series(i), label) for i, label in enumerate(labels)]),
        )
    ]


def _table(links: list[dict[str, Any]]) -> Grid:
    rows: list[tuple[str, ...]] = []
    for link in links[:40]:
        latency, peak = number(link.get("latency_s")), number(link.get("peak_busbw_bytes_per_s"))
        rows.append(
            (
                str(link.get("collective", "?")).replace("_", "-"),
                _group(link.get("ranks")),
                format_seconds(latency) if latency is not None else "-",
                rate_label(peak) if peak is not None else "-",
            )
        )
    more = f" {len(links) - 40} more groups are in probe.json." if len(links) > 40 else ""
    return Grid(
        title="Measured collectives",
        head=("collective", "group", "latency", "highest bus bandwidth"),
        rows=tuple(rows),
        caption="Latency is the time of the smallest message." + more,
        numeric=frozenset({2, 3}),
    )


def memory_capacity(probe: Mapping[str, Any]) -> float | None:
    """Return the bytes that one rank of the probed machine may use: an equal share of what was available."""
    available = number(table(probe.get("memory")).get("available_bytes"))
    world = number(probe.get("world_size"))
    return available / world if available and world else None
