"""What each rank of a probe measures: compute, memory, overheads and collectives.

Ranks of one machine may have to share cores. A single short operation then is either undisturbed or waits for a
whole time slice, and the median of such times says nothing about a step. So compute is measured as a count over a
window in which all ranks work, in wall and in processor seconds; and a collective between pieces of compute, as it
stands in a step: in a tight loop its threads stay awake and its ranks in step, and it takes a half of that time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.units import MIB, format_bytes
from meshwright.mesh.env import RankFacts
from meshwright.parallel.products import use_products
from meshwright.probe import compute, links
from meshwright.probe.links import Points
from meshwright.probe.ranks import Prober
from meshwright.probe.request import Request
from meshwright.probe.topology import gpu_topology, memory_bytes, node_name


def measure(facts: RankFacts, request: Request) -> list[dict[str, Any]]:
    """Return what every rank measured, by rank (the same list on each rank).

    Communication: every collective that is measured, barriers, and one all_gather of the findings on "world".
    """
    if request.quick:
        torch.manual_seed(0)
    probe = Prober(facts, request)
    probe.say(f"{facts.world_size} ranks on {probe.device.type}, {facts.backend}")
    total, available = memory_bytes()
    name, topology = "cpu", None
    if probe.device.type == "cuda":
        available, total = torch.cuda.mem_get_info(probe.device)
        name = torch.cuda.get_device_name(probe.device)
        found = gpu_topology() if facts.local_rank == 0 else None
        topology = found.as_dict() if found else None
    held = use_products("machine", probe.device.type)  # as a run has them
    probe.say("matmul, fp32 and bf16")
    matmul = compute.matmul(probe)
    probe.say("attention")
    attention = compute.attention(probe)
    probe.say("memory, overheads, optimizer")
    copy, elementwise = compute.memory(probe)
    op_s, backward_op_s = compute.overhead(probe)
    optimizer_byte_s, optimizer_tensor_s = compute.optimizer(probe)
    in_place: dict[str, Any] | None = None
    if probe.device.type == "cpu":
        probe.say("blocks, hooks and sharded units in their place")
        in_place = compute.in_place(probe, op_s)
    timed: list[tuple[list[int], str, Points]] = []
    pairs: dict[tuple[int, int], float] = {}
    if facts.world_size > 1:
        timed = links.links(probe)
        probe.say(f"each pair, {format_bytes(MIB if request.quick else 4 * MIB)}")
        pairs = links.pairs(probe)
    mine = {
        "host": node_name(),
        "device": name,
        "total_bytes": total,
        "available_bytes": available,
        "topology": topology,
        "matmul": matmul,
        "attention": attention,
        "threads": torch.get_num_threads(),
        "copy_byte_s": copy,
        "elementwise_byte_s": elementwise,
        "op_s": op_s,
        "backward_op_s": backward_op_s,
        "optimizer_byte_s": optimizer_byte_s,
        "optimizer_tensor_s": optimizer_tensor_s,
        "in_place": in_place,
        "links": timed,
        "pairs": pairs,
    }
    everything: list[Any] = [mine]
    if facts.world_size > 1:
        everything = [None] * facts.world_size
        dist.all_gather_object(everything, mine)
    if held is not None:
        held.close()
    probe.say("done")
    return everything
