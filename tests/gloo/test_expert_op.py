"""Dispatch, grouped matmul and combine over ranks against one device: forward and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gloo

NUM_EXPERTS, TOP_K, HIDDEN = 8, 2, 12
ROUTINGS = ("spread", "skewed", "one rank", "one expert", "own experts only")


def _experts(dtype=torch.float64):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=10, num_local_experts=NUM_EXPERTS)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return experts.to(dtype)


def _tokens(rank, world, routing):
    """Tokens, experts chosen and their weights of one rank; ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    n = 7 + 3 * rank
    hidden = torch.randn(n, HIDDEN, dtype=torch.float64, generator=generator)
    weights = torch.rand(n, TOP_K, dtype=torch.float64, generator=generator)
    each = NUM_EXPERTS // world
    low, high = {
        "spread": (0, NUM_EXPERTS),
        "skewed": (0, 3),
        "one rank": (0, each) if each >= TOP_K else (0, TOP_K),
        "one expert": (5, 5 + TOP_K),
        "own experts only": (min(rank * each, NUM_EXPERTS - TOP_K),) * 2,
    }[routing]
    high = max(high, low + TOP_K)
    index = torch.stack([torch.randperm(high - low, generator=generator)[:TOP_K] + low for _ in range(n)])
    return hidden, index, weights


def _on_rank(rank, world, routing):
    import torch.distributed as dist

    from meshwright.parallel.expert import dispatch_combine

    whole = _experts()
    hidden, index, weights = (t.clone() for t in _tokens(rank, world, routing))
    hidden.requires_grad_()
    weights.requires_grad_()
    each = NUM_EXPERTS // world
    mine = _experts()
    for name in ("gate_up_proj", "down_proj"):
        part = getattr(whole, name).detach()[rank * each : (rank + 1) * each].clone()
        setattr(mine, name, torch.nn.Parameter(part))
    out = dispatch_combine(mine, hidden, index, weights, num_experts=NUM_EXPERTS, group=dist.group.WORLD)
    (out.sin().sum() * (1 + rank)).backward()
    grads = [mine.gate_up_proj.grad, mine.down_proj.grad]
    assert all(g is not None for g in grads)
    return [t.detach() for t in (out, hidden.grad, weights.grad, *grads)]


def _one_device(world, routing):
    """The same maths by transformers' own loop over the experts, on all ranks' tokens at once."""
    experts = _experts()
    outs, leaves, loss = [], [], 0.0
    for rank in range(world):
        hidden, index, weights = _tokens(rank, world, routing)
        hidden.requires_grad_()
        weights.requires_grad_()
        out = experts(hidden, index, weights)
        loss = loss + out.sin().sum() * (1 + rank)
        outs.append(out.detach())
        leaves.append((hidden, weights))
    loss.backward()
    return outs, leaves, experts


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_exchange_equals_one_device(pool, world, routing):
    """H86: ranks and experts without a token end the step like any other; their gradients are zeros."""
    outs, leaves, experts = _one_device(world, routing)
    each = NUM_EXPERTS // world
    for rank, (out, d_hidden, d_weights, d_up, d_down) in enumerate(
        pool.run(_on_rank, world, routing, timeout_s=60.0)
    ):
        mine = slice(rank * each, (rank + 1) * each)
        pairs = [
            (out, outs[rank]),
            (d_hidden, leaves[rank][0].grad),
            (d_weights, leaves[rank][1].grad),
            (d_up, experts.gate_up_proj.grad[mine]),
            (d_down, experts.down_proj.grad[mine]),
        ]
        for got, wanted in pairs:
            assert (got - wanted).abs().max().item() <= 1e-13 * wanted.abs().max().clamp(min=1.0).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(16, 24), (12, 20), (33, 37)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 0], [0, 0, 0, 7]])
def test_grouped_linear_with_and_without_torchs_kernel(dtype, sizes, counts):
    """What torch's grouped matmul refuses (float64, rows of odd bytes) is done expert by expert."""
    from meshwright.parallel.expert import can_group, grouped_linear

    generator = torch.Generator().manual_seed(0)
    rows, (f, d) = sum(counts), sizes
    x = torch.randn(rows, d, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(4, f, d, generator=generator).to(dtype).requires_grad_()
    assert can_group(x, w) == (dtype != torch.float64 and all(n * w.element_size() % 16 == 0 for n in sizes))
    grouped_linear(x, w, counts).square().sum().backward()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts))
    torch.einsum("sd,sfd->sf", x64, w64[expert]).square().sum().backward()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for got, wanted in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert got is not None
        assert got.shape == wanted.shape
        scale = wanted.abs().max().item() if wanted.numel() else 0.0
        assert not wanted.numel() or (got.double() - wanted).abs().max().item() <= bound * max(scale, 1.0)


def test_autocast_multiplies_in_its_dtype():
    """Under autocast the experts compute in its dtype like every other matrix, whatever they are stored in."""
    from meshwright.parallel.expert import grouped_linear

    x, w = torch.randn(4, 16), torch.randn(2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(x, w, [1, 3]).dtype == torch.bfloat16
