"""Best first: blocks in the order of their bounds, priced until no other block can be among the best.

What is left out is left out by an admissible bound: a block's least seconds (or bytes) exceed what the layouts found
so far have, so no layout in it can be among the best, or on the Pareto front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats
from meshwright.cost.pipeline import contention, shares_cores
from meshwright.cost.predict import OOM_GATE, oom_probability
from meshwright.cost.replay import makespans
from meshwright.cost.rows import Index, Rows
from meshwright.cost.slots import Slot, make_slot
from meshwright.cost.sweep import Swept, block_floors, step_seconds, sweep
from meshwright.cost.tables import Tables
from meshwright.layout.layout import Layout
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import generate
from meshwright.search.space import Blocks

FIRST_LAYOUTS: Final = 4_000
MORE_LAYOUTS: Final = 60_000
"""Layouts that are priced together: few at first, to know what must be beaten."""
PLAYED: Final = 128
"""Layouts that are played on the clock together."""
OBJECTIVES: Final = ("time", "memory", "cost")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One priced layout: where its row is, seconds (played, or the bound), peak bytes, whether it surely fits."""

    rows: Rows
    row: int
    slot: Slot
    seconds: float
    peak: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """Blocks of one placement with their floors; ``seconds`` and ``memory`` are [blocks]."""

    tables: Tables
    blocks: Blocks
    slot: Slot
    seconds: Floats
    memory: Floats


@dataclass
class Best:
    """What the search has found so far.

    Attributes:
        wanted: how many layouts are wanted.
        limit: bytes up to which a layout fits.
        found: played layouts that fit, best first.
        smallest: layouts with the lowest peaks, whether they fit or not.
        of_pp: the best played layout of each pipeline degree.
    """

    objective: str
    wanted: int
    limit: float
    pareto: bool = False
    searched: int = 0
    fitting: int = 0
    played: int = 0
    found: list[Candidate] = field(default_factory=list[Candidate])
    smallest: list[Candidate] = field(default_factory=list[Candidate])
    of_pp: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    front: list[Candidate] = field(default_factory=list[Candidate])

    @property
    def by_memory(self) -> bool:
        """Whether the lowest peak is wanted, not the shortest step."""
        return self.objective == "memory"

    def threshold(self) -> float:
        """Return what another layout must be below to be among the best: seconds or bytes."""
        if len(self.found) < self.wanted:
            return float("inf")
        last = self.found[self.wanted - 1]
        return last.peak if self.by_memory else last.seconds

    def add(self, some: Sequence[Candidate]) -> None:
        """Take in played layouts that fit."""
        self.found += some
        self.found.sort(key=lambda c: (c.peak, c.seconds) if self.by_memory else (c.seconds, c.peak))
        del self.found[4 * self.wanted + 64 :]
        for c in some:
            before = self.of_pp.get(c.slot.pp)
            if before is None or c.seconds < before.seconds:
                self.of_pp[c.slot.pp] = c
        if self.pareto:
            self.front = front_of([*self.front, *some])

    def beaten(self, seconds: Floats, memory: Floats) -> NDArray[np.bool_]:
        """Return which of some floors cannot enter what is wanted."""
        out: NDArray[np.bool_] = (memory if self.by_memory else seconds) >= self.threshold()
        return out & dominated(self.front, seconds, memory) if self.pareto else out


