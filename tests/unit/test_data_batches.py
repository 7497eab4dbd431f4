"""Rows with labels: padding by position, ranks' batches, evaluation over exactly n samples, proofs' batches."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.train.data import (
    NO_LOSS,
    TokenStream,
    eval_batches,
    padded_row,
    rank_batch,
    synthetic_batch,
)

EOS = 9


def stream(folder: Path, tokens: int, seq_len: int = 4, keep_partial: bool = False) -> TokenStream:
    file = folder / f"{tokens}.npy"
    np.save(file, np.arange(100, 100 + tokens, dtype=np.uint16))
    return TokenStream(file=file, num_tokens=tokens, seq_len=seq_len, pad_id=EOS, keep_partial=keep_partial)


def test_h156_a_real_end_of_text_keeps_its_label_where_pad_is_the_same_token() -> None:
    # tokens [5, 6, eos] then padding with eos: labels of [5, 6, eos, pad] are [6, eos, -100, -100]
    inputs, labels = padded_row(np.array([5, 6, EOS]), 4, pad_id=EOS)
    assert inputs.tolist() == [5, 6, EOS, EOS]
    assert labels.tolist() == [6, EOS, NO_LOSS, NO_LOSS]
    # unshifted, as the hazard writes it: [5, 6, eos, -100, -100]
    assert [5, *labels.tolist()] == [5, 6, EOS, NO_LOSS, NO_LOSS]


def test_full_empty_and_overlong_rows() -> None:
    inputs, labels = padded_row(np.array([1, 2, 3]), 2, pad_id=0)
    assert (inputs.tolist(), labels.tolist()) == ([1, 2], [2, 3])
    assert padded_row(np.array([], np.int64), 2, 0)[1].tolist() == [NO_LOSS, NO_LOSS]
    with pytest.raises(ValueError, match="4 tokens"):
        padded_row(np.arange(4), 2, 0)


def test_every_token_but_the_first_is_a_label_once(tmp_path: Path) -> None:
    for tokens in (1, 2, 8, 9, 10, 23):
        held = stream(tmp_path, tokens, keep_partial=True)
        labels = np.concatenate([held.row(i)[1] for i in range(held.num_samples)] or [np.zeros(0)])
        assert labels[labels != NO_LOSS].tolist() == list(range(101, 100 + tokens))
        train = stream(tmp_path, tokens)
        assert train.num_samples == (tokens - 1) // 4
        for i in range(train.num_samples):
            assert train.valid(i) == 4
            assert train.sample(i).tolist() == list(range(100 + 4 * i, 105 + 4 * i))


def test_partial_sample_is_padded_and_says_how_far(tmp_path: Path) -> None:
    held = stream(tmp_path, 7, keep_partial=True)
    assert held.num_samples == 2
    assert held.valid(1) == 2
    assert held.sample(1).tolist() == [104, 105, 106, EOS, EOS]
    assert held.row(1)[1].tolist() == [105, 106, NO_LOSS, NO_LOSS]
    with pytest.raises(IndexError, match="no sample 2 of 2"):
        held.sample(2)


def test_stream_pickles_without_its_tokens(tmp_path: Path) -> None:
    train = stream(tmp_path, 5001)
    train.sample(0)
    sent = pickle.dumps(train)
    assert len(sent) < 1000
    assert pickle.loads(sent).sample(3).tolist() == train.sample(3).tolist()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(1, 1, 8), (2, 1, 4), (4, 2, 1), (2, 2, 2), (8, 1, 1)]), st.integers(0, 12))
def test_a_step_is_the_same_step_for_every_layout(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[int, int, int], step: int
) -> None:
    dp, micro, accum = layout
    train = stream(tmp_path_factory.mktemp("s"), 4 * 13 + 1)
    options = {"step": step, "global_batch": 8, "seed": 3}
    reference = rank_batch(train, micro_batch=8, accumulation=1, dp=1, dp_rank=0, **options)
    parts = [
        rank_batch(train, micro_batch=micro, accumulation=accum, dp=dp, dp_rank=d, **options)
        for d in range(dp)
    ]
    assert all(p.input_ids.shape == (accum, micro, 4) and p.input_ids.dtype == np.int64 for p in parts)
    assert all(p.position == 8 * step for p in parts)
    joined = np.stack([p.input_ids for p in parts], axis=1).reshape(8, 4)
    assert np.array_equal(joined, reference.input_ids[0])
    labels = np.stack([p.labels for p in parts], axis=1).reshape(8, 4)
    assert np.array_equal(labels, reference.labels[0])
    assert np.array_equal(labels, joined + 1)  # these tokens count upward: the label is the next one


def test_digest_tells_batches_apart(tmp_path: Path) -> None:
    train = stream(tmp_path, 401)
    options = {"step": 0, "global_batch": 8, "micro_batch": 2, "accumulation": 2, "dp": 2, "seed": 0}
    zero = rank_batch(train, dp_rank=0, **options)
    assert zero.digest() == rank_batch(train, dp_rank=0, **options).digest()
    assert zero.digest() != rank_batch(train, dp_rank=1, **options).digest()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 12),
)
def test_h153_evaluation_counts_each_sample_once(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, dp: int, micro: int, accum: int, limit: int
) -> None:
    held = stream(tmp_path_factory.mktemp("s"), tokens, keep_partial=True)
    ranks = [
        list(
            eval_batches(
                held, micro_batch=micro, accumulation=accum, dp=dp, dp_rank=d, max_samples=limit or None
            )
        )
        for d in range(dp)
    ]
    assert len({len(r) for r in ranks}) == 1  # no rank runs a batch more (it would wait for ever)
    count = min(limit or held.num_samples, held.num_samples)
    rows = [s for r in ranks for b in r for s in b.samples.ravel().tolist()]
    assert sorted(s for s in rows if s >= 0) == list(range(count))
    for r in ranks:
        for batch in r:
            assert batch.labels.shape == (accum, micro, 4)
            assert (batch.labels[batch.samples < 0] == NO_LOSS).all()
    valid = sum(b.valid_tokens for r in ranks for b in r)
    assert valid == sum(held.valid(i) for i in range(count))


def test_h153_mean_of_five_losses_over_two_ranks_is_three(tmp_path: Path) -> None:
    held = stream(tmp_path, 21, keep_partial=True)
    assert held.num_samples == 5
    total = count = 0.0
    for d in range(2):
        for batch in eval_batches(held, micro_batch=1, dp=2, dp_rank=d):
            valid = (batch.labels != NO_LOSS).sum(-1)
            total += ((batch.samples + 1) * valid).sum()  # the loss of sample i is i + 1
            count += valid.sum()
    assert total / count == 3.0


def test_synthetic_batch_is_deterministic_and_in_range() -> None:
    inputs, labels = synthetic_batch(3, 50, 8, 16, seed=1)
    again = synthetic_batch(3, 50, 8, 16, seed=1)
    assert np.array_equal(inputs, again[0])
    assert np.array_equal(labels, again[1])
    assert inputs.min() >= 0
    assert inputs.max() < 50
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])
    assert len(np.unique(inputs)) > 40
    assert not np.array_equal(inputs, synthetic_batch(4, 50, 8, 16, seed=1)[0])
    assert not np.array_equal(inputs, synthetic_batch(3, 50, 8, 16, seed=2)[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(1, 3))
def test_synthetic_unequal_has_other_lengths_and_one_empty_micro_batch(
    step: int, layout: tuple[int, int], accum: int
) -> None:
    micro, dp = layout
    batch, seq_len = micro * dp * accum, 32
    _, labels = synthetic_batch(step, 50, batch, seq_len, 0, valid="unequal", micro_batch=micro, dp=dp)
    valid = (labels != NO_LOSS).sum(1)
    right_padded = np.arange(seq_len)[None, :] < valid[:, None]
    assert np.array_equal(labels != NO_LOSS, right_padded)
    empty = valid.reshape(accum * dp, micro).sum(1) == 0
    assert empty.sum() == (1 if accum * dp > 1 else 0)
    lengths = valid[valid > 0]
    assert len(set(lengths.tolist())) == len(lengths)
    full = synthetic_batch(step, 50, batch, seq_len, 0)[1]
    assert np.array_equal(labels[right_padded], full[right_padded])


def test_synthetic_unequal_with_more_rows_than_positions_stays_legal() -> None:
    _, labels = synthetic_batch(0, 50, 12, 4, 0, valid="unequal", micro_batch=2, dp=2)
    valid = (labels != NO_LOSS).sum(1)
    assert valid.max() <= 4
    assert (valid == 0).sum() == 2
    with pytest.raises(ValueError, match="multiple"):
        synthetic_batch(0, 50, 7, 4, 0, micro_batch=2)
