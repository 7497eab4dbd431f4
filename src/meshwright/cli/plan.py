"""``meshwright plan``: the best layouts of a model on a cluster."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.units import format_seconds
from meshwright.cli.options import Adapter, Cluster, GlobalBatch, Gpus, Json, Model, SeqLen
from meshwright.cli.output import check_writable, show_json
from meshwright.cli.plan_answers import (
    Request,
    cheapest,
    explained,
    explained_text,
    front_text,
    named,
    not_built,
    told_apart,
)
from meshwright.cli.plan_table import describe_item, plans_table
from meshwright.cli.plan_try import as_dict as try_dict
from meshwright.cli.plan_try import as_text as try_text
from meshwright.cli.plan_try import check_try
from meshwright.cli.plan_try import try_best as run_best

if TYPE_CHECKING:
    from meshwright.search.search import SearchResult


class Objective(StrEnum):
    """What "best" means."""

    TIME = "time"
    MEMORY = "memory"
    COST = "cost"


class Precision(StrEnum):
    """Compute precisions of a plan; "any" tries each that the device has. fp8 is priced and cannot run yet."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP8_ROWWISE = "fp8-rowwise"
    FP8_BLOCKWISE = "fp8-blockwise"
    ANY = "any"


def plan(
    model: Model,
    cluster: Cluster,
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    gpus: Gpus = None,
    top: Annotated[
        int, typer.Option("--top", min=1, max=1000, metavar="K", help="How many plans to show.")
    ] = 5,
    fix: Annotated[
        str, typer.Option("--fix", metavar="LAYOUT", help='Keys that must be so, such as "tp=2,zero=3".')
    ] = "",
    objective: Annotated[
        Objective,
        typer.Option("--objective", help="What the best plan has least of; cost tries fewer nodes too."),
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
    why: Annotated[
        str,
        typer.Option(
            "--why", metavar="LAYOUT", help="Also judge this layout: its rule, its cost or what it lacks."
        ),
    ] = "",
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also every layout that none is both faster and smaller than.")
    ] = False,
    unbuilt: Annotated[
        bool, typer.Option("--unbuilt", help="Also price what cannot run yet; such plans say so.")
    ] = False,
    try_best: Annotated[
        int | None,
        typer.Option(
            "--try", min=1, max=64, metavar="K", help="Run the best K here for a few steps, learn, rank anew."
        ),
    ] = None,
    adapter: Adapter = None,
    as_json: Json = False,
) -> None:
    """Find the best layouts; exit 1 with the nearest misses when nothing fits.

    Example: meshwright plan llama-2-7b --cluster a100-40gb-x8 --seq-len 2048 --global-batch 64
    """
    _same_precision(fix, precision)
    if out is not None:
        check_writable(out)
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.machine_fit import calibrated
    from meshwright.layout.parse import parse_layout
    from meshwright.mesh.env import cache_folder
    from meshwright.model.adapters import adapted, parse_adapter
    from meshwright.model.read_hf import read_model
    from meshwright.search.search import search

    spec = adapted(read_model(model), parse_adapter(adapter) if adapter is not None else None)
    probed = read_cluster(cluster, gpus)
    if try_best is not None:
        check_try(probed, unbuilt=unbuilt)
    machine, _ = calibrated(probed, cache_folder())
    request = Request(
        spec,
        machine,
        seq_len,
        global_batch,
        {
            "fix": fix,
            "objective": objective.value,
            "precision": precision.value if precision else None,
            "include_unbuilt": unbuilt,
        },
    )
    if why:  # a text that is not a layout is said before the search
        parse_layout(why, "--why")
    more: dict[str, Any] = {}
    if objective is Objective.COST:
        request, more["prices"] = cheapest(request)
        machine = request.cluster
    shown = max(top, try_best or 0)
    result = search(
        spec, machine, seq_len, global_batch, top=shown, model_path=model, pareto=pareto, **request.search
    )
    found = bool(result.plans)
    more |= _more(request, result, why, explain=explain, pareto=pareto)
    best = result.plans[0] if found else None
    if found and try_best is not None:
        outcome = run_best(request, probed, result, try_best, top, model)
        more["try"] = try_dict(outcome)
        best = outcome.after[0][0]
    if best is not None and out is not None:
        from meshwright.program.plan_file import save_plan

        save_plan(best, out)
    if as_json:
        show_json(_json(request, result) | more)
    else:
        _show(request, result, more, explain=explain, out=out)
    if not found:
        raise typer.Exit(int(ExitCode.NO))


