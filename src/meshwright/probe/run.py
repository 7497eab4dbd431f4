"""``run_probe``: measure this machine (under torchrun, this cluster) and return the probe's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.cluster.load import PROBE_FORMAT, cluster_from_probe
from meshwright.cost.in_place import ONCE, REFERENCES, in_place_figures
from meshwright.cost.meeting import LINK_PRODUCTS, MEET_BYTES
from meshwright.mesh import env
from meshwright.mesh.imports import MODEL_CODE
from meshwright.mesh.launch import run_local
from meshwright.probe.fit import advice, crossover_bytes, link, ring_order
from meshwright.probe.processor import core_share, quiet_share
from meshwright.probe.topology import describe_nodes, effective_cores, machine_facts


def run_probe(nproc: int, quick: bool, show: Callable[[str], None]) -> dict[str, Any]:
    """Return what ``nproc`` ranks measure on this machine, or the ranks of torchrun where it started this process.

    Progress lines go to ``show``. Every rank of torchrun gets the same result.

    Raises:
        MeshwrightError: E520 for a number of ranks that cannot be; what ``run_local`` raises.
    """
    facts = env.torchrun_facts()
    if nproc < 1 or (facts is not None and nproc != facts.world_size):
        world = "" if facts is None else f", and torchrun started {facts.world_size}"
        raise MeshwrightError(problem("E520", where="nproc", found=f"{nproc} ranks asked for{world}"))
    import torch

    from meshwright.probe.measure import measure
    from meshwright.probe.request import Request

    local = nproc if facts is None else facts.local_world_size
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "cpu"
    request = Request(quick=quick, device=device, show=None if facts is None else show)
    results = run_local(
        measure,
        nproc,
        request,
        device=device,
        on_line=show,
        preload=("meshwright.probe.measure", *MODEL_CODE),
        collective_timeout_s=120.0,
    )
    ranks: list[dict[str, Any]] = results[0]
    return assemble(
        ranks,
        matmul_shapes=request.products,
        attention_shapes=request.attention_shapes,
        cores=effective_cores(),
        backend="gloo" if device == "cpu" else "nccl",
        torch_version=torch.__version__,
        quick=quick,
        machine=machine_facts(device),
    )


def assemble(
    ranks: Sequence[Mapping[str, Any]],
    *,
    matmul_shapes: Sequence[tuple[int, int, int]],
    attention_shapes: Sequence[tuple[int, int, int, int]],
    cores: float,
    backend: str,
    torch_version: str,
    quick: bool,
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the probe's JSON from what each rank measured.

    Times and rates of compute are means over ranks (they work at the same time, each for the whole window); on a CPU
    they are processor seconds over the share of a core that a rank has, which other programs do not stretch. A
    link's points are those of its first rank, which are the slowest rank's times already. ``processor_s`` and
    ``processor`` are the processor seconds of the same. ``machine`` says where it was measured and when.

    Raises:
        MeshwrightError: E521 for ranks on different devices.
    """
    if any(r["device"] != ranks[0]["device"] for r in ranks):
        names = sorted({str(r["device"]) for r in ranks})
        raise MeshwrightError(
            problem("E521", where="devices", found=f"the ranks run on {' and '.join(names)}"),
            ExitCode.ENVIRONMENT,
        )
    world_size = len(ranks)
    is_cpu = ranks[0]["device"] == "cpu"
    matmul: list[dict[str, Any]] = []
    attention: list[dict[str, Any]] = []
    share = core_share(world_size, cores) if is_cpu and ranks[0]["threads"] == 1 else None

    def both(get: Callable[[Mapping[str, Any]], tuple[float, float]]) -> tuple[float, float]:
        """Return wall and processor seconds, means over ranks."""
        wall, used = (statistics.fmean(get(r)[i] for r in ranks) for i in range(2))
        # what the ranks themselves used, over the share of a core that each has, is not stretched by other programs
        return (wall if share is None else used / share), used

    for p, precision in enumerate(("fp32", "bf16")):
        for i, (m, k, n) in enumerate(matmul_shapes):
            j = p * len(matmul_shapes) + i
            time_s, processor_s = both(lambda r, j=j: r["matmul"][j])
            matmul.append(
                {
                    "precision": precision,
                    "m": m,
                    "k": k,
                    "n": n,
                    "time_s": time_s,
                    "processor_s": processor_s,
                    "flops_per_s": 2.0 * m * k * n / time_s,
                }
            )
        for i, (batch, heads, seq, head_dim) in enumerate(attention_shapes):
            j = p * len(attention_shapes) + i
            forward = both(lambda r, j=j: r["attention"][j][0])
            backward = both(lambda r, j=j: r["attention"][j][1])
            attention.append(
                {
                    "precision": precision,
                    "batch": batch,
                    "heads": heads,
                    "seq": seq,
                    "head_dim": head_dim,
                    "forward_s": forward[0],
                    "backward_s": backward[0],
                    "forward_processor_s": forward[1],
                    "backward_processor_s": backward[1],
                }
            )
    links = [
        link(group, kind, points)
        for rank, found in enumerate(ranks)
        for group, kind, points in found["links"]
        if group[0] == rank
    ]
    pairs: dict[tuple[int, int], float] = {}
    for found in ranks:
        pairs.update(found["pairs"])
    order = ring_order(pairs, world_size)
    by_kind = {x["collective"]: x for x in links if len(x["ranks"]) == world_size}
    rule: dict[str, Any] | None = None
    below: float | None = 0.0
    if world_size > 1:
        curves = [
            [(p["bytes"], p["time_s"]) for p in by_kind[kind]["points"]]
            for kind in ("broadcast", "all_reduce")
        ]
        shared = min(len(curves[0]), len(curves[1]))
        below = crossover_bytes(curves[0][:shared], curves[1][:shared])
        rule = {
            "broadcast_below_bytes": below,
            "measured_up_to_bytes": curves[0][shared - 1][0],
            "group_size": world_size,
        }
    busy = [sum(wall for wall, _ in r["matmul"]) for r in ranks]
    middle = statistics.median(busy)
    quiet = quiet_share(ranks, share)
    byte_s = {
        name: both(lambda r, name=name: r[f"{name}_byte_s"]) for name in ("copy", "elementwise", "optimizer")
    }
    once_s = {
        name: both(lambda r, name=name: r[name]) for name in ("op_s", "backward_op_s", "optimizer_tensor_s")
    }
    placed = all(r.get("in_place") for r in ranks)
    if placed:
        once_s |= {name: both(lambda r, name=name: r["in_place"][name]) for name in ONCE}
    memory, overhead = (
        [{f"{name}_bytes_per_s": 1 / byte_s[name][i] for name in names} for i in range(2)]
        for names in (("copy", "elementwise"), ("optimizer",))
    )
    for i in range(2):
        overhead[i] |= {name: timing[i] for name, timing in once_s.items()}
    nodes = describe_nodes([r["host"] for r in ranks])
    probe: dict[str, Any] = {
        "format": PROBE_FORMAT,
        "device": ranks[0]["device"],
        "world_size": world_size,
        "backend": backend,
        "cores": cores,
        "torch": torch_version,
        "quick": quick,
        "links": links,
        "matmul": matmul,
        "attention": attention,
        "memory": {
            "total_bytes": min(r["total_bytes"] for r in ranks),
            "available_bytes": min(r["available_bytes"] for r in ranks),
            **memory[0],
        },
        "overhead": overhead[0],
        "processor": {"memory": memory[1], "overhead": overhead[1]},
        "quiet_share": quiet,
        "machine": dict(machine or {}),
        "topology": {
            **nodes,
            "cores_per_node": cores,
            "memory_per_node_bytes": min(r["total_bytes"] for r in ranks),
            "gpus": [] if is_cpu else [r["device"] for r in ranks],
            "gpu_links": ranks[0]["topology"],
            "pairs": [{"ranks": list(p), "bytes_per_s": rate} for p, rate in sorted(pairs.items())],
        },
        "small_tensor_rule": rule,
        "ring_order": order,
        "advice": advice(
            world_size=world_size,
            cores=cores,
            is_cpu=is_cpu,
            links=links,
            matmul=matmul,
            rank_slowness=[b / middle for b in busy],
            quiet_share=quiet,
            pair_rates=pairs,
            order=order,
            broadcast_below_bytes=below,
        ),
    }
    return probe | ({"in_place": _in_place(ranks, probe, both, share)} if placed else {})


