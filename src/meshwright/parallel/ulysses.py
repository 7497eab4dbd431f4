"""Ulysses: an all-to-all turns a part of the sequence of all heads into the whole sequence of a part of the heads.

Maths: attention of different heads is independent, so n ranks with H / n query heads each compute it on whole
sequences. Rank j needs the key/value heads that its query heads read. Where n divides the K key/value heads it gets
K / n of them; where n is larger, several ranks get the same head and its gradient is the sum of theirs.

Communication on ``cp`` (n ranks): forward one all-to-all of queries, keys and values together and one of the output;
backward their transposes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout.context import kv_heads_sent
from meshwright.parallel.dropout import Drops
from meshwright.parallel.ring import ring_attention, ring_of
from meshwright.parallel.tiles import Rule


def _swap(parts_nX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row j to rank j; return what the ranks sent, by rank."""
    out = torch.empty_like(parts_nX)
    dist.all_to_all_single(out.view(-1), parts_nX.contiguous().view(-1), group=group)
    return out


class _Swap(torch.autograd.Function):
    """An all-to-all of equal parts; its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, parts_nX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swap(parts_nX, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swap(grads[0], ctx.group), None


def by_heads(x_BHLE: Tensor, heads_each: int) -> Tensor:
    """Return [n, B x heads_each x L x E]: what each rank gets of this rank's part of the sequence."""
    b, h, length, e = x_BHLE.shape
    return x_BHLE.reshape(b, h // heads_each, heads_each, length, e).transpose(0, 1).flatten(1)


def whole_sequence(parts_nX: Tensor, b: int, heads_each: int, e: int) -> Tensor:
    """Return [B, heads_each, n x L, E] of the parts that the ranks sent, in their order."""
    n = parts_nX.shape[0]
    parts = parts_nX.reshape(n, b, heads_each, -1, e)
    return parts.permute(1, 2, 0, 3, 4).reshape(b, heads_each, -1, e)


def ulysses_attention(
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLF: Tensor,
    *,
    group: dist.ProcessGroup,
    rule: Rule,
    scale: float,
    documents_BT: Tensor | None = None,
    drops: Drops | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention output [B, H, L, F] of this rank's part of the sequence (part i of n on rank i).

    ``documents_BT``: document of each position of the whole sequence, or None; only equal ones see each other.
    ``drops``: dropout of attention probabilities of the heads that this rank holds outside, or None.
    ``sinks_H``: a score without a value of each of those heads, or None.
    Communication: see the module. n divides H.
    """
    n = group.size()
    (b, h, length, e), f = q_BHLE.shape, v_BKLF.shape[-1]
    each, kv = h // n, k_BKLE.shape[1]
    heads = torch.tensor(kv_heads_sent(h, kv, n), device=q_BHLE.device)
    if len(heads) != kv or kv % n:
        k_BKLE, v_BKLF = k_BKLE.index_select(1, heads), v_BKLF.index_select(1, heads)
    kv_each = len(heads) // n
    parts = [by_heads(q_BHLE, each), by_heads(k_BKLE, kv_each), by_heads(v_BKLF, kv_each)]
    sizes = [p.shape[1] for p in parts]
    sent: Any = _Swap.apply(torch.cat(parts, 1), group)
    q, k, v = (
        whole_sequence(p, b, heads_here, size)
        for p, heads_here, size in zip(sent.split(sizes, 1), (each, kv_each, kv_each), (e, e, f), strict=True)
    )
    mine = None if drops is None else drops.from_head(group.rank() * each)
    sinks = None if sinks_H is None else sinks_H.narrow(0, group.rank() * each, each)
    ring = ring_of(None, [((0, n * length),)], rule, scale, documents_BT, mine, sinks)
    out = ring_attention(q, k, v, ring)
    back = out.reshape(b, each, n, length, f).permute(2, 0, 1, 3, 4).flatten(1)
    got: Any = _Swap.apply(back, group)
    return got.reshape(n, b, each, length, f).transpose(0, 1).reshape(b, h, length, f)
