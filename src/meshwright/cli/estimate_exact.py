"""``meshwright estimate --exact``: the traced memory beside the closed form's, as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base.errors import MeshwrightError, problem, refuse
from meshwright.base.units import format_bytes
from meshwright.cli.output import table

if TYPE_CHECKING:
    from meshwright.cluster.spec import ClusterSpec
    from meshwright.layout.layout import Layout
    from meshwright.model.spec import ModelSpec

NOT_TRACED = {"exact": None, "closed_form": None, "difference": None}
"""What an illegal layout has in place of a trace."""

UNKNOWN_CODES = ("E124", "E125")
"""Refusals of ``read_model`` that say: no family file describes this model."""


def traced(
    item: Mapping[str, Any],
    spec: ModelSpec,
    layout: Layout,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    model: str,
    frozen: tuple[str, ...],
) -> dict[str, Any]:
    """Return ``item`` with what a trace found: ``exact``, ``closed_form``, ``difference``, and its own ``fits``.

    Raises:
        MeshwrightError: see ``exact.estimate.exact_answer``; E272 where a base in 4 bits cannot be packed.
    """
    if not item["legal"]:
        return dict(item) | NOT_TRACED
    from meshwright.exact.estimate import exact_answer
    from meshwright.parallel.quantised import missing_bitsandbytes
    from meshwright.program.make import make_plan

    refuse(missing_bitsandbytes(spec, "cpu"))
    plan = make_plan(spec, layout, global_batch, seq_len, model, frozen=frozen, cluster=cluster)
    return dict(item) | exact_answer(plan, spec, cluster, item["ranks"])


def traced_unknown(
    error: MeshwrightError,
    model: str,
    layout: Layout,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    frozen: tuple[str, ...],
    adapter: str | None,
) -> dict[str, Any]:
    """Return the item of a model that no family file describes: memory, and no time.

    Raises:
        MeshwrightError: ``error``, where it says something else; E467 for an adapter; E468, E811 without a module.
    """
    if not {p.code for p in error.problems} <= set(UNKNOWN_CODES):
        raise error
    if adapter is not None:
        found = f"--adapter {adapter} on a model that no family file describes"
        refuse([problem("E467", where="--adapter", found=found, do="leave --adapter out")])
    from meshwright.cost.predict import check_world
    from meshwright.exact.estimate import exact_answer
    from meshwright.exact.model import unknown_spec
    from meshwright.model.read_hf import read_config
    from meshwright.program.make import make_plan

    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    spec = unknown_spec(read_config(path), path.resolve().parent.name)
    check_world(layout, cluster)
    plan = make_plan(spec, layout, global_batch, seq_len, model, frozen=frozen, cluster=cluster)
    warning = problem("W469", where="model.config", found=error.problems[0].found)
    item: dict[str, Any] = {
        "layout": plan.layout.as_dict(),
        "layout_text": plan.layout.text(),
        "world_size": plan.world_size,
        "predicted": None,
        "hidden_s": None,
        "why": [],
        "binds": "",
        "legal": True,
        "problems": [warning.as_dict()],
        "ranks": [],
        "host_bytes": None,
        "host_seconds": None,
        "host_assumptions": [],
    }
    return item | exact_answer(plan, spec, cluster, ())


def exact_text(item: Mapping[str, Any], capacity_bytes: float) -> str:
    """Return the traced part of an item for people: the peak and its moment, each class of ranks, the difference."""
    exact, difference = item["exact"], item["difference"]
    if exact is None:
        return ""
    lines = [
        f"  exact      {format_bytes(exact['peak_memory_bytes'])} of {format_bytes(capacity_bytes)} at the peak: "
        f"{exact['moment']}; traced in {exact['seconds']:.1f} s"
    ]
    for rank in exact["ranks"]:
        lines.append(
            f"             {rank['position']} rank {rank['rank']}: {format_bytes(rank['peak_memory_bytes'])}, "
            f"{rank['moment']}; {rank['method']}"
        )
    lines += [f"  counts     {text}" for text in exact["assumptions"]]
    if difference is None:
        rows = [
            (name, format_bytes(size), "-", "-", "-") for name, size in exact["memory_bytes"].items() if size
        ]
    else:
        sizes = exact["memory_bytes"] | {"peak": exact["peak_memory_bytes"]}
        off = difference["memory_bytes"] | {"peak": difference["peak_memory_bytes"]}
        share = difference["memory_pct_of_peak"] | {"peak": difference["peak_pct"]}
        rows = [
            (n, format_bytes(sizes[n]), format_bytes(sizes[n] - off[n]), f"{off[n]:+,}", f"{share[n]:+.1f}")
            for n in off
        ]
    header = ("category", "exact", "closed form", "difference, bytes", "% of the peak")
    shown = table(header, rows, right=(1, 2, 3, 4)).splitlines()
    return "\n".join([*lines, *(f"  {line}" for line in shown)])
