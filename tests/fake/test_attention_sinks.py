"""Sinks in attention that is seen in parts: they join once, whatever the parts, in range of the numbers."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch

from meshwright.parallel.attend import Parts, attend, sink_gradient
from meshwright.parallel.dropout import attention
from meshwright.parallel.ring import ring_attention, ring_of
from meshwright.parallel.tiles import Rule, Tile

B, H, K, T, E = 2, 4, 2, 24, 8


Four: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.float64) -> Four:
    made = torch.Generator().manual_seed(0)
    shapes = ((B, H, T, E), (B, K, T, E), (B, K, T, E), (H,))
    q, k, v, sinks = (torch.randn(s, generator=made, dtype=dtype).requires_grad_() for s in shapes)
    return q, k, v, sinks


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention with the sink as one more column of the scores, as the model writes it."""
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    at = torch.arange(T)
    ahead = at[:, None] - at[None, :]
    hidden = (ahead < 0) | (ahead >= (window or T))
    scores = (q @ k.transpose(-1, -2) * E**-0.5).masked_fill(hidden, -torch.inf)
    column = sinks[None, :, None, None].expand(B, H, T, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("runs", [((0, T),), ((0, 7), (7, 9), (16, 8))], ids=["one", "three"])
def test_output_and_gradients_equal_one_more_column(window: int | None, runs: Any) -> None:
    want, got = inputs(), inputs()
    out = plain(*want, window)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    ring = ring_of(None, [runs], Rule(window=window), E**-0.5, sinks_H=got[3])
    here = ring_attention(*got[:3], ring)
    (here * weight).sum().backward()
    torch.testing.assert_close(here, out, rtol=1e-13, atol=1e-13)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


def test_h65_a_large_sink_takes_all_and_overflows_nothing() -> None:
    """H65 for sinks: merged with scores near 0, one of 1000 leaves an output of 0 and finite gradients."""
    q, k, v, _ = inputs(torch.float32)
    sinks = torch.tensor([1000.0, -1000.0, 0.0, 1.0]).requires_grad_()
    ring = ring_of(None, [((0, T),)], Rule(), E**-0.5, sinks_H=sinks)
    out = ring_attention(q, k, v, ring)
    out.square().sum().backward()
    assert not out[:, 0].any()
    free = ring_attention(q, k, v, ring_of(None, [((0, T),)], Rule(), E**-0.5))
    torch.testing.assert_close(out[:, 1], free[:, 1])
    assert sinks.grad is not None
    assert all(g is not None and g.isfinite().all() for g in (q.grad, k.grad, v.grad, sinks.grad))


def test_a_sink_that_joined_each_part_would_count_twice() -> None:
    """The formula is felt: with the sink in both of two parts the output is another one."""
    q, k, v, sinks = (x.detach() for x in inputs())
    once, twice = Parts(q, E), Parts(q, E)
    for parts in (once, twice):
        for start in (0, T // 2):
            tile = Tile(0, T, start, start + T // 2, "full")
            keys = slice(start, start + T // 2)
            parts.add(tile, *attend(q, k[:, :, keys], v[:, :, keys], E**-0.5, False, None))
            if parts is twice or start:
                parts.sink(sinks)
    assert float((once.out_BHQE - twice.out_BHQE).abs().max()) > 1e-2
    grad = sink_gradient(q, once.out_BHQE, once.lse_BHQ, sinks)
    assert grad.shape == (H,)


@pytest.mark.parametrize("masked", [False, True])
def test_the_function_with_dropout_keeps_the_sink(masked: bool) -> None:
    """What stands in for transformers' attention where there is dropout, without any: the same output."""
    q, k, v, sinks = (x.detach() for x in inputs())
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None] if masked else None
    out, _ = attention(torch.nn.Module(), q, k, v, mask, 0.0, s_aux=sinks)
    torch.testing.assert_close(out.transpose(1, 2), plain(q, k, v, sinks, None), rtol=1e-13, atol=1e-13)
