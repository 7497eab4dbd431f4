"""Batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import MeshwrightError
from meshwright.layout.batch import check_batch, derive_batch, nearest_batches
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout


def test_h169_the_numbers_and_the_nearest_batches_are_told() -> None:
    with pytest.raises(MeshwrightError) as caught:
        derive_batch(parse_layout("dp=7,micro_batch=2"), 256, 128)
    (found,) = caught.value.problems
    assert found.code == "E220"
    for number in ("256", "dp = 7", "micro_batch = 2", "252 | 266"):
        assert number in found.text()


def test_h169_a_batch_below_one_micro_batch_is_refused() -> None:
    with pytest.raises(MeshwrightError) as caught:
        derive_batch(parse_layout("micro_batch=8"), 4, 128)
    (found,) = caught.value.problems
    assert found.code == "E221"
    assert "global batch = 8" in found.do
    assert "micro_batch = " in found.do


def test_h171_accumulation_counts_the_whole_world() -> None:
    layout = parse_layout("dp=16,micro_batch=16")  # 2 nodes of 8
    assert derive_batch(layout, 1024, 128).accumulation == 4


def test_h53_eight_sequences_in_three_are_refused_with_numbers() -> None:
    with pytest.raises(MeshwrightError, match=r"8 / \(1 \* 3\) = 2.667") as caught:
        derive_batch(parse_layout("micro_batch=3"), 8, 16)
    assert "6 | 9" in caught.value.problems[0].do


@pytest.mark.parametrize(("batch", "seq"), [(0, 1), (-4, 1), (1, 0)])
def test_numbers_below_one(batch: int, seq: int) -> None:
    assert [p.code for p in check_batch(Layout(), batch, seq)] == ["E222"]


def test_tokens_of_a_step() -> None:
    batch = derive_batch(parse_layout("dp=2,micro_batch=2,cp=2"), 16, 128)
    assert (batch.accumulation, batch.tokens) == (4, 2048)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 3000))
def test_every_choice_offered_is_legal(dp: int, micro: int, batch: int) -> None:
    layout = Layout(dp=dp, micro_batch=micro)
    found = check_batch(layout, batch, 8)
    near = nearest_batches(layout, batch)
    assert near
    assert all(not check_batch(layout, n, 8) for n in near)
    assert all(abs(n - batch) <= max(dp * micro, dp * micro - batch) for n in near)
    if not found:
        derived = derive_batch(layout, batch, 8)
        assert derived.dp * derived.micro_batch * derived.accumulation == batch
        return
    for choice in found[0].do.split("; or "):
        key, _, values = choice.partition(" = ")
        for value in map(int, values.split(" | ")):
            changed = {
                "global batch": (layout, value),
                "micro_batch": (Layout(dp=dp, micro_batch=value), batch),
                "dp": (Layout(dp=value, micro_batch=micro), batch),
            }[key]
            assert not check_batch(*changed, 8)
