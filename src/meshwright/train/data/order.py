"""The global cursor: which sample is at which place of which step, for any layout.

The order depends on the seed and on how many samples were drawn before, and on nothing else: not on the
number of ranks, the micro-batch, the accumulation, or a restart in between. Memory does not grow with the
corpus: each epoch's order is a keyed permutation computed per index (a Feistel network over the next power
of four, indices outside the range walked on until they fall inside).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_ROUNDS = 8


def mix64(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return 64 well-mixed bits for each 64-bit value: a bijection.

    Source: the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        z = np.asarray(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key_of(*parts: int) -> np.uint64:
    """Return one 64-bit key for a sequence of integers (seed, purpose, epoch, ...)."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64(key ^ mix64(np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64)))
    return key[0]


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    return [key_of(seed, epoch, number) for number in range(_ROUNDS)]


def permute(index: NDArray[Any], num_samples: int, seed: int, epoch: int) -> Ints:
    """Return where each index stands in the epoch's order: a permutation of ``range(num_samples)``.

    Shapes: ``index`` of any shape, the result has the same.
    """
    half = max(2, ((num_samples - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = _round_keys(seed, epoch)

    def feistel(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value >> shift, value & mask
        for key in keys:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        return (left << shift) | right

    flat = np.asarray(index).reshape(-1)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= num_samples):
        raise ValueError(f"index outside range(0, {num_samples})")
    value = feistel(flat.astype(np.uint64))
    outside = np.flatnonzero(value >= num_samples)
    while outside.size:
        value[outside] = feistel(value[outside])
        outside = outside[value[outside] >= num_samples]
    return value.astype(np.int64).reshape(np.shape(index))


def samples_at(position: int, count: int, num_samples: int, seed: int) -> Ints:
    """Return the ``count`` samples that follow after ``position`` samples were drawn.

    Every sample comes once per epoch; an epoch's end inside the range loses and repeats nothing.

    Shapes: ``[count]``.
    """
    if num_samples < 1 or position < 0:
        raise ValueError(f"no sample {position} in a corpus of {num_samples}")
    return samples_of(np.arange(position, position + count, dtype=np.int64), num_samples, seed)


def samples_of(draws: Ints, num_samples: int, seed: int) -> Ints:
    """Return the sample of each draw; draw d is in epoch ``d // num_samples``.

    Shapes: ``draws`` ``[count]``, the result has the same.
    """
    epochs, index = np.divmod(draws, num_samples)
    samples = np.empty(len(draws), np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        samples[here] = permute(index[here], num_samples, seed, epoch)
    return samples


def batch_samples(step: int, global_batch: int, num_samples: int, seed: int) -> Ints:
    """Return the samples of one step; ``step`` counts from 0.

    Shapes: ``[global_batch]``.
    """
    return samples_at(step * global_batch, global_batch, num_samples, seed)


def rank_rows(global_batch: int, micro_batch: int, accumulation: int, dp: int, dp_rank: int) -> Ints:
    """Return the rows of the global batch that one data-parallel coordinate works on.

    Micro-batch k of coordinate d takes rows ``k*(dp*micro_batch) + d*micro_batch + j``, so that a step with
    more accumulation and less dp sees the same rows in the same micro-batch.

    Shapes: ``[accumulation, micro_batch]``.
    """
    if global_batch != dp * micro_batch * accumulation:
        raise ValueError(
            f"global batch {global_batch} is not dp {dp} * micro-batch {micro_batch} * accumulation {accumulation}"
        )
    if not 0 <= dp_rank < dp:
        raise ValueError(f"no data-parallel coordinate {dp_rank} of {dp}")
    rows = np.arange(global_batch, dtype=np.int64).reshape(accumulation, dp, micro_batch)
    return rows[:, dp_rank].copy()
