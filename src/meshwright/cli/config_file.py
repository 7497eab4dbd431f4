"""``meshwright config``: the run file's schema, and every value of a run with its origin."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from meshwright.cli.options import Json, MaybeLayout, Sets
from meshwright.cli.output import show_json, show_warnings, table

app = typer.Typer(help="The run file: its schema, and the values in force.", rich_markup_mode=None)


@app.command()
def show(
    run_file: Annotated[str, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)],
    layout: MaybeLayout = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value came from.")] = False,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Print every value that a run would have; checks the file on the way."""
    from meshwright.config.load import load_run
    from meshwright.config.resolve import resolve

    run = resolve(load_run(run_file, tuple(sets or ())), layout=layout)
    if as_json:
        out: dict[str, Any] = {"resolved": run.as_dict()}
        if origin:
            out |= {"origins": dict(run.origins), "found_in": dict(run.found_in)}
        show_json(out | {"warnings": [w.as_dict() for w in run.warnings]})
        return
    rows = [
        (key, json.dumps(value), run.origins[key], run.found_in.get(key, ""))
        for key, value in run.flat().items()
    ]
    header = ("setting", "value", "origin", "path taken from")
    print(table(header, rows) if origin else table(header[:2], [row[:2] for row in rows]))
    show_warnings(run.warnings)


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the run file's keys with type, default and meaning; --json prints the JSON schema."""
    from meshwright.config.schema import RunFile, described_keys

    if as_json:
        show_json(RunFile.model_json_schema())
        return
    print(table(("key", "type", "default", "meaning"), described_keys()))
