"""Priced pieces and units as arrays that grow: each distinct one is priced once for a whole search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats, GroupShape
from meshwright.cost.data_parallel import unit_seconds
from meshwright.cost.pieces import Pricer
from meshwright.cost.pipeline import message_seconds, tied_seconds
from meshwright.cost.rows import Index, Rows
from meshwright.cost.units import StageUnits, UnitSize, expert_shapes, group_shapes, stage_units
from meshwright.cost.work import Work, sharding_stage, work_key
from meshwright.layout.layout import Layout

BLOCK_KEYS: Final = ("tp", "sp", "cp", "cp_style", "ep", "micro_batch", "recompute", "plain")
"""Columns that the work of a block and of the embedding depends on; the head's also on ``loss``."""
UNIT_KEYS: Final = ("tp", "ep", "dp", "cp", "order", "shard", "plain")
"""Columns that the sizes and the data-parallel communication of units depend on, beside the pipeline degree."""
SEND_KEYS: Final = ("tp", "sp", "cp", "cp_style", "dp", "order", "micro_batch", "plain")
TIED_KEYS: Final = ("tp", "dp", "cp", "zero", "shard", "order", "schedule")
WORK: Final = tuple(f.name for f in fields(Work) if f.name != "flops")
SIZES: Final = tuple(f.name for f in fields(UnitSize))
SECONDS: Final = ("gather", "scatter", "reduce", "hooks", "rows", "apart")
EDGES: Final = tuple(f"{name}_edge" for name in SECONDS)
"""Seconds of single units that may not be hidden: those of their group, without experts that have groups of their own."""


def placed_by(rows: Rows) -> tuple[str, ...]:
    """Return the columns that decide, beside the degrees of tp and cp, where the ranks of a block's groups sit.

    None while tp and cp are the innermost axes and no expert is spread, or all rows have one order of that kind.
    """
    orders: tuple[tuple[str, ...], ...] = rows.values["order"]
    if any(order[:2] != ("tp", "cp") for order in orders):
        return ("dp", "order")
    return ("order",) if len(orders) > 1 and max(rows.values["ep"]) > 1 else ()


@dataclass
class Numbered:
    """Numbers combinations of columns in the order in which they are first seen, and keeps a figure of each.

    ``make(layouts)`` returns the figures of new combinations, [combinations, ...].
    """

    names: tuple[str, ...]
    make: Callable[[Sequence[Layout]], Floats]
    figures: Floats | None = None
    _seen: dict[tuple[Any, ...], NDArray[np.int32]] = field(default_factory=dict[Any, Any])
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict[Any, int])

    def look(self, rows: Rows) -> Index:
        """Return [rows] the number of each row's combination; its figure is ``figures[number]``."""
        work = "ep" in self.names and "order" not in self.names
        places = placed_by(rows) if work else ()
        names = (*self.names, *places)
        tables = tuple(rows.values[name] for name in names)
        code = np.zeros(len(rows), dtype=np.int64)
        for name, table in zip(names, tables, strict=True):
            if len(table) > 1:
                code *= len(table)
                code += rows.codes[name]
        # groups of tp and cp that are innermost are the same in every pipeline, and so is the work of a block
        alike = work and not places and max(rows.values["ep"]) == 1
        space = (0 if alike else rows.pp, tables)
        if space not in self._seen:
            cells = int(np.prod([len(t) for t in tables]))
            self._seen[space] = np.full(cells, -1, dtype=np.int32)
        number = self._seen[space]
        out = number[code]
        if (out < 0).any():
            new = np.flatnonzero(out < 0)
            codes, first = np.unique(code[new], return_index=True)
            self._add(rows, codes, new[first], number)
            out = number[code]
        return out.astype(np.intp)

    def _add(self, rows: Rows, codes: NDArray[np.int64], first: Index, number: NDArray[np.int32]) -> None:
        start = 0 if self.figures is None else len(self.figures)
        made: list[Layout] = []
        for code, row in zip(codes, first, strict=True):
            number[code] = start + len(made)
            made.append(rows.layout(int(row)))
        figures = np.asarray(self.make(made), dtype=np.float64)
        self.figures = figures if self.figures is None else np.concatenate((self.figures, figures))


