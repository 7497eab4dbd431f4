"""Links that have become slow: a small message round the ring of ranks now and then, compared with the best of its kind.

The collectives of a step wait for the slowest rank as well as for the slowest link, so their times name neither. A
message from each rank to the next, all ranks waiting for it together, times one link each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from meshwright.base.axes import WORLD
from meshwright.base.units import format_bytes
from meshwright.mesh.device_mesh import MeshView

MESSAGE_BYTES: Final = 1 << 18
TIMES: Final = 3
EVERY: Final = 20
"""Steps between two measurements."""
LEAST_S: Final = 2e-3
"""What a message may take without being called slow: below it, cores that are shared say more than the link."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A link, in one direction: its ends by rank and address, its rate in bytes/s, and how many times slower it is."""

    ranks: tuple[int, int]
    addresses: tuple[str, str]
    bytes_per_s: float
    usual_bytes_per_s: float

    @property
    def times(self) -> float:
        """How many times slower it is than the best of its kind."""
        return self.usual_bytes_per_s / self.bytes_per_s

    def text(self) -> str:
        """Return it for people."""
        (a, b), (x, y) = self.ranks, self.addresses
        return (
            f"W576  link rank {a} ({x}) -> rank {b} ({y}): {format_bytes(self.bytes_per_s)}/s, "
            f"{self.times:.1f} times slower than the best of its kind in this run "
            f"({format_bytes(self.usual_bytes_per_s)}/s)"
        )


def slow_links(
    seconds: Mapping[int, float], where: Mapping[int, tuple[int, str]], best: dict[bool, float], factor: float
) -> list[SlowLink]:
    """Return the links that are ``factor`` times slower than the best of their kind, and note new best ones in ``best``.

    Args:
        seconds: time of a message to each rank from the one before it, by receiving rank.
        where: node and address of each rank.
        best: fewest seconds so far of links within a node (False) and between nodes (True).
        factor: from when on a link is slow.
    """
    ends = {rank: ((rank - 1) % len(seconds), rank) for rank in seconds}
    kinds = {rank: where[a][0] != where[b][0] for rank, (a, b) in ends.items()}
    for rank, value in seconds.items():
        best[kinds[rank]] = min(value, best.get(kinds[rank], value))
    found: list[SlowLink] = []
    for rank, value in sorted(seconds.items()):
        usual = best[kinds[rank]]
        if value > max(factor * usual, LEAST_S):
            a, b = ends[rank]
            link = SlowLink(
                ranks=(a, b),
                addresses=(where[a][1], where[b][1]),
                bytes_per_s=MESSAGE_BYTES / value,
                usual_bytes_per_s=MESSAGE_BYTES / usual,
            )
            found.append(link)
    return found


class Links:
    """Measures the ring of links every ``EVERY`` steps, beginning with the first; None as ``factor`` measures nothing."""

    def __init__(self, factor: float | None, node: int, address: str) -> None:
        self._factor = factor
        self._mine = (node, address)
        self._where: dict[int, tuple[int, str]] = {}
        self._best: dict[bool, float] = {}
        self._steps = 0

    def check(self, view: MeshView) -> list[SlowLink]:
        """Return the links that are slow now, the same on all ranks; every rank calls it after every step.

        Communication: every ``EVERY`` steps ``TIMES`` messages of 256 KiB to the next rank, each behind a barrier,
        and one all_gather of a number (the first time also of an address) on ``world``.
        """
        group = view.groups.get(WORLD)
        if self._factor is None or group is None or dist.get_world_size(group) < 2:
            return []
        self._steps += 1
        if (self._steps - 1) % EVERY:
            return []
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        mine = min(_message(rank, size, view, group) for _ in range(TIMES))
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (mine, self._mine), group=group)
        self._where = {r: where for r, (_, where) in enumerate(gathered)}
        return slow_links({r: s for r, (s, _) in enumerate(gathered)}, self._where, self._best, self._factor)


def _message(rank: int, size: int, view: MeshView, group: dist.ProcessGroup) -> float:
    """Return the seconds from a barrier until the message of the rank before has come."""
    out = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=view.device)
    into = torch.empty_like(out)
    dist.barrier(group=group)
    begin = time.perf_counter()
    works = [
        dist.irecv(into, group_src=(rank - 1) % size, group=group),
        dist.isend(out, group_dst=(rank + 1) % size, group=group),
    ]
    for work in works:
        if work is not None:
            work.wait()
            if work is works[0]:
                if view.device.type == "cuda":
                    torch.cuda.synchronize(view.device)
                took = time.perf_counter() - begin
    return took
