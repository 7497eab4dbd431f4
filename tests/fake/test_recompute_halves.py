"""Recompute under a backward in halves, in one process, with torch's own two halves: bits, passes, and what is held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F

from meshwright.parallel.halves import Halves, weight_nodes
from meshwright.parallel.recompute import recompute_blocks

WIDTH, WIDE, ROWS = 16, 64, 24
UNIT = ROWS * WIDTH * 8
"""Bytes of one activation in float64."""


class Block(nn.Module):
    """Norms, attention with dropout of the model's kind, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (False, True, True))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.gate = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, WIDTH, bias=False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = self.first(x)
        heads = [m(h)[None, None] for m in (self.q, self.k, self.v)]
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(*heads, is_causal=True)[0, 0]), 0.3)
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def three() -> list[Block]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(3)]


def both_halves(
    blocks: list[Any], mode: str, between: Callable[[Halves], None] = lambda halves: None
) -> tuple[list[Tensor], Halves]:
    """Return all gradients of one backward in halves, after ``between`` has looked."""
    halves = Halves()
    recompute_blocks(blocks, mode, halves=halves)
    model = nn.Sequential(*blocks)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    out = model(x)
    grad = torch.randn_like(out)
    _, groups = stage_backward_input([out], [grad], [x], iter(model.parameters()))
    held = list(halves.filled)
    halves.settle(groups)
    halves.filled.extend(held)  # for ``between`` to look at
    between(halves)
    halves.settle(None)
    stage_backward_weight(iter(model.parameters()), groups)
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], halves


def held_bytes(halves: Halves, blocks: list[Any]) -> int:
    """Return the bytes of storages in filled places, weights left out."""
    weights = {p.untyped_storage().data_ptr() for b in blocks for p in b.parameters()}
    values = [p.value for f in halves.filled for p in f.places() if p.value is not None]
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
    return sum(size for at, size in storages.items() if at not in weights)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_h117_gradients_are_the_same_bits_and_no_block_runs_three_times(mode: str) -> None:
    """H117: also what dropout drew from torch's generator is drawn again."""
    plain, blocks = three(), three()
    want, _ = both_halves(plain, "none")
    got, _ = both_halves(blocks, mode)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert [b.passes for b in blocks] == [2, 2, 2]
    assert [b.passes for b in plain] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_waits_for_the_weight_half_is_counted_by_hand(mode: str) -> None:
    """Per block: normalized rows of RMSNorm, input and statistics of LayerNorm, and what enters each product once."""
    seen: list[int] = []
    blocks = three()
    both_halves(blocks, mode, lambda halves: seen.append(held_bytes(halves, blocks)))
    statistics = 2 * ROWS * 8
    assert seen == [3 * (5 * UNIT + WIDE // WIDTH * UNIT + statistics)]


def test_a_llama_block_keeps_what_the_page_says() -> None:
    """docs/concepts/recompute.md: 5 D + F per token; here F = 3 D."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 37}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: Any = LlamaForCausalLM(config).model
    halves = Halves()
    recompute_blocks(model.layers, "full", halves=halves)
    x = torch.randn(1, ROWS, 32, requires_grad=True)
    out = model(inputs_embeds=x, use_cache=False).last_hidden_state
    _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], iter(model.parameters()))
    frames = list(halves.filled)
    halves.settle(groups)
    halves.filled.extend(frames)
    assert held_bytes(halves, list(model.layers)) == 2 * (5 * 32 + 96) * ROWS * 4


def test_nothing_is_left_after_the_weight_half() -> None:
    blocks = three()
    _, halves = both_halves(blocks, "full")
    assert halves.filled == []
    kept: list[Any] = []
    gc.disable()
    try:
        both_halves(three(), "full", lambda halves: kept.extend(halves.filled))
        assert [p for f in kept for p in f.places() if p.value is not None] == []
    finally:
        gc.enable()


def test_a_whole_backward_empties_places_as_it_passes() -> None:
    blocks, halves = three(), Halves()
    recompute_blocks(blocks, "full", halves=halves)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    live: list[int] = []
    for block in blocks:
        block.first.weight.register_hook(lambda grad: live.append(held_bytes(halves, blocks)))
    nn.Sequential(*blocks)(x).sum().backward()
    assert [b.passes for b in blocks] == [2, 2, 2]
    # when a block's last gradient is made, hardly anything is left of it and nothing of those behind it
    assert max(live) <= 2 * UNIT + ROWS * 8


class Twice(nn.Module):
    """One weight in two products, one after the other: a group whose intermediates follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.sin(self.inner(torch.cos(x))) * x)


class Written(nn.Module):
    """A product that is written into a view: a node that does not show what it saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        weight = torch.zeros(2, WIDTH, dtype=x.dtype)
        weight[0].copy_(self.scale.exp()).mul_(self.scale)
        out[:, : WIDTH // 2] += (x * weight[0])[:, : WIDTH // 2]
        return out + x.tanh() * weight.sum(0)


@pytest.mark.parametrize("kind", [Twice, Written])
def test_weights_on_unusual_paths(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    first, second = kind().double(), kind().double()
    second.load_state_dict(first.state_dict())
    want, _ = both_halves([first], "none")
    got, _ = both_halves([second], "full")
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def test_a_read_of_what_was_not_kept_is_an_error_and_no_other_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault planted: nothing counts as read by the weight half."""
    monkeypatch.setattr("meshwright.parallel.halves.weight_nodes", lambda groups: [])
    with pytest.raises(RuntimeError, match="was not kept for it"):
        both_halves(three(), "full")


def test_the_walk_stays_off_the_path_to_the_stages_input() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = torch.sin(torch.cos(x) @ w.t())
    _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], iter([w]))  # type: ignore[arg-type]
    assert [type(n).__name__ for n in weight_nodes(groups)] == ["MmBackward0", "TBackward0", "AccumulateGrad"]


def test_a_block_that_saves_another_number_of_tensors_is_an_error() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return torch.sin(torch.cos(x) if self.passes == 1 else x)

    with pytest.raises(RuntimeError) as error:
        both_halves([Changes()], "full")
    assert "saved 2 tensors, and 1" in str(error.value.__cause__)
