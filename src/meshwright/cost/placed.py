"""Seconds of what a probe measured in its place at some sizes: FSDP2 units, whole, and collectives of the tensor axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import CollectiveTimes, Floats, GroupShape, ascending
from meshwright.cost.meeting import Meetings, meetings

UNIT_PARTS: Final = ("unit", "gather", "scatter")
TENSOR_PARTS: Final = ("pair", "reduce")
"""A gather with the scatter that is its transpose, and a sum."""
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "unit": (),
    "gather": ("all_gather",),
    "scatter": ("reduce_scatter",),
    "pair": ("all_gather", "reduce_scatter"),
    "reduce": ("all_reduce",),
}
"""The collectives in a part."""


@dataclass(frozen=True)
class PlaceTimes:
    """What parts take in their place. ``points`` are a probe's: (part, ranks) to bytes and seconds."""

    times: CollectiveTimes
    points: Mapping[tuple[str, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[str, int], tuple[Floats, Floats]]
    )
    meetings: Meetings = field(default_factory=Meetings)

    def has(self, part: str) -> bool:
        """Return whether a part was measured."""
        return any(name == part for name, _ in self.points)

    def seconds(self, part: str, num_bytes: Floats | float, shape: GroupShape) -> Floats:
        """Return the seconds of a measured part of so many bytes.

        Between the measured sizes they are on a line over bytes. Beyond them, and in groups of other sizes, they change
        by as much as the collectives in the part do, and are never below half of the measured.
        """
        size = np.asarray(num_bytes, dtype=np.float64)
        if shape.size < 2:
            return np.zeros_like(size)
        known = sorted(n for name, n in self.points if name == part)
        near = min(known, key=lambda n: (abs(math.log(n / shape.size)), n))
        xs, ys = self.points[part, near]
        inside = np.clip(size, xs[0], xs[-1])
        seconds = np.interp(inside, xs, ys)
        more = np.zeros_like(size)
        for kind in KINDS[part]:
            more = more + self.times.seconds(kind, size, shape)
            more = more - self.times.seconds(kind, inside, GroupShape(near, 1, near))
        return np.where(size > 0, np.maximum(seconds + more, 0.5 * seconds), 0.0)

    def later(self, part: str, work_s: float, shape: GroupShape) -> float:
        """Return the seconds by which a part takes longer after ``work_s`` of work than where it was measured.

        The part "link" is any collective of a link's measurement. Negative after less work; 0 where no meetings were
        measured.
        """
        if not self.meetings or shape.size < 2:
            return 0.0
        apart = float(self.meetings.log(work_s)) - self.meetings.log_apart(part, shape.size)
        return len(KINDS.get(part, (part,))) * self.meetings.slope(shape.size) * apart

    def of_units(self, gathered: Floats, reduced: Floats, shape: GroupShape) -> dict[str, Floats]:
        """Return hooks, gathers and scatters of units of so many bytes, where they were measured; {} elsewhere.

        Where meetings were measured, those of a gather and a scatter after the least work, and ``apart``: how much longer
        either is for each e-fold of work before it.
        """
        if not self.has("unit"):
            return {}
        out = {
            "hooks": self.seconds("unit", gathered, shape),
            "gather": self.seconds("gather", gathered, shape),
            "scatter": self.seconds("scatter", reduced, shape),
        }
        if self.meetings:
            slope = self.meetings.slope(shape.size)
            for part in ("gather", "scatter"):
                least = 0.5 * out[part]
                out[part] = np.maximum(out[part] - slope * self.meetings.log_apart(part, shape.size), least)
            out["apart"] = np.full_like(out["hooks"], slope)
        return out


def place_times(cluster: ClusterSpec, times: CollectiveTimes) -> PlaceTimes:
    """Return what a cluster's probe measured in its place; nothing for a datasheet's cluster."""
    raw: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, seconds in cluster.measured.items():
        parts = key.split("/")
        if parts[0] in ("shard_s", "tensor_s"):
            raw.setdefault((parts[1], int(parts[2])), []).append((float(parts[3]), seconds))
    points: dict[tuple[str, int], tuple[Floats, Floats]] = {}
    for group, listed in raw.items():
        table = np.asarray(sorted(listed), dtype=np.float64)
        points[group] = (table[:, 0], ascending(table[:, 1]))
    return PlaceTimes(times, points, meetings(cluster))
