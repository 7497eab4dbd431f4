"""``meshwright estimate``: what one layout would cost, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cli.options import Adapter, Cluster, Freeze, GlobalBatch, Gpus, Json, Model, SeqLen
from meshwright.cli.output import show_json
from meshwright.cli.plan_table import describe_item

if TYPE_CHECKING:
    from meshwright.cluster.spec import ClusterSpec
    from meshwright.layout.layout import Layout
    from meshwright.model.spec import ModelSpec


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
    exact: Annotated[
        bool, typer.Option("--exact", help="Also trace the memory: the worst ranks, played without a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict time and memory of one layout; exit 1 when it is illegal or does not fit.

    Example: meshwright estimate llama-2-7b --cluster a100-40gb-x8 --layout "dp=8,zero=3" --seq-len 2048
    --global-batch 64
    """
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.machine_fit import calibrated
    from meshwright.layout.parse import parse_layout
    from meshwright.mesh.env import cache_folder

    parsed = parse_layout(layout)
    machine, _ = calibrated(read_cluster(cluster, gpus or parsed.world_size), cache_folder())
    frozen = tuple(freeze or ())
    try:
        spec = _spec(model, adapter, frozen)
    except MeshwrightError as error:
        if not exact:
            raise
        from meshwright.cli.estimate_exact import traced_unknown

        item = traced_unknown(error, model, parsed, machine, seq_len, global_batch, frozen, adapter)
    else:
        item = _priced(spec, parsed, machine, seq_len, global_batch, frozen)
        if exact:
            from meshwright.cli.estimate_exact import traced

            item = traced(item, spec, parsed, machine, seq_len, global_batch, model, frozen)
    if as_json:
        show_json(item)
    else:
        print(_text(item, machine.device.memory.value))
    if not (item["legal"] and item["fits"]):
        raise typer.Exit(int(ExitCode.NO))


def _spec(model: str, adapter: str | None, frozen: tuple[str, ...]) -> ModelSpec:
    from meshwright.model.adapters import adapted, parse_adapter
    from meshwright.model.read_hf import read_model
    from meshwright.program.make import check_frozen

    spec = adapted(read_model(model), parse_adapter(adapter) if adapter is not None else None)
    refuse(check_frozen(spec, frozen))
    return spec


def _priced(
    spec: ModelSpec,
    layout: Layout,
    machine: ClusterSpec,
    seq_len: int,
    global_batch: int,
    frozen: tuple[str, ...],
) -> dict[str, Any]:
    from meshwright.cost.estimate import estimate as price

    return price(spec, layout, machine, seq_len, global_batch, frozen, schedule_rows(layout.schedule))


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
    verdict = "fits" if item["fits"] else "does NOT fit"
    legal = "legal" if item["legal"] else "NOT legal today"
    traced = ""
    if item.get("exact") is not None:
        from meshwright.cli.estimate_exact import exact_text

        traced = exact_text(item, capacity_bytes)
    if item["predicted"] is None and not traced:
        return "\n".join([*lines, "illegal: no prediction"])
    head = item["layout_text"] if item["predicted"] is None else describe_item(item, capacity_bytes)
    host = [_host(item["host_bytes"])] if item.get("host_bytes") else []
    host += [_beside(item["host_seconds"], item["host_assumptions"])] if item.get("host_seconds") else []
    return "\n".join([head, *host, *([traced] if traced else []), *lines, f"{legal}; {verdict}"])


def _host(held: dict[str, float]) -> str:
    """Return the line about host memory of one node."""
    sizes = {name: format_bytes(value) for name, value in held.items()}
    return (
        f"  host       loading {sizes['load']} a node (a whole model in every process would be {sizes['load_naive']}), "
        f"copy for checkpoints {sizes['checkpoint']}, rows of a step {sizes['data']}"
    )


def _beside(found: dict[str, float], assumed: list[str]) -> str:
    """Return the lines about what takes time beside the steps."""
    times = {name: format_seconds(value) for name, value in found.items()}
    rates = f" (assumed: {'; '.join(assumed)})" if assumed else ""
    write, read = times["checkpoint_write"], times["checkpoint_read"]
    return (
        f"  beside     a checkpoint {write} to write to local disks, {read} to read;"
        f" written beside the training a step waits {times['checkpoint_copy']}\n"
        f"             rows of a step {times['data']}{rates}"
    )
