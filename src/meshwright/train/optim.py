"""The optimizer over this rank's parameters, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A learning-rate schedule: linear warm-up, then constant, linear or cosine down to ``min_ratio``.

    ``rate(step)`` is the rate used by update ``step`` (counted from 1); it depends on nothing else, so a
    resumed run has it right at once and it does not run faster with more ranks.
    """

    name: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.0

    def rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, the first being 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.name == "constant":
            return self.peak
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        shape = 1.0 - done if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)


def build_optimizer(
    params: Mapping[str, nn.Parameter], decays: Iterable[str], settings: Any
) -> torch.optim.Optimizer:
    """Return AdamW (fused where it exists) or SGD over the trainable ``params``.

    Weight decay applies to the names in ``decays`` only (matrices by their logical shape), however a shard or a
    wrapper changed them. ``settings`` has name, lr, weight_decay, betas, eps and momentum.
    """
    decaying = set(decays)
    groups = [
        {"params": [p for n, p in params.items() if n in decaying], "weight_decay": settings.weight_decay},
        {"params": [p for n, p in params.items() if n not in decaying], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    try:
        return torch.optim.AdamW(
            groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps, fused=True
        )
    except RuntimeError:  # this device or dtype has no fused kernel: the same update, more launches
        return torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
