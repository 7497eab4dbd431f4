"""``meshwright models`` and ``meshwright clusters``: what is known by name, each number with its source."""

from __future__ import annotations

from typing import Any

from meshwright.cli.options import Json
from meshwright.cli.output import show_json, table


def models(as_json: Json = False) -> None:
    """List the models that are known by name, with the source of their figures."""
    from meshwright.base.units import format_count
    from meshwright.model.catalogue import entries
    from meshwright.model.counts import active_parameters
    from meshwright.model.read_hf import spec_from_config

    rows: list[dict[str, Any]] = []
    for entry in entries():
        spec = spec_from_config(entry.config, entry.name, entry.source)
        rows.append(
            {
                "name": entry.name,
                "family": spec.family,
                "num_parameters": spec.num_parameters,
                "num_active_parameters": active_parameters(spec),
                "num_layers": spec.num_layers,
                "hidden_size": spec.hidden_size,
                "published_parameters": entry.published_parameters,
                "source": entry.source,
            }
        )
    if as_json:
        show_json({"models": rows})
        return
    header = ("name", "family", "parameters", "active", "layers", "hidden", "source")
    lines = [
        (
            row["name"],
            row["family"],
            format_count(row["num_parameters"]),
            format_count(row["num_active_parameters"]),
            str(row["num_layers"]),
            str(row["hidden_size"]),
            row["source"],
        )
        for row in rows
    ]
    print(table(header, lines, right=(2, 3, 4, 5)))


def clusters(as_json: Json = False) -> None:
    """List the clusters that are known by name; --json gives every number with its source."""
    from meshwright.cluster.catalogue import describe_clusters

    rows = describe_clusters()
    if as_json:
        show_json({"clusters": rows})
        return
    print(cluster_table(rows))


def cluster_table(rows: list[dict[str, Any]]) -> str:
    """Return the clusters as a table: datasheet figures in the units people quote, one line a cluster."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        figures = row["figures"]
        sources = dict.fromkeys(f["source"] for f in figures.values() if f["kind"] == "datasheet")
        lines.append(
            (
                row["name"],
                row["device"] or "unknown",
                str(row["gpus_per_node"] or "-"),
                _scaled(figures.get("memory"), 1e9, "GB"),
                _scaled(figures.get("peak_flops_bf16") or figures.get("peak_flops_fp16"), 1e12, "TFLOP/s"),
                _scaled(figures.get("intra_rate"), 1e9, "GB/s"),
                _scaled(figures.get("inter_rate"), 1e9, "GB/s"),
                "; ".join(sources) or row["notes"],
            )
        )
    header = ("name", "device", "GPUs", "memory", "bf16 or fp16", "in a node", "between nodes", "source")
    return table(header, lines, right=(2, 3, 4, 5, 6))


def _scaled(figure: dict[str, Any] | None, scale: float, unit: str) -> str:
    """Return a figure in ``unit``; one that is not from a datasheet says so."""
    if figure is None:
        return "-"
    mark = "" if figure["kind"] == "datasheet" else f" ({figure['kind']})"
    return f"{figure['value'] / scale:.4g} {unit}{mark}"