def _in_place(
    ranks: Sequence[Mapping[str, Any]],
    probe: Mapping[str, Any],
    both: Callable[[Callable[[Mapping[str, Any]], tuple[float, float]]], tuple[float, float]],
    share: float | None,
) -> dict[str, Any]:
    """Return the JSON of what was measured in its place: factors of its parts on their pieces, and sharded units.

    A group's units are the mean over its ranks: each has its own share of the work in the whole group's time.
    """
    rows: list[dict[str, Any]] = []
    for i, one in enumerate(REFERENCES):
        row: dict[str, Any] = asdict(one)
        for name in ranks[0]["in_place"]["references"][i]:
            timing = both(lambda r, i=i, name=name: r["in_place"]["references"][i][name])
            row |= {f"{name}_s": timing[0], f"{name}_processor_s": timing[1]}
        rows.append(row)
    return {
        **in_place_figures(cluster_from_probe(probe), rows),
        "references": rows,
        "sharding": _of_groups(ranks, "sharding", share),
        "tensor": _of_groups(ranks, "tensor", share),
        "meetings": meeting_points(ranks, share),
    }


def meeting_points(ranks: Sequence[Mapping[str, Any]], share: float | None) -> list[dict[str, Any]]:
    """Return each group's meetings: what a collective takes beyond the work before it, means over the group's ranks.

    In wall seconds both, from the same repeats: what others took of either cancels as far as it can. The length of the
    work is what it takes of the processor over the share of a core that a rank has, as in every price.
    """
    groups: dict[tuple[int, ...], list[Any]] = {}
    for rank in ranks:
        for group, found in rank["in_place"]["meetings"]:
            groups.setdefault(tuple(group), []).append(found)
    out: list[dict[str, Any]] = []
    for group, rows in groups.items():
        points: list[dict[str, Any]] = []
        for alike in zip(*rows, strict=True):
            alone = [statistics.fmean(x.alone[i] for x in alike) for i in range(2)]
            joined = [statistics.fmean(x.joined[i] for x in alike) for i in range(2)]
            work_s = alone[0] if share is None else alone[1] / share
            points.append(
                {
                    "apart_s": work_s,
                    "meet_s": max(joined[0] - alone[0], 1e-9),
                    "meet_processor_s": max(joined[1] - alone[1], 1e-9),
                    "calls": min(x.calls for x in alike),
                }
            )
        link_s = points[0]["apart_s"] / rows[0][0].products * LINK_PRODUCTS
        out.append({"ranks": list(group), "bytes": MEET_BYTES, "points": points, "link_apart_s": link_s})
    return out


def _of_groups(ranks: Sequence[Mapping[str, Any]], name: str, share: float | None) -> list[dict[str, Any]]:
    """Return each group's points, means over its ranks."""
    groups: dict[tuple[int, ...], list[Any]] = {}
    for rank in ranks:
        for group, points in rank["in_place"][name]:
            groups.setdefault(tuple(group), []).append(points)
    return [{"ranks": list(group), "points": _points(found, share)} for group, found in groups.items()]


def _points(rows: Sequence[Sequence[Any]], share: float | None) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for alike in zip(*rows, strict=True):
        point: dict[str, Any] = {"bytes": alike[0].num_bytes}
        wall, used = (statistics.fmean(x.apart[i] for x in alike) for i in range(2))
        point["apart_s"] = wall if share is None else used / share
        for part in alike[0].seconds:
            for i, key in enumerate((f"{part}_s", f"{part}_processor_s")):
                point[key] = statistics.fmean(x.seconds[part][i] for x in alike)
        if share is not None and "unit_s" in point:  # hooks do not wait for other ranks
            point["unit_s"] = point["unit_processor_s"] / share
        points.append(point)
    return points
