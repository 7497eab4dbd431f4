"""Which positions of a sequence a rank of the context axis holds; pure arithmetic.

A sequence is padded to a length that every rank divides alike. ``ring`` cuts it in 2 * cp pieces and gives rank i the
pieces i and 2 * cp - 1 - i (zig-zag), so that every rank has the same share of a causal mask; ``ulysses`` gives rank i
the i-th of cp pieces, because its attention sees whole sequences.
"""

from __future__ import annotations

from math import lcm
from typing import Final

from meshwright.layout.layout import Layout

Run = tuple[int, int]
"""(first position, number of positions) of a stretch that lies together in the sequence and on its rank."""

DRAWN_AT_ONCE: Final = 2**21
"""Scores of attention over ranks that are computed at once when shares are dropped: their masks are made of 64-bit
numbers, several to each score."""


def length_unit(layout: Layout) -> int:
    """Return what the padded length is a multiple of: cp pieces (2 * cp for a ring), and tp tokens with sp=on."""
    if layout.cp == 1:
        return 1
    tp = layout.tp if layout.sp else 1
    return layout.cp * (lcm(2, tp) if layout.cp_style == "ring" else tp)


def padded_length(layout: Layout, seq_len: int) -> int:
    """Return the positions that all ranks of the context axis hold together: ``seq_len``, rounded up."""
    unit = length_unit(layout)
    return -(-seq_len // unit) * unit


def local_length(layout: Layout, seq_len: int) -> int:
    """Return the positions that one rank of the context axis holds, padding among them."""
    return padded_length(layout, seq_len) // layout.cp


def runs(style: str, cp: int, index: int, padded: int) -> tuple[Run, ...]:
    """Return the stretches that coordinate ``index`` holds of ``padded`` positions, ascending."""
    if cp == 1:
        return ((0, padded),)
    if style == "ulysses":
        each = padded // cp
        return ((index * each, each),)
    piece = padded // (2 * cp)
    return ((index * piece, piece), ((2 * cp - 1 - index) * piece, piece))


def kv_heads_sent(heads: int, kv_heads: int, cp: int) -> tuple[int, ...]:
    """Return the key/value heads that ``ulysses`` sends, rank by rank of ``cp``, equally many to each.

    Rank j has query heads j * heads / cp and following, and query head h reads key/value head h // (heads / kv_heads).
    A rank gets the heads it needs: kv_heads / cp where that is whole; one, where all its query heads read the same;
    else one for each of its query heads.
    """
    if kv_heads % cp == 0:
        return tuple(range(kv_heads))
    each, group = heads // cp, heads // kv_heads
    if group % each == 0:
        return tuple(j * each // group for j in range(cp))
    return tuple(h // group for h in range(heads))
