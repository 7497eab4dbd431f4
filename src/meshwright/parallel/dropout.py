"""Dropout whose masks do not depend on the layout: each element's fate is a function of what it is, not of where.

Maths: a 64-bit mixing function of (seed, step, row of the global batch, place in the model, token or head and positions,
feature) gives each element of a logical activation a number that is uniform in [0, 1); it is kept where the number is at
least p. The number needs no state, so every rank computes it for the elements it holds, a recomputed forward computes it
again, and a resumed run goes on with the masks that an unbroken one has.

Places: every ``nn.Dropout`` of the model, by its logical name, and the dropout of attention probabilities, which fused
kernels draw by themselves: a model that asks for it gets attention in separate operations (scores, softmax, mask,
product), by transformers' attention registry; no class is changed. Over a context axis that is ``parallel.context``,
which drops the same pairs of positions.

Shape suffixes: B micro-batch, T tokens, D features, H heads, Q and K query and key positions.

Communication: none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.mesh.device_mesh import MeshView
from meshwright.parallel.stage import logical_name

NAME = "meshwright_dropout"
"""Under which transformers' registries know our attention function."""

ATTRIBUTE = "meshwright_dropout"
"""Attribute of an attention module that holds its ``Place``."""

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""Odd constants of the splitmix64 generator, as signed 64-bit numbers (Steele, Lea, Flood 2014)."""

_DIGITS = 53
"""Bits of a mixed number that are compared with p."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of 64-bit numbers (torch shifts signed ones arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Return the splitmix64 finalizer of int64 numbers, elementwise."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def place_number(name: str) -> int:
    """Return a fixed signed 64-bit number of a place in the model."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def kept(keys_B: Tensor, index: Tensor, p: float) -> Tensor:
    """Return which elements stay, [B, *index.shape], bool.

    Args:
        keys_B: one mixed number per row of the batch, int64.
        index: the number of each element within a row's logical activation, int64.
        p: probability of an element to go.
    """
    keys = keys_B.view(-1, *[1] * index.ndim)
    numbers = _shifted(mixed(index * _STEP + keys), 64 - _DIGITS)
    return numbers >= round(p * (1 << _DIGITS))


def apply_mask(x: Tensor, kept_: Tensor, p: float) -> Tensor:
    """Return ``x`` with the rest zeroed, scaled by 1 / (1 - p). Saves the mask until backward."""
    return x.masked_fill(~kept_, 0.0) / (1.0 - p) if p < 1.0 else x * 0.0


@dataclass
class Dropout:
    """What decides the masks of the forward that runs next; one for all stages of a rank.

    Attributes:
        seed: of the run.
        step: number of the update.
        rows_B: rows of the global batch of the micro-batch, int64.
        rows_AB: those of every micro-batch of the step on this rank.
        head: first head of attention that this rank has.
        positions: token positions that this rank holds inside the blocks, where not all; by how many it holds.
    """

    seed: int
    step: int = 0
    rows_AB: Tensor | None = None
    rows_B: Tensor | None = None
    head: int = 0
    positions: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def start(self, step: int, rows_AB: Tensor) -> None:
        """Begin an update whose micro-batches hold ``rows_AB`` of the global batch."""
        self.step, self.rows_AB = step, rows_AB

    def micro_batch(self, k: int) -> None:
        """Say which micro-batch the next forward runs."""
        self.rows_B = None if self.rows_AB is None else self.rows_AB[k]

    def keys(self, place: int, rows_B: Tensor, step: int) -> Tensor:
        """Return one number per row for a place in the model: mixed, so that no two rows, steps or places agree."""
        seed, at, now = (
            torch.tensor([self.seed, place, step]).to(rows_B.device).unbind()
        )  # sums wrap at 64 bits
        return mixed(mixed(mixed(seed * _STEP + at) + now * _STEP) + (rows_B + 1) * _STEP)

    def tokens(self, held: int, device: torch.device) -> Tensor:
        """Return the positions of the ``held`` tokens that an activation has on this rank, int64 [T]."""
        found = self.positions.get(held)
        return torch.arange(held, device=device) if found is None else found.to(device)

    def held(self) -> Held:
        """Return a context that brings back what is current now (for a recomputed forward)."""
        return Held(self, self.step, self.rows_B)


@dataclass
class Held:
    """Brings a ``Dropout`` back to an earlier micro-batch while a block runs again; may be entered several times."""

    dropout: Dropout
    step: int
    rows_B: Tensor | None
    before: list[tuple[int, Tensor | None]] = field(default_factory=list[tuple[int, "Tensor | None"]])

    def __enter__(self) -> None:
        self.before.append((self.dropout.step, self.dropout.rows_B))
        self.dropout.step, self.dropout.rows_B = self.step, self.rows_B

    def __exit__(self, *_: object) -> None:
        self.dropout.step, self.dropout.rows_B = self.before.pop()


@dataclass(frozen=True)
class Drops:
    """Which attention probabilities of one forward are dropped, whichever rank has them.

    Attributes:
        keys_B: one mixed number per row of the batch.
        p: probability of a share to go.
        head: first head of attention that is asked about.
        seq_len: tokens of a row of the batch.
    """

    keys_B: Tensor
    p: float
    head: int
    seq_len: int

    def kept(self, heads: int, q_at_Q: Tensor, k_at_K: Tensor) -> Tensor:
        """Return which shares of ``heads`` heads stay, bool [B, heads, Q, K], by the positions of the pairs."""
        head_H = torch.arange(self.head, self.head + heads, device=q_at_Q.device)
        place_QK = q_at_Q[:, None] * self.seq_len + k_at_K
        return kept(self.keys_B, head_H[:, None, None] * self.seq_len**2 + place_QK, self.p)

    def from_head(self, first: int) -> Drops:
        """Return those of the heads ``first`` and following."""
        return replace(self, head=self.head + first)


@dataclass(frozen=True)
class Place:
    """One place of dropout in the model."""

    dropout: Dropout
    number: int

    def on_tokens(self, x_BTD: Tensor, p: float) -> Tensor:
        """Drop elements of an activation by row, token position and feature."""
        rows_B = self._rows(x_BTD)
        token_T = self.dropout.tokens(x_BTD.shape[1], x_BTD.device)
        feature_D = torch.arange(x_BTD.shape[2], device=x_BTD.device)
        index_TD = token_T[:, None] * x_BTD.shape[2] + feature_D
        keys_B = self.dropout.keys(self.number, rows_B, self.dropout.step)
        return apply_mask(x_BTD, kept(keys_B, index_TD, p), p)

    def on_probabilities(self, x_BHQK: Tensor, p: float) -> Tensor:
        """Drop attention probabilities by row, head, query and key position."""
        _, heads, q, k = x_BHQK.shape
        at = torch.arange(k, device=x_BHQK.device)
        return apply_mask(x_BHQK, self.drops(x_BHQK, p, k).kept(heads, at[:q], at), p)

    def drops(self, like: Tensor, p: float, seq_len: int) -> Drops:
        """Return what drops attention probabilities of the forward that runs now.

        ``like`` has the batch as its first dim, and the device; ``seq_len`` tokens are in a row of the batch.
        """
        keys_B = self.dropout.keys(self.number, self._rows(like), self.dropout.step)
        return Drops(keys_B, p, self.dropout.head, seq_len)

    def _rows(self, x: Tensor) -> Tensor:
        rows_B = self.dropout.rows_B
        if rows_B is None or rows_B.shape[0] != x.shape[0]:
            raise RuntimeError("a forward with dropout began before its rows of the batch were said")
        return rows_B.to(x.device)


def _forward(module: nn.Dropout, place: Place, x: Tensor) -> Tensor:
    if not module.training or module.p == 0.0:
        return x
    return place.on_tokens(x, module.p)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' registry calls it, with our mask on the probabilities; else its own SDPA.

    Shapes: query [B, H, Q, E]; key and value [B, H or fewer, K, E]; returns [B, Q, H, E]. ``s_aux`` [H]: a score of each
    head without a value.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if dropout == 0.0 and softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        attention_mask = ones.tril(scores.shape[-1] - scores.shape[-2])
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    share = torch.softmax(scores, -1, dtype=wide).to(query.dtype)
    share = share if s_aux is None else share[..., :-1]
    if dropout:
        place: Place = getattr(module, ATTRIBUTE)
        share = place.on_probabilities(share, dropout)
    return (share @ value).transpose(1, 2).contiguous(), None


def use_dropout(causal_lm: nn.Module, dropout: Dropout, *, attends: bool) -> None:
    """Make every dropout of ``causal_lm`` draw its masks from ``dropout``; names must be those of the whole model.

    ``attends``: also that of attention probabilities (it is then no longer fused).
    """
    for name, module in causal_lm.named_modules():
        if isinstance(module, nn.Dropout):
            place = Place(dropout, place_number(logical_name(name)))
            setattr(module, "forward", partial(_forward, module, place))  # noqa: B010 - not by its declared type
    if not attends:
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model: Any = causal_lm
    model.set_attn_implementation(NAME)
    for name, module in causal_lm.named_modules():
        if hasattr(module, "is_causal"):
            setattr(module, ATTRIBUTE, Place(dropout, place_number(f"{logical_name(name)}.probabilities")))


def place_on_axes(dropout: Dropout, view: MeshView, heads: int, positions_L: Tensor) -> None:
    """Tell ``dropout`` which heads and tokens this rank has.

    ``positions_L``: positions that its coordinate on the context axis holds, of which the tensor axis takes a part.
    """
    tp, at, held = view.layout.tp, view.coords["tp"], len(positions_L)
    dropout.head = at * heads // tp
    dropout.positions[held] = positions_L
    if view.layout.sp and tp > 1:
        each = held // tp
        dropout.positions[each] = positions_L[at * each : (at + 1) * each]
