"""One optimizer step, the same for every layout.

1. count the valid tokens of the whole job;
2. forward and backward of all micro-batches, the loss being the sum of token losses / valid tokens;
3. finish the gradients (data parallel, tied pair);
4. one all_reduce of three sums over owned elements: squares, loss, overflows;
5. clip by the norm over logical parameters, each counted once, and update - or skip, on all ranks alike.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.axes import WORLD
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.loss import IGNORE
from meshwright.train.data import rank_rows
from meshwright.train.optim import Rate, set_rate
from meshwright.train.scale import LossScale


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did; the same on every rank.

    ``grad_norm`` is before clipping, over logical parameters. ``skipped`` is "" or why nothing was updated.
    ``phases_s`` are this rank's seconds. ``asked`` ranks wanted to be heard: above 0, nothing was computed and the
    step is still to be done.
    """

    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    skipped: str
    loss_scale: float
    phases_s: dict[str, float] = field(default_factory=dict[str, float])
    asked: int = 0


ASK = 1 << 40
"""What a rank that wants to be heard adds to its count of valid tokens; no step has as many tokens."""


def sum_over_world(values: Tensor, model: ParallelModel) -> Tensor:
    """Sum ``values`` over all ranks in place. Communication: one all_reduce on ``world`` (none for one rank)."""
    group = model.view.groups.get(WORLD)
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    inputs_ABT: Tensor,
    labels_ABT: Tensor,
    *,
    step: int,
    rate: Rate,
    max_norm: float | None,
    scale: LossScale,
    positions_ABT: Tensor | None = None,
    on_gradients: Callable[[ParallelModel], None] | None = None,
    ask: bool = False,
) -> StepResult:
    """Run update ``step`` (counted from 1) on this rank's micro-batches; see the module for its five parts.

    Args:
        model: this rank's part of the model.
        optimizer: over ``model.trainable()``.
        inputs_ABT: token ids, [accumulation, micro_batch, T].
        labels_ABT: shifted labels, [accumulation, micro_batch, T].
        step: number of the update.
        rate: learning-rate schedule.
        max_norm: clip the gradient norm to this; None clips nothing.
        scale: loss scale, updated in place.
        positions_ABT: positions that begin again with each packed document, [accumulation, micro_batch, T]; None
            where a row is one document.
        on_gradients: called with the finished gradients before they are clipped (still times the loss scale).
        ask: this rank was asked to stop or to save; all ranks learn of it with the count, and none computes.
    """
    marks = [time.perf_counter()]
    lr = rate.rate(step)
    set_rate(optimizer, lr)
    model.zero_grad()

    # A batch is counted once: by one rank of the first pipeline rank of each replica of the data.
    mine = (labels_ABT != IGNORE).sum() if model.view.counts_batch else torch.zeros((), dtype=torch.int64)
    asked, valid = divmod(int(sum_over_world((mine + ask * ASK).to(model.view.device), model)), ASK)
    marks.append(time.perf_counter())
    if asked:
        return StepResult(
            loss=math.nan,
            grad_norm=math.nan,
            lr=lr,
            valid_tokens=valid,
            skipped="",
            loss_scale=scale.value,
            asked=asked,
        )
    if valid == 0:
        return StepResult(
            loss=math.nan,
            grad_norm=math.nan,
            lr=lr,
            valid_tokens=0,
            skipped="no valid token",
            loss_scale=scale.value,
        )

    if model.dropout is not None:  # masks follow from the rows of the batch
        model.begin_step(step, _rows(model))
    loss_sum = model.forward_backward(inputs_ABT, labels_ABT, scale.value / valid, positions_ABT)
    marks.append(time.perf_counter())
    model.finish_gradients()
    marks.append(time.perf_counter())
    if on_gradients is not None:
        on_gradients(model)

    square_sum, held_square_sum = model.square_sums()
    # Judged by what every rank holds, not by what it owns: a bad replica must stop all of them too.
    overflow = (~torch.isfinite(held_square_sum)).to(torch.float64)
    square_sum = torch.nan_to_num(square_sum, nan=0.0, posinf=0.0)
    sums = sum_over_world(torch.stack([square_sum, loss_sum, overflow]), model)
    square_sum, loss_sum, overflow = sums.tolist()
    norm = math.sqrt(square_sum) / scale.value if not overflow else math.inf
    loss = loss_sum / valid
    used_scale = scale.value
    bad = bool(overflow) or not math.isfinite(loss)
    scale.update(bad)
    if not bad:
        factor = 1.0 / used_scale
        if max_norm is not None and norm > max_norm:
            factor *= max_norm / norm
        if factor != 1.0:
            model.scale_gradients(factor)
        optimizer.step()
    marks.append(time.perf_counter())
    names = ("count", "forward_backward", "reduce", "optimizer")
    phases: dict[str, float] = dict(zip(names, _differences(marks), strict=True))
    return StepResult(
        loss=loss,
        grad_norm=norm,
        lr=lr,
        valid_tokens=valid,
        skipped="the loss or a gradient is not finite" if bad else "",
        loss_scale=used_scale,
        phases_s=phases,
    )


def _rows(model: ParallelModel) -> Tensor:
    """Return the rows of the global batch that this rank's micro-batches are, [accumulation, B]."""
    b = model.plan.batch
    rows_AB = rank_rows(b.global_batch, b.micro_batch, b.accumulation, b.dp, model.view.dp_rank)
    return torch.from_numpy(rows_AB)


def _differences(marks: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(marks)]
