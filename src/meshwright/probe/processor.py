"""A probe read in processor seconds: what the ranks themselves used, whoever else had the cores.

Wall time on a machine with fewer cores than ranks, or with other programs, says little about the work. The same
cost model on a probe whose seconds are processor seconds predicts the processor seconds of a step.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cluster.load import cluster_from_probe
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.fast import columns
from meshwright.cost.in_place import MEASURED, in_place_figures
from meshwright.cost.pieces import make_pricer
from meshwright.cost.placed import TENSOR_PARTS, UNIT_PARTS
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec


def core_share(world_size: int, cores: float) -> float:
    """Return the share of a core that one of ``world_size`` ranks has when all compute."""
    return min(1.0, cores / world_size)


def quiet_share(ranks: Sequence[Mapping[str, Any]], share: float | None) -> float:
    """Return which part of their cores the ranks had while they measured matmuls; 1 where that is not known."""
    if share is None:
        return 1.0
    had = [used / wall for r in ranks for wall, used in r["matmul"]]
    return min(1.0, statistics.fmean(had) / share)


def processor_view(probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the probe with every time in processor seconds of one rank, and a core for each rank.

    Raises:
        KeyError: for a probe without processor seconds.
    """
    view = copy.deepcopy(dict(probe))
    for row in view["matmul"]:
        row["time_s"] = row["processor_s"]
        row["flops_per_s"] = 2.0 * row["m"] * row["k"] * row["n"] / row["time_s"]
    for row in view["attention"]:
        row["forward_s"], row["backward_s"] = row["forward_processor_s"], row["backward_processor_s"]
    for part in ("memory", "overhead"):
        view[part] |= view["processor"][part]
    for one in view["links"]:
        for point in one["points"]:
            point["time_s"] = point["processor_s"]
    _even([(f"{x['collective']}/{len(x['ranks'])}", x["points"]) for x in view["links"]], ("time_s",))
    view["cores"] = float(view["world_size"])
    placed = view.pop("in_place", None)
    if placed is not None:
        placed.pop("meetings", None)  # waiting costs no processor seconds
        for kind, parts in (("sharding", UNIT_PARTS), ("tensor", TENSOR_PARTS)):
            groups = placed.get(kind, [])
            for point in (p for one in groups for p in one["points"]):
                point |= {f"{part}_s": point[f"{part}_processor_s"] for part in parts}
            _even([(str(len(x["ranks"])), x["points"]) for x in groups], [f"{part}_s" for part in parts])
        for row in placed["references"]:
            row |= {f"{name}_s": row[f"{name}_processor_s"] for name in MEASURED}
        view["in_place"] = placed | in_place_figures(cluster_from_probe(view), placed["references"])
    return view


def _even(found: Sequence[tuple[str, list[dict[str, Any]]]], names: Sequence[str]) -> None:
    """Set figures of points of groups that are alike (name, points) to their mean over the groups, in place.

    In wall seconds the slowest group paces a step; in processor seconds each group pays its own.
    """
    alike: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name, points in found:
        for point in points:
            alike.setdefault((name, int(point["bytes"])), []).append(point)
    for points in alike.values():
        for name in names:
            mean = statistics.fmean(p[name] for p in points)
            for point in points:
                point[name] = mean


def processor_cluster(probe: Mapping[str, Any], name: str = "probed") -> ClusterSpec:
    """Return the cluster of a probe in processor seconds."""
    return cluster_from_probe(processor_view(probe), name)


def processor_seconds(spec: ModelSpec, layout: Layout, batch: Batch, cluster: ClusterSpec) -> float:
    """Return the processor seconds of one step over all ranks; ``cluster`` is that of ``processor_cluster``.

    Waiting costs nothing, so each stage counts its own work: compute, its share of collectives, messages and update.
    """
    pricer = make_pricer(spec, cluster, batch.seq_len, layout.precision)
    cols = columns(pricer, [layout], [batch])
    stages = float(
        sum(
            x[0].sum()
            for x in (cols.compute, cols.recompute, cols.tensor, cols.context, cols.expert, cols.data)
        )
    )
    ranks_of_stage = layout.world_size / layout.pp
    m = float(batch.accumulation)
    # each border: a message forward and one back, of which a rank at either end pays the seconds
    messages = 2.0 * 2.0 * m * float(cols.send[0]) * (layout.num_stages - 1)
    whole = (float(cols.optimizer[0]) + float(cols.offload[0]) + float(cols.other[0])) * layout.world_size
    return (stages + messages) * ranks_of_stage + whole
