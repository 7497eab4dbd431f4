"""Attention of some queries to some keys, so that the parts of a cut sequence add up to the whole: maths only.

A softmax over keys that are seen in parts: each part gives its own normalised output o and the logarithm l of its sum
of exponentials. Two parts make l = log(exp(l1) + exp(l2)) and o = exp(l1 - l) o1 + exp(l2 - l) o2, which never leaves
the range of the numbers. Backward of a part needs only the *final* o and l: with p = exp(s - l) the scores' gradient
is p (dO v' - rowsum(dO o)), and gradients of queries and keys are sums over parts.

Which part sees what follows from the positions (``parallel.tiles``).

A soft cap c makes scores c tanh(s / c): their gradient is multiplied by 1 - (score / c)^2.

With dropout o is the sum of the shares that are left, scaled by 1 / (1 - p), times their values; l is that of all shares,
so parts add up as before. Backward: the gradient of a share that was dropped is 0, of the others dO v' / (1 - p).

A sink is one more score z of a head, the same for every query, without a value. It joins once, after all parts, with
output 0 and l = z: the formulas above hold with the l and o that it leaves, and its own gradient is the sum over
queries of -exp(z - l) rowsum(dO o).

Shape suffixes: B micro-batch, H query heads, K key/value heads, Q queries, S keys, E head size. Key/value heads are
never expanded: query head h reads key/value head h // (H / K).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from meshwright.layout.context import DRAWN_AT_ONCE
from meshwright.parallel.tiles import Tile

ROWS_AT_ONCE = 2**24
"""Largest number of scores that the plain kernel holds at once (B x H x queries x S)."""


class Pairs(Protocol):
    """What is particular to the pairs of a tile: which see each other, a cap of scores, which shares are dropped."""

    @property
    def cap(self) -> float | None:
        """The soft cap of scores, or None."""
        ...

    @property
    def draws(self) -> bool:
        """Whether shares are dropped."""
        ...

    def seen(self, start: int, stop: int) -> Tensor | None:
        """Return which keys the queries start..stop see, bool [1 or B, 1, rows, S]; None for all."""
        ...

    def dropping(self, start: int, stop: int) -> Callable[[Tensor], Tensor]:
        """Return what drops and scales numbers of the pairs [B, H, rows, S] of queries start..stop."""
        ...


# --- kernels: forward gives (output, log-sum-exp), backward takes the final ones ---


def attend(
    q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scale: float, causal: bool, pairs: Pairs | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, E] in the queries' dtype and the log-sum-exp [B, H, Q] in at least float32.

    ``causal`` hides keys of a larger index (as many queries as keys); ``pairs`` hides and drops beside it. A query that
    sees nothing has output 0 and log-sum-exp -inf. Uses the device's fused kernel where it can (``fused``): those that
    give a log-sum-exp take neither a mask, a soft cap nor a dropout mask, so with ``pairs`` the plain one runs.
    """
    if pairs is None and (kernel := fused(q_BHQE, v_BKSE)) is not None:
        if kernel == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_BHQE, k_BKSE, v_BKSE, 0.0, causal, scale=scale
            )
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            q_BHQE, k_BKSE, v_BKSE, 0.0, causal, scale=scale
        )
        return out[0], out[1]
    return plain(q_BHQE, k_BKSE, v_BKSE, scale, causal, pairs)


def attend_backward(
    grad_BHQE: Tensor,
    q_BHQE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    causal: bool,
    pairs: Pairs | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's share of the gradients of queries, keys and values, given the final output and log-sum-exp."""
    if pairs is None and (kernel := fused(q_BHQE, v_BKSE)) is not None:
        if kernel == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_BHQE, q_BHQE, k_BKSE, v_BKSE, out_BHQE, lse_BHQ, 0.0, causal, scale=scale
            )
        none = torch.zeros((), dtype=torch.uint64, device=q_BHQE.device)  # no dropout: no random numbers
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_BHQE, q_BHQE, k_BKSE, v_BKSE, out_BHQE, lse_BHQ.contiguous(), None, None,
            q_BHQE.shape[2], k_BKSE.shape[2], 0.0, causal, none, none, scale=scale,
        )  # fmt: skip
    return plain_backward(grad_BHQE, q_BHQE, k_BKSE, v_BKSE, out_BHQE, lse_BHQ, scale, causal, pairs)


