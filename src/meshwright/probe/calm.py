"""Which repeats of a measurement other programs left alone: what the ranks used of what all cores of the node worked.

Waits between ranks have a long tail of their own: threads of one rank that share a core for a time slice, deep sleeps.
A step pays the mean of it. A lower quartile drops it with the disturbances; a plain mean keeps both.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import torch

CALM: Final = 0.1
"""Cores that others may have had in a repeat that counts as undisturbed: a tick of the clock in the shortest ones."""
FEWEST: Final = 3
"""At least this many repeats count, and a quarter of all: the calmest."""


class Ranks(Protocol):
    """What is needed of a probe."""

    facts: Any
    device: torch.device

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def agree(self, value: float) -> float:
        """Return the greatest value over all ranks."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of values over all ranks."""
        ...

    def sync(self) -> None:
        """Wait for the device."""
        ...


def busy_seconds() -> float | None:
    """Return for how long this node's cores have worked since it began, by Linux's own count; None elsewhere."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
        user, nice, system, _, _, irq, soft, steal = (int(x) for x in fields[1:9])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Span:
    """From its making to its end: the node's busy seconds, this process' processor seconds, and wall seconds."""

    def __init__(self) -> None:
        self._busy = busy_seconds()
        self._used, self._wall = time.process_time(), time.perf_counter()

    def end(self) -> tuple[float | None, float, float]:
        """Return the three; the node's busy seconds are None where they are not known."""
        wall, used, busy = time.perf_counter() - self._wall, time.process_time() - self._used, busy_seconds()
        passed = None if self._busy is None or busy is None else busy - self._busy
        return passed, used, max(wall, 1e-9)


def cores_of_others(
    probe: Ranks, busy: Sequence[float | None], used: Sequence[float], wall: Sequence[float]
) -> list[float] | None:
    """Return how many cores of a node other programs had in each repeat, means over nodes; None where it is not known.

    ``busy`` are the seconds that this node's cores worked in each repeat, ``used`` this rank's processor seconds, and
    ``wall`` its wall seconds. Every rank gets the same.

    Communication: one sum over all ranks.
    """
    local = probe.facts.local_world_size
    mine = [math.nan if b is None else (b / local - u) / w for b, u, w in zip(busy, used, wall, strict=True)]
    found = [x * local / probe.facts.world_size for x in probe.total(mine)]
    return None if any(math.isnan(x) for x in found) else found


def calm_ones(others: Sequence[float] | None) -> list[int] | None:
    """Return the repeats that others left alone, by the cores that others had in each; None where that is not known.

    Those below ``CALM``, but at least a quarter of all.
    """
    if not others:
        return None
    order = sorted(range(len(others)), key=lambda i: others[i])
    least = min(len(order), max(FEWEST, len(order) // 4))
    return sorted(i for place, i in enumerate(order) if place < least or others[i] <= CALM)


def calm_mean(values: Sequence[float], calm: Sequence[int] | None) -> float:
    """Return the mean of the calm repeats; without knowing them the lower quartile, since others only lengthen one."""
    if calm is None:
        return sorted(values)[len(values) // 4]
    return fmean(values[i] for i in calm)
