"""The global cursor: same order for any layout, every sample once per epoch, O(1) memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.data.order import batch_samples, mix64, permute, rank_rows, samples_at

quick = settings(max_examples=80, deadline=None)


def test_mix64_gives_the_published_sequence() -> None:
    # SplitMix64 seeded with 1234567: its state grows by the golden gamma, so outputs are mix64 of the states before
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + k * gamma) % 2**64 for k in range(3)], np.uint64)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@quick
@given(st.integers(1, 700), st.integers(0, 2**63), st.integers(0, 5))
def test_each_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


def test_permutation_has_no_order_left() -> None:
    n = 20_000
    placed = permute(np.arange(n), n, seed=3, epoch=0)
    steps = np.abs(np.diff(placed))
    assert abs(np.corrcoef(np.arange(n), placed)[0, 1]) < 0.03
    assert abs(steps.mean() / n - 1 / 3) < 0.01  # two independent places are a third of the range apart
    assert np.count_nonzero(placed == np.arange(n)) < 10


def test_large_corpus_needs_no_table() -> None:
    n = 10**12 + 7
    some = permute(np.arange(n - 1000, n), n, seed=0, epoch=1)
    assert len(set(some.tolist())) == 1000
    assert some.min() >= 0
    assert some.max() < n


def test_index_outside_the_corpus_is_an_error() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([5]), 5, 0, 0)
    with pytest.raises(ValueError, match="corpus of 0"):
        samples_at(0, 1, 0, 0)


def test_h154_epochs_differ_and_repeat_for_the_same_seed() -> None:
    n = 10
    epochs = [samples_at(e * n, n, n, seed=7).tolist() for e in range(4)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert epochs == [samples_at(e * n, n, n, seed=7).tolist() for e in range(4)]
    assert samples_at(0, n, n, seed=8).tolist() != epochs[0]


@quick
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 9))
def test_every_sample_once_per_epoch_across_borders(n: int, batch: int, seed: int) -> None:
    steps = -(-3 * n // batch)
    drawn = np.concatenate([batch_samples(s, batch, n, seed) for s in range(steps)])
    for epoch in range(3):
        assert sorted(drawn[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_h144_stop_and_go_on_sees_each_sample_once() -> None:
    # 10 samples, batch 2, stopped after 2 steps and resumed: nothing repeated, nothing skipped, next epoch too
    unbroken = samples_at(0, 20, 10, seed=1).reshape(10, 2)
    before = [batch_samples(step, 2, 10, seed=1) for step in range(2)]
    after = [batch_samples(step, 2, 10, seed=1) for step in range(2, 10)]
    assert np.array_equal(np.stack(before + after), unbroken)
    assert sorted(np.concatenate(before + after[:3]).tolist()) == list(range(10))
    assert not np.array_equal(unbroken[5:], unbroken[:5])


def test_h145_another_dp_after_resume_sees_exactly_the_rest() -> None:
    n, batch = 12, 4
    seen: list[int] = []
    for dp_rank in range(2):  # dp=2: one step of 4
        seen += batch_samples(0, batch, n, 5)[rank_rows(batch, 2, 1, 2, dp_rank)].ravel().tolist()
    rest: list[int] = []
    for step in (1, 2):  # resumed as dp=1
        rest += batch_samples(step, batch, n, 5)[rank_rows(batch, 2, 2, 1, 0)].ravel().tolist()
    assert len(rest) == 8
    assert sorted(seen + rest) == list(range(n))


def test_another_global_batch_after_resume_goes_on_by_position() -> None:
    n = 30
    whole = samples_at(0, 30, n, 2).tolist()
    assert samples_at(0, 12, n, 2).tolist() + samples_at(12, 6, n, 2).tolist() == whole[:18]
    assert samples_at(18, 12, n, 2).tolist() == whole[18:]


@quick
@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_h150_h158_ranks_share_nothing_and_miss_nothing(dp: int, micro: int, accum: int, seed: int) -> None:
    batch = dp * micro * accum
    rows = [rank_rows(batch, micro, accum, dp, d) for d in range(dp)]
    assert all(r.shape == (accum, micro) for r in rows)
    assert sorted(np.concatenate([r.ravel() for r in rows]).tolist()) == list(range(batch))
    n = 4 * batch
    samples: list[int] = []
    for step in range(4):
        drawn = batch_samples(step, batch, n, seed)
        for r in rows:
            samples += drawn[r].ravel().tolist()
    assert sorted(samples) == list(range(n))


@quick
@given(st.sampled_from([(1, 4), (2, 2), (4, 1)]), st.integers(1, 3))
def test_h142_micro_batches_are_the_same_for_any_dp(layout: tuple[int, int], micro: int) -> None:
    # with dp*accumulation fixed, the set of micro-batches is the same: micro-batch k of rank d is number k*dp + d
    dp, accum = layout
    batch = 4 * micro
    reference = rank_rows(batch, micro, 4, 1, 0)
    for d in range(dp):
        for k, rows in enumerate(rank_rows(batch, micro, accum, dp, d)):
            assert rows.tolist() == reference[k * dp + d].tolist()


def test_rows_follow_the_formula() -> None:
    batch, micro, accum, dp, d = 24, 2, 4, 3, 1
    rows = rank_rows(batch, micro, accum, dp, d)
    for k in range(accum):
        for j in range(micro):
            assert rows[k, j] == k * (dp * micro) + d * micro + j


def test_batch_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="global batch 7"):
        rank_rows(7, 2, 2, 2, 0)
    with pytest.raises(ValueError, match="coordinate 2"):
        rank_rows(8, 2, 2, 2, 2)
