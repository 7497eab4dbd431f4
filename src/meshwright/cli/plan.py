"""``meshwright plan``: the best layouts of a model on a cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.units import format_seconds
from meshwright.cli.not_built import refuse_not_built
from meshwright.cli.options import Adapter, Cluster, GlobalBatch, Gpus, Json, Model, SeqLen
from meshwright.cli.output import check_writable, show_json
from meshwright.cli.plan_table import describe_item, plans_table


class Objective(StrEnum):
    """What "best" means."""

    TIME = "time"
    MEMORY = "memory"
    COST = "cost"


class Precision(StrEnum):
    """Compute precisions of a plan."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def plan(
    model: Model,
    cluster: Cluster,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    gpus: Gpus = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="K", help="How many plans to show.")] = 5,
    fix: Annotated[
        str, typer.Option("--fix", metavar="LAYOUT", help='Keys that must be so, such as "tp=2,zero=3".')
    ] = "",
    objective: Annotated[
        Objective, typer.Option("--objective", help="What the best plan has least of.")
    ] = Objective.TIME,
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", help="Compute precision; the planner's choice without it."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="plan.json", help="Write the best plan to a file.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every plan in full, with its reasons.")
    ] = False,
    try_best: Annotated[
        int | None,
        typer.Option("--try", min=1, metavar="K", help="Run the best K for a few steps (not built yet)."),
    ] = None,
    adapter: Adapter = None,
    as_json: Json = False,
) -> None:
    """Find the best layouts; exit 1 with the nearest misses when nothing fits.

    Example: meshwright plan llama-2-7b --cluster a100-40gb-x8 --seq-len 2048 --global-batch 64
    """
    if try_best is not None:
        refuse_not_built(
            "meshwright plan --try", "run the best plan with meshwright train --plan plan.json --steps 5"
        )
    _same_precision(fix, precision)
    if out is not None:
        check_writable(out)
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.estimate import item
    from meshwright.model.adapters import adapted, parse_adapter
    from meshwright.model.read_hf import read_model
    from meshwright.search.search import search

    spec = adapted(read_model(model), parse_adapter(adapter) if adapter is not None else None)
    machine = read_cluster(cluster, gpus)
    result = search(
        spec,
        machine,
        seq_len,
        global_batch,
        fix=fix,
        objective=objective.value,
        precision=precision.value if precision else None,
        top=top,
        model_path=model,
    )
    found = bool(result.plans)
    if found and out is not None:
        from meshwright.program.plan_file import save_plan

        save_plan(result.plans[0], out)
    if as_json:
        show_json(
            {
                "plans": [item(p) for p in result.plans]
                if found
                else [nearest_miss(item(p)) for p in result.misses],
                "searched": result.searched,
                "bounded": result.bounded,
                "legal": result.legal,
                "fits": result.fits,
                "seconds": result.seconds,
            }
        )
    else:
        capacity = machine.device.memory.value
        items = [item(p) for p in result.plans] if found else [item(p) for p in result.misses]
        if not found:
            print("nothing fits; the nearest misses, each with the cheapest change that would make it fit:")
        print(plans_table(items, capacity))
        for miss in () if found else result.misses:
            print(f"  {miss.layout.text()}: {miss.why[0]}")
        if explain:
            for shown in items:
                print()
                print(describe_item(shown, capacity))
        elif found:
            print("\n".join(f"why: {sentence}" for sentence in result.plans[0].why))
        print(
            f"{result.searched} layouts priced, {result.bounded} ruled out by a bound, {result.legal} legal, "
            f"{result.fits} fit; {format_seconds(result.seconds)}"
        )
        if found and out is not None:
            print(f"the best plan is in {out}; next: meshwright train RUN.yaml --plan {out}")
    if not found:
        raise typer.Exit(int(ExitCode.NO))


def _same_precision(fix: str, precision: Precision | None) -> None:
    """Refuse --fix precision=... beside another --precision."""
    from meshwright.layout.parse import written_keys

    fixed = written_keys(fix).get("precision")
    if precision is not None and fixed is not None and fixed != precision.value:
        raise MeshwrightError(
            problem(
                "E864",
                where="meshwright plan",
                found=f"--fix precision={fixed} and --precision {precision.value}",
                do="give the precision once",
            )
        )


def nearest_miss(item: dict[str, Any]) -> dict[str, Any]:
    """Return the ITEM of a plan that does not fit, with the cheapest change that would make it fit."""
    return {**item, "fits": False, "change": item["why"][0] if item["why"] else ""}
