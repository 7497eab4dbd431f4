"""From steps of few blocks and micro-batches to the step that is asked for, where that is exact; no torch here.

The blocks of a uniform model are alike, and so are the micro-batches in the middle of a step. Then the live bytes of a
place of the step - a block or micro-batch counted from the nearer end - are linear in the number of blocks and in the
number of micro-batches: a first and a second size fix the line, and a third one must lie on it to the byte. Places in
the middle lie between those that are counted from the ends. Where a third size disagrees nothing is composed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from meshwright.exact.trace import Place, Segment, Trace

Size: TypeAlias = tuple[int, int]
"""Blocks in each stage of the rank, and micro-batches."""

FEWEST_BLOCKS: Final = 4
"""Two at either end: FSDP2 gathers one unit ahead, and reduces one while the next one computes."""
FEWEST_MICRO_BATCHES: Final = 3
"""A first one and two at the end: the last one also completes the gradients."""
FEWEST_IN_PIPELINE: Final = 2
"""Micro-batches for each rank of a pipeline: it fills and empties once."""
FEWEST_BY_TURNS: Final = 3
"""The same where a rank's stages take turns: the fullest moment of a long step is up to two rounds before its end."""
FEWEST_IN_V: Final = 4
"""The same in a V, whose first stage runs ahead of the second by up to two rounds at either end."""


@dataclass(frozen=True)
class Axis:
    """The sizes that are traced along one direction: one, or three at equal distances.

    Of the smallest size one part in ``parts`` is counted from the start, the others from the end.
    """

    sizes: tuple[int, ...]
    parts: int = 2

    @property
    def step(self) -> int:
        """Distance between the sizes."""
        return self.sizes[1] - self.sizes[0] if len(self.sizes) > 1 else 1

    def steps_to(self, size: int) -> int:
        """Return how many steps ``size`` is from the first one."""
        return (size - self.sizes[0]) // self.step

    def near(self, index: int, size: int) -> int | None:
        """Return ``index`` of ``size`` counted from the nearer end (the last is -1), or None in the middle.

        The smallest size is cut in two; what a larger one has between them is the middle.
        """
        if len(self.sizes) == 1:
            return index
        first = self.sizes[0] // self.parts
        if index < first:
            return index
        back = index - size
        return back if back >= first - self.sizes[0] else None


def axis(size: int, fewest: int, step: int, *, alike: bool, parts: int = 2) -> Axis:
    """Return what is traced along a direction: three small sizes, or ``size`` itself where that is not more work."""
    start = fewest + (size - fewest) % step
    if not alike or size <= start + 2 * step:
        return Axis((size,), parts)
    return Axis((start, start + step, start + 2 * step), parts)


@dataclass(frozen=True)
class Grid:
    """The traced sizes in both directions."""

    blocks: Axis
    micro_batches: Axis

    def corners(self) -> tuple[Size, ...]:
        """Return the sizes that fix the lines."""
        return tuple((n, m) for n in self.blocks.sizes[:2] for m in self.micro_batches.sizes[:2])

    def checks(self) -> tuple[Size, ...]:
        """Return the sizes that must lie on them."""
        n, m = self.blocks.sizes, self.micro_batches.sizes
        return (*((x, m[0]) for x in n[2:]), *((n[0], x) for x in m[2:]))

    def near(self, place: Place, size: Size) -> Place | None:
        """Return ``place`` of a step of ``size`` counted from the nearer ends, or None in the middle of either."""
        block = self.blocks.near(place.block, size[0]) if place.part == "block" else place.block
        micro = self.micro_batches.near(place.micro_batch, size[1]) if place.stage >= 0 else place.micro_batch
        if block is None or micro is None:
            return None
        return replace(place, block=block, micro_batch=micro)

    def counted(self, place: Place, size: Size) -> Place:
        """Return the place whose ``near`` is ``place``, counted from the first."""
        block = place.block + size[0] if place.part == "block" and place.block < 0 else place.block
        micro = place.micro_batch
        if place.stage >= 0 and micro < 0:
            micro += size[1]
        return replace(place, block=block, micro_batch=micro)


def compose(grid: Grid, traces: Mapping[Size, Trace], size: Size) -> Trace:
    """Return the trace of a step of ``size`` from those of the grid's corners.

    Its segments are those near the ends, which hold the peak.
    """
    corners = grid.corners()
    if size in corners and len(corners) == 1:
        return traces[size]
    nears = {corner: _nears(grid, traces[corner]) for corner in corners}
    shared = set.intersection(*(set(found) for found in nears.values()))
    segments = {
        grid.counted(place, size): Segment(
            nears[corners[-1]][place].order,
            _line(grid, {corner: nears[corner][place].live_bytes for corner in corners}, size),
        )
        for place in shared
    }
    return Trace(
        blocks=size[0],
        micro_batches=size[1],
        segments=segments,
        rest_bytes=_line(grid, {corner: traces[corner].rest_bytes for corner in corners}, size),
    )


def disagreement(grid: Grid, traces: Mapping[Size, Trace]) -> str:
    """Return why nothing can be composed - the first traced size that is off the lines - or ""."""
    for size in grid.checks():
        wanted, found = compose(grid, traces, size), traces[size]
        for place, segment in wanted.segments.items():
            here = found.segments.get(place)
            if here is None or here.total != segment.total:
                return _off(size, place, segment.total, None if here is None else here.total)
        if wanted.peak()[1].total != found.peak()[1].total:
            return _off(size, found.peak()[0], wanted.peak()[1].total, found.peak()[1].total)
    return ""


def _off(size: Size, place: Place, expected: int, found: int | None) -> str:
    return f"with {size[0]} blocks and {size[1]} micro-batches, {place}: {found} bytes where {expected} are on the line"


def _nears(grid: Grid, trace: Trace) -> dict[Place, Segment]:
    size = (trace.blocks, trace.micro_batches)
    nears = ((grid.near(place, size), segment) for place, segment in trace.segments.items())
    return {near: segment for near, segment in nears if near is not None}


def _line(grid: Grid, corners: Mapping[Size, Mapping[str, int]], size: Size) -> dict[str, int]:
    """Return bytes by category at ``size``: linear in either direction from those at the corners."""
    n, m = grid.blocks.sizes[:2], grid.micro_batches.sizes[:2]
    along_n, along_m = grid.blocks.steps_to(size[0]), grid.micro_batches.steps_to(size[1])

    def at(name: str, x: int, y: int) -> int:
        return corners[x, y].get(name, 0)

    out: dict[str, int] = {}
    for name in _names(corners.values()):
        base = at(name, n[0], m[0])
        by_n = at(name, n[-1], m[0]) - base
        by_m = at(name, n[0], m[-1]) - base
        both = at(name, n[-1], m[-1]) - base - by_n - by_m
        out[name] = base + along_n * by_n + along_m * by_m + along_n * along_m * both
    return out


def _names(tables: Iterable[Mapping[str, int]]) -> list[str]:
    return sorted({name for table in tables for name in table})
