"""``meshwright report``: one self-contained page about a run or a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import Json
from meshwright.cli.output import show_json


def report(
    target: Annotated[
        str,
        typer.Argument(metavar="(RUN_DIR | plan.json)", help="A run folder or a plan.", show_default=False),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="page.html", help="The page; without it, RUN_DIR/report.html."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page that needs no network: prediction, measurement, memory, timeline and proof."""
    from meshwright.report.page import write_report

    page = write_report(target, out)
    if as_json:
        show_json({"page": str(page), "bytes": page.stat().st_size})
    else:
        print(f"written to {page}")
