"""``meshwright explain``: what one rank does in one step, or the page of an error code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cli.errors_page import all_markdown, page_json
from meshwright.cli.options import Adapter, Freeze, Json, MaybeGlobalBatch, MaybeLayout, MaybeSeqLen
from meshwright.cli.output import show_json
from meshwright.cli.target import plan_of

if TYPE_CHECKING:
    from meshwright.program.plan import Plan


def explain(
    target: Annotated[
        str | None,
        typer.Argument(metavar="(plan.json | MODEL | CODE)", help="A plan, a model with --layout, or E201."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="N", help="Which rank to explain.")
    ] = None,
    layout: MaybeLayout = None,
    seq_len: MaybeSeqLen = None,
    global_batch: MaybeGlobalBatch = None,
    freeze: Freeze = None,
    adapter: Adapter = None,
    every_code: Annotated[bool, typer.Option("--all-markdown", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Tell what rank N is and does in one step; or explain an error code.

    Examples: meshwright explain plan.json --rank 3; meshwright explain E201
    """
    if every_code:
        print(all_markdown())
        return
    if target is None:
        needs = "an error code, a plan.json, or a model with --layout"
        raise MeshwrightError(
            problem("E862", where="meshwright explain", found="there is nothing to explain", needs=needs)
        )
    if re.fullmatch(r"[EWew][0-9]{1,5}", target) and not Path(target).exists():
        options = {
            "--rank": rank,
            "--layout": layout,
            "--seq-len": seq_len,
            "--global-batch": global_batch,
            "--freeze": freeze,
            "--adapter": adapter,
        }
        given = [name for name, value in options.items() if value not in (None, [])]
        if given:
            found = f"{', '.join(given)} with the code {target.upper()}"
            do = f"meshwright explain {target.upper()}"
            raise MeshwrightError(problem("E864", where="meshwright explain", found=found, do=do))
        from meshwright.program.explain import explain_error

        page = explain_error(target)
        if as_json:
            show_json(page_json(target))
        else:
            print(page)
        return
    plan = plan_of(target, layout, seq_len, global_batch, tuple(freeze or ()), adapter)
    if rank is None:
        do = f"add --rank N with N from 0 to {plan.world_size - 1}"
        raise MeshwrightError(problem("E862", where="meshwright explain", found="--rank is missing", do=do))
    from meshwright.program.explain import explain_rank
    from meshwright.program.plan import plan_spec

    spec = plan_spec(plan)
    text = explain_rank(plan, spec, rank, _gpus_per_node(plan))
    if as_json:
        show_json({"rank": rank, "world_size": plan.world_size, "plan_hash": plan.hash, "text": text})
    else:
        print(text)


def _gpus_per_node(plan: Plan) -> int | None:
    """Return the node size of the plan's cluster, or None where that cluster is not known here."""
    if not plan.cluster:
        return None
    from meshwright.cluster.load import read_cluster

    try:
        return read_cluster(plan.cluster, plan.world_size).gpus_per_node
    except MeshwrightError:
        return None
