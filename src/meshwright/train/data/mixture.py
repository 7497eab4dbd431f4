"""Several sources in given shares, under the same global cursor as one.

Positions are cut in blocks of 4,096 draws. In each block every source has the same number of draws, and a permutation
keyed by seed and block says which. How often a source was drawn before any position is therefore arithmetic: nothing
has to be remembered, and no layout or restart can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshwright.base.errors import MeshwrightError, problem
from meshwright.train.data.order import Ints, key_of, permute, samples_of
from meshwright.train.data.stream import Rows

BLOCK: Final = 4096
"""Draws in which the shares are exact; a share is a whole number of them."""

_BLOCK_KEY, _SOURCE_KEY = 0x6D6978, 0x737263


@dataclass(frozen=True, kw_only=True)
class MixedRows:
    """Samples of several sources, numbered one source after the other.

    Attributes:
        parts: the sources.
        quotas: draws of each source in a block; () where samples are not drawn but counted through (evaluation),
            in one fixed order that mixes them.
    """

    parts: tuple[Rows, ...]
    quotas: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Samples of all sources."""
        return sum(part.num_samples for part in self.parts)

    @property
    def fresh_draws(self) -> int:
        """How many draws in a row hold no sample twice, by the shares."""
        return min(p.num_samples * BLOCK // q for p, q in zip(self.parts, self.quotas, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.parts[0].seq_len

    @property
    def pad_id(self) -> int:
        """What stands behind a row's tokens."""
        return self.parts[0].pad_id

    @property
    def isolated(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        return any(part.isolated for part in self.parts)

    def row(self, index: int) -> tuple[Ints, Ints]:
        """Return input ids and shifted labels of one sample. Shapes: ``[seq_len]`` each."""
        part, at = self._place(index)
        return part.row(at)

    def row_documents(self, index: int) -> Ints:
        """Return which document of the row each place is of. Shapes: ``[seq_len]``."""
        part, at = self._place(index)
        return part.row_documents(at)

    def _place(self, index: int) -> tuple[Rows, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"no sample {index} of {self.num_samples}")
        if not self.quotas:
            index = int(permute(np.array([index]), self.num_samples, 0, 0)[0])
        for part in self.parts:
            if index < part.num_samples:
                return part, index
            index -= part.num_samples
        raise AssertionError("the samples of the parts are all samples")


def quotas_of(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Return the draws of each source in a block of 4,096, by largest remainder.

    Raises:
        MeshwrightError: E645 for a share that would come to none.
    """
    exact = np.asarray(weights, np.float64) / float(np.sum(weights)) * BLOCK
    quotas = np.floor(exact).astype(np.int64)
    for index in np.argsort(quotas - exact, kind="stable")[: BLOCK - int(quotas.sum())]:
        quotas[index] += 1
    for name, quota, weight in zip(names, quotas.tolist(), weights, strict=True):
        if quota < 1:
            found = f"weight {weight:g} of {float(np.sum(weights)):g} is less than 1 of {BLOCK} sequences"
            raise MeshwrightError(problem("E645", where=f"data.sources.{name}", found=found))
    return tuple(quotas.tolist())


def _block(number: int, quotas: Sequence[int], seed: int) -> tuple[Ints, Ints]:
    """Return, for each draw of a block, its source and how many draws of the source the block has before it."""
    slots = permute(np.arange(BLOCK), BLOCK, int(key_of(seed, _BLOCK_KEY)), number)
    source = np.searchsorted(np.cumsum(quotas), slots, "right")
    before = np.empty(BLOCK, np.int64)
    for index in range(len(quotas)):
        here = source == index
        before[here] = np.arange(np.count_nonzero(here))
    return source, before


def mixed_at(position: int, count: int, rows: MixedRows, seed: int) -> Ints:
    """Return the ``count`` samples that follow after ``position`` draws from all sources together.

    Shapes: ``[count]``.
    """
    draws = np.arange(position, position + count, dtype=np.int64)
    blocks, places = np.divmod(draws, BLOCK)
    samples = np.empty(count, np.int64)
    offsets = np.cumsum([0, *(part.num_samples for part in rows.parts)])
    for number in np.unique(blocks).tolist():
        source, before = _block(number, rows.quotas, seed)
        here = np.flatnonzero(blocks == number)
        for index, part in enumerate(rows.parts):
            mine = here[source[places[here]] == index]
            drawn = number * rows.quotas[index] + before[places[mine]]
            key = int(key_of(seed, _SOURCE_KEY, index))
            samples[mine] = offsets[index] + samples_of(drawn, part.num_samples, key)
    return samples


def end_of(rows: Rows, epochs: int | None, seed: int) -> int | None:
    """Return after how many samples ``epochs`` passes end: of the source that ends first, where there are several."""
    if epochs is None:
        return None
    if not isinstance(rows, MixedRows):
        return epochs * rows.num_samples
    ends: list[int] = []
    for index, part in enumerate(rows.parts):
        number, place = divmod(epochs * part.num_samples, rows.quotas[index])
        source, before = _block(number, rows.quotas, seed)
        ends.append(number * BLOCK + int(np.flatnonzero((source == index) & (before == place))[0]))
    return min(ends)
