"""No layout is legal: which rule the pinned one breaks, and the nearest values that would be legal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.cluster.spec import ClusterSpec
from meshwright.layout.batch import MOST_SEQUENCES, check_batch, derive_batch
from meshwright.layout.check import check, divisors, nearest_choices
from meshwright.layout.layout import Layout
from meshwright.layout.parse import complete
from meshwright.model.spec import ModelSpec
from meshwright.search.space import Blocks, Space, all_blocks

DEGREES: Final = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "chunks", "shard", "zero")
"""Pinned keys whose nearest legal values are looked for."""
BATCHES: Final = 64
"""How many multiples of the smallest micro-batch step are tried for a legal global batch."""


def nothing_legal(spec: ModelSpec, cluster: ClusterSpec, space: Space, fix: str) -> list[Problem]:
    """Return E409 with the nearest legal values of each pinned key, and what is wrong with the pinned layout."""
    pinned = f" with {fix}" if fix else ""
    found = (
        f"no layout of {cluster.num_gpus} GPUs{pinned} is legal for a global batch of {space.global_batch} "
        f"and {space.seq_len} tokens"
    )
    near = [text for key in DEGREES if key in space.pins and (text := _nearest(spec, space, key))]
    for key in sorted(set(space.pins) - set(DEGREES)):
        if _without(spec, space, key):
            near.append(f"leave {key} open")
    do = "; or ".join(near)
    if not do and space.pins and next(all_blocks(spec, replace(space, pins={})), None) is not None:
        do = "two or more of the pinned keys must change: leave them open"
    if not do:
        batch = _batch(spec, space)
        do = f"global batch = {batch}" if batch else ""
    return [problem("E409", where="plan", found=found, do=do), *_why(spec, cluster, space)]


def _without(spec: ModelSpec, space: Space, *keys: str) -> list[Blocks]:
    pins = {k: v for k, v in space.pins.items() if k not in keys}
    return list(all_blocks(spec, replace(space, pins=pins)))


def _nearest(spec: ModelSpec, space: Space, key: str) -> str:
    """Return the legal values of one pinned key that are nearest to the pinned one, the others kept."""
    legal: set[int] = set()
    for blocks in _without(spec, space, key):
        if key in ("pp", "chunks"):
            legal.add(int(getattr(blocks.rows, key)))
            continue
        if key in ("zero", "shard"):
            legal |= {int(blocks.rows.values[key][c]) for x in blocks.lists for c in x[key]}
            continue
        legal |= {int(v) for v in blocks.rows.column(key)}
    return f"{key} = {nearest_choices(sorted(legal), int(space.pins[key]))}" if legal else ""


def _batch(spec: ModelSpec, space: Space) -> int:
    """Return the smallest larger global batch for which something is legal, or 0."""
    unit = int(space.pins.get("dp", 1)) * int(space.pins.get("micro_batch", 1))
    for unit_ in (unit, *sorted({unit * d for d in divisors(space.num_gpus)})):
        first = -(-space.global_batch // unit_) * unit_
        for wanted in range(first, min(first + BATCHES * unit_, MOST_SEQUENCES) + 1, unit_):
            wider = replace(space, global_batch=wanted)
            if wanted != space.global_batch and next(all_blocks(spec, wider), None) is not None:
                return wanted
    return 0


def _why(spec: ModelSpec, cluster: ClusterSpec, space: Space) -> list[Problem]:
    """Return what is wrong with the layout that the pinned keys come nearest to."""
    held: dict[str, Any] = dict(space.pins)
    inner = 1
    for key in ("tp", "pp", "cp"):
        inner *= int(held.get(key, 1))
    held.setdefault("dp", max(1, space.num_gpus // inner))
    held.setdefault("precision", space.precision)
    layout: Layout = complete(held)
    problems = check_batch(layout, space.global_batch, space.seq_len)
    try:
        batch = derive_batch(layout, space.global_batch, space.seq_len)
    except MeshwrightError:
        batch = None
    problems += check(spec, layout, batch, cluster, for_run=not space.include_unbuilt)
    return [p for p in problems if p.severity == "error"]
