"""The space of layouts as columns: blocks of layouts that share their work, and the layouts of a block.

A block fixes the degrees, the schedule, the micro-batch, recompute and the loss; its layouts differ in the ZeRO stage,
the shard group, the order of axes and what is offloaded. A whole block can be left out by one bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np

from meshwright.base.axes import LAYOUT_AXES
from meshwright.cost.rows import Codes, Index, Rows
from meshwright.layout import built
from meshwright.layout.check import check_cut, divisors
from meshwright.layout.layout import Layout
from meshwright.layout.parse import CHOICES
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import V_SHAPED
from meshwright.search import legal

MAX_MICRO_BATCH: Final = 64
MAX_CHUNKS: Final = 8
"""Largest micro-batch, and most stages per rank, that are tried unless they are pinned."""
LEAST_POSITIONS: Final = 1024
"""A context axis is tried where each rank keeps this many positions: it is for long sequences, and dp does the rest."""
PIPELINE_INSIDE: Final = ("tp", "cp", "pp", "dp")
"""The other order that is tried: stages on neighbouring devices, replicas far apart."""
SINGLE: Final = ("1f1b", "gpipe", "zb-h1")
"""Schedules with one stage per rank."""

Runs: TypeAlias = frozenset[tuple[int, bool, str]]
"""ZeRO stages, whether the shard group is all of dp * cp, and offloads that run together."""


@dataclass(frozen=True)
class Known:
    """What is known of a space while it is enumerated.

    Attributes:
        runs: what runs, by what the rules about it look at: whether there is a pipeline, and several stages per rank,
            the number of ``_coarse``, and the schedule.
        lists: inner codes, by what they depend on.
    """

    runs: dict[tuple[bool, bool, int, str], Runs] = field(
        default_factory=dict[tuple[bool, bool, int, str], Runs]
    )
    lists: dict[tuple[Any, ...], Mapping[str, Codes]] = field(
        default_factory=dict[tuple[Any, ...], Mapping[str, Codes]]
    )


@dataclass(frozen=True, kw_only=True)
class Space:
    """What to enumerate.

    Attributes:
        num_gpus, gpus_per_node: devices in all and on one node.
        global_batch, seq_len: sequences per step, and their tokens.
        pins: values that ``--fix`` writes, by key.
        precision: of every layout.
        include_unbuilt: also what the runtime cannot run so far.
    """

    num_gpus: int
    gpus_per_node: int
    global_batch: int
    seq_len: int
    precision: str
    pins: Mapping[str, Any]
    include_unbuilt: bool

    def choices(self, key: str, every: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of a key: the pinned one, or those of ``every`` that run."""
        if key in self.pins:
            return (self.pins[key],)
        if self.include_unbuilt or key not in built.OPTIONS:
            return every
        return tuple(v for v in every if v in built.OPTIONS[key])

    def degrees(self, axis: str) -> tuple[int, ...]:
        """Return the degrees of an axis: the pinned one, or the divisors of the devices where the axis runs."""
        if axis in self.pins:
            return (int(self.pins[axis]),)
        if not (self.include_unbuilt or axis in built.AXES):
            return (1,)
        found = divisors(self.num_gpus)
        return tuple(d for d in found if axis != "cp" or d == 1 or self.seq_len >= d * LEAST_POSITIONS)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of one pipeline degree, stages per rank and placement.

    Attributes:
        rows: [blocks] each with the values of its sparest layout: ZeRO 3 over all of dp * cp.
        inner: [blocks] which of ``lists`` holds the block's own layouts.
        lists: codes of zero, shard, stage, plain, order and offload, by column.
        count: [blocks] how many layouts a block has.
    """

    rows: Rows
    inner: Index
    lists: tuple[Mapping[str, Codes], ...]
    count: Index

    def expand(self, index: Index) -> Rows:
        """Return all layouts of some blocks."""
        chosen = self.inner[index]
        sizes = self.count[index]
        block = np.repeat(index, sizes)
        starts = np.concatenate(([0], np.cumsum([len(x["zero"]) for x in self.lists])))
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        at = np.repeat(starts[chosen], sizes) + within
        codes = {name: column[block] for name, column in self.rows.codes.items()}
        for name in self.lists[0] if self.lists else ():
            codes[name] = np.concatenate([x[name] for x in self.lists])[at]
        held = {f: getattr(self.rows, f) for f in ("pp", "chunks", "cut", "precision", "values")}
        return Rows(**held, codes=codes)


def all_blocks(spec: ModelSpec, space: Space) -> Iterator[Blocks]:
    """Yield the legal blocks of every pipeline degree, number of stages per rank and placement."""
    known = Known()
    for pp in space.degrees("pp"):
        if space.num_gpus % pp or pp > spec.num_layers:
            continue
        for chunks, schedules in _pipelines(spec, space, pp):
            cuts = [space.pins["cut"]] if "cut" in space.pins else ["auto"]
            for cut in cuts:
                if check_cut(spec.num_layers, Layout(pp=pp, chunks=chunks, cut=cut)):
                    continue
                found = _blocks(spec, space, pp, chunks, cut, schedules, known)
                if found is not None:
                    yield found


def _pipelines(spec: ModelSpec, space: Space, pp: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (stages per rank, schedules) that share their stages."""
    pins = space.pins
    every = space.choices("schedule", CHOICES["schedule"])
    if pp == 1 and "schedule" not in pins:
        every = ("1f1b",)
    single = tuple(s for s in SINGLE if s in every) or tuple(s for s in every if s.startswith("@"))
    if single and pins.get("chunks", 1) == 1:
        yield 1, single
    if pp == 1:
        return
    shaped = tuple(s for s in V_SHAPED if s in every)
    if shaped and pins.get("chunks", 2) == 2:
        yield 2, shaped
    if "interleaved" in every:
        most = min(MAX_CHUNKS, spec.num_layers // pp)
        for chunks in (pins["chunks"],) if "chunks" in pins else range(2, most + 1):
            if chunks > 1:
                yield chunks, ("interleaved",)


def _blocks(
    spec: ModelSpec,
    space: Space,
    pp: int,
    chunks: int,
    cut: str,
    schedules: tuple[str, ...],
    known: Known,
) -> Blocks | None:
    values = _tables(spec, space, pp, schedules)
    grid = _degree_grid(spec, space, pp, chunks, values)
    if grid is None:
        return None
    codes = _with_policies(spec, space, pp, chunks, values, grid)
    if not len(codes["dp"]):
        return None
    lists, inner = _inner(spec, space, pp, chunks, values, codes, known)
    dp, cp = (np.asarray(values[n])[codes[n]] for n in ("dp", "cp"))
    whole = dp * cp > 1
    place = {size: i for i, size in enumerate(values["shard"])}
    spare = np.array([place.get(int(n), 0) for n in (dp * cp)[_firsts(dp * cp)[0]]], dtype=np.int16)
    sparse = {
        "zero": np.where(whole, values["zero"].index(3), 0).astype(np.int16)
        if 3 in values["zero"]
        else np.zeros(len(dp), dtype=np.int16),
        "shard": spare[_firsts(dp * cp)[1]],
        "stage": np.where(whole, 3, 0).astype(np.int16),
        "plain": np.where(whole, 0, 1).astype(np.int16),
        "order": np.zeros(len(dp), dtype=np.int16),
        "offload": np.zeros(len(dp), dtype=np.int16),
    }
    count = np.array([len(x["zero"]) for x in lists], dtype=np.intp)[inner]
    keep = count > 0
    rows = Rows(
        pp=pp, chunks=chunks, cut=cut, precision=space.precision, values=values, codes=codes | sparse
    ).take(keep)
    return Blocks(rows=rows, inner=inner[keep], lists=lists, count=count[keep]) if len(rows) else None


def _firsts(column: Index) -> tuple[Index, Index]:
    _, first, at = np.unique(column, return_index=True, return_inverse=True)
    return first, at.reshape(-1)


def _tables(spec: ModelSpec, space: Space, pp: int, schedules: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Return the values of every column."""
    pins, batch = space.pins, space.global_batch
    tp, cp = space.degrees("tp"), space.degrees("cp")
    dp = sorted(
        {space.num_gpus // pp // t // c for t in tp for c in cp if space.num_gpus // pp % (t * c) == 0}
    )
    micro = tuple(d for d in divisors(batch) if d <= MAX_MICRO_BATCH)
    experts = (1,)
    if "ep" in pins:
        experts = (int(pins["ep"]),)
    elif spec.moe is not None:
        experts = tuple(d for d in space.degrees("ep") if spec.moe.num_experts % d == 0)
    shards = {1, *(d * c for n in dp for c in cp for d in divisors(n))}
    if "shard" in pins:
        shards = {1, int(pins["shard"])}
    return {
        "tp": tp,
        "cp": cp,
        "dp": tuple(dp) or (1,),
        "ep": experts,
        "micro_batch": (int(pins["micro_batch"]),) if "micro_batch" in pins else micro,
        "sp": (bool(pins["sp"]),) if "sp" in pins else (True, False),
        "cp_style": space.choices("cp_style", CHOICES["cp_style"]),
        "recompute": space.choices("recompute", CHOICES["recompute"]),
        "loss": space.choices("loss", CHOICES["loss"]),
        "schedule": schedules,
        "kv_heads": (pins["kv_heads"],) if "kv_heads" in pins else ("split", "replicate"),
        "compile": space.choices("compile", ("off",)),
        "zero": (int(pins["zero"]),) if "zero" in pins else (0, 1, 2, 3),
        "shard": tuple(sorted(shards)),
        "stage": (0, 1, 2, 3),
        "plain": (False, True),
        "order": (pins["order"],) if "order" in pins else (LAYOUT_AXES, PIPELINE_INSIDE),
        "offload": space.choices("offload", ("none",)),
        "accumulation": tuple(divisors(batch)),
    }


def _product(sizes: list[int]) -> list[Codes]:
    """Return the index columns of a full product, the last one fastest."""
    grid = np.indices(sizes, dtype=np.int16) if sizes else np.zeros((0, 1), dtype=np.int16)
    return [np.asarray(axis).reshape(-1) for axis in grid]


def _degree_grid(
    spec: ModelSpec, space: Space, pp: int, chunks: int, values: Mapping[str, tuple[Any, ...]]
) -> dict[str, Codes] | None:
    """Return codes of tp, cp, ep, micro_batch, dp and accumulation that fill the devices and divide the batch."""
    names = ("tp", "cp", "ep", "micro_batch")
    held = dict(zip(names, _product([len(values[n]) for n in names]), strict=True))
    tp, cp, ep, micro = (np.asarray(values[n], dtype=np.int64)[held[n]] for n in names)
    good = legal.tensor_degrees(spec, values["tp"], space.pins.get("kv_heads"))[held["tp"]]
    room = space.num_gpus // pp
    good &= room % (tp * cp) == 0
    dp = room // np.maximum(tp * cp, 1)
    good &= space.global_batch % np.maximum(dp * micro, 1) == 0
    if "dp" in space.pins:
        good &= dp == int(space.pins["dp"])
    good &= legal.experts(spec, ep, dp * cp)
    if not good.any():
        return None
    m = space.global_batch // np.maximum(dp * micro, 1)
    at_dp = np.searchsorted(values["dp"], dp[good])
    at_m = np.searchsorted(values["accumulation"], m[good])
    out = {n: held[n][good].astype(np.int16) for n in names}
    return out | {"dp": at_dp.astype(np.int16), "accumulation": at_m.astype(np.int16)}


def _with_policies(
    spec: ModelSpec,
    space: Space,
    pp: int,
    chunks: int,
    values: Mapping[str, tuple[Any, ...]],
    grid: Mapping[str, Codes],
) -> dict[str, Codes]:
    """Return codes of the degrees times sp, cp_style, recompute, loss and schedule, as far as they are legal."""
    names = ("sp", "cp_style", "recompute", "loss", "schedule")
    policies = dict(zip(names, _product([len(values[n]) for n in names]), strict=True))
    size = len(policies["sp"])
    codes: dict[str, Codes] = {n: np.repeat(column, size) for n, column in grid.items()}
    codes |= {n: np.tile(column, len(grid["dp"])) for n, column in policies.items()}
    tp, cp, m = (np.asarray(values[n], dtype=np.int64)[codes[n]] for n in ("tp", "cp", "accumulation"))
    sp = np.asarray(values["sp"], dtype=np.bool_)[codes["sp"]]
    ulysses = np.asarray([v == "ulysses" for v in values["cp_style"]])[codes["cp_style"]]
    good = legal.sequences(spec, space.seq_len, tp, cp, sp, ulysses)
    if "cp_style" not in space.pins:
        good &= (cp > 1) | (codes["cp_style"] == 0)
    if "loss" not in space.pins and "parallel" in values["loss"]:
        good &= (tp > 1) | (codes["loss"] != values["loss"].index("parallel"))  # nothing to cut: it is eager
    for i, schedule in enumerate(values["schedule"]):
        allowed = legal.micro_batches(schedule, pp, chunks, m)
        if schedule == "gpipe" and "schedule" not in space.pins:
            allowed &= m > 1  # with one micro-batch it is 1f1b
        good &= allowed | (codes["schedule"] != i)
    codes = {n: column[good] for n, column in codes.items()}
    tp = tp[good]
    if "kv_heads" in space.pins:
        kv = np.zeros(len(tp), dtype=np.int16)
    else:
        kv = ((tp > 1) & (spec.num_kv_heads % np.maximum(tp, 1) > 0)).astype(np.int16)
    return codes | {"kv_heads": kv, "compile": np.zeros(len(tp), dtype=np.int16)}


def _inner(
    spec: ModelSpec,
    space: Space,
    pp: int,
    chunks: int,
    values: Mapping[str, tuple[Any, ...]],
    codes: Mapping[str, Codes],
    known: Known,
) -> tuple[tuple[Mapping[str, Codes], ...], Index]:
    """Return the lists of inner codes, and which list each block has."""
    rows = Rows(pp=pp, chunks=chunks, cut="auto", precision=space.precision, values=values, codes=codes)
    coarse = np.zeros(len(rows), dtype=np.intp) if space.include_unbuilt else _coarse(spec, rows)
    names = ("dp", "cp", "schedule", "ep")
    key = np.zeros(len(rows), dtype=np.int64)
    for name in names:
        key = key * len(values[name]) + codes[name]
    key = key * (int(coarse.max()) + 1) + coarse
    _, first, at = np.unique(key, return_index=True, return_inverse=True)
    made: dict[tuple[Any, ...], int] = {}
    lists: list[Mapping[str, Codes]] = []
    number: list[int] = []
    degrees = [np.asarray(values[n])[codes[n][first]].tolist() for n in ("dp", "cp", "ep")]
    schedules = [values["schedule"][code] for code in codes["schedule"][first]]
    for row, group, schedule, *degree in zip(
        first.tolist(), coarse[first].tolist(), schedules, *degrees, strict=True
    ):
        like = (pp > 1, chunks > 1, group, schedule)
        if like not in known.runs:
            known.runs[like] = _runs(spec, space, _layout(rows, row))
        slot = (pp, *degree, legal.shard_allowed(3, schedule, pp), known.runs[like])
        if slot not in made:
            made[slot] = len(lists)
            if slot not in known.lists:
                known.lists[slot] = _inner_codes(space, _layout(rows, row), values, known.runs[like])
            lists.append(known.lists[slot])
        number.append(made[slot])
    return tuple(lists), np.asarray(number, dtype=np.intp)[at.reshape(-1)]


def _coarse(spec: ModelSpec, rows: Rows) -> Index:
    """Return a number for what the rules about what runs look at: which axes are above 1, and the policies.

    Of tp it is also whether the model's tensors can be cut so.
    """
    code = np.zeros(len(rows), dtype=np.intp)
    for name in ("cp", "ep", "dp"):
        code = code * 2 + (rows.column(name) > 1)
    kinds = [legal.tensor_kind(spec, tp) for tp in rows.values["tp"]]
    code = code * (max(kinds) + 1) + np.asarray(kinds, dtype=np.intp)[rows.codes["tp"]]
    for name in ("sp", "cp_style", "recompute", "loss", "kv_heads"):
        code = code * len(rows.values[name]) + rows.codes[name]
    return code


def _layout(rows: Rows, row: int) -> Layout:
    held = {n: rows.values[n][rows.codes[n][row]] for n in rows.codes if n != "accumulation"}
    return Layout(pp=rows.pp, chunks=rows.chunks, precision=rows.precision, **held)


def _runs(spec: ModelSpec, space: Space, like: Layout) -> Runs:
    """Return which (ZeRO stage, shard group is all of dp * cp, offload) run with a layout's other keys."""
    room = like.dp * like.cp
    part = max(2, like.cp) * like.ep
    kinds = [(z, room if z else 1, True) for z in range(4)] + [(z, part, False) for z in range(1, 4)]
    out: set[tuple[int, bool, str]] = set()
    offloads = space.choices("offload", ("none",))
    if space.include_unbuilt:
        return frozenset((zero, whole, offload) for offload in offloads for zero, _, whole in kinds)
    for offload in offloads:
        for zero, shard, whole in kinds:
            made = replace(like, zero=zero, shard=shard, offload=offload)
            if legal.runs(spec, made):
                out.add((zero, whole, offload))
    return frozenset(out)


def _inner_codes(
    space: Space, like: Layout, values: Mapping[str, tuple[Any, ...]], runs: Runs
) -> Mapping[str, Codes]:
    """Return the codes of a block's layouts: ZeRO stages with shard groups, orders of axes, offload."""
    room = like.dp * like.cp
    pairs: list[tuple[int, int]] = []
    for zero in values["zero"]:
        sizes = [1] if zero == 0 else [d * like.cp for d in divisors(like.dp) if d * like.cp > 1]
        if zero and room == 1:
            sizes = [1] if "zero" in space.pins else []
        if "shard" in space.pins:
            sizes = [s for s in sizes if s == space.pins["shard"]]
        if legal.shard_allowed(zero, like.schedule, like.pp):
            pairs += [(zero, s) for s in sizes]
    apart = (
        like.pp > 1 and like.dp > 1 and space.num_gpus > space.gpus_per_node
    )  # on one node, and without replicas, every order is alike
    orders = range(len(values["order"])) if apart else range(1)
    every = [
        (z, s, o, f)
        for z, s in pairs
        for o in orders
        for f, offload in enumerate(values["offload"])
        if (z, s == room or z == 0, offload) in runs
        and (space.include_unbuilt or legal.expert_shards(like, z, s, values["order"][o]))
    ]
    zero_at = {z: i for i, z in enumerate(values["zero"])}
    shard_at = {s: i for i, s in enumerate(values["shard"])}

    def column(items: list[int]) -> Codes:
        return np.asarray(items, dtype=np.int16)

    return {
        "zero": column([zero_at[z] for z, *_ in every]),
        "shard": column([shard_at[s] for _, s, *_ in every]),
        "stage": column([z if s > 1 else 0 for z, s, *_ in every]),
        "plain": column([int(z == 0 or s == 1) for z, s, *_ in every]),
        "order": column([o for *_, o, _ in every]),
        "offload": column([f for *_, f in every]),
    }
