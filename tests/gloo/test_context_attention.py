"""Ring and Ulysses attention on ranks: outputs and gradients equal one device's in float64."""

from __future__ import annotations

from typing import Any

import pytest

RING, ULYSSES = "ring", "ulysses"


def _cut(
    rank: int,
    world: int,
    style: str,
    length: int,
    heads: int,
    kv: int,
    rule: tuple[bool, int | None],
    docs: bool,
) -> dict[str, float]:
    """Return the largest differences of this rank's part from one device's plain softmax."""
    import torch
    import torch.distributed as dist

    from meshwright.layout.context import padded_length, runs
    from meshwright.layout.parse import parse_layout
    from meshwright.parallel.ring import ring_attention, ring_of
    from meshwright.parallel.tiles import Rule, positions_of, visible
    from meshwright.parallel.ulysses import ulysses_attention

    padded = padded_length(parse_layout(f"cp={world},cp_style={style}"), length)
    generator = torch.Generator().manual_seed(1)

    def draw(h: int) -> torch.Tensor:
        return torch.randn(2, h, padded, 8, dtype=torch.float64, generator=generator)

    q, k, v, g = (draw(h).requires_grad_() for h in (heads, kv, kv, heads))
    g[:, :, length:].data.zero_()  # padding has no loss
    at = torch.arange(padded)
    # the last document is a single position: its queries see nothing of other ranks
    documents = torch.stack([at // 5, (at >= 3).long() + (at == length - 1)]) if docs else None
    allowed = Rule(*rule)
    seen = visible(at, at, allowed, documents, documents)
    if not allowed.causal:
        seen = seen & (at < length)[None, None, None, :]
        documents = (at >= length).long()[None].expand(2, -1)  # what hides padding where nothing else does
    scores = q @ k.repeat_interleave(heads // kv, 1).transpose(-1, -2) * 0.3
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(heads // kv, 1)
    grads = torch.autograd.grad(want, (q, k, v), g)

    group = dist.group.WORLD
    assert group is not None
    held = [runs(style, world, i, padded) for i in range(world)]
    mine = positions_of(held[rank], q.device)
    parts = [x.detach()[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    if style == RING:
        out = ring_attention(*parts, ring_of(group, held, allowed, 0.3, documents))
    else:
        out = ulysses_attention(*parts, group=group, rule=allowed, scale=0.3, documents_BT=documents)
    out.backward(g[:, :, mine])
    real = mine < length
    diffs = {"out": (out - want[:, :, mine])[:, :, real].abs().max().item()}
    for name, part, full in zip("qkv", parts, grads, strict=True):
        assert part.grad is not None
        diffs[name] = (part.grad - full[:, :, mine]).abs().max().item()
    return diffs


CASES = [
    # ranks, length, heads, kv heads, (causal, window), documents
    (1, 16, 4, 2, (True, None), False),
    (2, 16, 4, 2, (True, None), False),
    (4, 16, 4, 2, (True, None), False),  # H74: four ranks for two key/value heads
    (2, 16, 4, 4, (False, None), False),
    (2, 7, 4, 1, (True, None), False),  # H71
    (4, 13, 8, 2, (True, None), False),
    (3, 20, 6, 2, (True, None), False),
    (2, 16, 4, 2, (True, 5), False),
    (4, 32, 4, 2, (True, 3), False),  # ranks that see nothing of some others
    (2, 15, 4, 2, (True, None), True),  # packed documents
    (4, 30, 4, 2, (True, None), True),
    (2, 13, 4, 2, (False, None), False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("style", [RING, ULYSSES])
def test_h63_h66_h71_h74_outputs_and_gradients_equal_one_device(pool: Any, style: str, case: Any) -> None:
    ranks, length, heads, kv, rule, docs = case
    for found in pool.run(_cut, ranks, style, length, heads, kv, rule, docs):
        assert max(found.values()) < 1e-12, found


def _with_part_outputs(rank: int, world: int) -> dict[str, float]:
    """The mutant of H63: the backward is given each part's own output in place of the final one."""
    from meshwright.parallel import ring

    right = ring.attend_backward

    def wrong(grad: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any) -> Any:
        lse, scale, causal, pairs = rest
        out, _ = ring.attend(q, k, v, scale, causal, pairs)
        return right(grad, q, k, v, out, lse, scale, causal, pairs)

    ring.attend_backward = wrong
    try:
        return _cut(rank, world, RING, 16, 4, 2, (True, None), False)
    finally:
        ring.attend_backward = right


def test_h63_a_backward_with_each_parts_own_output_is_seen(pool: Any) -> None:
    found = pool.run(_with_part_outputs, 2)
    assert max(f["out"] for f in found) < 1e-12
    assert max(f["q"] for f in found) > 1e-3


def _volumes(rank: int, world: int, style: str) -> list[tuple[str, int]]:
    import torch
    import torch.distributed as dist

    from meshwright.layout.context import runs
    from meshwright.parallel.record import CollectiveRecorder
    from meshwright.parallel.ring import ring_attention, ring_of
    from meshwright.parallel.tiles import Rule
    from meshwright.parallel.ulysses import ulysses_attention

    group = dist.group.WORLD
    assert group is not None
    q, k, v = (torch.randn(1, h, 4, 8, requires_grad=True) for h in (4, 2, 2))
    with CollectiveRecorder({group.group_name: "cp"}) as recorder:
        if style == RING:
            held = [runs(style, world, i, 4 * world) for i in range(world)]
            out = ring_attention(q, k, v, ring_of(group, held, Rule(), 1.0))
        else:
            out = ulysses_attention(q, k, v, group=group, rule=Rule(), scale=1.0)
        out.sum().backward()
    return [(r.kind, r.num_bytes) for r in recorder.records]


def test_key_value_heads_are_never_expanded_on_the_wire(pool: Any) -> None:
    kv = 2 * 2 * 4 * 8 * 4  # keys and values of two heads, four positions, eight numbers of four bytes
    for found in pool.run(_volumes, 4, RING):
        assert found.count(("send", kv)) == found.count(("recv", kv)) == 3 * 3
        assert len(found) == 18
    for found in pool.run(_volumes, 2, ULYSSES):
        assert found == [
            ("all_to_all", 4 * 4 * 8 * 4 + kv),
            ("all_to_all", 4 * 4 * 8 * 4),
            ("all_to_all", 4 * 4 * 8 * 4),
            ("all_to_all", 4 * 4 * 8 * 4 + kv),
        ]
