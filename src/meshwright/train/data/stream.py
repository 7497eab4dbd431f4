"""Samples by number: what every split offers, and a stream of tokens in one file cut into them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.order import Ints

NO_LOSS: Final = -100
"""The label of a position that carries no loss."""


def padded_row(tokens: NDArray[Any], seq_len: int, pad_id: int) -> tuple[Ints, Ints]:
    """Return input ids and labels of one row from up to ``seq_len + 1`` tokens.

    ``labels[t]`` is the token after ``input_ids[t]``. What lies behind the tokens is padding: its inputs are
    ``pad_id`` and its labels -100, by position and never by value, so that a real end-of-text token keeps
    its label even where it is also the padding.

    Shapes: ``[seq_len]`` each.
    """
    count = len(tokens)
    if count > seq_len + 1:
        raise ValueError(f"{count} tokens do not fit a row of {seq_len} + 1")
    inputs = np.full(seq_len, pad_id, np.int64)
    labels = np.full(seq_len, NO_LOSS, np.int64)
    inputs[: min(count, seq_len)] = tokens[:seq_len]
    labels[: max(count - 1, 0)] = tokens[1:]
    return inputs, labels


class Rows(Protocol):
    """Samples of one split, by number: rows of ``seq_len`` inputs and shifted labels."""

    @property
    def num_samples(self) -> int:
        """How many there are."""
        ...

    @property
    def fresh_draws(self) -> int:
        """How many draws in a row hold no sample twice."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the split (of rows of documents: labels with a loss)."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def pad_id(self) -> int:
        """What stands behind a row's tokens."""
        ...

    @property
    def isolated(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        ...

    def row(self, index: int) -> tuple[Ints, Ints]:
        """Return input ids and shifted labels of one sample. Shapes: ``[seq_len]`` each."""
        ...

    def row_documents(self, index: int) -> Ints:
        """Return which document of the row each place is of, -1 for padding (``isolated``). Shapes: ``[seq_len]``."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Tokens of one split in one file, cut into samples: sample i holds tokens i*seq_len to (i+1)*seq_len.

    Neighbours share one token, so each token but the first is a label exactly once. The last, partial
    sample is padded where ``keep_partial``, else dropped.
    """

    file: Path
    num_tokens: int
    seq_len: int
    pad_id: int
    keep_partial: bool

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, mapped into memory read-only. Shapes: ``[num_tokens]``."""
        return np.load(self.file, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the place of the tokens, not the tokens."""
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    @property
    def num_samples(self) -> int:
        """Samples in the stream."""
        labels = max(self.num_tokens - 1, 0)
        return -(-labels // self.seq_len) if self.keep_partial else labels // self.seq_len

    @property
    def fresh_draws(self) -> int:
        """How many draws in a row hold no sample twice: an epoch."""
        return self.num_samples

    @property
    def isolated(self) -> bool:
        """Documents run on in a stream: what is before is seen, whatever document it is of."""
        return False

    def row_documents(self, index: int) -> Ints:
        """Return that a row is one document. Shapes: ``[seq_len]``."""
        return np.zeros(self.seq_len, np.int64)

    def valid(self, index: int) -> int:
        """Return how many labels of sample ``index`` carry a loss."""
        return min(self.seq_len, self.num_tokens - 1 - index * self.seq_len)

    def sample(self, index: int) -> Ints:
        """Return the tokens of one sample; behind a partial one stands padding (see ``valid``).

        Shapes: ``[seq_len + 1]``.
        """
        row = np.full(self.seq_len + 1, self.pad_id, np.int64)
        piece = self._piece(index)
        row[: len(piece)] = piece
        return row

    def row(self, index: int) -> tuple[Ints, Ints]:
        """Return input ids and shifted labels of one sample. Shapes: ``[seq_len]`` each."""
        return padded_row(self._piece(index), self.seq_len, self.pad_id)

    def _piece(self, index: int) -> NDArray[Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"no sample {index} of {self.num_samples}")
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]
