"""Parity: how far a layout's losses, gradients, norms and weights are from one device's.

Each rank compares its own shards with the same slices of the reference, so no whole model is gathered. The
relative difference of a tensor is max|g - ref| / max(max|ref|, 1e-6 x the largest |ref| over all tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

FLOOR = 1e-6
"""Share of the largest reference entry below which a tensor's own size no longer counts."""


@dataclass(frozen=True)
class TensorDiff:
    """One tensor on one rank: largest absolute difference, and the sums that show a constant factor."""

    max_abs: float
    dot: float
    ref_square: float
    square: float
    finite: bool

    def merge(self, other: TensorDiff) -> TensorDiff:
        """Join two shards of one tensor."""
        return TensorDiff(
            max(self.max_abs, other.max_abs),
            self.dot + other.dot,
            self.ref_square + other.ref_square,
            self.square + other.square,
            self.finite and other.finite,
        )


def local_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of ``full`` that this rank holds of ``like`` (all of it for a plain tensor)."""
    if not isinstance(like, DTensor):
        return full
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            pieces = torch.chunk(full, like.device_mesh.size(axis), dim=placement.dim)
            at = coordinate[axis]
            full = pieces[at] if at < len(pieces) else full.narrow(placement.dim, 0, 0)
    return full


def diff(value: Tensor, reference: Tensor) -> TensorDiff:
    """Compare two local tensors of one shape in float64."""
    v, r = value.detach().double().cpu(), reference.double()
    if v.numel() == 0:
        return TensorDiff(0.0, 0.0, 0.0, 0.0, True)
    return TensorDiff(
        (v - r).abs().max().item(),
        torch.sum(v * r).item(),
        torch.sum(r * r).item(),
        torch.sum(v * v).item(),
        bool(torch.isfinite(v).all()),
    )


def compare(
    tensors: Mapping[str, Tensor],
    kind: str,
    file: Path,
    rename: Mapping[str, str],
    cut: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[str, TensorDiff]:
    """Return the differences of this rank's ``tensors`` from ``kind``/NAME in a reference ``file``.

    ``rename`` maps a tied copy's name to the name the reference knows; ``cut`` (by name) takes this rank's part on
    the tensor axis.

    Weights whose gradients were rounding alone are not compared, entry by entry (their gradients are): Adam divides a
    gradient by its own size, so that two orders of summation take steps that have nothing in common.
    """
    out: dict[str, TensorDiff] = {}
    with safe_open(str(file), framework="pt") as reference:
        rounding = {n for n in reference.keys() if n.startswith("rounding/")}  # noqa: SIM118 - a file, not a dict

        def part(key: str, name: str, like: Tensor) -> Tensor:
            full = reference.get_tensor(key)
            return local_slice(full if cut is None else cut(name, full), like)

        for name, tensor in tensors.items():
            known = rename.get(name, name)
            value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            expected = part(f"{kind}/{known}", name, tensor)
            if kind == "weight" and f"rounding/{known}" in rounding:
                left_out = part(f"rounding/{known}", name, tensor).to(value.device)
                value = torch.where(left_out, expected.to(value), value.detach())
            out[name] = diff(value, expected)
    return out


def merge_ranks(ranks: Sequence[Mapping[str, TensorDiff]]) -> dict[str, TensorDiff]:
    """Join what the ranks found, by tensor."""
    merged: dict[str, TensorDiff] = {}
    for rank in ranks:
        for name, item in rank.items():
            merged[name] = merged[name].merge(item) if name in merged else item
    return merged


def relative(
    diffs: Mapping[str, TensorDiff], ref_max: Mapping[str, float], rename: Mapping[str, str]
) -> dict[str, float]:
    """Return the relative difference of each tensor (inf where it is not finite)."""
    floor = FLOOR * max(ref_max.values(), default=0.0)
    out: dict[str, float] = {}
    for name, item in diffs.items():
        scale = max(ref_max[rename.get(name, name)], floor)
        if not item.finite:
            out[name] = float("inf")
        elif scale > 0:
            out[name] = item.max_abs / scale
        else:  # every reference entry is zero
            out[name] = 0.0 if item.max_abs == 0 else float("inf")
    return out


def worst_of(steps: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Return {tensor, step, rel_diff} of the largest relative difference, or None when nothing was compared."""
    found = [(value, name, k + 1) for k, step in enumerate(steps) for name, value in step.items()]
    if not found:
        return None
    value, name, step = max(found)
    return {"tensor": name, "step": step, "rel_diff": value}


def compare_references(a: Any, b: Any, steps: int) -> dict[str, float]:
    """Return {loss, gradients, grad_norm, weights}: the largest differences of reference ``a`` from ``b``.

    The loss of ``a`` is looked at in each order in which it summed the tokens: of a single sum the rounding may vanish by
    chance.
    """
    gradients: list[dict[str, float]] = []
    weights: list[dict[str, float]] = []
    for k in range(steps):
        name = f"step-{k}.safetensors"
        with safe_open(str(Path(a.folder) / name), framework="pt") as file:
            got = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - a file, not a dict
        for kind, maxima, out in (
            ("gradient", b.gradient_max[k], gradients),
            ("weight", b.weight_max[k], weights),
        ):
            mine = {n.removeprefix(f"{kind}/"): t for n, t in got.items() if n.startswith(f"{kind}/")}
            out.append(relative(compare(mine, kind, Path(b.folder) / name, {}), maxima, {}))
    return {
        "loss": max(abs(x - b.losses[k]) for k in range(steps) for x in (a.losses[k], *a.reordered[k])),
        "grad_norm": max(abs(x - y) / y for x, y in zip(a.norms, b.norms, strict=True)),
        "gradients": max(v for s in gradients for v in s.values()),
        "weights": max(v for s in weights for v in s.values()),
    }
