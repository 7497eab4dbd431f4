"""The placement account: every logical parameter is placed exactly once, before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.base.errors import MeshwrightError, problem
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import expert_degrees
from meshwright.mesh.device_mesh import MeshView
from meshwright.model.quantised import row_bytes
from meshwright.model.sharding import rule, tp_copies, tp_shape
from meshwright.model.spec import ModelSpec, TensorSpec


@dataclass(frozen=True)
class Placed:
    """What one rank holds of one logical parameter.

    ``numel`` is local, without padding; ``replicas`` is how many ranks hold the same elements.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    stage: int
    tp: int = 0
    """Coordinate on the tensor axis."""


def placed(params: Mapping[str, Tensor], stage_of: Mapping[str, int], tp: int = 0) -> list[Placed]:
    """Return the account of one rank's parameters, by logical name; ``stage_of`` says the stage of each."""
    return [
        Placed(
            name,
            tuple(p.shape),
            p.to_local().numel() if isinstance(p, DTensor) else p.numel(),
            stage_of[name],
            tp,
        )
        for name, p in params.items()
    ]


def check_placement(
    spec: ModelSpec, view: MeshView, params: Mapping[str, Tensor], stage_of: Mapping[str, int]
) -> dict[str, Any]:
    """Return the account over all ranks, the same on each; every rank calls it before the first step.

    Communication: one all_gather of names and sizes on ``world``.

    Raises:
        MeshwrightError: E540 when a parameter is not placed exactly once.
    """
    mine = placed(params, stage_of, view.coords["tp"])
    ranks: list[Any] = [mine]
    if view.layout.world_size > 1:
        ranks = [None] * view.layout.world_size
        dist.all_gather_object(ranks, mine)
    result = account(spec, view.layout, ranks)
    refuse_incomplete(result)
    return result


def account(spec: ModelSpec, layout: Layout, ranks: Sequence[Sequence[Placed]]) -> dict[str, Any]:
    """Return {complete, tensors, missing, wrong}: shards x replicas = logical, for every tensor of ``spec``.

    A tied tensor that two stages hold counts as two uses of one logical tensor.
    """
    replicas = layout.dp_replicate * (layout.dp_shard * layout.cp if layout.zero == 0 else 1)
    held: dict[str, list[Placed]] = {}
    for rank in ranks:
        for item in rank:
            held.setdefault(item.name, []).append(item)
    missing: list[str] = []
    wrong: list[dict[str, Any]] = []
    for tensor in spec.tensors():
        items = held.pop(tensor.name, [])
        if tensor.tied_to is not None:
            if not items:
                continue  # one storage on one stage
        elif not items:
            missing.append(tensor.name)
            continue
        total = sum(i.numel for i in items)
        experts = layout.ep > 1 and rule(tensor).ep_dim is not None
        copies = expert_degrees(layout)[0] if experts else replicas
        rows = tensor.quantised and layout.zero == 3 and layout.shard > 1
        if tensor.quantised and not rows:  # whole on every rank of a data-parallel group
            copies = layout.dp * layout.cp
        expected = prod(tensor.shape) * copies * tp_copies(tensor, layout.tp, spec.attention)
        if rows:  # bytes, which are cut anywhere
            expected = sum(_row(tensor, spec, layout, tp)[0] for tp in range(layout.tp)) * copies
        stages = {i.stage for i in items}
        local = _row if rows else _local_shape
        shaped = all(i.shape == local(tensor, spec, layout, i.tp) for i in items)
        if total != expected or len(stages) != 1 or not shaped:
            wrong.append(
                {
                    "name": tensor.name,
                    "elements": total,
                    "expected": expected,
                    "stages": sorted(stages),
                    "shape": list(items[0].shape),
                }
            )
    unknown = sorted(held)
    return {
        "complete": not (missing or wrong or unknown),
        "tensors": sum(1 for t in spec.tensors() if t.tied_to is None),
        "missing": missing,
        "wrong": wrong,
        "unknown": unknown,
    }


def _local_shape(tensor: TensorSpec, spec: ModelSpec, layout: Layout, tp: int) -> tuple[int, ...]:
    shape = tp_shape(tensor, layout.tp, tp, spec.attention)
    return (shape[0] // layout.ep, *shape[1:]) if rule(tensor).ep_dim is not None else shape


def _row(tensor: TensorSpec, spec: ModelSpec, layout: Layout, tp: int) -> tuple[int, ...]:
    """Return the shape of the row of bytes that stands for a matrix in 4 bits."""
    assert spec.adapter is not None
    here = prod(tp_shape(tensor, layout.tp, tp, spec.attention))
    return (row_bytes(here, tensor.numel, spec.adapter.double),)


def refuse_incomplete(result: Mapping[str, Any]) -> None:
    """Raise E540 when an account is not complete."""
    if result["complete"]:
        return
    names = [*result["missing"], *(w["name"] for w in result["wrong"]), *result["unknown"]]
    raise MeshwrightError(
        problem(
            "E540",
            where="placement",
            found=f"{len(names)} of {result['tensors']} tensors are not placed exactly once: "
            + ", ".join(names[:5])
            + (" ..." if len(names) > 5 else ""),
        )
    )
