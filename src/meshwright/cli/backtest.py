"""``meshwright backtest``: predict measured runs, and say how far off the predictions are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cli.options import Json
from meshwright.cli.output import check_writable, show_json, show_line, table, write_new_text

if TYPE_CHECKING:
    from meshwright.cost.backtest.run import Report


def backtest(
    runs: Annotated[
        str, typer.Argument(metavar="RUNS.csv", help="Table of measured runs.", show_default=False)
    ],
    oom: Annotated[
        str | None,
        typer.Option(
            "--oom", metavar="OOM.csv", help="Table of layouts that ran out of memory.", show_default=False
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit on the other folds instead of using the shipped profile.")
    ] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            "--folds", metavar="K", help="Folds of whole sweeps (5 without it).", show_default=False
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            "--page",
            metavar="DIR",
            help="Write the page with its plots into this folder.",
            show_default=False,
        ),
    ] = None,
    save_profile: Annotated[
        str | None,
        typer.Option(
            "--save-profile",
            metavar="FILE",
            help="With --calibrate: store a profile of all rows.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and score the predictions: errors by source, rank, regret, memory, out of memory.

    Example: meshwright backtest RUNS.csv --oom OOM.csv --calibrate --folds 5 --json
    """
    if not calibrate and (folds is not None or save_profile):
        option = "--folds" if folds is not None else "--save-profile"
        found = f"{option} without --calibrate"
        raise MeshwrightError(
            problem("E864", where=option, found=found, do="add --calibrate, or leave it out")
        )
    if page:
        _folder(page)
    if save_profile:
        check_writable(save_profile, "--save-profile")
    from meshwright.cost.backtest.run import backtest as run
    from meshwright.cost.backtest.table import read_table

    rows = read_table(runs)
    out = read_table(oom) if oom else ()
    report = run(rows, out, calibrate=calibrate, folds=5 if folds is None else folds)
    if save_profile:
        from meshwright.cost.backtest.store import profile_of, profile_text

        text = profile_text(profile_of(rows, out, report))
        write_new_text(save_profile, text, "--save-profile")
        show_line(f"meshwright: wrote {save_profile}")
    if page:
        from meshwright.cost.backtest.page import pages

        for name, text in pages(report).items():
            write_new_text(Path(page) / name, text, "--page")
        show_line(f"meshwright: wrote the page into {page}")
    if as_json:
        show_json(report.scores | {"predictions": [p.as_dict() for p in report.predictions]})
    else:
        print(_text(report))


def _folder(path: str) -> None:
    target = Path(path)
    if not target.is_dir():
        found = "is a file" if target.exists() else "does not exist"
        raise MeshwrightError(
            problem("E867", where=f"--page {path}", found=found, do="name a folder that exists")
        )


def _text(report: Report) -> str:
    scores = report.scores
    header = (
        "source",
        "rows",
        "time %",
        "bias %",
        "80 % band",
        "top-1 %",
        "top-3 %",
        "memory rows",
        "memory %",
    )
    body = [_line(name, entry) for name, entry in scores["by_source"].items()]
    lines = [table(header, body, right=range(1, len(header)))]
    time, memory = scores["time"], scores["memory"]
    how = f"{scores['folds']} folds of whole sweeps" if scores["calibrated"] else "the shipped profile"
    lines.append(f"\n{scores['scored']} of {scores['rows']} rows scored by {how}; means over sources:")
    lines.append(
        f"  time    {_number(time['mape_pct'])} % off, bias {_number(time['bias_pct'])} %, "
        f"{_number(time['coverage_pct'])} % inside the 80 % band, top-1 regret {_number(time['top1_regret_pct'])} %"
    )
    lines.append(f"  memory  {_number(memory['mape_pct'])} % off, bias {_number(memory['bias_pct'])} %")
    if memory["oom_rows"]:
        lines.append(
            f"  out of memory: {_number(memory['oom_recall_pct'])} % of {memory['oom_rows']} recognised, "
            f"{_number(memory['oom_false_alarm_pct'])} % false alarms among {memory['oom_ran_rows']} that ran"
        )
    for name, left in scores.get("left_out", {}).items():
        lines.append(
            f"  a whole {name.replace('_', ' ')} left out: {_number(left['mape_pct'])} % off, "
            f"|bias| {_number(left['abs_bias_pct'])} %, {_number(left['coverage_pct'])} % inside the band"
        )
    counts: dict[str, int] = {}
    for row in report.skipped:
        counts[row.why] = counts.get(row.why, 0) + 1
    lines.append(f"{len(report.skipped)} rows skipped:")
    lines += [f"  {n:4d}  {why}" for why, n in sorted(counts.items(), key=lambda kv: -kv[1])[:12]]
    if len(counts) > 12:
        lines.append(f"        and {len(counts) - 12} more reasons (--json names every row)")
    return "\n".join(lines)


def _line(name: str, entry: dict[str, Any]) -> list[str]:
    time, memory = entry["time"], entry["memory"]
    keys = ("mape_pct", "bias_pct", "coverage_pct", "top1_regret_pct", "top3_regret_pct")
    cells = [_number(time.get(key)) for key in keys]
    return [name[:48], str(time["rows"]), *cells, str(memory["rows"]), _number(memory.get("mape_pct"))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
