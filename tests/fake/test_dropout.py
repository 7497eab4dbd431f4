"""Dropout masks as functions of what an element is: their statistics, and that a shard's mask is a slice of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.dropout import Dropout, Place, attention, kept, mixed, place_number

ROWS = torch.tensor([3, 8])


def place(step: int = 1, seed: int = 0, name: str = "h.0.drop") -> Place:
    dropout = Dropout(seed, step=step, rows_B=ROWS)
    return Place(dropout, place_number(name))


def test_mixing_is_splitmix64() -> None:
    """The published generator: state 0 and step 0x9E3779B97F4A7C15 give these first outputs."""
    state = torch.tensor([-7046029254386353131, 2 * -7046029254386353131 + 2**64])
    assert [int(x) % 2**64 for x in mixed(state)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_scale(p: float) -> None:
    out = place().on_tokens(torch.ones(2, 64, 500), p)
    share = (out == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / out.numel()) ** 0.5
    assert torch.equal(out[out != 0].unique(), torch.ones(1) / (1 - p))


def test_p_of_one_keeps_nothing() -> None:
    assert not place().on_tokens(torch.ones(2, 4, 4), 1.0).any()


@pytest.mark.parametrize("other", [place(step=2), place(seed=1), place(name="h.1.drop")])
def test_other_steps_seeds_and_places_draw_other_masks(other: Place) -> None:
    x = torch.ones(2, 32, 64)
    same = (place().on_tokens(x, 0.5) == other.on_tokens(x, 0.5)).double().mean().item()
    assert abs(same - 0.5) < 0.05


def test_rows_draw_their_own_masks_wherever_they_are() -> None:
    x = torch.ones(2, 16, 16)
    whole = place().on_tokens(x, 0.5)
    assert not torch.equal(whole[0], whole[1])
    alone = Place(Dropout(0, step=1, rows_B=ROWS[1:]), place_number("h.0.drop"))
    assert torch.equal(alone.on_tokens(x[1:], 0.5)[0], whole[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 8), st.floats(0.05, 0.95))
def test_h39_shards_have_slices_of_the_whole_mask(each: int, at: int, width: int, p: float) -> None:
    """H39: different tokens on the ranks of a sequence-parallel region have different masks, which are the whole's."""
    whole = place().on_tokens(torch.ones(2, 4 * each, width), p)
    dropout = Dropout(0, step=1, rows_B=ROWS, positions={each: torch.arange(at * each, (at + 1) * each)})
    part = Place(dropout, place_number("h.0.drop")).on_tokens(torch.ones(2, each, width), p)
    if 4 * each != each:
        assert torch.equal(part, whole[:, at * each : (at + 1) * each])
    heads = place().on_probabilities(torch.ones(2, 4, 5, 5), p)
    cut = Place(Dropout(0, step=1, rows_B=ROWS, head=2), place_number("h.0.drop"))
    assert torch.equal(cut.on_probabilities(torch.ones(2, 2, 5, 5), p), heads[:, 2:])


def test_neighbours_are_not_correlated() -> None:
    index = torch.arange(100_000)
    stay = kept(torch.tensor([12345]), index, 0.5)[0].double()
    for lag in (1, 2, 64, 1000):
        product = (stay[:-lag] - 0.5) * (stay[lag:] - 0.5)
        assert abs(product.mean().item()) < 5 * 0.25 / (len(product) ** 0.5)


def test_attention_without_its_mask_is_transformers_own() -> None:
    """The separate operations, with a mask that keeps all, equal the fused kernel: grouped heads, causal or masked."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    module.meshwright_dropout = place()  # type: ignore[assignment]
    q, k, v = (torch.randn(2, h, 6, 8, dtype=torch.float64) for h in (4, 2, 2))
    window = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2).expand(2, 1, 6, 6)
    for mask in (None, window):
        ours, _ = attention(module, q, k, v, mask, dropout=1e-18, scaling=0.3)
        theirs, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=0.3)
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_forward_before_its_rows_are_said_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rows"):
        Place(Dropout(0), 1).on_tokens(torch.ones(2, 4, 4), 0.5)
