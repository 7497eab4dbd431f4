"""``meshwright estimate``: what one layout would cost, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.base.units import format_bytes
from meshwright.cli.not_built import refuse_not_built
from meshwright.cli.options import Adapter, Cluster, Freeze, GlobalBatch, Gpus, Json, Model, SeqLen
from meshwright.cli.output import show_json
from meshwright.cli.plan_table import describe_item


def estimate(
    model: Model,
    cluster: Cluster,
    layout: Annotated[
        str,
        typer.Option(
            "--layout", metavar="LAYOUT", help='Layout text, such as "dp=8,zero=3".', show_default=False
        ),
    ],
    seq_len: SeqLen,
    global_batch: GlobalBatch,
    gpus: Gpus = None,
    freeze: Freeze = None,
    adapter: Adapter = None,
    exact: Annotated[bool, typer.Option("--exact", help="Trace on fake ranks (not built yet).")] = False,
    as_json: Json = False,
) -> None:
    """Predict time and memory of one layout; exit 1 when it is illegal or does not fit.

    Example: meshwright estimate llama-2-7b --cluster a100-40gb-x8 --layout "dp=8,zero=3" --seq-len 2048
    --global-batch 64
    """
    if exact:
        refuse_not_built(
            "meshwright estimate --exact", "leave --exact out: the cost model answers without a trace"
        )
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.estimate import estimate as price
    from meshwright.cost.machine_fit import calibrated
    from meshwright.layout.parse import parse_layout
    from meshwright.mesh.env import cache_folder
    from meshwright.model.adapters import adapted, parse_adapter
    from meshwright.model.read_hf import read_model
    from meshwright.program.make import check_frozen

    spec = adapted(read_model(model), parse_adapter(adapter) if adapter is not None else None)
    parsed = parse_layout(layout)
    refuse(check_frozen(spec, tuple(freeze or ())))
    machine, _ = calibrated(read_cluster(cluster, gpus or parsed.world_size), cache_folder())
    rows = schedule_rows(parsed.schedule)
    item = price(spec, parsed, machine, seq_len, global_batch, tuple(freeze or ()), rows)
    if as_json:
        show_json(item)
    else:
        print(_text(item, machine.device.memory.value))
    if not (item["legal"] and item["fits"]):
        raise typer.Exit(int(ExitCode.NO))


def schedule_rows(name: str) -> str:
    """Return the rows in the file of ``schedule=@FILE``, or "" for a named schedule.

    Raises:
        MeshwrightError: E114 when the file cannot be read, E306 when it is empty.
    """
    if not name.startswith("@"):
        return ""
    try:
        text = Path(name[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = f"cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
        raise MeshwrightError(problem("E114", where=f"schedule file {name[1:]}", found=found)) from None
    if not text.strip():
        raise MeshwrightError(
            problem("E306", where=f"schedule file {name[1:]}", found="the text has no action")
        )
    return text


def _text(item: dict[str, Any], capacity_bytes: float) -> str:
    lines = [f"{p['code']}  {p['where']}: {p['found']}\n      do     {p['do']}" for p in item["problems"]]
    if item["predicted"] is None:
        return "\n".join([*lines, "illegal: no prediction"])
    verdict = "fits" if item["fits"] else "does NOT fit"
    legal = "legal" if item["legal"] else "NOT legal today"
    return "\n".join(
        [describe_item(item, capacity_bytes), _host(item["host_bytes"]), *lines, f"{legal}; {verdict}"]
    )


def _host(held: dict[str, float]) -> str:
    """Return the line about host memory of one node."""
    sizes = {name: format_bytes(value) for name, value in held.items()}
    return (
        f"  host       loading {sizes['load']} a node (a whole model in every process would be {sizes['load_naive']}), "
        f"copy for checkpoints {sizes['checkpoint']}, rows of a step {sizes['data']}"
    )
