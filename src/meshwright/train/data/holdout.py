"""Which documents are held out for evaluation: by the hash of their text, so that equal ones are on one side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.train.data.order import Ints


def held_out(
    ends: Ints, digests: NDArray[np.uint64], fraction: float, *, tail: bool = True
) -> tuple[NDArray[np.bool_], str]:
    """Return which documents are held out, and how the split was made.

    Documents are taken in the order of their hashes, equal documents together, until the fraction is
    reached. Where documents are too few or too long for that (less than half or more than twice the
    fraction), the tail of the stream is held out instead; without ``tail``, where documents must stay whole, the
    nearest number of whole documents is, as long as most of the text stays to train on.
    """
    held = np.zeros(len(ends), np.bool_)
    if fraction <= 0:
        return held, "none held out"
    lengths = np.diff(ends, prepend=0)
    order = np.lexsort((np.arange(len(ends)), digests))
    reached = np.cumsum(lengths[order])
    count = int(np.searchsorted(reached, fraction * reached[-1])) + 1
    while count < len(order) and digests[order[count]] == digests[order[count - 1]]:
        count += 1
    share = reached[min(count, len(order)) - 1] / reached[-1]
    most = min(2 * fraction, (1 + fraction) / 2) if tail else (1 + fraction) / 2
    if count < len(order) and (not tail or fraction / 2 <= share) and share <= most:
        held[order[:count]] = True
        return held, "whole documents, by hash"
    return held, "tail of the stream" if tail else "none held out: too few documents"
