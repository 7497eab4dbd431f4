"""``run_probe``: measure this machine (under torchrun, this cluster) and return the probe's JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.mesh import env
from meshwright.mesh.launch import run_local
from meshwright.probe.fit import advice, crossover_bytes, link, ring_order
from meshwright.probe.topology import describe_nodes, effective_cores


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

    from meshwright.probe.measure import Request, measure

    local = nproc if facts is None else facts.local_world_size
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "cpu"
    request = Request(quick=quick, device=device, show=None if facts is None else show)
    results = run_local(
        measure,
        nproc,
        request,
        device=device,
        on_line=show,
        preload=("meshwright.probe.measure",),
        collective_timeout_s=120.0,
    )
    ranks: list[dict[str, Any]] = results[0]
    return assemble(
        ranks,
        matmul_shapes=request.matmul_shapes,
        attention_shapes=request.attention_shapes,
        cores=effective_cores(),
        backend="gloo" if device == "cpu" else "nccl",
        torch_version=torch.__version__,
        quick=quick,
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
) -> dict[str, Any]:
    """Return the probe's JSON from what each rank measured.

    Times and rates of compute are means over ranks (they work at the same time, each for the whole window); a
    link's points are those of its first rank, which are the slowest rank's times already.

    Raises:
        MeshwrightError: E521 for ranks on different devices.
    """

    def mean(get: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.fmean(get(r) for r in ranks)

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
    for p, precision in enumerate(("fp32", "bf16")):
        for i, (m, k, n) in enumerate(matmul_shapes):
            j = p * len(matmul_shapes) + i
            time_s = mean(lambda r, j=j: r["matmul"][j])
            matmul.append(
                {
                    "precision": precision,
                    "m": m,
                    "k": k,
                    "n": n,
                    "time_s": time_s,
                    "flops_per_s": 2.0 * m * k * n / time_s,
                }
            )
        for i, (batch, heads, seq, head_dim) in enumerate(attention_shapes):
            j = p * len(attention_shapes) + i
            attention.append(
                {
                    "precision": precision,
                    "batch": batch,
                    "heads": heads,
                    "seq": seq,
                    "head_dim": head_dim,
                    "forward_s": mean(lambda r, j=j: r["attention"][j][0]),
                    "backward_s": mean(lambda r, j=j: r["attention"][j][1]),
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
        both = [
            [(p["bytes"], p["time_s"]) for p in by_kind[kind]["points"]]
            for kind in ("broadcast", "all_reduce")
        ]
        shared = min(len(both[0]), len(both[1]))
        below = crossover_bytes(both[0][:shared], both[1][:shared])
        rule = {
            "broadcast_below_bytes": below,
            "measured_up_to_bytes": both[0][shared - 1][0],
            "group_size": world_size,
        }
    middle = statistics.median(sum(r["matmul"]) for r in ranks)
    nodes = describe_nodes([r["host"] for r in ranks])
    return {
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
            "copy_bytes_per_s": mean(lambda r: r["copy"]),
            "elementwise_bytes_per_s": mean(lambda r: r["elementwise"]),
        },
        "overhead": {
            "op_s": mean(lambda r: r["op_s"]),
            "backward_op_s": mean(lambda r: r["backward_op_s"]),
            "optimizer_bytes_per_s": mean(lambda r: r["optimizer_bytes_per_s"]),
            "optimizer_tensor_s": mean(lambda r: r["optimizer_tensor_s"]),
        },
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
            rank_slowness=[sum(r["matmul"]) / middle for r in ranks],
            pair_rates=pairs,
            order=order,
            broadcast_below_bytes=below,
        ),
    }
