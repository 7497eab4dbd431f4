"""The space of layouts: every combination of degrees and policies that fills the devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from meshwright.layout import built
from meshwright.layout.check import divisors
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec

MAX_MICRO_BATCH: Final = 64
PRICED_SCHEDULES: Final = ("1f1b", "gpipe")
"""Schedules with one stage per rank, which the cost model prices."""

LEAST_POSITIONS: Final = 1024
"""A context axis is tried where each rank keeps this many positions: it is for long sequences, and dp does the rest."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What to enumerate.

    Attributes:
        num_gpus, gpus_per_node: devices in all and on one node.
        seq_len: positions of a sequence.
        pins: values that ``--fix`` writes, by key.
        precision: of every layout, unless pinned.
        include_unbuilt: also what the runtime cannot run so far.
    """

    num_gpus: int
    gpus_per_node: int
    global_batch: int
    seq_len: int
    precision: str
    pins: Mapping[str, Any]
    include_unbuilt: bool


def enumerate_layouts(spec: ModelSpec, space: Space) -> Iterator[Layout]:
    """Yield every layout whose degrees fill the devices and divide the batch, before the rules are asked."""
    pins = space.pins
    for tp, pp, cp in _degrees(spec, space):
        dp = space.num_gpus // (tp * pp * cp)
        if space.global_batch % dp or pins.get("dp", dp) != dp:
            continue
        local = space.global_batch // dp
        for ep, (zero, shard), micro_batch, recompute, schedule, sp in product(
            _expert_degrees(spec, space, dp * cp),
            _zero_and_shard(space, dp, cp),
            _pinned(pins, "micro_batch", [d for d in divisors(local) if d <= MAX_MICRO_BATCH]),
            _pinned(pins, "recompute", _options(space, "recompute")),
            _pinned(pins, "schedule", list(PRICED_SCHEDULES) if pp > 1 else ["1f1b"]),
            _pinned(pins, "sp", [True] if tp > 1 else [False]),
        ):
            if local % micro_batch:
                continue
            if schedule == "gpipe" and local == micro_batch and "schedule" not in pins:
                continue  # with one micro-batch it is 1f1b
            yield Layout(
                dp=dp,
                zero=zero,
                shard=shard,
                tp=tp,
                sp=sp,
                pp=pp,
                cp=cp,
                ep=ep,
                micro_batch=micro_batch,
                recompute=recompute,
                schedule=schedule,
                precision=pins.get("precision", space.precision),
                **{
                    k: pins[k]
                    for k in ("cut", "order", "loss", "kv_heads", "compile", "offload", "chunks", "cp_style")
                    if k in pins
                },
            )


def _degrees(spec: ModelSpec, space: Space) -> Iterator[tuple[int, int, int]]:
    pins, gpus = space.pins, space.num_gpus
    for tp in _pinned(pins, "tp", _axis(space, "tp", divisors(gpus))):
        if gpus % tp or (tp > spec.num_heads and "tp" not in pins):
            continue
        for pp in _pinned(pins, "pp", _axis(space, "pp", divisors(gpus // tp))):
            if gpus // tp % pp or (pp > spec.num_layers and "pp" not in pins):
                continue
            degrees = [
                d for d in divisors(gpus // tp // pp) if d == 1 or space.seq_len >= d * LEAST_POSITIONS
            ]
            for cp in _pinned(pins, "cp", _axis(space, "cp", degrees)):
                if gpus // tp // pp % cp == 0:
                    yield tp, pp, cp


def _axis(space: Space, axis: str, degrees: list[int]) -> list[int]:
    return degrees if space.include_unbuilt or axis in built.AXES else [1]


def _options(space: Space, key: str) -> list[str]:
    every = {"recompute": ["none", "selective", "full"]}[key]
    return every if space.include_unbuilt else [v for v in every if v in built.OPTIONS[key]]


def _pinned(pins: Mapping[str, Any], key: str, values: list[Any]) -> list[Any]:
    return [pins[key]] if key in pins else values


def _expert_degrees(spec: ModelSpec, space: Space, ranks: int) -> list[int]:
    if "ep" in space.pins:
        return [space.pins["ep"]]
    if spec.moe is None:
        return [1]
    experts = spec.moe.num_experts
    return _axis(space, "ep", [d for d in divisors(ranks) if experts % d == 0])


def _zero_and_shard(space: Space, dp: int, cp: int) -> list[tuple[int, int]]:
    """Return ZeRO stages with their shard groups: all of dp * cp, or a part of it (HSDP)."""
    pins = space.pins
    out: list[tuple[int, int]] = []
    for zero in _pinned(pins, "zero", [0, 1, 2, 3] if dp * cp > 1 else [0]):
        if zero == 0:
            out += [(0, s) for s in _pinned(pins, "shard", [1])]
            continue
        # a smaller shard group pays where it stays inside nodes, or is the whole
        sizes = [d * cp for d in divisors(dp) if d * cp > 1]
        wanted = [s for s in sizes if s == dp * cp or s <= 4 * space.gpus_per_node]
        out += [(zero, s) for s in _pinned(pins, "shard", wanted or [dp * cp])]
    return out