def fused(q_BHQE: Tensor, v_BKSE: Tensor) -> Literal["cpu", "cuda"] | None:
    """Return which fused kernel with a log-sum-exp takes these tensors, or None for the plain one.

    The CPU's takes every float dtype; CUDA's flash attention takes 16 bit and head sizes up to 256 by eights.
    """
    size = q_BHQE.shape[-1]
    if size != v_BKSE.shape[-1]:
        return None
    if q_BHQE.device.type == "cpu":
        return "cpu"
    low = q_BHQE.dtype in (torch.bfloat16, torch.float16)
    return "cuda" if q_BHQE.device.type == "cuda" and low and size % 8 == 0 and size <= 256 else None


def plain(
    q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scale: float, causal: bool, pairs: Pairs | None
) -> tuple[Tensor, Tensor]:
    """Do what ``attend`` says with matrix products, some queries at a time, in at least float32."""
    full = torch.promote_types(q_BHQE.dtype, torch.float32)
    heads, kv = q_BHQE.shape[1], k_BKSE.shape[1]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    k, v = k_BKSE.to(full), v_BKSE.to(full)
    for start, stop in _row_blocks(q_BHQE, k_BKSE, pairs):
        scores = _scores(q_BHQE, k, scale, causal, pairs, start, stop)
        lse = scores.logsumexp(-1)
        share = _dropping(pairs, start, stop)(_shares(scores, lse))
        out = _grouped(share, kv) @ v
        outs.append(_heads(out, heads, stop - start).to(q_BHQE.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_backward(
    grad_BHQE: Tensor,
    q_BHQE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    out_BHQE: Tensor,
    lse_BHQ: Tensor,
    scale: float,
    causal: bool,
    pairs: Pairs | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``attend_backward`` says, computing the shares again some queries at a time."""
    full = torch.promote_types(q_BHQE.dtype, torch.float32)
    heads, kv = q_BHQE.shape[1], k_BKSE.shape[1]
    k, v = k_BKSE.to(full), v_BKSE.to(full)
    grad_q: list[Tensor] = []
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in _row_blocks(q_BHQE, k_BKSE, pairs):
        rows, drop = slice(start, stop), _dropping(pairs, start, stop)
        grad = grad_BHQE[:, :, rows].to(full)
        scores = _scores(q_BHQE, k, scale, causal, pairs, start, stop)
        share = _shares(scores, lse_BHQ[:, :, rows].to(full))
        row_sum = (grad * out_BHQE[:, :, rows].to(full)).sum(-1, keepdim=True)
        share_g, grad_g = _grouped(drop(share), kv), _grouped(grad, kv)
        grad_v += share_g.transpose(-1, -2) @ grad_g
        seen_by = drop(_heads(grad_g @ v.transpose(-1, -2), heads, stop - start))
        grad_s = share * (seen_by - row_sum)
        if pairs is not None and pairs.cap is not None:  # hidden scores are -inf and have no share
            slope = 1.0 - (scores / pairs.cap).square()
            grad_s = grad_s * slope.masked_fill(scores == -math.inf, 0.0)
        grad_s_g = _grouped(grad_s * scale, kv)
        grad_q.append(_heads(grad_s_g @ k, heads, stop - start).to(q_BHQE.dtype))
        grad_k += grad_s_g.transpose(-1, -2) @ _grouped(q_BHQE[:, :, rows].to(full), kv)
    return torch.cat(grad_q, 2), grad_k.to(k_BKSE.dtype), grad_v.to(v_BKSE.dtype)


def _row_blocks(q_BHQE: Tensor, k_BKSE: Tensor, pairs: Pairs | None) -> list[tuple[int, int]]:
    """Return stretches of queries whose scores together stay below ``ROWS_AT_ONCE``, or ``DRAWN_AT_ONCE``."""
    b, h, queries, _ = q_BHQE.shape
    most = DRAWN_AT_ONCE if pairs is not None and pairs.draws else ROWS_AT_ONCE
    rows = max(1, min(queries, most // max(1, b * h * k_BKSE.shape[2])))
    return [(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def _scores(
    q_BHQE: Tensor, k_BKSE: Tensor, scale: float, causal: bool, pairs: Pairs | None, start: int, stop: int
) -> Tensor:
    """Return the scores [B, H, rows, S] of queries start..stop, -inf where hidden."""
    kv, keys = k_BKSE.shape[1], k_BKSE.shape[2]
    q_g = _grouped(q_BHQE[:, :, start:stop].to(k_BKSE.dtype), kv)
    scores = _heads(q_g @ k_BKSE.transpose(-1, -2), q_BHQE.shape[1], stop - start) * scale
    if pairs is not None and pairs.cap is not None:
        scores = torch.tanh(scores / pairs.cap) * pairs.cap
    if causal:
        at = torch.arange(start, stop, device=scores.device)[:, None]
        hidden = at < torch.arange(keys, device=scores.device)[None, :]
        scores = scores.masked_fill(hidden, -math.inf)
    seen = None if pairs is None else pairs.seen(start, stop)
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def _dropping(pairs: Pairs | None, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if pairs is None else pairs.dropping(start, stop)


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), 0 in rows that see nothing."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _grouped(x_BHQn: Tensor, kv: int) -> Tensor:
    """Return [B, K, H / K x Q, n]: the queries of all heads that read one key/value head, together."""
    b, h, q, n = x_BHQn.shape
    return x_BHQn.reshape(b, kv, h // kv * q, n)


def _heads(x_BKGn: Tensor, heads: int, queries: int) -> Tensor:
    return x_BKGn.reshape(x_BKGn.shape[0], heads, queries, x_BKGn.shape[-1])


# --- adding up parts ---


class Parts:
    """The output and log-sum-exp of queries over the keys seen so far, in at least float32."""

    def __init__(self, like_BHQE: Tensor, out_size: int) -> None:
        b, h, q, _ = like_BHQE.shape
        self.shape = (b, h, q, out_size)
        self.dtype = torch.promote_types(like_BHQE.dtype, torch.float32)
        self._seen = False

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Add what the tile's queries saw in it; ``out`` and ``lse`` are left as they are."""
        if not self._seen:
            self._seen = True
            b, h, q, e = self.shape
            # token first in memory, as the matrix behind attention reads it: one storage serves both
            self.out_BHQE = out.new_zeros((b, q, h, e), dtype=self.dtype).transpose(1, 2)
            if (tile.q0, tile.q1) == (0, q):
                # copies, because they are added to in place: selective recompute keeps the kernel's own outputs
                self.out_BHQE.copy_(out)
                self.lse_BHQ = lse.to(self.dtype, copy=True)
                return
            self.lse_BHQ = out.new_full(self.shape[:3], -math.inf, dtype=self.dtype)
        rows = slice(tile.q0, tile.q1)
        before = self.lse_BHQ[:, :, rows]
        joined = torch.logaddexp(before, lse.to(before.dtype))
        base = joined.masked_fill(joined == -math.inf, 0.0)
        held = self.out_BHQE[:, :, rows]
        held.mul_((before - base).exp()[..., None])
        held.add_(out.to(held.dtype) * (lse.to(before.dtype) - base).exp()[..., None])
        self.lse_BHQ[:, :, rows] = joined

    def sink(self, sinks_H: Tensor) -> None:
        """Join a score of each head that has no value, after all keys."""
        joined_BHQ = torch.logaddexp(self.lse_BHQ, sinks_H.to(self.lse_BHQ.dtype)[:, None])
        self.out_BHQE.mul_((self.lse_BHQ - joined_BHQ).exp()[..., None])
        self.lse_BHQ = joined_BHQ


def sink_gradient(grad_BHQE: Tensor, out_BHQE: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient [H] of the sinks over these queries, given the final output and log-sum-exp."""
    full = lse_BHQ.dtype
    row_sum_BHQ = (grad_BHQE.to(full) * out_BHQE.to(full)).sum(-1)
    share_BHQ = (sinks_H.to(full)[:, None] - lse_BHQ).exp()
    return -(share_BHQ * row_sum_BHQ).sum((0, 2)).to(sinks_H.dtype)
