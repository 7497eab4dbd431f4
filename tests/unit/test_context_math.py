"""The maths of a cut sequence in one process: tiles, merging of parts, kernels, and who holds what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshwright.layout.context import kv_heads_sent, local_length, padded_length, runs
from meshwright.layout.parse import parse_layout
from meshwright.parallel import attend as maths
from meshwright.parallel import tiles as geometry
from meshwright.parallel.attend import Parts, attend
from meshwright.parallel.context import ContextAxis, local_batch
from meshwright.parallel.dropout import Drops
from meshwright.parallel.loss import IGNORE
from meshwright.parallel.ring import Ring, ring_attention, ring_of
from meshwright.parallel.tiles import Rule, Tile, positions_of, tiles, visible

CPU = torch.device("cpu")


def test_zigzag_gives_rank_0_the_first_and_the_last_piece() -> None:
    assert runs("ring", 2, 0, 16) == ((0, 4), (12, 4))  # H66: 0-3 and 12-15
    assert runs("ring", 2, 1, 16) == ((4, 4), (8, 4))
    assert runs("ulysses", 2, 1, 16) == ((8, 8),)


@pytest.mark.parametrize(("style", "cp", "length"), [("ring", 2, 8), ("ring", 4, 8), ("ulysses", 4, 8)])
def test_h71_lengths_that_do_not_divide_are_rounded_up(style: str, cp: int, length: int) -> None:
    layout = parse_layout(f"cp={cp},cp_style={style}")
    assert padded_length(layout, 7) == length
    assert local_length(layout, 7) == length // cp
    held = [p for i in range(cp) for p in positions_of(runs(style, cp, i, length), CPU).tolist()]
    assert sorted(held) == list(range(length))


def test_lengths_also_divide_over_the_tensor_axis() -> None:
    assert padded_length(parse_layout("cp=2,tp=4"), 17) == 24
    assert padded_length(parse_layout("cp=2,tp=4,sp=off"), 17) == 20
    assert padded_length(parse_layout("tp=4"), 17) == 17


@pytest.mark.parametrize("rule", [Rule(), Rule(window=5)])
@pytest.mark.parametrize("rows", [1, 3])
def test_tiles_of_documents_cover_each_visible_pair_once(
    rule: Rule, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a batch with borders of their own: a tile is left out, or goes without a mask, only where all agree."""
    monkeypatch.setattr(geometry, "LEAST_PIECE", 2)
    length, cp = 32, 2
    documents = _documents(rows, length)
    held = [runs("ring", cp, i, length) for i in range(cp)]
    few = 0
    for mine, theirs in itertools.product(range(cp), repeat=2):
        ring = Ring(group=None, index=mine, runs=tuple(held), rule=rule, scale=1.0, documents_BT=documents)
        q_at, k_at = positions_of(held[mine], CPU), positions_of(held[theirs], CPU)
        want = visible(q_at, k_at, rule, documents[:, q_at], documents[:, k_at])[:, 0]
        got = torch.zeros_like(want, dtype=torch.int64)
        for t in ring.parts(theirs):
            block = want.new_ones(rows, t.q1 - t.q0, t.k1 - t.k0).long()
            if t.kind == "causal":
                block = block.tril()
            elif t.kind == "masked":
                q, k = q_at[t.q0 : t.q1], k_at[t.k0 : t.k1]
                block = visible(q, k, rule, documents[:, q], documents[:, k])[:, 0].long()
            got[:, t.q0 : t.q1, t.k0 : t.k1] += block
            few += 1
        assert torch.equal(got, want.long())
    assert few < 60  # tiles beside each other are one


