"""What it takes ranks to meet after working apart: a collective behind stretches of work of several lengths.

The longer ranks work between two collectives, the farther apart they arrive, and the deeper the core of the one that
waits has gone to sleep, so that every thread that hands the message on wakes up later. Both are time in which nobody
works: wall seconds, hardly processor seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from meshwright.cost.meeting import MEET_BYTES
from meshwright.probe.block import Timing
from meshwright.probe.calm import Ranks, Span, calm_ones, cores_of_others
from meshwright.probe.place import FEWEST, MOST, typical

WINDOW_S: Final = 0.05
"""Seconds that a window of calls takes at least, about, or a tenth of the budget: ticks of the clock count others' work.
A window has at least ``FEWEST`` calls. Long ones have a larger part of the budget."""
LONG_S: Final = 0.002
"""Seconds of work from which on it is long."""
WARM: Final = 20
COUNTED: Final = 100
"""Products before, and in, the one measurement by which the work is cut."""
SIDE: Final = 128
"""Rows and columns of the products that the work is made of."""


@dataclass(frozen=True)
class Meeting:
    """Seconds of a rank's stretch of work alone, and with the collective behind it; means over ``calls`` of them.

    The work are so many ``products``.
    """

    alone: Timing
    joined: Timing
    calls: int
    products: int


Meetings: TypeAlias = tuple[list[int], list[Meeting]]
"""The ranks of a group, and its meetings by ascending stretch."""


def meetings(probe: Ranks, stretches_s: Sequence[float], budget_s: float) -> list[Meetings]:
    """Return, of the groups that this rank belongs to (pairs, and all ranks), its meetings after such stretches of work.

    ``budget_s`` is what one of them takes, half of it for short stretches and twice as much for long ones.

    Communication: sums of ``MEET_BYTES`` bytes in each group, barriers, and sums of seconds over all ranks.
    """
    world, rank = probe.facts.world_size, probe.facts.rank
    square = torch.zeros(SIDE, SIDE)
    for _ in range(WARM):
        torch.mm(square, square)
    used = time.process_time()
    for _ in range(COUNTED):
        torch.mm(square, square)
    each_s = max(probe.agree((time.process_time() - used) / COUNTED), 1e-6)
    counts = [max(1, round(stretch / each_s)) for stretch in stretches_s]
    found: list[Meetings] = []
    for size in sorted({2, world}) if world > 1 else ():
        groups = [list(range(i, i + size)) for i in range(0, world - size + 1, size)]
        handles = [dist.new_group(g) for g in groups]
        mine = next((i for i, g in enumerate(groups) if rank in g), None)
        group: Any = None if mine is None else handles[mine]
        here = [
            _meeting(probe, group, count, stretch, budget_s)
            for count, stretch in zip(counts, stretches_s, strict=True)
        ]
        if mine is not None:
            found.append((groups[mine], here))
    return found


def _meeting(probe: Ranks, group: Any, count: int, stretch_s: float, budget_s: float) -> Meeting:
    square = torch.zeros(SIDE, SIDE)
    payload = torch.zeros(MEET_BYTES // 4)
    calls = max(FEWEST, int(max(WINDOW_S, 0.1 * budget_s) / (stretch_s + 0.001)))

    def work() -> None:
        for _ in range(count):
            torch.mm(square, square)

    def meet() -> None:
        work()
        dist.all_reduce(payload, group=group)

    def window(what: Callable[[], None]) -> Timing:
        probe.barrier()
        wall, used = time.perf_counter(), time.process_time()
        if group is not None:
            for _ in range(calls):
                what()
        return (time.perf_counter() - wall) / calls, (time.process_time() - used) / calls

    begin = time.perf_counter()
    window(meet)
    first_s = max(probe.agree(time.perf_counter() - begin), 1e-4)
    budget_s *= 2.0 if stretch_s > LONG_S else 0.5
    turns = max(FEWEST, min(MOST, int(budget_s / (1.5 * first_s))))
    alone: list[Timing] = []
    joined: list[Timing] = []
    spans: list[tuple[float | None, float, float]] = []
    for _ in range(turns):
        span = Span()
        alone.append(window(work))
        joined.append(window(meet))
        spans.append(span.end())
    calm = calm_ones(cores_of_others(probe, *zip(*spans, strict=True)))
    return Meeting(
        alone=typical(alone, calm),
        joined=typical(joined, calm),
        calls=calls * (turns if calm is None else len(calm)),
        products=count,
    )