@dataclass(frozen=True)
class Tables:
    """The priced pieces of one search, by what they depend on; figures are [combinations, ...].

    Attributes:
        blocks: [.., WORK, kinds] of one block of each kind; ``embeddings`` and ``heads`` [.., WORK].
        units: [.., SIZES + SECONDS + EDGES, units] of the first, an inner and the last stage's root, then each kind
            of block.
        sends, tied: [..] seconds of one message, and of summing a tied embedding.
    """

    blocks: Numbered
    embeddings: Numbered
    heads: Numbered
    units: dict[int, Numbered]
    sends: dict[int, Numbered]
    tied: dict[int, Numbered]
    pricer: Pricer

    def of_pipeline(self, kind: str, pp: int, stages: int) -> Numbered:
        """Return the ``units``, ``sends`` or ``tied`` of a pipeline degree and number of stages."""
        held: dict[int, Numbered] = getattr(self, kind)
        slot = pp * 1000 + min(stages, 3) if kind == "units" else pp
        if slot not in held:
            pricer = self.pricer
            if kind == "units":
                held[slot] = Numbered(UNIT_KEYS, lambda made: _units(pricer, made, min(stages, 3)))
            else:
                price = message_seconds if kind == "sends" else tied_seconds
                names = SEND_KEYS if kind == "sends" else TIED_KEYS
                held[slot] = Numbered(names, lambda made: np.array([price(pricer, x) for x in made]))
        return held[slot]


def make_tables(pricer: Pricer) -> Tables:
    """Return empty tables of a pricer."""

    def figures(work: Work) -> list[float]:
        return [getattr(work, name) for name in WORK]

    def blocks(made: Sequence[Layout]) -> Floats:
        kinds = range(len(pricer.kinds))
        out = [[figures(pricer.block(k, key)) for k in kinds] for key in map(work_key, made)]
        return np.array(out, dtype=np.float64).transpose(0, 2, 1)

    def embeddings(made: Sequence[Layout]) -> Floats:
        return np.array([figures(pricer.embedding(work_key(x))) for x in made])

    def heads(made: Sequence[Layout]) -> Floats:
        return np.array([figures(pricer.head(work_key(x), x.loss)) for x in made])

    ends = tuple(name for name in BLOCK_KEYS if name != "recompute")
    return Tables(
        blocks=Numbered(BLOCK_KEYS, blocks),
        embeddings=Numbered(ends, embeddings),
        heads=Numbered((*ends, "loss"), heads),
        units={},
        sends={},
        tied={},
        pricer=pricer,
    )


def _units(pricer: Pricer, layouts: Sequence[Layout], stages: int) -> Floats:
    """Return [layouts, SIZES + SECONDS + EDGES, units] of single units; ``stages`` is at most 3."""
    known: dict[tuple[int, int, int], tuple[Floats, ...]] = {}
    sizes: list[tuple[Floats, ...]] = []
    for layout in layouts:
        key = (layout.tp, layout.ep, layout.shard if sharding_stage(layout) else 1)
        if key not in known:
            known[key] = _unit_sizes(stage_units(pricer, stages, *key))
        sizes.append(known[key])
    whole, rest, experts = (np.array([held[i] for held in sizes]) for i in range(3))
    node = pricer.cluster.gpus_per_node
    seconds = _unit_seconds(pricer, layouts, rest, [group_shapes(x, node)[:2] for x in layouts])
    spread = [i for i, x in enumerate(layouts) if x.ep > 1]
    total = seconds.copy()
    if spread:
        some = [layouts[i] for i in spread]
        own = [expert_shapes(x, node) for x in some]
        total[spread] += _unit_seconds(pricer, some, experts[spread], own)
    return np.concatenate((whole, total, seconds), axis=1)


def _unit_sizes(made: StageUnits) -> tuple[Floats, ...]:
    """Return [SIZES, units] of whole units, of what their group holds, and of experts with groups of their own."""

    def figures(units: Sequence[UnitSize]) -> Floats:
        return np.array([[float(getattr(u, name)) for u in units] for name in SIZES])

    roots = (made.root[0], made.root[len(made.root) // 2], made.root[-1])
    whole = figures((*roots, *made.kinds))
    if not made.experts:
        return whole, whole, np.zeros_like(whole)
    experts = figures((*roots, *made.experts))
    experts[:, : len(roots)] = 0.0
    return whole, figures((*roots, *made.rest)), experts


def _unit_seconds(
    pricer: Pricer,
    layouts: Sequence[Layout],
    sizes: Floats,
    groups: Sequence[tuple[GroupShape, GroupShape]],
) -> Floats:
    """Return [layouts, SECONDS, units] of units with these groups that shard them and hold copies."""
    places: dict[tuple[bool, GroupShape, GroupShape], list[int]] = {}
    for number, (layout, (group, copies)) in enumerate(zip(layouts, groups, strict=True)):
        places.setdefault((sharding_stage(layout) > 0, group, copies), []).append(number)
    out = np.zeros((len(layouts), len(SECONDS), sizes.shape[2]))
    for (sharded, group, copies), numbers in places.items():
        index = np.asarray(numbers, dtype=np.intp)
        some = {name: sizes[index, i] for i, name in enumerate(SIZES)}
        for name, column in unit_seconds(pricer, some, sharded, group, copies).items():
            out[index, SECONDS.index(name)] = column
    return out