def front_of(some: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that none is both faster and smaller than, fastest first."""
    out: list[Candidate] = []
    for c in sorted(some, key=lambda c: (c.seconds, c.peak)):
        if not out or c.peak < out[-1].peak:
            out.append(c)
    return out


def dominated(front: Sequence[Candidate], seconds: Floats, memory: Floats) -> NDArray[np.bool_]:
    """Return which (seconds, bytes) some candidate of the front is at least as good as in both."""
    if not front:
        return np.zeros(len(seconds), dtype=np.bool_)
    at = np.searchsorted([c.seconds for c in front], seconds, side="right") - 1
    peaks = np.array([c.peak for c in front])  # falling
    return (at >= 0) & (peaks[np.maximum(at, 0)] <= memory)


def fit_limit(capacity: float) -> float:
    """Return the highest peak that is still said to fit: its probability of running out of memory is the gate's."""
    low, high = 0.0, 2.0 * capacity
    for _ in range(60):
        middle = 0.5 * (low + high)
        if oom_probability(middle, capacity) <= OOM_GATE:
            low = middle
        else:
            high = middle
    return low


def survey(tables: Tables, blocks: Blocks) -> Surveyed:
    """Return the floors of the blocks of one placement."""
    slot = make_slot(tables.pricer, blocks.rows.layout(0))
    seconds, memory = block_floors(tables, blocks.rows, slot)
    return Surveyed(tables=tables, blocks=blocks, slot=slot, seconds=seconds, memory=memory)


def run(surveyed: Sequence[Surveyed], best: Best) -> None:
    """Price blocks, best floor first, until the others cannot enter; ``best`` takes in what is found."""
    if not surveyed:
        return
    place = np.concatenate([np.full(len(s.seconds), i) for i, s in enumerate(surveyed)])
    index = np.concatenate([np.arange(len(s.seconds)) for s in surveyed])
    seconds = np.concatenate([s.seconds for s in surveyed])
    memory = np.concatenate([s.memory for s in surveyed])
    count = np.concatenate([s.blocks.count for s in surveyed])
    could = np.flatnonzero(memory <= best.limit)
    order = could[np.argsort((memory if best.by_memory else seconds)[could], kind="stable")]
    size = FIRST_LAYOUTS
    while len(order):
        open_ = ~best.beaten(seconds[order], memory[order])
        order = order[open_]
        if not len(order):
            return
        many = int(np.searchsorted(np.cumsum(count[order]), size)) + 1
        chosen, order, size = order[:many], order[many:], MORE_LAYOUTS
        for i in np.flatnonzero(np.bincount(place[chosen])):
            _price(surveyed[int(i)], index[chosen[place[chosen] == i]], best)


def nearest_misses(surveyed: Sequence[Surveyed], best: Best) -> None:
    """Price the blocks with the lowest floors of memory, when nothing fits."""
    place = np.concatenate([np.full(len(s.memory), i) for i, s in enumerate(surveyed)])
    index = np.concatenate([np.arange(len(s.memory)) for s in surveyed])
    memory = np.concatenate([s.memory for s in surveyed])
    count = np.concatenate([s.blocks.count for s in surveyed])
    order = np.argsort(memory, kind="stable")
    chosen = order[: int(np.searchsorted(np.cumsum(count[order]), 4 * FIRST_LAYOUTS)) + 1]
    for i in np.flatnonzero(np.bincount(place[chosen])):
        _price(surveyed[int(i)], index[chosen[place[chosen] == i]], best, every=True)


def _price(one: Surveyed, index: Index, best: Best, *, every: bool = False) -> None:
    """Price the layouts of some blocks; with ``every`` those too whose seconds alone leave them out."""
    rows = one.blocks.expand(index)
    if not len(rows):
        return
    times = step_seconds(one.tables, rows, one.slot)
    limit = math.inf
    if best.found and not every:
        limit = best.limit
        # something fits, so that nobody asks for near misses: bytes only of what is fast enough
        memory = np.repeat(one.memory[index], one.blocks.count[index])
        some = np.flatnonzero(~best.beaten(times.least, memory))
        if not len(some):
            return
        if len(some) < len(rows):
            rows, times = rows.take(some), times.take(some)
    priced = sweep(one.tables, rows, one.slot, times, limit)
    best.searched += len(rows)
    fits = priced.peak <= best.limit
    best.fitting += int(fits.sum())
    if every or not best.found:
        for i in np.argsort(priced.peak, kind="stable")[: best.wanted]:
            at = int(i)
            best.smallest.append(_candidate(one, rows, at, float(priced.least[at]), priced, best.limit))
        best.smallest.sort(key=lambda c: (c.peak, c.seconds))
        del best.smallest[best.wanted :]
    could = np.flatnonzero(fits)
    could = could[~best.beaten(priced.least[could], priced.peak[could])]
    key = priced.peak if best.by_memory else priced.least
    could = could[np.lexsort((priced.peak[could], key[could]))]
    if best.by_memory and not best.pareto:
        best.add(
            [
                _candidate(one, rows, int(i), float(priced.least[i]), priced, best.limit)
                for i in could[: best.wanted]
            ]
        )
        return
    while len(could):
        some, could = could[:PLAYED], could[PLAYED:]
        exact = _play(one, rows, some, priced)
        best.played += len(some)
        best.add(
            [
                _candidate(one, rows, int(i), float(s), priced, best.limit)
                for i, s in zip(some, exact, strict=True)
            ]
        )
        could = could[~best.beaten(priced.least[could], priced.peak[could])]


def _candidate(one: Surveyed, rows: Rows, row: int, seconds: float, priced: Swept, limit: float) -> Candidate:
    peak = float(priced.peak[row])
    held = rows.take(np.array([row], dtype=np.intp))
    return Candidate(rows=held, row=0, slot=one.slot, seconds=seconds, peak=peak, fits=peak <= limit)


def _play(one: Surveyed, rows: Rows, index: Index, priced: Swept) -> Floats:
    """Return the seconds of a step of some rows with their schedules played on the clock."""
    slot = one.slot
    if slot.num_stages == 1:
        return priced.least[index]
    out = np.zeros(len(index))
    some = rows.take(index)
    number, first = some.distinct(("schedule", "accumulation"))
    for n, row in enumerate(first):
        at = np.flatnonzero(number == n)
        like = some.layout(int(row))
        here = index[at]
        forward = priced.forward[here][:, slot.run_of].T.copy()
        backward = priced.backward[here][:, slot.run_of].T.copy()
        weight = priced.weight[here][:, slot.run_of].T.copy()
        m = some.accumulation(int(row))
        if shares_cores(one.tables.pricer.cluster, like):
            length = _taking_turns(one, like, m, forward, backward, weight, priced.send[here])
        else:
            length, _ = makespans(
                like.schedule, slot.pp, slot.chunks, m, forward, backward, priced.send[here], weight
            )
        out[at] = length + priced.rest[here]
    return out


def _taking_turns(
    one: Surveyed, like: Layout, m: int, forward: Floats, backward: Floats, weight: Floats, send: Floats
) -> Floats:
    """Return makespans on a CPU whose ranks take turns on fewer cores: each layout on the clock by itself."""
    cluster = one.tables.pricer.cluster
    schedule = generate(like.schedule, like.pp, m, like.chunks)
    out = np.zeros(len(send))
    for i in range(len(send)):
        times = list(forward[:, i]), list(backward[:, i]), float(send[i]), list(weight[:, i])
        clock = run_clock(schedule, *times)
        out[i] = clock.makespan_s * contention(clock, cluster, like)
    return out
