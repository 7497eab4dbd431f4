"""``meshwright train``: run what the run file says."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cli.faults import RUN_FOLDER
from meshwright.cli.options import Json, MaybeLayout, Nproc, Sets
from meshwright.cli.output import show_json, show_line, show_warnings
from meshwright.cli.target import one_layout

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN.yaml", help="The run file (YAML, JSON or TOML).", show_default=False)
]


def train(
    run_file: RunArgument,
    layout: MaybeLayout = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="plan.json", help="A plan written by `meshwright plan --out`."),
    ] = None,
    nproc: Nproc = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Stop after global step N; the schedule's horizon stays run.steps.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint; the layout may change.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and stop.")] = False,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Train: starts its own local ranks, or joins those of torchrun.

    Example: meshwright train recipes/demo.yaml --layout "dp=2,zero=3,pp=2" --set run.steps=20
    """
    if layout is not None and plan is not None:
        found = "--layout and --plan; a plan has its layout in it"
        raise MeshwrightError(
            problem("E864", where="meshwright train", found=found, do="give one of the two")
        )
    one_layout("train", {"--layout": layout, "--plan": plan}, sets or ())
    from meshwright.config.load import load_run
    from meshwright.config.resolve import resolve

    overridden = ("layout",) if plan is not None else ()
    run = resolve(load_run(run_file, tuple(sets or ())), layout=layout, overridden=overridden)
    from meshwright.mesh.env import torchrun_facts
    from meshwright.mesh.imports import load_modules

    load_modules(("meshwright.orchestrate.training",))
    from meshwright.orchestrate.training import train_command

    facts = torchrun_facts()
    first = facts is None or facts.rank == 0
    if first:
        show_warnings(run.warnings)
    try:
        result = train_command(
            run,
            plan_path=plan,
            layout=layout,
            nproc=nproc,
            stop_at_step=steps,
            resume=resume,
            dry_run=dry_run,
            json_output=as_json,
            show=show_line if as_json else print_now,
        )
    except MeshwrightError:
        raise
    except Exception as error:
        error.add_note(f"{RUN_FOLDER}{run.run.dir}")
        raise
    if as_json and first:
        show_json(result)


def print_now(line: str) -> None:
    """Print one line of progress on standard output, at once; where nobody can read it any more, print no others.

    The run goes on: its figures are in the run folder.
    """
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
