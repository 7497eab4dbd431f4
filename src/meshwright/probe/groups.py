"""What groups of ranks take in a step: sharded units, and collectives of the tensor axis between pieces of compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.base.units import KIB
from meshwright.parallel.build import build_model
from meshwright.parallel.zero import Zero, shard
from meshwright.probe.block import TINY, TOKENS, Timing, scaled
from meshwright.probe.calm import Ranks
from meshwright.probe.place import Pass, in_turn, less, whole

UNIT_WIDTHS: Final = (16, 160)
"""Hidden sizes of the blocks that are sharded: a few KiB, where only calls count, and more than a MiB."""
UNIT_BLOCKS: Final = 3
PAYLOADS: Final = (32 * KIB, 512 * KIB)
"""Bytes of a collective of the tensor axis: a CPU's messages, and beyond them."""
CHAIN: Final = 6
BETWEEN, BETWEEN_CALLS = 128, 4
"""The compute before each: so many products of so many rows and columns (about a quarter of a millisecond)."""


@dataclass(frozen=True)
class Point:
    """Seconds by part at one size: of a sharded unit's hooks, gather and scatter, or of the tensor axis' collectives.

    ``apart`` are those of the work between two of these collectives.
    """

    num_bytes: int
    seconds: Mapping[str, Timing]
    apart: Timing


Grouped: TypeAlias = tuple[list[int], list[Point]]
"""The ranks of a group and what was measured in it, by size."""


def in_groups(probe: Ranks, budget_s: float) -> tuple[list[Grouped], list[Grouped]]:
    """Return, of the groups that this rank belongs to, what sharded units and collectives of the tensor axis take.

    Units are of ``UNIT_WIDTHS``, the collectives' payloads of ``PAYLOADS`` bytes. A rank without a group keeps step.

    Communication: gathers, scatters and sums in each group, and what ``in_turn`` says.
    """
    world, rank = probe.facts.world_size, probe.facts.rank
    units: list[Grouped] = []
    tensors: list[Grouped] = []
    for size in sorted({2, world}) if world > 1 else ():
        groups = [list(range(i, i + size)) for i in range(0, world - size + 1, size)]
        handles = [dist.new_group(g) for g in groups]
        mine = next((i for i, g in enumerate(groups) if rank in g), None)
        if mine is None:
            for _ in (*UNIT_WIDTHS, *PAYLOADS):
                in_turn(probe, (), budget_s)
            continue
        group: Any = handles[mine]
        mesh = DeviceMesh.from_group(group, probe.device.type, mesh=groups[mine])
        units.append((groups[mine], _units(probe, mesh, budget_s)))
        tensors.append((groups[mine], [_collectives(probe, group, n, budget_s) for n in PAYLOADS]))
    return units, tensors


Move: TypeAlias = Callable[[Tensor], Tensor]
"""What a region does with a flat tensor, forward or backward."""


class _Moving(torch.autograd.Function):
    """A region of the tensor axis: some compute, then ``ahead``; backward some compute, then ``behind``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None], ahead: Move, behind: Move) -> Tensor:
        ctx.work, ctx.behind = work, behind
        work()
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.work()
        return ctx.behind(grads[0].contiguous()), None, None, None


def _collectives(probe: Ranks, group: Any, num_bytes: int, budget_s: float) -> Point:
    """Return seconds of a gather with its scatter, and of a sum, of ``num_bytes`` between pieces of compute.

    Each is a chain of regions, in turn with the same chain whose regions copy on this rank only.
    """
    n = dist.get_world_size(group)
    part = num_bytes // 4 // n
    square = torch.zeros(BETWEEN, BETWEEN)

    def work() -> None:
        for _ in range(BETWEEN_CALLS):
            torch.mm(square, square)

    def gather(x: Tensor) -> Tensor:
        out = x.new_empty(part * n)
        dist.all_gather_into_tensor(out, x, group=group)
        return out

    def scatter(x: Tensor) -> Tensor:
        out = x.new_empty(part)
        dist.reduce_scatter_tensor(out, x, group=group)
        return out

    def total(x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    def spread(x: Tensor) -> Tensor:
        return x.repeat(n)

    def cut(x: Tensor) -> Tensor:
        return x[:part].clone()

    def chain(numel: int, *moves: tuple[Move, Move]) -> Pass:
        x = torch.zeros(numel, requires_grad=True)

        def forward(_: Any) -> Tensor:
            y = x
            for _ in range(CHAIN):
                for ahead, behind in moves:
                    y = _Moving.apply(y, work, ahead, behind)
            return y.sum()

        return forward, lambda loss: loss.backward()

    passes = (
        chain(part, (gather, scatter), (scatter, gather)),
        chain(part, (spread, cut), (cut, spread)),
        chain(part * n, (total, total)),
        chain(part * n, (torch.clone, torch.clone)),
    )
    pairs, copies, sums, clones = (whole(x) for x in in_turn(probe, passes, budget_s))
    calls = 2.0 * CHAIN  # forward and backward
    seconds = {"pair": less(pairs, copies, calls), "reduce": less(sums, clones, calls)}
    # a pair's chain has two pieces of work for each
    return Point(part * n * 4, seconds, scaled(whole((copies, clones)), 1.0 / (3.0 * calls)))


def _units(probe: Ranks, mesh: DeviceMesh, budget_s: float) -> list[Point]:
    points: list[Point] = []
    for width in UNIT_WIDTHS:
        plain, kept, freed = (_unit_model(width) for _ in range(3))
        num_bytes = sum(p.numel() * p.element_size() for p in plain.layers[0].parameters())
        engines = [
            shard(base, list(base.layers), mesh, stage, param_dtype=None, reduce_dtype=None)
            for base, stage in ((kept, 2), (freed, 3))
        ]
        passes = [
            _unit_pass(plain, None, 0),
            _unit_pass(kept, engines[0], 1),
            _unit_pass(kept, engines[0], 2),
            _unit_pass(freed, engines[1], 3),
        ]
        none, one, two, three = (whole(x) for x in in_turn(probe, passes, budget_s))
        totals = [less(one, none, 1.0), less(two, one, 1.0), less(three, two, 2.0)]
        # the root is a unit of its own, and small: at the first width it counts as one more, later it costs as much
        if points:
            small = [points[0].seconds[part] for part in ("unit", "scatter", "gather")]
            unit, scatter, gather = (less(t, s, UNIT_BLOCKS) for t, s in zip(totals, small, strict=True))
        else:
            unit, scatter, gather = (scaled(t, 1.0 / (UNIT_BLOCKS + 1)) for t in totals)
        seconds = {"unit": unit, "gather": gather, "scatter": scatter}
        # forward and backward of every block, and of the root
        points.append(Point(num_bytes, seconds, scaled(none, 0.5 / (UNIT_BLOCKS + 1))))
    return points


def _unit_model(width: int) -> Any:
    config = TINY | {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "head_dim": width // 4,
        "num_hidden_layers": UNIT_BLOCKS,
    }
    made: Any = build_model(config, seed=0)
    return made.model


def _unit_pass(base: Any, engine: Zero | None, stage: int) -> Pass:
    """Return a pass of a micro-batch that is not the last of its step, under a stage's policy."""
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)

    def forward(_: Any) -> Tensor:
        return base(input_ids=ids, use_cache=False)[0].sum()

    def backward(loss: Tensor) -> None:
        if engine is not None:
            engine.stage = stage
            engine.before_backward(last=False)
        loss.backward()

    return forward, backward
