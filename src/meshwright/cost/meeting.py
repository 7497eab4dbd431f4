"""What a blocking collective takes more the longer its ranks worked apart before it, where a probe has measured it.

Ranks that share no clock arrive apart, and a core that waits longer sleeps deeper. Measured on a CPU both grow about
with the logarithm of the work before the meeting; a line over that logarithm is fitted to a probe's few lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

import numpy as np

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import Floats

MEET_BYTES: Final = 64 * 1024
"""Payload of the collective by which a probe measures meetings."""
LINK_PRODUCTS: Final = 8
"""Products between two collectives of a link's measurement: each takes as long as one of those before a meeting."""


@dataclass(frozen=True)
class Meetings:
    """Seconds of meetings by ranks: ``lines`` hold those after ``least`` work, and more of them per e-fold of it.

    ``least`` and ``most`` are the shortest and the longest work that was measured, in seconds: beyond, nothing changes.
    ``apart`` is the work, in seconds, before each collective that was measured in its place, by part and ranks.
    """

    lines: Mapping[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    least: float = 0.0
    most: float = 0.0
    apart: Mapping[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

    def __bool__(self) -> bool:
        """Return whether any was measured."""
        return bool(self.lines)

    def slope(self, size: int) -> float:
        """Return by how many seconds a meeting of ``size`` ranks is longer for each e-fold of work; 0 if unmeasured."""
        return self.lines[self._near(size)][1] if self.lines else 0.0

    def log(self, work_s: Floats | float) -> Floats:
        """Return the logarithm of seconds of work over ``least``, kept within what was measured."""
        if not self.lines:
            return np.zeros_like(np.asarray(work_s, dtype=np.float64))
        return np.log(np.clip(work_s, self.least, self.most) / self.least)

    def log_apart(self, part: str, size: int) -> float:
        """Return ``log`` of the work before each collective of a part that was measured in its place."""
        known = [n for name, n in self.apart if name == part]
        if not known:
            return 0.0
        near = min(known, key=lambda n: (abs(math.log(n / size)), n))
        return float(self.log(self.apart[part, near]))

    def _near(self, size: int) -> int:
        return min(self.lines, key=lambda n: (abs(math.log(n / size)), n))


def meetings(cluster: ClusterSpec) -> Meetings:
    """Return the meetings of a cluster's probe; none for a datasheet's cluster or a probe of before."""
    raw: dict[int, list[tuple[float, float]]] = {}
    apart: dict[tuple[str, int], float] = {}
    for key, seconds in cluster.measured.items():
        kind, _, rest = key.partition("/")
        if kind == "meet_s":
            ranks, micros = rest.split("/")
            raw.setdefault(int(ranks), []).append((float(micros) * 1e-6, seconds))
        elif kind == "apart_s":
            part, ranks = rest.split("/")
            apart[part, int(ranks)] = seconds
    if not raw:
        return Meetings()
    works = [work for points in raw.values() for work, _ in points]
    return Meetings(
        lines={n: _line(points, min(works)) for n, points in raw.items()},
        least=min(works),
        most=max(works),
        apart=apart,
    )


def _line(points: list[tuple[float, float]], least: float) -> tuple[float, float]:
    """Return (seconds after ``least`` work, seconds per e-fold of it) of a line through most of the points.

    The median of the slopes between any two of them, so that one disturbed point does not count much; never negative.
    """
    known = [(math.log(work / least), seconds) for work, seconds in points]
    slopes = [(b - a) / (y - x) for (x, a), (y, b) in combinations(known, 2) if y != x]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return median(seconds - slope * x for x, seconds in known), slope
