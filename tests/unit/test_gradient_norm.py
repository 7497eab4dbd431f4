"""The sum of squares of gradients keeps its digits however many there are."""

from __future__ import annotations

import torch

from meshwright.parallel.apply import _square_sum


def test_a_long_float32_buffer_loses_no_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator) for n in (3_000_001, 1024, 5, 70_000)]
    grads.append(torch.randn(64, 48, generator=generator).t())
    want = sum(g.double().square().sum().item() for g in grads)
    got = _square_sum(grads)
    assert got.dtype == torch.float64
    assert abs(got.item() / want - 1) < 1e-7
    assert _square_sum([torch.tensor([torch.inf])]).item() == torch.inf
