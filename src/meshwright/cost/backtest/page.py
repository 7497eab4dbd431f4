"""The page about the cost model's scores: tables and scatter plots, written by one command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from meshwright.cost.backtest.run import Predicted, Report

WIDTH: Final = 640.0
HEIGHT: Final = 440.0
LEFT: Final = 60.0
TOP: Final = 24.0
SIDE: Final = 360.0
COLOURS: Final = (
    *(
        "#4269d0",
        "#efb118",
        "#ff725c",
        "#6cc5b0",
        "#3ca951",
        "#ff8ab7",
        "#a463f2",
        "#97bbf5",
        "#9c6b4e",
        "#9498a0",
    ),
    *("#1f77b4", "#2ca02c", "#d62728", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)


def pages(report: Report) -> dict[str, str]:
    """Return the files of the page by name: ``backtest.md`` and its plots."""
    plots = {
        "backtest-time.svg": scatter(
            [
                (p.case.label, p.case.step_s, p.step_s)
                for p in report.predictions
                if p.step_s and not p.case.composed
            ],
            "seconds per step",
        ),
        "backtest-memory.svg": scatter(
            [
                (p.case.label, p.case.memory / 2**30, p.peak_bytes / 2**30)
                for p in report.predictions
                if p.peak_bytes and p.case.memory
            ],
            "GiB at the peak",
        ),
        "backtest-oom.svg": oom_plot(report.predictions),
    }
    return plots | {"backtest.md": _markdown(report)}


def scatter(points: Sequence[tuple[str, float | None, float | None]], unit: str) -> str:
    """Return an SVG of predicted over measured on log axes, one colour per source, lines at -20, 0 and +20 %."""
    held = [(name, m, p) for name, m, p in points if m and p]
    if not held:
        return _svg([f'<text x="{LEFT}" y="{TOP + 20}">no rows</text>'])
    low = 10 ** math.floor(math.log10(min(min(m, p) for _, m, p in held)))
    high = 10 ** math.ceil(math.log10(max(max(m, p) for _, m, p in held)))
    span = math.log10(high / low)

    def x(value: float) -> float:
        return LEFT + SIDE * math.log10(value / low) / span

    def y(value: float) -> float:
        return TOP + SIDE - SIDE * math.log10(value / low) / span

    out: list[str] = []
    for power in range(round(span) + 1):
        at = low * 10**power
        out.append(f'<line x1="{x(at):.1f}" y1="{TOP}" x2="{x(at):.1f}" y2="{TOP + SIDE}" class="grid"/>')
        out.append(f'<line x1="{LEFT}" y1="{y(at):.1f}" x2="{LEFT + SIDE}" y2="{y(at):.1f}" class="grid"/>')
        out.append(f'<text x="{x(at):.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">{at:g}</text>')
        out.append(f'<text x="{LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>')
    for factor, style in ((1.0, "one"), (1.2, "far"), (1 / 1.2, "far")):
        begin, end = max(low, low / factor), min(high, high / factor)
        out.append(
            f'<line x1="{x(begin):.1f}" y1="{y(begin * factor):.1f}" x2="{x(end):.1f}" '
            f'y2="{y(end * factor):.1f}" class="{style}"/>'
        )
    names = sorted({name for name, _, _ in held}, key=lambda n: -sum(1 for name, _, _ in held if name == n))
    colour = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    out += [f'<circle cx="{x(m):.1f}" cy="{y(p):.1f}" r="2.2" fill="{colour[n]}"/>' for n, m, p in held]
    for k, name in enumerate(names):
        top = TOP + 12 + 15 * k
        out.append(f'<circle cx="{LEFT + SIDE + 18}" cy="{top - 4}" r="4" fill="{colour[name]}"/>')
        out.append(f'<text x="{LEFT + SIDE + 28}" y="{top}">{escape(_short(name))}</text>')
    out.append(
        f'<text x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 36}" text-anchor="middle">measured, {unit}</text>'
    )
    out.append(f'<text x="{LEFT}" y="{TOP - 8}">predicted, {unit}; dashed: 20 % off</text>')
    return _svg(out)


def oom_plot(predictions: Sequence[Predicted]) -> str:
    """Return an SVG of how many layouts that ran, and that ran out, have which predicted probability of running out."""
    held = [p for p in predictions if p.oom_probability is not None]
    bins: dict[bool, list[int]] = {False: [0] * 10, True: [0] * 10}
    for p in held:
        assert p.oom_probability is not None
        bins[p.ran_out][min(9, int(10 * p.oom_probability))] += 1
    most = max([1, *bins[False], *bins[True]])
    out: list[str] = []
    step = SIDE / 10
    for ran_out, colour, shift in ((False, COLOURS[0], 2.0), (True, COLOURS[2], step / 2)):
        for k, count in enumerate(bins[ran_out]):
            tall = SIDE * math.log1p(count) / math.log1p(most)
            left = LEFT + step * k + shift
            place = (
                f'x="{left:.1f}" y="{TOP + SIDE - tall:.1f}" width="{step / 2 - 3:.1f}" height="{tall:.1f}"'
            )
            out.append(f'<rect {place} fill="{colour}"/>')
            if count:
                out.append(
                    f'<text x="{left + step / 4:.1f}" y="{TOP + SIDE - tall - 3:.1f}" text-anchor="middle">{count}</text>'
                )
    for k in range(0, 11, 2):
        out.append(
            f'<text x="{LEFT + step * k:.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">{k / 10:g}</text>'
        )
    middle = f'x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 36}" text-anchor="middle"'
    out.append(f"<text {middle}>predicted probability of running out</text>")
    out.append(f'<text x="{LEFT}" y="{TOP - 8}">layouts (log scale): blue ran, red ran out of memory</text>')
    return _svg(out)


def _svg(body: Sequence[str]) -> str:
    style = "text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}.one{stroke:#333}"
    style += ".far{stroke:#999;stroke-dasharray:4 3}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img"><style>{style}</style>'
    return (
        "\n".join([head, f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" fill="#fff"/>', *body, "</svg>"])
        + "\n"
    )


def _short(name: str) -> str:
    return name if len(name) <= 34 else name[:33] + "…"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    line = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*line, *("| " + " | ".join(row) + " |" for row in rows)]


def _markdown(report: Report) -> str:
    s = report.scores
    how = (
        f"Every row is predicted by a fit that saw no row of its sweep ({s['folds']} folds of whole sweeps)."
        if s["calibrated"]
        else "Rows are predicted by the profile that the package ships, which was fitted on most of them."
    )
    out = [
        "# Backtest: predictions against public measurements",
        "",
        "This page is written by `meshwright backtest RUNS.csv --oom OOM.csv --calibrate --page DIR`; do not edit it.",
        f"{s['scored']} of {s['rows']} rows are scored. {how}",
        "Errors are 100 × (predicted − measured) / measured; means are over sources, never over rows.",
        "",
        "## Time",
        "",
        "![predicted over measured step time](backtest-time.svg)",
        "",
        *_time_table(s["by_source"]),
        "",
        *_summary("time", s["time"]),
        "",
    ]
    for name, left in s.get("left_out", {}).items():
        title = {"source": "A whole source left out", "model_size": "One model size left out"}.get(
            name, "One generation of devices left out"
        )
        out += [f"### {title}", "", *_summary("time", left), ""]
        out += _table(
            ("source", "rows", "error %", "bias %", "inside the 80 % band %"),
            [
                (
                    k,
                    str(v["rows"]),
                    _number(v["mape_pct"]),
                    _number(v["bias_pct"]),
                    _number(v.get("coverage_pct")),
                )
                for k, v in left["by_source"].items()
            ],
        )
        out.append("")
    out += _memory(s)
    counts: dict[str, list[str]] = {}
    for row in report.skipped:
        counts.setdefault(row.why, []).append(row.id)
    out += ["## Rows that are not scored", ""]
    rows = sorted(counts.items(), key=lambda kv: (-len(kv[1]), kv[0]))
    out += _table(("rows", "why", "ids"), [(str(len(ids)), _cell(why), _ids(ids)) for why, ids in rows])
    return "\n".join(out) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def _ids(ids: Sequence[str]) -> str:
    return ", ".join(f"`{i}`" for i in ids)


def _time_table(by_source: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for name, entry in by_source.items():
        t = entry["time"]
        if t["rows"]:
            keys = (
                "mape_pct",
                "median_ape_pct",
                "bias_pct",
                "spearman",
                "coverage_pct",
                "top1_regret_pct",
                "top3_regret_pct",
            )
            cells = [_number(t.get(key)) if key != "spearman" else _rank(t.get(key)) for key in keys]
            rows.append((name, str(t["rows"]), *cells))
    header = (
        "source",
        "rows",
        "error %",
        "median %",
        "bias %",
        "rank corr.",
        "in 80 % band %",
        "top-1 regret %",
        "top-3 %",
    )
    return _table(header, rows)


def _rank(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _summary(what: str, t: dict[str, Any]) -> list[str]:
    text = f"Mean over {t['sources']} sources: {_number(t['mape_pct'])} % off, mean bias {_number(t['bias_pct'])} %"
    text += f", mean |bias| {_number(t.get('abs_bias_pct'))} %"
    if what == "time":
        text += f", {_number(t.get('coverage_pct'))} % of rows inside the 80 % band"
    return [text + "."]


def _memory(s: dict[str, Any]) -> list[str]:
    m = s["memory"]
    number: Callable[[float | None], str] = _number
    rows = [
        (
            k,
            str(v["memory"]["rows"]),
            *(number(v["memory"][key]) for key in ("mape_pct", "bias_pct", "worst_pct")),
        )
        for k, v in s["by_source"].items()
        if v["memory"]["rows"]
    ]
    out = ["## Memory", "", "![predicted over measured peak](backtest-memory.svg)", ""]
    out += [*_table(("source", "rows", "error %", "bias %", "worst %"), rows), "", *_summary("memory", m), ""]
    if m["oom_rows"]:
        out += [
            "## Out of memory",
            "",
            "![probability of running out](backtest-oom.svg)",
            "",
            f"{m['oom_rows']} layouts ran out of memory; {number(m['oom_recall_pct'])} % of them have a probability "
            f"above {m['oom_probability_gate']:g}. {m['oom_ran_rows']} layouts ran; {number(m['oom_false_alarm_pct'])} % "
            "of them are false alarms.",
            "",
        ]
    return out
