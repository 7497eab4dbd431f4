"""What one data-parallel coordinate sees of a step: its rows of the global batch, for training, evaluation, proofs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.train.data.mixture import MixedRows, mixed_at
from meshwright.train.data.order import Ints, key_of, mix64, permute, rank_rows, samples_at
from meshwright.train.data.packing import positions_of
from meshwright.train.data.stream import NO_LOSS, Rows


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The micro-batches of one data-parallel coordinate in one step.

    Every rank of the same tp, cp or pp group holds the same RankBatch.

    Attributes:
        input_ids: token ids. Shapes: ``[accumulation, micro_batch, seq_len]``, int64.
        labels: the token after each, -100 where there is no loss; already shifted. Same shape.
        samples: which sample each row is, -1 for a padding row. Shapes: ``[accumulation, micro_batch]``.
        position: samples that the whole job drew before this batch (the global cursor).
        documents: which document of its row each place is of, where rows hold several that must not see each
            other; None where they do not. Same shape as ``input_ids``.
    """

    input_ids: Ints
    labels: Ints
    samples: Ints
    position: int
    documents: Ints | None = None

    @property
    def positions(self) -> Ints | None:
        """Positions that begin again with each document, or None where a row is one. Shapes: as ``documents``."""
        return None if self.documents is None else positions_of(self.documents)

    @property
    def valid_tokens(self) -> int:
        """Labels of this coordinate that carry a loss."""
        return int(np.count_nonzero(self.labels != NO_LOSS))

    def digest(self) -> str:
        """Return a hash of the content, equal on ranks that must hold the same batch."""
        documents = b"" if self.documents is None else self.documents.tobytes()
        return hashlib.sha256(self.input_ids.tobytes() + self.labels.tobytes() + documents).hexdigest()[:16]


def _gather(rows: Rows, samples: Ints, position: int) -> RankBatch:
    shape = (*samples.shape, rows.seq_len)
    inputs = np.full(shape, rows.pad_id, np.int64)
    labels = np.full(shape, NO_LOSS, np.int64)
    documents = np.zeros(shape, np.int64) if rows.isolated else None
    for place in np.ndindex(*samples.shape):
        if samples[place] >= 0:
            inputs[place], labels[place] = rows.row(int(samples[place]))
            if documents is not None:
                documents[place] = rows.row_documents(int(samples[place]))
    return RankBatch(input_ids=inputs, labels=labels, samples=samples, position=position, documents=documents)


def drawn_samples(rows: Rows, position: int, count: int, seed: int, end: int | None = None) -> Ints:
    """Return the samples of the draws ``position`` to ``position + count`` of the whole job, -1 behind ``end``.

    They depend on the seed and the position alone: not on ranks, layout or restarts.

    Shapes: ``[count]``.
    """
    if isinstance(rows, MixedRows):
        samples = mixed_at(position, count, rows, seed)
    else:
        samples = samples_at(position, count, rows.num_samples, seed)
    return samples if end is None else np.where(np.arange(position, position + count) < end, samples, -1)


def rank_batch(
    stream: Rows,
    *,
    step: int,
    global_batch: int,
    micro_batch: int,
    accumulation: int,
    dp: int,
    dp_rank: int,
    seed: int,
    end: int | None = None,
) -> RankBatch:
    """Return one coordinate's rows of one step; ``step`` counts from 0 (step s is the (s+1)-th update).

    Behind ``end``, where finite data is over, rows are padding without any label: the last step has fewer samples,
    and every rank as many micro-batches as before.
    """
    drawn = drawn_samples(stream, step * global_batch, global_batch, seed, end)
    rows = rank_rows(global_batch, micro_batch, accumulation, dp, dp_rank)
    return _gather(stream, drawn[rows], step * global_batch)


def eval_batches(
    stream: Rows,
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


def synthetic_documents(step: int, labels: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return documents for the rows of a synthetic batch, and its labels without those that reach another document.

    About eight documents to a row of 32 places, at least two, other borders in every row and step; a part of the rows
    ends in padding, which carries no loss. Where nothing would be left to predict, labels stay as they are.

    Shapes: ``labels`` ``[global_batch, seq_len]``, both results the same.
    """
    seq_len = labels.shape[1]
    numbers = mix64(np.arange(labels.size, dtype=np.uint64) ^ key_of(seed, step, 3)).reshape(labels.shape)
    begins = numbers % np.uint64(max(2, min(4, seq_len // 4))) == 0
    if seq_len > 1:
        begins[:, 1 + step % (seq_len - 1)] = True
    begins[:, 0] = False
    documents = np.cumsum(begins, axis=1, dtype=np.int64)
    ends = np.zeros(labels.shape, np.bool_)
    ends[:, :-1] = begins[:, 1:]
    padded = (documents == documents[:, -1:]) & (numbers[:, :1] % np.uint64(2) == 0) & (documents > 0)
    left = np.where(ends | padded, NO_LOSS, labels)
    return documents, left if np.any(left != NO_LOSS) else labels
