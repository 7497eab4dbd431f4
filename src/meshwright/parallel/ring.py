"""Ring attention: keys and values go round the ranks of a group while queries stay.

Communication on ``cp`` (n ranks, one message holds a rank's keys and values): forward n - 1 messages to the next
rank, each on its way while the part at hand is computed; backward n - 1 of the same and n - 1 of the gradients of
keys and values, which follow them round and arrive at home (in at least float32: they are sums over ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout.context import Run
from meshwright.parallel.attend import Parts, attend, attend_backward, sink_gradient
from meshwright.parallel.dropout import Drops
from meshwright.parallel.pairs import TilePairs
from meshwright.parallel.tiles import Rule, Tile, pieces, positions_of, tiles


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Who holds which positions, and what sees what.

    Attributes:
        group: the ranks of the ring in order of their coordinate; None for one rank.
        index: this rank's coordinate.
        runs: of each coordinate, the stretches it holds.
        rule: which positions see each other.
        scale: factor on the scores.
        documents_BT: document of each position of the whole sequence, [B, T], ascending along a row, or None; only
            equal ones see each other.
        drops: dropout of attention probabilities, or None.
        sinks_H: one more score of each head, whose share goes nowhere, or None.
    """

    group: dist.ProcessGroup | None
    index: int
    runs: tuple[tuple[Run, ...], ...]
    rule: Rule
    scale: float
    documents_BT: Tensor | None = field(default=None, compare=False)
    drops: Drops | None = field(default=None, compare=False)
    sinks_H: Tensor | None = field(default=None, compare=False)
    _parts: dict[int, tuple[Tile, ...]] = field(
        default_factory=dict[int, tuple[Tile, ...]], init=False, compare=False
    )

    @property
    def size(self) -> int:
        """Ranks of the ring."""
        return len(self.runs)

    def parts(self, source: int) -> tuple[Tile, ...]:
        """Return the tiles of this rank's queries and the keys of coordinate ``source``."""
        mine, theirs = self.runs[self.index], self.runs[source]
        if self.documents_BT is None:
            return tiles(mine, theirs, self.rule)
        if source not in self._parts:  # forward and backward ask for the same
            length, held = self.documents_BT.shape[1], self._documents
            cut = (pieces(mine, length), pieces(theirs, length))
            self._parts[source] = tiles(*cut, self.rule, held.__getitem__)
        return self._parts[source]

    @cached_property
    def _documents(self) -> dict[Run, tuple[tuple[int, int], ...]]:
        """First and last document of every piece, row by row. Reads them from the device once."""
        assert self.documents_BT is not None
        length = self.documents_BT.shape[1]
        every = [piece for runs in self.runs for piece in pieces(runs, length)]
        at = torch.tensor([(start, start + n - 1) for start, n in every], device=self.documents_BT.device)
        edges = self.documents_BT[:, at.view(-1)].view(-1, len(every), 2).transpose(0, 1).tolist()
        return {
            piece: tuple((first, last) for first, last in rows)
            for piece, rows in zip(every, edges, strict=True)
        }

    def pairs(self, tile: Tile, source: int, q_BHQE: Tensor) -> TilePairs | None:
        """Return the pairs of a tile that needs a mask, or whose scores are capped or shares dropped."""
        if tile.kind != "masked" and self.drops is None and self.rule.cap is None:
            return None
        device = q_BHQE.device
        return TilePairs(
            q_at_Q=positions_of(self.runs[self.index], device)[tile.q0 : tile.q1],
            k_at_S=positions_of(self.runs[source], device)[tile.k0 : tile.k1],
            heads=q_BHQE.shape[1],
            rule=self.rule if tile.kind == "masked" else None,
            documents_BT=self.documents_BT,
            drops=self.drops,
            cap=self.rule.cap,
        )


class Rotation:
    """One message to the next rank and one from the previous rank, on their way."""

    def __init__(self, outgoing: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, n = group.rank(), group.size()
        self.incoming = torch.empty_like(outgoing)
        self._outgoing = outgoing  # kept until it is sent
        self._works: list[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=group, tag=tag, group_peer=(rank + 1) % n),
                dist.P2POp(dist.irecv, self.incoming, group=group, tag=tag, group_peer=(rank - 1) % n),
            ]
        )

    def wait(self) -> Tensor:
        """Return what came in, once both are done."""
        for work in self._works:
            work.wait()
        return self.incoming


def pack(k_BKSE: Tensor, v_BKSF: Tensor) -> Tensor:
    """Return keys and values as one flat message."""
    return torch.cat([k_BKSE.reshape(-1), v_BKSF.reshape(-1)])


