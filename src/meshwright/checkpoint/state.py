"""What a rank holds, by logical name: parameters and optimizer state as one flat mapping of tensors.

Keys are ``model/NAME`` and ``optimizer/NAME/ENTRY`` (exp_avg, exp_avg_sq, step, ...). A tied copy has the key of
the tensor that it copies. Nothing in a key depends on rank, stage, shard or wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwright.base.errors import MeshwrightError, problem
from meshwright.checkpoint.manifest import MODEL, OPTIMIZER, listed

Place: TypeAlias = Callable[[str, Tensor], Tensor]
"""From a parameter's name and this rank's part of a tensor to that part at its place in the logical tensor."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's tensors by key, those that are second copies of a key, and numbers that the optimizer keeps.

    ``copies`` are (key, tensor) of a tied copy whose original is on this rank too. ``numbers`` maps a key to the
    optimizer's entry (state mapping, entry name) that is a plain number; ``tensors`` holds it as a 0-d tensor.
    """

    tensors: dict[str, Tensor]
    copies: list[tuple[str, Tensor]]
    numbers: dict[str, tuple[dict[str, Any], str]]


def rank_state(
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    tied: Mapping[str, str],
    *,
    with_copies: bool,
    place: Place | None = None,
) -> RankState:
    """Return this rank's state by key. ``with_copies``: a tied copy whose original is elsewhere is named by it.

    ``place`` puts a tensor of a parameter's shape at its place in the logical tensor (see ``checkpoint.pieces``).

    Raises:
        MeshwrightError: E716 when the optimizer holds a tensor that has no logical name.
    """
    tensors: dict[str, Tensor] = {}
    copies: list[tuple[str, Tensor]] = []
    numbers: dict[str, tuple[dict[str, Any], str]] = {}
    names = {id(p): name for name, p in params.items()}

    def add(key: str, name: str, tensor: Tensor) -> None:
        if name in tied and with_copies and tied[name] in params:
            copies.append((key, tensor.detach()))
        elif name not in tied or with_copies:
            placed = place is not None and tensor.shape == params[name].shape
            tensors[key] = place(name, tensor.detach()) if place and placed else tensor.detach()

    for name, parameter in params.items():
        add(f"{MODEL}{tied.get(name, name)}", name, parameter)
    for parameter in optimized(optimizer):
        name = names.get(id(parameter))
        if name is None:
            raise MeshwrightError(
                problem(
                    "E716",
                    where="optimizer",
                    found=f"a parameter of shape {list(parameter.shape)} is not among the {len(params)} named ones",
                )
            )
        assert optimizer is not None
        entries = optimizer.state.get(parameter, {})
        for entry, value in entries.items():
            key = f"{OPTIMIZER}{tied.get(name, name)}/{entry}"
            if isinstance(value, bool | int | float):
                kind = torch.float64 if isinstance(value, float) else torch.int64
                add(key, name, torch.tensor(value, dtype=kind))
                numbers[key] = (entries, entry)
            elif isinstance(value, Tensor):
                add(key, name, value)
            elif value is not None:
                raise MeshwrightError(
                    problem(
                        "E716",
                        where="optimizer",
                        found=f"its entry {entry} of {name} is a {type(value).__name__}",
                    )
                )
    return RankState(tensors=tensors, copies=copies, numbers=numbers)


def optimized(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the parameters that ``optimizer`` updates."""
    return [p for g in optimizer.param_groups for p in g["params"]] if optimizer is not None else []


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has made its state for every parameter that it updates."""
    return all(optimizer.state.get(p) for p in optimized(optimizer))


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make every entry of the optimizer's state, which torch makes only in the first update.

    Done by one update with zero gradients and rate 0, which leaves the parameters as they are; gradients that
    were there are put back.
    """
    kept = [(p, p.grad) for p in optimized(optimizer)]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for parameter, _ in kept:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in kept:
            parameter.grad = gradient


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a person wants to know of the optimizer: its class and each group's plain settings."""
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {
                k: v
                for k, v in group.items()
                if k != "params" and isinstance(v, bool | int | float | str | list | tuple)
            }
            for group in optimizer.param_groups
        ],
    }


def names_of(keys: list[str]) -> str:
    """Return the first few keys for a message."""
    return listed(sorted(keys))