@pytest.mark.parametrize("rule", [Rule(), Rule(causal=False), Rule(window=3), Rule(window=9)])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_tiles_cover_each_visible_pair_once(rule: Rule, cp: int) -> None:
    length = 16
    for mine, theirs in itertools.product(range(cp), repeat=2):
        q_runs, k_runs = runs("ring", cp, mine, length), runs("ring", cp, theirs, length)
        q_at, k_at = positions_of(q_runs, CPU), positions_of(k_runs, CPU)
        want = visible(q_at, k_at, rule, None, None)[0, 0]
        got = torch.zeros_like(want, dtype=torch.int64)
        for t in tiles(q_runs, k_runs, rule):
            block = torch.ones(t.q1 - t.q0, t.k1 - t.k0, dtype=torch.int64)
            if t.kind == "causal":
                block = block.tril()
            elif t.kind == "masked":
                block = visible(q_at[t.q0 : t.q1], k_at[t.k0 : t.k1], rule, None, None)[0, 0].long()
            got[t.q0 : t.q1, t.k0 : t.k1] += block
        assert torch.equal(got, want.long())


def test_zigzag_is_balanced_one_kernel_call_for_each_other_rank() -> None:
    cp, length = 4, 32
    areas = []
    for mine in range(cp):
        area = 0
        for theirs in range(cp):
            found = tiles(runs("ring", cp, mine, length), runs("ring", cp, theirs, length), Rule())
            assert len(found) == 1
            (t,) = found
            area += (t.q1 - t.q0) * (t.k1 - t.k0)
        areas.append(area)
    assert len(set(areas)) == 1


def test_a_window_skips_what_is_too_far_behind() -> None:
    assert tiles(((24, 4),), ((0, 4),), Rule(window=8)) == ()
    assert tiles(((4, 4),), ((0, 4),), Rule(window=8)) == (Tile(0, 4, 0, 4, "full"),)


def test_h65_merging_is_safe_and_exact() -> None:
    like = torch.zeros(1, 1, 1, 1)
    tile = Tile(0, 1, 0, 1, "full")

    def part(value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value)

    parts = Parts(like, 1)
    parts.add(tile, part(1.0), torch.zeros(1, 1, 1))
    parts.add(tile, part(3.0), torch.full((1, 1, 1), math.log(3.0)))
    assert parts.out_BHQE.item() == pytest.approx(2.5)
    parts = Parts(like, 1)
    parts.add(tile, part(1.0), torch.full((1, 1, 1), 1000.0))
    parts.add(tile, part(3.0), torch.zeros(1, 1, 1))
    assert (parts.lse_BHQ.item(), parts.out_BHQE.item()) == (1000.0, 1.0)
    parts.add(tile, part(7.0), torch.full((1, 1, 1), -math.inf))  # a part in which nothing is seen
    assert (parts.lse_BHQ.item(), parts.out_BHQE.item()) == (1000.0, 1.0)


def _split_error(parts_count: int) -> float:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 64, 16, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    parts, each = Parts(q, 16), 64 // parts_count
    for n in range(parts_count):
        keys = slice(n * each, (n + 1) * each)
        parts.add(Tile(0, 64, 0, each, "full"), *attend(q, k[:, :, keys], v[:, :, keys], 0.25, False, None))
    return (parts.out_BHQE.to(torch.bfloat16).double() - want).abs().max().item()


def test_h65_bf16_error_of_four_parts_is_at_most_twice_that_of_one() -> None:
    assert _split_error(4) <= 2 * _split_error(1)


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_plain_and_fused_kernels_agree(kv: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "ROWS_AT_ONCE", 2 * 4 * 7 * 3)  # three queries at a time
    q, k, v, g = (torch.randn(2, h, 7, 8, dtype=torch.float64) for h in (4, kv, kv, 4))
    out, lse = attend(q, k, v, 0.3, causal, None)
    other, other_lse = maths.plain(q, k, v, 0.3, causal, None)
    assert torch.allclose(out, other, atol=1e-12)
    assert torch.allclose(lse, other_lse, atol=1e-12)
    fused = maths.attend_backward(g, q, k, v, out, lse, 0.3, causal, None)
    plain = maths.plain_backward(g, q, k, v, out, lse, 0.3, causal, None)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(fused, plain, strict=True))