def unpack(message: Tensor, k_like: Tensor, v_like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a message, as views."""
    k, v = message.split([k_like.numel(), v_like.numel()])
    return k.view(k_like.shape), v.view(v_like.shape)


class _RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks (see the module)."""

    @staticmethod
    def forward(
        ctx: Any, q_BHQE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, sinks_H: Tensor | None, ring: Ring
    ) -> Tensor:
        parts = Parts(q_BHQE, v_BKSF.shape[-1])

        def add(source: int, k: Tensor, v: Tensor) -> None:
            for tile in ring.parts(source):
                rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
                pairs = ring.pairs(tile, source, q_BHQE)
                out, lse = attend(
                    q_BHQE[:, :, rows], k[:, :, keys], v[:, :, keys], ring.scale, tile.kind == "causal", pairs
                )
                parts.add(tile, out, lse)

        _round(ring, k_BKSE, v_BKSF, add)
        if sinks_H is not None:
            parts.sink(sinks_H)
        out = parts.out_BHQE.to(q_BHQE.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q_BHQE, k_BKSE, v_BKSF, out, parts.lse_BHQ, sinks_H)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ring: Ring = ctx.ring
        q, k_home, v_home, out, lse, sinks_H = ctx.saved_tensors
        grad = grads[0].contiguous()
        full = lse.dtype
        grad_q = torch.zeros_like(q, dtype=full)
        home: list[Tensor] = []
        travelling: Rotation | None = None

        def add(source: int, k: Tensor, v: Tensor) -> None:
            nonlocal travelling
            grad_k, grad_v = torch.zeros_like(k, dtype=full), torch.zeros_like(v, dtype=full)
            for tile in ring.parts(source):
                rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
                pairs = ring.pairs(tile, source, q)
                dq, dk, dv = attend_backward(
                    grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys],
                    out[:, :, rows], lse[:, :, rows], ring.scale, tile.kind == "causal", pairs,
                )  # fmt: skip
                grad_q[:, :, rows] += dq
                grad_k[:, :, keys] += dk
                grad_v[:, :, keys] += dv
            message = pack(grad_k, grad_v)
            if source == ring.index:
                home.append(message)
                return
            if travelling is not None:  # what the ranks before have added to this block's gradients
                message += travelling.wait()
            assert ring.group is not None
            travelling = Rotation(message, ring.group, tag=1)

        _round(ring, k_home, v_home, add)
        if travelling is not None:
            home[0] += travelling.wait()
        grad_k, grad_v = unpack(home[0], k_home, v_home)
        grad_sinks = None if sinks_H is None else sink_gradient(grad, out, lse, sinks_H)
        return grad_q.to(q.dtype), grad_k.to(k_home.dtype), grad_v.to(v_home.dtype), grad_sinks, None


def _round(ring: Ring, k_home: Tensor, v_home: Tensor, add: Callable[[int, Tensor, Tensor], None]) -> None:
    """Call ``add`` with the keys and values of every coordinate, this rank's first, while the next are on their way."""
    k, v = k_home, v_home
    message = pack(k, v) if ring.size > 1 else None
    for step in range(ring.size):
        coming = None
        if step + 1 < ring.size:
            assert message is not None
            assert ring.group is not None
            coming = Rotation(message, ring.group, tag=0)
        add((ring.index - step) % ring.size, k, v)
        if coming is not None:
            message = coming.wait()
            k, v = unpack(message, k_home, v_home)


def ring_attention(q_BHQE: Tensor, k_BKSE: Tensor, v_BKSF: Tensor, ring: Ring) -> Tensor:
    """Return the attention output [B, H, Q, F] of this rank's queries over the keys of all ranks of the ring.

    Key/value heads are K <= H, H a multiple of K. Communication: see the module; none for one rank.
    """
    out: Any = _RingAttention.apply(q_BHQE, k_BKSE, v_BKSF, ring.sinks_H, ring)
    return out


def ring_of(
    group: dist.ProcessGroup | None,
    runs: Sequence[tuple[Run, ...]],
    rule: Rule,
    scale: float,
    documents_BT: Tensor | None = None,
    drops: Drops | None = None,
    sinks_H: Tensor | None = None,
) -> Ring:
    """Return the ring of ``group``; ``runs`` of each of its coordinates."""
    index = 0 if group is None else group.rank()
    return Ring(
        group=group,
        index=index,
        runs=tuple(runs),
        rule=rule,
        scale=scale,
        documents_BT=documents_BT,
        drops=drops,
        sinks_H=sinks_H,
    )
