"""Which pairs of a tile see each other, and which of their shares dropout takes: made some queries at a time.

A mask over all pairs of a sequence is T x T for every head with dropout; nobody keeps one. It follows from positions,
documents and the elements' keys (``parallel.dropout``), so forward and backward make it again for the rows at hand.

Communication: none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshwright.parallel.dropout import Drops, apply_mask
from meshwright.parallel.tiles import Rule, visible


@dataclass(frozen=True, kw_only=True)
class TilePairs:
    """The pairs of one tile's queries and keys, by their positions in the sequence.

    Attributes:
        q_at_Q: positions of the queries.
        k_at_S: positions of the keys.
        heads: query heads of this rank.
        rule: what sees what by position; None where the tile's kind says it all.
        documents_BT: document of each position of the sequence, or None; only equal ones see each other.
        drops: dropout of the shares, or None.
        cap: soft cap of the scores, or None.
    """

    q_at_Q: Tensor
    k_at_S: Tensor
    heads: int
    rule: Rule | None
    documents_BT: Tensor | None
    drops: Drops | None
    cap: float | None = None

    @property
    def draws(self) -> bool:
        """Whether shares are dropped."""
        return self.drops is not None

    def seen(self, start: int, stop: int) -> Tensor | None:
        """Return which keys the queries start..stop see, bool [1 or B, 1, rows, S]; None for all."""
        if self.rule is None:
            return None
        q_at, docs = self.q_at_Q[start:stop], self.documents_BT
        if docs is None:
            return visible(q_at, self.k_at_S, self.rule, None, None)
        return visible(q_at, self.k_at_S, self.rule, docs[:, q_at], docs[:, self.k_at_S])

    def dropping(self, start: int, stop: int) -> Callable[[Tensor], Tensor]:
        """Return what drops and scales numbers of the pairs [B, H, rows, S] of queries start..stop."""
        drops = self.drops
        if drops is None:
            return lambda x_BHQS: x_BHQS
        kept_BHQS = drops.kept(self.heads, self.q_at_Q[start:stop], self.k_at_S)
        return lambda x_BHQS: apply_mask(x_BHQS, kept_BHQS, drops.p)
