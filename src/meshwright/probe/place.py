"""What parts of a step take in their place: whole blocks, heads, recompute, and regions of the tensor axis.

Pieces that are timed alone miss what stands between them: Python around operations, operands that other pieces have
pushed out of the caches, hooks, and accumulation into gradients. Here small models run forward and backward as the
engine runs them, in turn with the same model without the one thing that is measured; the difference is its price.
Seconds are means over the turns that other programs left alone, since a step pays the average call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from meshwright.cost.in_place import REFERENCES, Reference
from meshwright.parallel.build import build_model
from meshwright.parallel.recompute import recompute_blocks
from meshwright.parallel.stage import token_loss_sum
from meshwright.probe.block import MANY, TINY, TOKENS, Timing, scaled
from meshwright.probe.calm import Ranks, Span, calm_mean, calm_ones, cores_of_others

FEW_BLOCKS, MORE_BLOCKS = 1, 3
"""Blocks of the two models whose difference is one block in its place."""
REGIONS: Final = 24
FEWEST, MOST = 4, 24
"""Turns of a measurement."""


Pass: TypeAlias = Sequence[Callable[[Any], Any]]
"""Stages of one pass, each called with what the one before it made (the first with None)."""


def in_turn(probe: Ranks, passes: Sequence[Pass], budget_s: float) -> list[list[Timing]]:
    """Return the seconds of each stage of each pass, the passes run one after the other in turn, for ``budget_s``.

    Communication: that of the passes, a barrier before each turn, one all_reduce of the seconds of the first turn, and
    one of what others used.
    """
    for one in passes:
        _marked(probe, one)
    probe.barrier()
    begin = time.perf_counter()
    for one in passes:
        _marked(probe, one)
    turn_s = max(probe.agree(time.perf_counter() - begin), 1e-4)
    turns = max(FEWEST, min(MOST, int(budget_s / turn_s)))
    marks: list[list[list[Timing]]] = [[] for _ in passes]
    spans: list[tuple[float | None, float, float]] = []
    for _ in range(turns):
        probe.barrier()
        span = Span()
        for into, one in zip(marks, passes, strict=True):
            into.append(_marked(probe, one))
        spans.append(span.end())
    calm = calm_ones(cores_of_others(probe, *zip(*spans, strict=True)))
    return [[typical(stage, calm) for stage in zip(*into, strict=True)] for into in marks]


def _marked(probe: Ranks, one: Pass) -> list[Timing]:
    """Run a pass once; return the seconds of its stages."""
    found: list[Timing] = []
    made: Any = None
    wall, used = time.perf_counter(), time.process_time()
    for stage in one:
        made = stage(made)
        probe.sync()
        after, spent = time.perf_counter(), time.process_time()
        found.append((after - wall, spent - used))
        wall, used = after, spent
    return found


def typical(values: Sequence[Timing], calm: Sequence[int] | None) -> Timing:
    """Return means over the ``calm`` turns, that of processor seconds without its extreme eighths.

    On cores that others keep awake a collective takes fewer processor seconds too: threads are woken sooner.
    """
    used = sorted(t[1] for t in (values if calm is None else [values[i] for i in calm]))
    cut = len(used) // 8
    return calm_mean([t[0] for t in values], calm), fmean(used[cut : len(used) - cut])


def less(more: Timing, fewer: Timing, count: float) -> Timing:
    """Return the difference of two timings over ``count``, never below a nanosecond."""
    return max(more[0] - fewer[0], 1e-9) / count, max(more[1] - fewer[1], 1e-9) / count


def whole(stages: Sequence[Timing]) -> Timing:
    """Return the seconds of all stages."""
    return sum(s[0] for s in stages), sum(s[1] for s in stages)


def accumulating(base: Any, ids: Tensor) -> Pass:
    """Return a model's forward, and its backward into gradients that stay, as of a later micro-batch."""
    return (lambda _: base(input_ids=ids, use_cache=False)[0].sum(), lambda loss: loss.backward())


