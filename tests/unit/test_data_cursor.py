"""One global cursor: the order depends on seed and step alone, for every layout, restart, mixture and end of data."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import MeshwrightError
from meshwright.train.data import NO_LOSS, RankBatch, drawn_samples, rank_batch
from meshwright.train.data.mixture import BLOCK, MixedRows, end_of, mixed_at, quotas_of
from meshwright.train.data.packing import pack

SEQ_LEN = 8


@dataclass(frozen=True)
class Packed:
    """Packed rows of made-up documents, without files: sample i holds the numbers of its documents."""

    lengths: tuple[int, ...]
    base: int = 0
    seq_len: int = SEQ_LEN
    pad_id: int = 0
    isolated: bool = True

    @property
    def _rows(self) -> list[list[int]]:
        order, bounds = pack(np.asarray(self.lengths, np.int64), SEQ_LEN)
        return [order[a:b].tolist() for a, b in itertools.pairwise(bounds)]

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    @property
    def fresh_draws(self) -> int:
        return self.num_samples

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def row(self, index: int) -> tuple[Any, Any]:
        labels = np.full(SEQ_LEN, NO_LOSS, np.int64)
        ids = [d for d in self._rows[index] for _ in range(self.lengths[d])]
        labels[: len(ids)] = np.asarray(ids) + self.base + 1
        return labels.copy(), labels

    def row_documents(self, index: int) -> Any:
        out = np.full(SEQ_LEN, -1, np.int64)
        ids = [n for n, d in enumerate(self._rows[index]) for _ in range(self.lengths[d])]
        out[: len(ids)] = ids
        return out


lengths = st.lists(st.integers(1, SEQ_LEN), min_size=4, max_size=30).map(tuple)
layouts = st.sampled_from(
    [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (1, 8), (8, 1), (4, 2)]
)  # dp, micro
BATCH = 8


def of_step(
    rows: Any, step: int, layout: tuple[int, int], seed: int, end: int | None = None
) -> list[RankBatch]:
    dp, micro = layout
    return [
        rank_batch(
            rows,
            step=step,
            global_batch=BATCH,
            micro_batch=micro,
            accumulation=BATCH // dp // micro,
            dp=dp,
            dp_rank=rank,
            seed=seed,
            end=end,
        )
        for rank in range(dp)
    ]


def whole(ranks: list[RankBatch], name: str) -> Any:
    """Return an array of all ranks in the order of the global batch."""
    return np.stack([getattr(r, name) for r in ranks], axis=1).reshape(BATCH, -1)


@settings(max_examples=60, deadline=None)
@given(lengths, layouts, layouts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
def test_h144_h145_h149_the_next_sample_after_a_change_of_layout_is_the_right_one(
    documents: tuple[int, ...], one: tuple[int, int], two: tuple[int, int], stop: int, more: int, seed: int
) -> None:
    """H144, H145, H149: steps 0..stop in one layout and on in another are the steps of one device, packs included."""
    rows = Packed(documents)
    for step in range(stop + more + 1):
        layout = one if step < stop else two
        ranks, alone = of_step(rows, step, layout, seed), of_step(rows, step, (1, BATCH), seed)
        for name in ("samples", "input_ids", "labels", "documents", "positions"):
            assert np.array_equal(whole(ranks, name), whole(alone, name)), name


@settings(max_examples=60, deadline=None)
@given(lengths, layouts, st.integers(1, 3), st.integers(0, 3))
def test_h9_h150_h155_finite_data_ends_on_the_same_step_with_nothing_lost_or_repeated(
    documents: tuple[int, ...], layout: tuple[int, int], epochs: int, seed: int
) -> None:
    """H9, H150, H155: every rank runs as many micro-batches, the last batch is short, each sample comes once an epoch."""
    rows = Packed(documents)
    end = end_of(rows, epochs, seed)
    assert end == epochs * rows.num_samples
    steps = -(-end // BATCH)
    seen: Counter[int] = Counter()
    shapes = set()
    for step in range(steps):
        ranks = of_step(rows, step, layout, seed, end)
        shapes |= {r.input_ids.shape for r in ranks}
        seen.update(int(s) for r in ranks for s in r.samples.ravel() if s >= 0)
        assert all((r.labels[r.samples < 0] == NO_LOSS).all() for r in ranks)
        assert sum(r.valid_tokens for r in ranks) > 0  # no step of finite data is empty
    assert len(shapes) == 1  # no rank waits for a micro-batch that another does not have
    assert seen == Counter(dict.fromkeys(range(rows.num_samples), epochs))
    behind = of_step(rows, steps, layout, seed, end)
    assert all((r.samples < 0).all() for r in behind)


def mixture(sizes: list[int], weights: list[float]) -> MixedRows:
    parts = tuple(Packed((SEQ_LEN,) * n, base=1000 * k) for k, n in enumerate(sizes))
    return MixedRows(parts=parts, quotas=quotas_of(weights, [str(k) for k in range(len(sizes))]))


def test_shares_are_exact_in_every_block() -> None:
    rows = mixture([5, 3, 11], [1.0, 2.0, 5.0])
    assert sum(rows.quotas) == BLOCK
    assert rows.quotas == (512, 1024, 2560)
    for block in range(3):
        source = np.searchsorted([5, 8, 19], mixed_at(block * BLOCK, BLOCK, rows, seed=1), "right")
        assert np.bincount(source).tolist() == list(rows.quotas)
    few = np.searchsorted([5, 8, 19], mixed_at(0, 64, rows, seed=1), "right")
    assert len(set(few.tolist())) == 3  # mixed, not one after the other


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 8.0)), min_size=2, max_size=4),
    st.integers(0, 3 * BLOCK),
    st.integers(1, 200),
    st.integers(0, 5),
)
def test_a_mixture_is_the_same_wherever_one_begins_to_read(
    sources: list[tuple[int, float]], position: int, count: int, seed: int
) -> None:
    rows = mixture([n for n, _ in sources], [w for _, w in sources])
    start = max(position - 50, 0)
    longer = mixed_at(start, position - start + count, rows, seed)
    assert np.array_equal(longer[position - start :], mixed_at(position, count, rows, seed))
    assert np.array_equal(drawn_samples(rows, position, count, seed), mixed_at(position, count, rows, seed))


def test_h154_every_source_of_a_mixture_is_whole_in_each_of_its_epochs_and_reordered() -> None:
    """H154: another order each epoch, the same for the same seed."""
    rows = mixture([7, 4], [3.0, 1.0])
    drawn = mixed_at(0, 2 * BLOCK, rows, seed=3)
    for low, size in ((0, 7), (7, 4)):
        mine = drawn[(drawn >= low) & (drawn < low + size)]
        epochs = mine[: len(mine) // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(low, low + size)).all()
        assert len({tuple(e) for e in epochs.tolist()}) > 2
    assert np.array_equal(drawn, mixed_at(0, 2 * BLOCK, rows, seed=3))
    assert not np.array_equal(drawn, mixed_at(0, 2 * BLOCK, rows, seed=4))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=3), st.integers(1, 4), st.integers(0, 3))
def test_a_finite_mixture_ends_where_its_first_source_ends(sizes: list[int], epochs: int, seed: int) -> None:
    rows = mixture(sizes, [1.0 + k for k in range(len(sizes))])
    end = end_of(rows, epochs, seed)
    assert end is not None
    counts = np.bincount(drawn_samples(rows, 0, end, seed), minlength=rows.num_samples)
    assert counts.max() <= epochs
    after = np.bincount(mixed_at(0, end + 1, rows, seed), minlength=rows.num_samples)
    assert after.max() == epochs + 1
    edges = np.cumsum([0, *sizes])
    assert any((counts[a:b] == epochs).all() for a, b in itertools.pairwise(edges))
    assert (drawn_samples(rows, end - 1, 3, seed, end)[1:] == -1).all()


def test_e645_a_share_of_nothing() -> None:
    with pytest.raises(MeshwrightError) as caught:
        quotas_of([1.0, 1e-5], ["a", "b"])
    assert caught.value.problems[0].code == "E645"
    assert "data.sources.b" in caught.value.problems[0].where


def test_evaluation_of_a_mixture_counts_every_sample_once() -> None:
    from meshwright.train.data import eval_batches

    rows = MixedRows(parts=(Packed((SEQ_LEN,) * 5), Packed((SEQ_LEN,) * 4, base=1000)))
    seen = [b.labels[0, 0, 0] for b in eval_batches(rows, micro_batch=1, dp=1, dp_rank=0)]
    assert sorted(seen) == [1, 2, 3, 4, 5, 1001, 1002, 1003, 1004]
    assert any(label > 1000 for label in seen[:4])  # a few batches see both
