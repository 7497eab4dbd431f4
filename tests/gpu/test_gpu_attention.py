"""The kernels of the context axis on a GPU: flash attention's parts against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.parallel import tiles
from meshwright.parallel.attend import Parts, attend, attend_backward, fused, plain, plain_backward
from meshwright.parallel.dropout import Drops
from meshwright.parallel.ring import ring_attention, ring_of
from meshwright.parallel.tiles import Rule, Tile


def _near(got: Tensor, want: Tensor, bound: float) -> None:
    error = (got.double().cpu() - want).norm() / want.norm()
    assert error < bound, f"relative error {error:.2e}"


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize(("heads", "kv", "size"), [(8, 8, 64), (32, 8, 128), (6, 2, 40)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)]
)
def test_attention_and_its_gradients(
    heads: int, kv: int, size: int, causal: bool, dtype: torch.dtype, bound: float
) -> None:
    q, k, v = _drawn(2, heads, 128, size), _drawn(2, kv, 128, size), _drawn(2, kv, 128, size + 0)
    grad = _drawn(2, heads, 128, size + 0)
    q, k, v, grad = (t.to(dtype).double() for t in (q, k, v, grad))  # the same values on both sides
    scale = size**-0.5
    want, want_lse = plain(q, k, v, scale, causal, None)
    want_grads = plain_backward(grad, q, k, v, want, want_lse, scale, causal, None)
    there = [t.to("cuda", dtype) for t in (q, k, v, grad)]
    assert fused(there[0], there[2]) == ("cuda" if dtype == torch.bfloat16 else None)
    out, lse = attend(*there[:3], scale, causal, None)
    _near(out, want, bound)
    _near(lse, want_lse, bound)
    got = attend_backward(there[3], *there[:3], out, lse, scale, causal, None)
    for mine, theirs in zip(got, want_grads, strict=True):
        assert mine.shape == theirs.shape
        _near(mine, theirs, bound)


def test_parts_of_a_ring_add_up() -> None:
    """Queries of the second half see all keys of the first half and their own causally: two kernels, one result."""
    q, k, v = (_drawn(1, h, 256, 64).bfloat16() for h in (8, 4, 4))
    want, _ = plain(*(t.double() for t in (q, k, v)), 0.125, True, None)
    late = q[:, :, 128:].cuda()
    parts = Parts(late, 64)
    for start, causal in ((0, False), (128, True)):
        keys, values = (t[:, :, start : start + 128].cuda() for t in (k, v))
        out, lse = attend(late, keys, values, 0.125, causal, None)
        parts.add(Tile(0, 128, 0, 128, "causal" if causal else "full"), out, lse)
    _near(parts.out_BHQE, want[:, :, 128:], 5e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dropped", [False, True])
def test_documents_and_dropout_are_those_of_the_cpu(
    dropped: bool, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces inside one document take the flash kernel in bf16; a dropout mask has the same bits on both devices."""
    monkeypatch.setattr(tiles, "LEAST_PIECE", 64)
    length = 512
    q, k, v, grad = (_drawn(2, h, length, 64).to(dtype).double() for h in (8, 2, 2, 8))
    documents = torch.stack([torch.arange(length) // 128, torch.arange(length) // 100])
    keys = torch.tensor([7, -5])

    def both(device: str, used: torch.dtype) -> list[Tensor]:
        parts = [t.to(device, used).requires_grad_() for t in (q, k, v)]
        drops = Drops(keys.to(device), 0.3, 2, length) if dropped else None
        out = ring_attention(
            *parts, ring_of(None, [((0, length),)], Rule(), 0.125, documents.to(device), drops)
        )
        return [out, *torch.autograd.grad(out, parts, grad.to(device, used))]

    for mine, theirs in zip(both("cuda", dtype), both("cpu", torch.float64), strict=True):
        _near(mine.detach(), theirs.detach(), bound)