def _more(request: Request, result: SearchResult, why: str, *, explain: bool, pareto: bool) -> dict[str, Any]:
    """Return the answers that were asked for beside the list, in JSON form."""
    from meshwright.cost.estimate import item

    more: dict[str, Any] = {}
    if why:
        more["asked"] = named(request, why, result.plans[0] if result.plans else None).as_dict()
    if pareto:
        more["pareto"] = [item(p) for p in result.front]
    return more | (explained(request, result) if explain else {})


def _items(request: Request, result: SearchResult) -> list[dict[str, Any]]:
    from meshwright.cost.estimate import item
    from meshwright.search.price import price_of

    listed = [item(p) for p in result.plans] or [nearest_miss(item(p)) for p in result.misses]
    for shown, plan in zip(listed, result.plans or result.misses, strict=True):
        if plan.prediction is not None and request.cluster.price_per_device_hour is not None:
            step_s = plan.prediction.step_time_s
            shown["price_per_step"] = price_of(step_s, plan.layout.world_size, request.cluster)
        missing = not_built(request, plan)
        if missing or request.search["include_unbuilt"]:
            shown["not_built"] = missing
    return listed


def _json(request: Request, result: SearchResult) -> dict[str, Any]:
    return {
        "plans": _items(request, result),
        "like_the_best": told_apart(result)[0],
        "searched": result.searched,
        "bounded": result.bounded,
        "legal": result.legal,
        "fits": result.fits,
        "played": result.played,
        "seconds": result.seconds,
    }


def _show(
    request: Request, result: SearchResult, more: dict[str, Any], *, explain: bool, out: str | None
) -> None:
    capacity = request.cluster.device.memory.value
    items = _items(request, result)
    found = bool(result.plans)
    if not found:
        print("nothing fits; the nearest misses, each with the cheapest change that would make it fit:")
    print(plans_table(items, capacity))
    for miss in () if found else result.misses:
        print(f"  {miss.layout.text()}: {miss.why[0]}")
    for number, shown in enumerate(items, start=1):
        if shown.get("not_built"):
            print(f"#{number} cannot run yet: {'; '.join(shown['not_built'])}")
    if explain:
        for shown in items:
            print()
            print(describe_item(shown, capacity))
        print()
        print(explained_text(more))
    elif found:
        print("\n".join(f"why: {sentence}" for sentence in result.plans[0].why))
    if "prices" in more:
        print(f"why: {more['prices']['why']}")
    if apart := told_apart(result)[1]:
        by_time = " by their step time" if request.search["objective"] == Objective.MEMORY.value else ""
        print(f"why: {apart.replace('told apart', f'told apart{by_time}', 1)}")
    if "asked" in more:
        print("\n".join([f"{more['asked']['layout_text']}:", *(f"  {s}" for s in more["asked"]["why"])]))
    if "pareto" in more:
        print(front_text(more["pareto"]))
    if "try" in more:
        print(try_text(more["try"]))
    print(
        f"{result.searched} layouts priced, {result.bounded} ruled out by a bound, {result.legal} legal, "
        f"{result.fits} fit; {format_seconds(result.seconds)}"
    )
    if found and out is not None:
        print(f"the best plan is in {out}; next: meshwright train RUN.yaml --plan {shlex.quote(out)}")


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
