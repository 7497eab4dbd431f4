"""What a probe measures of compute: products, attention, memory, launches and the optimizer, on all ranks at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.base.units import MIB
from meshwright.cost.pieces import block_operations
from meshwright.model.read_hf import spec_from_config
from meshwright.probe.block import TINY, Timing, launches, scaled
from meshwright.probe.groups import in_groups
from meshwright.probe.meeting import meetings
from meshwright.probe.place import references, small_costs
from meshwright.probe.ranks import Prober

SETS_BYTES = 32 * MIB
MOST_SETS = 256
"""Operands are taken in turn from sets of this size in all, and of at most this number."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def operands(
    num_bytes: int, make: Callable[[], tuple[torch.Tensor, ...]]
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return what gives one set of operands after another, as a step does: the last one's are not in the caches."""
    sets = [make() for _ in range(max(1, min(MOST_SETS, SETS_BYTES // num_bytes)))]
    return itertools.cycle(sets).__next__


def matmul(probe: Prober) -> list[Timing]:
    """Return seconds of ``Request.products`` in each precision: of a linear layer forward, and of its gradients."""
    times: list[Timing] = []
    for dtype in _DTYPES.values():
        for m, k, n in probe.request.matmul_shapes:

            def make(
                m: int = m, k: int = k, n: int = n, dtype: torch.dtype = dtype
            ) -> tuple[torch.Tensor, ...]:
                return tuple(probe.empty(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))

            size = (m * k + n * k + m * n) * (4 if dtype == torch.float32 else 2)
            turn = operands(size, make)

            def ahead(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                x, w, _ = turn()
                return F.linear(x, w)

            def to_input(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                _, w, grad = turn()
                return grad @ w

            def to_weight(turn: Callable[[], tuple[torch.Tensor, ...]] = turn) -> torch.Tensor:
                x, _, grad = turn()
                return grad.T @ x

            times += [probe.rate(ahead), probe.rate(to_input), probe.rate(to_weight)]
    return times


def attention(probe: Prober) -> list[tuple[Timing, Timing]]:
    """Return forward and backward seconds of causal attention for each shape in each precision."""
    times: list[tuple[Timing, Timing]] = []
    for dtype in _DTYPES.values():
        for batch, heads, seq, head_dim in probe.request.attention_shapes:

            def make(
                shape: Any = (batch, seq, heads, head_dim), dtype: Any = dtype
            ) -> tuple[torch.Tensor, ...]:
                # as a model has them: heads taken out of the hidden dimension
                q, k, v = (
                    probe.empty(*shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
                )
                return q, k, v, probe.empty(*shape, dtype=dtype).transpose(1, 2)

            size = 4 * batch * heads * seq * head_dim * (4 if dtype == torch.float32 else 2)
            turn = operands(size, make)

            def ahead(turn: Any = turn) -> tuple[torch.Tensor, ...]:
                q, k, v, grad = turn()
                return F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, grad

            def behind(made: tuple[torch.Tensor, ...]) -> Any:
                out, q, k, v, grad = made
                return torch.autograd.grad(out, (q, k, v), grad)

            times.append(probe.paired_rate(ahead, behind))
    return times


def memory(probe: Prober) -> tuple[Timing, Timing]:
    """Return seconds per byte (read + written) of a copy, and of an elementwise operation that allocates."""
    count = probe.request.copied_bytes // 4
    source, target = probe.empty(count), probe.empty(count)
    copy_s = probe.rate(lambda: target.copy_(source))
    elementwise_s = probe.rate(lambda: source * 2.0)
    return scaled(copy_s, 1 / (8 * count)), scaled(elementwise_s, 1 / (8 * count))


def overhead(probe: Prober) -> tuple[Timing, Timing]:
    """Return seconds of one small operation of a decoder block's forward, and of one node of its backward."""
    return launches(probe.paired_rate, probe.device)


def in_place(probe: Prober, op_s: Timing) -> dict[str, Any]:
    """Return what blocks, recompute, regions, sharded units and meetings take in their place (see ``probe.place``)."""
    budget_s = probe.request.place_budget_s
    spec = spec_from_config(TINY, "tiny", "")
    operations = block_operations(spec, spec.blocks[0])[0]
    whole = references(probe, budget_s)
    small = small_costs(probe, op_s, operations, budget_s)
    units, tensors = in_groups(probe, budget_s)
    met = meetings(probe, probe.request.stretches_s, probe.request.meeting_budget_s)
    return {"references": whole, **small, "sharding": units, "tensor": tensors, "meetings": met}


def optimizer(probe: Prober) -> tuple[Timing, Timing]:
    """Return fused AdamW's seconds per byte of master, both moments and gradient, and its seconds per tensor."""

    def step_s(num_tensors: int, numel: int) -> Timing:
        tensors = [torch.nn.Parameter(probe.empty(numel)) for _ in range(num_tensors)]
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        return probe.rate(torch.optim.AdamW(tensors, lr=1e-6, fused=True).step)

    small_s = scaled(step_s(64, 64), 1 / 64)
    numel = probe.request.updated_elements
    large_s = step_s(2, numel)
    rest = [max(a - 2 * b, 1e-9) / (2 * numel * 16) for a, b in zip(large_s, small_s, strict=True)]
    return (rest[0], rest[1]), small_s
