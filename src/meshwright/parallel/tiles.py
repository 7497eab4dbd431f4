"""Which part of the scores of a cut sequence is seen, as rectangles: geometry only.

A stretch of queries sees all of an earlier stretch of keys, none of a later one, and of its own what is not ahead. Only a
window's edge needs a mask, and packed documents: with them stretches are cut in pieces, of which those without a
common document are left out, and those inside one document need no mask.

Communication: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from meshwright.layout.context import Run

LEAST_PIECE = 128
"""Positions below which a stretch is not cut further to skip what documents hide."""

MOST_PIECES = 64
"""Pieces that a whole sequence is cut in at most."""

Kind: TypeAlias = Literal["full", "causal", "masked"]


@dataclass(frozen=True)
class Rule:
    """Which pairs of positions see each other.

    Attributes:
        causal: a query sees no later key.
        window: a query sees keys less than this many positions before it; None for all.
        cap: soft cap of the scores of those that do; None for none.
    """

    causal: bool = True
    window: int | None = None
    cap: float | None = None


@dataclass(frozen=True)
class Tile:
    """A rectangle of local queries [q0, q1) and local keys [k0, k1) with one kind of mask.

    ``full``: every pair; ``causal``: as many queries as keys, at the same positions; ``masked``: by position.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind


Documents: TypeAlias = Callable[[Run], tuple[tuple[int, int], ...]]
"""Returns the first and the last document of a stretch, row by row of the batch; documents ascend along a row."""


def tiles(
    q_runs: Sequence[Run], k_runs: Sequence[Run], rule: Rule, documents: Documents | None = None
) -> tuple[Tile, ...]:
    """Return the rectangles of the scores that are not all hidden; each pair that may be seen is in exactly one.

    ``documents``: only pairs of one document see each other; the mask of a tile has to say so where it is "masked".
    """
    if rule.causal and rule.window is None and documents is None and tuple(q_runs) == tuple(k_runs):
        length = sum(n for _, n in q_runs)
        return (Tile(0, length, 0, length, "causal"),)
    found: list[Tile] = []
    q0 = 0
    for q in q_runs:
        row: list[Tile] = []
        k0 = 0
        for k in k_runs:
            kind = _kind(q, k, rule)
            if kind is not None and documents is not None:
                kind = _within(kind, documents(q), documents(k))
            if kind is not None:
                _add(row, Tile(q0, q0 + q[1], k0, k0 + k[1], kind))
            k0 += k[1]
        for tile in row:
            _add_below(found, tile)
        q0 += q[1]
    return tuple(found)


def pieces(runs: Sequence[Run], length: int) -> tuple[Run, ...]:
    """Return ``runs`` cut in pieces, of which a sequence of ``length`` positions has at most ``MOST_PIECES``."""
    size = max(LEAST_PIECE, -(-length // MOST_PIECES))
    return tuple((start + at, min(size, count - at)) for start, count in runs for at in range(0, count, size))


def _kind(q: Run, k: Run, rule: Rule) -> Kind | None:
    nearest, farthest = q[0] - (k[0] + k[1] - 1), q[0] + q[1] - 1 - k[0]  # smallest and largest query - key
    if rule.causal and farthest < 0:
        return None
    if rule.window is not None and nearest >= rule.window:
        return None
    if rule.window is not None and farthest >= rule.window:
        return "masked"
    if not rule.causal or nearest >= 0:
        return "full"
    return "causal" if q == k else "masked"


def _within(kind: Kind, q: Sequence[tuple[int, int]], k: Sequence[tuple[int, int]]) -> Kind | None:
    """Return what documents leave of a tile: nothing, all of it where each row has one, or a mask."""
    if not any(
        first <= k_last and k_first <= last for (first, last), (k_first, k_last) in zip(q, k, strict=True)
    ):
        return None
    one = all(first == last and (first, last) == keys for (first, last), keys in zip(q, k, strict=True))
    return kind if one else "masked"


def _add(row: list[Tile], new: Tile) -> None:
    """Append a tile to those of the same queries, joined with one beside it that is full or masked like it."""
    last = row[-1] if row else None
    if last is not None and last.kind == new.kind != "causal" and last.k1 == new.k0:
        row[-1] = Tile(new.q0, new.q1, last.k0, new.k1, new.kind)
    else:
        row.append(new)


def _add_below(found: list[Tile], new: Tile) -> None:
    """Append a tile to those of earlier queries, a full one joined with a full one of the same keys right before."""
    if new.kind == "full":
        for i in reversed(range(len(found))):
            old = found[i]
            if old.q1 < new.q0:
                break  # tiles come by their queries: none of these is left
            if old.kind == "full" and (old.k0, old.k1, old.q1) == (new.k0, new.k1, new.q0):
                found.pop(i)
                new = Tile(old.q0, new.q1, new.k0, new.k1, "full")
                break
    found.append(new)


def positions_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Return the positions of ``runs`` in order, int64 [sum of lengths]."""
    return torch.cat([torch.arange(start, start + n, device=device) for start, n in runs])


def visible(
    q_at_Q: Tensor, k_at_S: Tensor, rule: Rule, q_docs_BQ: Tensor | None, k_docs_BS: Tensor | None
) -> Tensor:
    """Return which keys each query sees, bool [1 or B, 1, Q, S]."""
    ahead_QS = q_at_Q[:, None] - k_at_S[None, :]
    seen_QS = torch.ones_like(ahead_QS, dtype=torch.bool)
    if rule.causal:
        seen_QS &= ahead_QS >= 0
    if rule.window is not None:
        seen_QS &= ahead_QS < rule.window
    if q_docs_BQ is None or k_docs_BS is None:
        return seen_QS[None, None]
    return seen_QS[None, None] & (q_docs_BQ[:, None, :, None] == k_docs_BS[:, None, None, :])
