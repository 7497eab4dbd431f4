"""What a probe measures of links: collectives between pieces of compute in groups of ranks, and messages of each pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.units import MIB
from meshwright.cost.meeting import LINK_PRODUCTS
from meshwright.probe.block import Timing
from meshwright.probe.ranks import Prober

Points = list[tuple[int, float, float]]
"""Bytes, wall seconds of the slowest rank, and processor seconds of one rank (the mean over the group)."""
BETWEEN = ((128, 128, 128), LINK_PRODUCTS)
"""The compute between two collectives: a product's shape, and how many of them (some tenths of a millisecond)."""


def between(probe: Prober) -> Callable[[], Any]:
    """Return the compute that stands between two collectives."""
    (m, k, n), count = BETWEEN
    a, b = probe.empty(m, k), probe.empty(k, n)

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b)

    return work


def collective(
    probe: Prober, make: Callable[[int], tuple[int, Callable[[], Any]] | None], group: Any, halves: int
) -> Points:
    """Return (bytes, wall seconds, processor seconds) at each size, between pieces of compute.

    ``make(bytes)`` gives the real size and the operation (None for a rank that only keeps step). Each repeat is a
    loop of compute alone, then one of compute and collective, on the slowest rank of the group. Reported is the
    difference of their lower quartiles, since other programs only ever make a repeat longer; of processor seconds
    the difference of their means, which a step of many calls pays. All ranks agree on the numbers of calls;
    ``halves`` is the number of messages one call stands for.
    """
    points: Points = []
    work = between(probe)
    begin = time.perf_counter()
    for size in probe.request.sizes:
        made = make(size)
        probe.barrier()
        if made:
            made[1]()
            probe.sync()
        probe.barrier()
        t0 = time.perf_counter()
        work()
        if made:
            made[1]()
            probe.sync()
        first_s = probe.agree(time.perf_counter() - t0)
        inner = max(1, min(8, int(0.006 / first_s)))
        repeats = max(5, min(9, int(probe.request.link_budget_s / 6 / (inner * first_s))))
        alone: list[Timing] = []
        joined: list[Timing] = []
        for _ in range(repeats):
            alone.append(loop(probe, work, None, inner))
            joined.append(loop(probe, work, made[1] if made else None, inner))
        if made:
            figures = torch.tensor([*alone, *joined], dtype=torch.float64, device=probe.device).T.contiguous()
            wall, used = figures[0].clone(), figures[1].clone()
            dist.all_reduce(wall, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(used, group=group)
            slowest, spent = [
                max(typical(x[repeats:].tolist()) - typical(x[:repeats].tolist()), 1e-6)
                for x, typical in ((wall, undisturbed), (used / group_size(group), statistics.fmean))
            ]
            points.append((made[0], slowest / halves, spent / halves))
        spent_s = probe.agree(time.perf_counter() - begin)
        if not probe.request.quick and spent_s > probe.request.link_budget_s:
            break
    return points


def loop(probe: Prober, work: Callable[[], Any], then: Callable[[], Any] | None, count: int) -> Timing:
    """Return this rank's seconds per round of ``work`` and, if given, ``then``."""
    probe.barrier()
    t0, c0 = time.perf_counter(), time.process_time()
    for _ in range(count):
        work()
        if then is not None:
            then()
    probe.sync()
    return (time.perf_counter() - t0) / count, (time.process_time() - c0) / count


def links(probe: Prober) -> list[tuple[list[int], str, Points]]:
    """Return, of the groups that this rank belongs to, each collective's points."""
    world, rank = probe.facts.world_size, probe.facts.rank
    found: list[tuple[list[int], str, Points]] = []
    size = 2
    sizes: list[int] = []
    while size < world:
        sizes.append(size)
        size *= 2
    for size in [*sizes, world]:
        groups = [list(range(i, i + size)) for i in range(0, world - size + 1, size)]
        handles = [dist.new_group(g) if size < world else dist.group.WORLD for g in groups]
        mine = next((i for i, g in enumerate(groups) if rank in g), None)
        ranks = groups[mine] if mine is not None else []
        group = handles[mine] if mine is not None else None
        kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
        if size == 2:
            kinds.append("send_recv")
        for kind in kinds:
            probe.say(f"{kind} in groups of {size}")
            points = collective(
                probe,
                lambda num_bytes, kind=kind, ranks=ranks, group=group: operation(
                    probe, kind, num_bytes, ranks, group
                ),
                group,
                halves=2 if kind == "send_recv" else 1,
            )
            if ranks:
                found.append((ranks, kind, points))
    return found


def operation(
    probe: Prober, kind: str, num_bytes: int, ranks: Sequence[int], group: Any
) -> tuple[int, Callable[[], Any]] | None:
    """Return the real bytes (see ``Collective.num_bytes``) and the call of one collective on this rank."""
    n = len(ranks)
    if n == 0:
        return None
    part = max(1, num_bytes // 4 // n)
    whole = probe.empty(part * n)
    piece = probe.empty(part)
    size = part * n * 4
    if kind == "all_reduce":
        return size, lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return size, lambda: dist.all_gather_into_tensor(whole, piece, group=group)
    if kind == "reduce_scatter":
        return size, lambda: dist.reduce_scatter_tensor(piece, whole, group=group)
    if kind == "all_to_all":
        out = probe.empty(part * n)
        return size, lambda: dist.all_to_all_single(out, whole, group=group)
    if kind == "broadcast":
        return size, lambda: dist.broadcast(whole, src=ranks[0], group=group)
    first = probe.facts.rank == ranks[0]
    return size, lambda: there_and_back(whole, first, ranks[1] if first else ranks[0])


def there_and_back(tensor: torch.Tensor, first: bool, peer: int) -> None:
    """Send the tensor to the peer and receive it back, or the other way round."""
    if first:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    else:
        dist.recv(tensor, peer)
        dist.send(tensor, peer)


def pairs(probe: Prober) -> dict[tuple[int, int], float]:
    """Return bytes/s of one message between each two ranks, while the others wait; {} for more than 64 ranks."""
    world, rank = probe.facts.world_size, probe.facts.rank
    rates: dict[tuple[int, int], float] = {}
    if world > 64:
        return rates
    num_bytes = MIB if probe.request.quick else 4 * MIB
    tensor = probe.empty(num_bytes // 4)
    for a in range(world):
        for b in range(a + 1, world):
            probe.barrier()
            if rank in (a, b):
                peer = b if rank == a else a
                times: list[float] = []
                for _ in range(4):
                    t0 = time.perf_counter()
                    there_and_back(tensor, rank == a, peer)
                    probe.sync()
                    times.append((time.perf_counter() - t0) / 2)
                if rank == a:
                    rates[a, b] = num_bytes / min(times[1:])
    return rates


def undisturbed(values: Sequence[float]) -> float:
    """Return the lower quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def group_size(group: Any) -> int:
    """Return the number of ranks of a process group."""
    return dist.get_world_size(group)