def references(probe: Ranks, budget_s: float) -> list[dict[str, Timing]]:
    """Return, for each of ``REFERENCES``, seconds forward and backward of a block, the head, and the rest of a pass."""
    found: list[dict[str, Timing]] = []
    for one in REFERENCES:
        few, many = in_turn(probe, [_model(one, n) for n in (FEW_BLOCKS, MORE_BLOCKS)], budget_s)
        count = MORE_BLOCKS - FEW_BLOCKS
        ahead, behind = less(many[0], few[0], count), less(many[3], few[3], count)
        found.append(
            {
                "forward": ahead,
                "backward": behind,
                "head_forward": scaled(whole((few[1], many[1])), 0.5),
                "head_backward": scaled(whole((few[2], many[2])), 0.5),
                "rest_forward": less(few[0], scaled(ahead, FEW_BLOCKS), 1.0),
                "rest_backward": less(few[3], scaled(behind, FEW_BLOCKS), 1.0),
            }
        )
    return found


def _model(one: Reference, blocks: int) -> Pass:
    """Return a pass in four stages: the model up to its head, head and loss, and both backward."""
    made: Any = build_model(one.config(blocks), seed=0)
    ids = torch.arange(one.batch * one.seq).view(one.batch, one.seq) % one.vocab

    def ahead(_: Any) -> Any:
        hidden: Tensor = made.model(input_ids=ids, use_cache=False)[0]
        return hidden, hidden.detach().requires_grad_()

    def loss(made_: tuple[Tensor, Tensor]) -> Any:
        return *made_, token_loss_sum(made.lm_head(made_[1]), ids)

    def head_behind(made_: tuple[Tensor, Tensor, Tensor]) -> Any:
        made_[2].backward()
        return made_[:2]

    return ahead, loss, head_behind, lambda made_: made_[0].backward(made_[1].grad)


def small_costs(probe: Ranks, op_s: Timing, operations: float, budget_s: float) -> dict[str, Timing]:
    """Return seconds of a gradient's accumulation, of a block's checkpoint beside its second forward, and of a region.

    ``op_s`` are those of a small operation, of which a block's forward has ``operations``.
    """
    ids = torch.zeros((1, TOKENS), dtype=torch.int64)
    bases: list[Any] = [build_model(TINY | {"num_hidden_layers": MANY}, seed=0) for _ in range(2)]
    recompute_blocks(list(bases[1].model.layers), "full")
    params = [p for p in bases[0].model.parameters() if p.requires_grad]
    plain = accumulating(bases[0].model, ids)
    gone: Pass = (plain[0], lambda loss: torch.autograd.grad(loss, params))
    hooked, bare = (_regions(with_regions=on) for on in (True, False))
    grads, kept, again, regions, modules = in_turn(
        probe, [gone, plain, accumulating(bases[1].model, ids), hooked, bare], budget_s
    )
    forward = scaled(op_s, operations)
    return {
        "accumulate_s": less(kept[1], grads[1], len(params)),
        "checkpoint_s": less(less(whole(again), whole(kept), MANY), forward, 1.0),
        "region_s": less(whole(regions), whole(modules), REGIONS),
    }


class _Region(torch.autograd.Function):
    """What stands around a collective of the tensor axis, without it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ahead: Callable[..., Tensor]) -> Tensor:
        ctx.group = group
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].contiguous(), None, None


def _regions(*, with_regions: bool) -> Pass:
    chain = [nn.Identity() for _ in range(REGIONS)]
    x = torch.zeros(1, TOKENS, TOKENS, requires_grad=True)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out: Any = _Region.apply(args[0], None, lambda t: t.view_as(t))
        return (out,), kwargs

    if with_regions:
        for module in chain:
            module.register_forward_pre_hook(hook, with_kwargs=True)

    def forward(_: Any) -> Tensor:
        y = x
        for module in chain:
            y = module(y)
        return y.sum()

    return forward, lambda loss: loss.backward()
