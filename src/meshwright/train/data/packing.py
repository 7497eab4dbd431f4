"""Rows from documents: what is done with long ones, and which documents share a row. Pure functions of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.order import Ints

RowKind: TypeAlias = Literal["stream", "pack", "pad"]
"""How documents fill rows: run on in one stream, several apart from each other, or one each with padding."""

TooLong: TypeAlias = Literal["refuse", "split", "truncate", "skip"]
"""What is done with a document that is longer than a row."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Pieces of documents that fit a row each: inputs are tokens ``start`` to ``start + length`` of the corpus.

    Shapes: ``[parts]`` each; ``document`` is which document a part is of.
    """

    start: Ints
    length: Ints
    document: Ints
    split: int = 0
    truncated: int = 0
    skipped: int = 0

    def chosen(self, keep: NDArray[np.bool_]) -> Parts:
        """Return the parts where ``keep``."""
        return Parts(
            start=self.start[keep],
            length=self.length[keep],
            document=self.document[keep],
            split=self.split,
            truncated=self.truncated,
            skipped=self.skipped,
        )


def cut_documents(starts: Ints, lengths: Ints, seq_len: int, too_long: TooLong) -> Parts:
    """Return the parts of documents of ``lengths`` tokens that begin at ``starts``.

    A document of n tokens has n - 1 inputs, each with the token after it as its label. ``split`` makes parts of
    ``seq_len`` inputs that share one token, so that every token but the first is a label once; ``truncate`` keeps the
    first part; ``skip`` drops the document; ``refuse`` is the caller's and cuts nothing here.
    """
    number = np.arange(len(starts), dtype=np.int64)
    inputs = np.maximum(lengths - 1, 0)
    long = inputs > seq_len
    some = inputs > 0
    if too_long == "skip":
        some &= ~long
    count = np.where(some, -(-inputs // seq_len) if too_long == "split" else 1, 0)
    document = np.repeat(number, count)
    first = np.repeat(np.cumsum(count) - count, count)
    at = (np.arange(len(document), dtype=np.int64) - first) * seq_len
    return Parts(
        start=starts[document] + at,
        length=np.minimum(inputs[document] - at, seq_len),
        document=document,
        split=int(np.count_nonzero(long)) if too_long == "split" else 0,
        truncated=int(np.count_nonzero(long)) if too_long == "truncate" else 0,
        skipped=int(np.count_nonzero(long)) if too_long == "skip" else 0,
    )


def pack(lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Return rows of parts: best fit, longest first.

    Each part goes where it leaves the least room; a full part has a row of its own. The same lengths in the same
    order give the same rows.

    Returns:
        ``order`` [parts], parts by row, and ``bounds`` [rows + 1], where each row's parts begin in it.

    Source: best fit decreasing, at most 11/9 of the fewest rows + 1 (Johnson et al., SIAM J. Computing 3, 1974).
    """
    by_length = np.argsort(-lengths, kind="stable")
    full = int(np.count_nonzero(lengths == seq_len))
    row_of = np.empty(len(lengths), np.int64)
    row_of[by_length[:full]] = np.arange(full)
    rows = full
    room: dict[int, list[int]] = {}  # open rows by the room that is left
    open_rooms = 0  # bit r is set where room[r] is not empty
    for part in by_length[full:].tolist():
        length = int(lengths[part])
        fits = open_rooms >> length
        if fits:
            left = length + (fits & -fits).bit_length() - 1
            row = room[left].pop()
            if not room[left]:
                open_rooms &= ~(1 << left)
        else:
            left, row = seq_len, rows
            rows += 1
        row_of[part] = row
        left -= length
        if left > 0:
            room.setdefault(left, []).append(row)
            open_rooms |= 1 << left
    order = np.argsort(row_of, kind="stable")
    bounds = np.searchsorted(row_of[order], np.arange(rows + 1))
    return order, bounds.astype(np.int64)


def positions_of(documents: NDArray[np.int64]) -> Ints:
    """Return positions that begin again at 0 where the document changes.

    Shapes: ``documents`` ``[..., seq_len]``, the result the same.
    """
    places = np.broadcast_to(np.arange(documents.shape[-1], dtype=np.int64), documents.shape)
    begins = np.ones(documents.shape, np.bool_)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)