@dataclass(frozen=True)
class Seen:
    """Pairs of a mask that is written down."""

    mask: torch.Tensor
    draws: bool = False
    cap: float | None = None

    def seen(self, start: int, stop: int) -> torch.Tensor:
        return self.mask[:, :, start:stop]

    def dropping(self, start: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x


def test_a_query_that_sees_nothing_has_output_and_gradient_zero() -> None:
    q, k, v, g = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(4))
    seen = torch.tensor([[False] * 3, [True, False, False], [True] * 3])[None, None]
    out, lse = attend(q, k, v, 0.5, False, Seen(seen))
    assert out[:, :, 0].abs().max() == 0
    assert bool((lse[:, :, 0] == -math.inf).all())
    grads = maths.attend_backward(g, q, k, v, out, lse, 0.5, False, Seen(seen))
    assert all(bool(torch.isfinite(x).all()) for x in grads)
    assert grads[0][:, :, 0].abs().max() == 0


def test_cuda_flash_takes_the_arguments_that_are_given_it() -> None:
    """Shapes only, on tensors without storage: the call itself needs a GPU."""
    q, k, v = (torch.empty(2, h, 16, 64, dtype=torch.bfloat16, device="meta") for h in (4, 2, 2))
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.1)
    assert (out[0].shape, out[1].shape) == (q.shape, (2, 4, 16))
    assert out[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("heads", "kv", "cp", "sent"),
    [
        (8, 4, 2, (0, 1, 2, 3)),
        (4, 2, 4, (0, 0, 1, 1)),  # H74: more ranks than key/value heads
        (8, 1, 2, (0, 0)),
        (
            12,
            3,
            2,
            (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2),
        ),  # a rank's six heads read one head and half of another
    ],
)
def test_ulysses_sends_each_rank_the_heads_its_queries_read(
    heads: int, kv: int, cp: int, sent: tuple[int, ...]
) -> None:
    assert kv_heads_sent(heads, kv, cp) == sent
    each, kv_each = heads // cp, len(sent) // cp
    for j in range(cp):
        for i in range(each):
            assert sent[j * kv_each + i // (each // kv_each)] == (j * each + i) // (heads // kv)


def _axis(style: str, cp: int, index: int, seq_len: int) -> ContextAxis:
    padded = padded_length(parse_layout(f"cp={cp},cp_style={style}"), seq_len)
    held = tuple(runs(style, cp, i, padded) for i in range(cp))
    positions = positions_of(held[index], CPU)
    group: Any = None
    return ContextAxis(
        group=group,
        style=style,
        runs=held,
        seq_len=seq_len,
        padded=padded,
        positions=positions,
        position_ids=positions.clamp(max=seq_len - 1)[None],
    )


def test_h68_labels_are_shifted_before_the_cut() -> None:
    ids, labels = torch.arange(1, 9)[None, None], torch.tensor([2, 3, 4, 5, 6, 7, 8, IGNORE])[None, None]
    inputs, mine = local_batch(_axis("ring", 2, 0, 8), ids, labels, IGNORE)
    assert inputs.tolist() == [[[1, 2, 7, 8]]]
    assert mine.tolist() == [[[2, 3, 8, IGNORE]]]
    parts = [local_batch(_axis("ring", 2, i, 8), ids, labels, IGNORE)[1] for i in range(2)]
    assert sum(int((p != IGNORE).sum()) for p in parts) == 7


def test_h71_padding_has_no_label_and_a_position_that_exists() -> None:
    ids, labels = torch.arange(1, 8)[None, None], torch.tensor([2, 3, 4, 5, 6, 7, IGNORE])[None, None]
    axes = [_axis("ring", 2, i, 7) for i in range(2)]
    parts = [local_batch(axis, ids, labels, IGNORE)[1] for axis in axes]
    assert sum(int((p != IGNORE).sum()) for p in parts) == 6
    assert axes[0].positions.tolist() == [0, 1, 6, 7]
    assert axes[0].position_ids.tolist() == [[0, 1, 6, 6]]


def test_h75_a_document_is_blind_to_the_one_before_it() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])

    def out(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ring_attention(q, key, value, ring_of(None, [((0, 8),)], Rule(), 0.5, documents))

    other_k, other_v = k.clone(), v.clone()
    other_k[:, :, 2] += 1
    other_v[:, :, 2] -= 3
    assert torch.equal(out(k, v)[:, :, 4:], out(other_k, other_v)[:, :, 4:])
    assert not torch.equal(out(k, v)[:, :, :4], out(other_k, other_v)[:, :, :4])


def _documents(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.rand(rows, length, generator=generator) < 0.2).long().cumsum(-1)


@pytest.mark.parametrize("rule", [Rule(), Rule(window=3), Rule(causal=False)])
@pytest.mark.parametrize("dropped", [False, True])
def test_h75_pieces_of_documents_with_dropout_equal_a_dense_softmax(
    rule: Rule, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of three positions, two queries at a time: outputs and gradients in float64."""
    monkeypatch.setattr(geometry, "LEAST_PIECE", 3)
    for name in ("ROWS_AT_ONCE", "DRAWN_AT_ONCE"):
        monkeypatch.setattr(maths, name, 2 * 4 * 3 * 2)
    length, documents = 23, _documents(2, 23)
    q, k, v, g = (torch.randn(2, h, length, 4, dtype=torch.float64).requires_grad_() for h in (4, 2, 2, 4))
    drops = Drops(torch.tensor([3, 99]), 0.4, 5, length) if dropped else None
    at = torch.arange(length)
    seen = visible(at, at, rule, documents, documents)
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~seen, -math.inf)
    share = scores.softmax(-1)
    if drops is not None:
        share = share * drops.kept(4, at, at) / 0.6
    want = torch.autograd.grad((share @ v.repeat_interleave(2, 1) * g.detach()).sum(), (q, k, v))
    ring = ring_of(None, [((0, length),)], rule, 0.3, documents, drops)
    out = ring_attention(q, k, v, ring)
    assert (out - share @ v.repeat_interleave(2, 1)).abs().max() < 1e-12
    got = torch.autograd.grad((out * g.detach()).sum(), (q, k, v))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


def test_pieces_without_a_common_document_are_skipped_and_those_inside_one_need_no_mask() -> None:
    length = 16 * geometry.LEAST_PIECE
    documents = (torch.arange(length) // (4 * geometry.LEAST_PIECE))[None].expand(2, -1)
    found = ring_of(None, [((0, length),)], Rule(), 1.0, documents).parts(0)
    assert {t.kind for t in found} == {"full", "causal"}
    area = sum((t.q1 - t.q0) * (t.k1 - t.k0) for t in found)
    assert (
        area == 4 * 10 * geometry.LEAST_PIECE**2
    )  # four triangles of four pieces, of 16 x 17 / 2 = 136 pieces
    shifted = torch.stack([documents[0], (torch.arange(length) + 1) // (4 * geometry.LEAST_PIECE)])
    assert "masked" in {t.kind for t in ring_of(None, [((0, length),)], Rule(), 1.0, shifted).parts(0)}


def test_a_long_sequence_has_few_pieces() -> None:
    assert len(geometry.pieces(((0, 2**20),), 2**20)) == geometry.MOST_PIECES
    assert geometry.pieces(((5, 7), (40, 3)), 64) == ((5, 7), (40, 3))
    assert geometry.pieces(((0, 300),), 300) == ((0, 128), (128, 128), (256, 44))


@pytest.mark.parametrize("rule", [Rule(cap=0.6), Rule(window=3, cap=0.6)], ids=str)
@pytest.mark.parametrize("docs", [False, True])
def test_soft_capped_scores_equal_plain_softmax(rule: Rule, docs: bool) -> None:
    """The cap is near the scores; hidden pairs stay hidden, and have no slope that is not a number."""
    generator = torch.Generator().manual_seed(2)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 8, 4, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v, g = draw(4), draw(2), draw(2), draw(4)
    at = torch.arange(8)
    documents = torch.stack([at // 3, (at > 4).long()]) if docs else None
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    capped = torch.tanh(scores / 0.6) * 0.6
    seen = visible(at, at, rule, documents, documents)
    want = capped.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    got = ring_attention(q, k, v, ring_of(None, [((0, 8),)], rule, 0.5, documents))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    mine = torch.autograd.grad(got, (q, k, v), g.detach())
    for one, two in zip(mine, torch.autograd.grad(want, (q, k, v), g.detach()), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)
