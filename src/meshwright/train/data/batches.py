"""What one data-parallel coordinate sees of a step: its rows of the global batch, for training, evaluation, proofs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.train.data.order import Ints, batch_samples, key_of, mix64, permute, rank_rows
from meshwright.train.data.store import NO_LOSS, TokenStream


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The micro-batches of one data-parallel coordinate in one step.

    Every rank of the same tp, cp or pp group holds the same RankBatch.

    Attributes:
        input_ids: token ids. Shapes: ``[accumulation, micro_batch, seq_len]``, int64.
        labels: the token after each, -100 where there is no loss; already shifted. Same shape.
        samples: which sample each row is, -1 for a padding row. Shapes: ``[accumulation, micro_batch]``.
        position: samples that the whole job drew before this batch (the global cursor).
    """

    input_ids: Ints
    labels: Ints
    samples: Ints
    position: int

    @property
    def valid_tokens(self) -> int:
        """Labels of this coordinate that carry a loss."""
        return int(np.count_nonzero(self.labels != NO_LOSS))

    def digest(self) -> str:
        """Return a hash of the content, equal on ranks that must hold the same batch."""
        return hashlib.sha256(self.input_ids.tobytes() + self.labels.tobytes()).hexdigest()[:16]


def _gather(stream: TokenStream, samples: Ints, position: int) -> RankBatch:
    inputs = np.full((*samples.shape, stream.seq_len), stream.pad_id, np.int64)
    labels = np.full((*samples.shape, stream.seq_len), NO_LOSS, np.int64)
    for place in np.ndindex(*samples.shape):
        if samples[place] >= 0:
            inputs[place], labels[place] = stream.row(int(samples[place]))
    return RankBatch(input_ids=inputs, labels=labels, samples=samples, position=position)


def rank_batch(
    stream: TokenStream,
    *,
    step: int,
    global_batch: int,
    micro_batch: int,
    accumulation: int,
    dp: int,
    dp_rank: int,
    seed: int,
) -> RankBatch:
    """Return one coordinate's rows of one step; ``step`` counts from 0 (step s is the (s+1)-th update)."""
    drawn = batch_samples(step, global_batch, stream.num_samples, seed)
    rows = rank_rows(global_batch, micro_batch, accumulation, dp, dp_rank)
    return _gather(stream, drawn[rows], step * global_batch)


def eval_batches(
    stream: TokenStream,
    *,
    micro_batch: int,
    dp: int,
    dp_rank: int,
    accumulation: int = 1,
    max_samples: int | None = None,
) -> Iterator[RankBatch]:
    """Yield one coordinate's batches of an evaluation over exactly the first ``max_samples`` samples.

    Every coordinate yields the same number of batches; where samples run out, rows are padding without any
    label, so that the sum of losses over the sum of valid tokens counts each sample once.
    """
    count = stream.num_samples if max_samples is None else min(max_samples, stream.num_samples)
    global_batch = micro_batch * accumulation * dp
    rows = rank_rows(global_batch, micro_batch, accumulation, dp, dp_rank)
    for position in range(0, count, global_batch):
        samples = rows + position
        yield _gather(stream, np.where(samples < count, samples, -1), position)


def synthetic_batch(
    step: int,
    vocab_size: int,
    global_batch: int,
    seq_len: int,
    seed: int,
    valid: Literal["unequal", "all"] = "all",
    micro_batch: int = 1,
    dp: int = 1,
) -> tuple[Ints, Ints]:
    """Return a random global batch for proofs, the same on every machine.

    With ``valid="unequal"`` each row has another number of valid labels (from 1 to seq_len, padding on the
    right), and one whole micro-batch of one data-parallel coordinate has none, where there is more than one:
    the case in which a mean of means goes wrong.

    Shapes: input ids and shifted labels ``[global_batch, seq_len]``.
    """
    if global_batch % (micro_batch * dp):
        raise ValueError(f"global batch {global_batch} is not a multiple of {micro_batch} * dp {dp}")
    key = key_of(seed, step, 0)
    count = global_batch * (seq_len + 1)
    numbers = mix64(np.arange(count, dtype=np.uint64) ^ key)
    tokens = (numbers % np.uint64(vocab_size)).astype(np.int64).reshape(global_batch, seq_len + 1)
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    if valid == "all":
        return inputs, labels
    domain = max(seq_len, global_batch)
    places = permute(np.arange(global_batch), domain, int(key_of(seed, step, 1)), 0)
    lengths = places * seq_len // domain + 1
    labels[np.arange(seq_len)[None, :] >= lengths[:, None]] = NO_LOSS
    micro_batches = global_batch // micro_batch
    if micro_batches > 1:
        # rows of a micro-batch are adjacent: micro-batch k of coordinate d starts at (k*dp + d) * micro_batch
        empty = int(key_of(seed, step, 2) % np.uint64(micro_batches))
        labels[empty * micro_batch : (empty + 1) * micro_batch] = NO_LOSS
    return inputs, labels
