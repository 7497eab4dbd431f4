"""The cut: how many layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Final

from meshwright.base.errors import Problem, problem, refuse
from meshwright.layout.layout import Layout
from meshwright.model.counts import block_forward_flops, head_forward_flops
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import placement

WORTHWHILE: Final = 0.005
"""Share of the busiest rank's time that must be won for stages of unlike size."""


def resolve(spec: ModelSpec, layout: Layout, seq_len: int) -> Layout:
    """Return the layout with what follows from the model written out: layers per stage, and heads that are replicated.

    Raises:
        MeshwrightError: as ``resolve_cut``.
    """
    fixed = layout.with_cut(resolve_cut(spec, layout, seq_len))
    few = spec.attention.kind == "gqa" and layout.tp > spec.num_kv_heads
    return replace(fixed, kv_heads="replicate") if few else fixed


def resolve_cut(spec: ModelSpec, layout: Layout, seq_len: int) -> tuple[int, ...]:
    """Return the layers per stage: as written, even, or (auto) with the smallest largest stage time.

    Auto counts each block's FLOPs, the embedding (a lookup: small) on the first stage and the head with the loss on
    the last; among equals it takes the most even cut. Where a rank has several stages, and equal stages leave one rank
    with more than it need have (the head's, whose other stages are as full as any), ranks are evened out instead.

    Raises:
        MeshwrightError: E211 more stages than layers, E212 a written cut that does not fit.
    """
    refuse(check_cut(spec.num_layers, layout))
    if layout.cut_layers:
        return layout.cut_layers
    if layout.cut == "even":
        return even_cut(spec.num_layers, layout.num_stages)
    blocks, first, last = stage_costs(spec, seq_len)
    found = balanced_cut(blocks, layout.num_stages, first, last)
    if layout.chunks == 1 or layout.schedule.startswith("@"):
        return found
    homes = placement(layout.schedule, layout.pp, layout.chunks)
    other = cut_by_rank(blocks, homes, first, last)
    loads = [max(rank_costs(blocks, cut, homes, first, last)) for cut in (found, other)]
    return other if loads[1] < (1.0 - WORTHWHILE) * loads[0] else found


def rank_costs(
    blocks: Sequence[float], cut: Sequence[int], homes: Sequence[int], first: float, last: float
) -> list[float]:
    """Return the cost of each pipeline rank, whose stages ``homes`` says."""
    out, at = [0.0] * (max(homes) + 1), 0
    for layers, home in zip(cut, homes, strict=True):
        out[home] += sum(blocks[at : at + layers])
        at += layers
    out[homes[0]] += first
    out[homes[-1]] += last
    return out


def cut_by_rank(blocks: Sequence[float], homes: Sequence[int], first: float, last: float) -> tuple[int, ...]:
    """Return a cut that evens out ranks, and stages on a rank, as if every block cost the same."""
    each = sum(blocks) / len(blocks)
    cost = [each + first * (s == 0) + last * (s == len(homes) - 1) for s in range(len(homes))]
    load = rank_costs(blocks, [0] * len(homes), homes, first, last)
    heap = [(load[rank] + each * homes.count(rank), rank) for rank in range(len(load))]
    heapify(heap)
    layers = [1] * len(homes)
    for _ in range(len(blocks) - len(homes)):
        held, rank = heap[0]
        heapreplace(heap, (held + each, rank))
        stage = min((s for s, home in enumerate(homes) if home == rank), key=lambda s: (cost[s], s))
        layers[stage] += 1
        cost[stage] += each
    return tuple(layers)


def check_cut(num_layers: int, layout: Layout) -> list[Problem]:
    """Return what is wrong with the number of stages (E211) or the written cut (E212)."""
    stages = layout.num_stages
    if stages > num_layers:
        by = f"pp * chunks = {layout.pp} * {layout.chunks}" if layout.chunks > 1 else f"pp = {layout.pp}"
        best = num_layers // layout.chunks
        return [
            problem(
                "E211",
                where="layout.pp",
                found=f"{by} makes {stages} stages, but the model has {num_layers} layers",
                do=f"pp = {best}" if best else "chunks = 1",
            )
        ]
    written = layout.cut_layers
    if not written:
        return []
    wrong: list[str] = []
    if len(written) != stages:
        wrong.append(f"{len(written)} numbers for {stages} stages")
    if 0 in written:
        wrong.append(f"stage {written.index(0)} has no layer")
    if sum(written) != num_layers:
        wrong.append(f"the numbers sum to {sum(written)}, the model has {num_layers} layers")
    if not wrong:
        return []
    even = "/".join(str(n) for n in even_cut(num_layers, stages))
    return [
        problem(
            "E212",
            where="layout.cut",
            found=f"cut={layout.cut}: {'; '.join(wrong)}",
            do=f"cut=auto, or for instance cut={even}",
        )
    ]


def even_cut(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return equal numbers of layers; the remainder goes to the stages before the last, one each."""
    base, extra = divmod(num_layers, stages)
    out = [base] * stages
    # The last stage also holds the head and the first the embedding: they get a further layer last.
    inner = [*range(1, stages - 1), *([0] if stages > 1 else []), stages - 1]
    for stage in inner[:extra]:
        out[stage] += 1
    return tuple(out)


def stage_costs(spec: ModelSpec, seq_len: int) -> tuple[tuple[float, ...], float, float]:
    """Return forward FLOPs per token of each block, of the embedding, and of the head with the loss."""
    known: dict[tuple[str, int, int | None], float] = {}
    blocks: list[float] = []
    for block in spec.blocks:
        key = (block.kind, block.ffn_size, block.sliding_window)
        if key not in known:
            known[key] = float(block_forward_flops(spec, block, seq_len))
        blocks.append(known[key])
    embedding = 2.0 * spec.hidden_size  # a lookup and a sum, no matrix product
    loss = 5.0 * spec.vocab_size  # maximum, subtract, exponential, sum, pick
    return tuple(blocks), embedding, float(head_forward_flops(spec)) + loss


@lru_cache(maxsize=256)
def balanced_cut(
    costs: tuple[float, ...], stages: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return the contiguous cut with the smallest largest stage cost; ties go to the most even one.

    Fuller stages come first. ``first`` and ``last`` are added to the first and last stage. No stage is empty.
    """
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    limit = _bottleneck(prefix, stages, first, last) * (1 + 1e-9)
    return _most_even(prefix, stages, first, last, limit)


def _bottleneck(prefix: Sequence[float], stages: int, first: float, last: float) -> float:
    """Return the least largest stage cost, by dynamic programming over (stage, layers before it)."""
    n = len(prefix) - 1
    if stages == 1:
        return prefix[n] + first + last
    best = [prefix[b] + first for b in range(n + 1)]
    best[0] = float("inf")
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        ends = (n,) if stage == stages - 1 else range(stage + 1, n - (stages - 1 - stage) + 1)
        row = [float("inf")] * (n + 1)
        a = stage
        for b in ends:
            # best[a] rises with a and the cost of a..b falls; where they cross moves on with b
            above = prefix[b] + extra
            while a < b - 1 and best[a] < above - prefix[a]:
                a += 1
            row[b] = max(best[a], above - prefix[a])
            if a > stage:
                row[b] = min(row[b], max(best[a - 1], above - prefix[a - 1]))
        best = row
    return best[n]


def _most_even(
    prefix: Sequence[float], stages: int, first: float, last: float, limit: float
) -> tuple[int, ...]:
    """Return the cut within ``limit`` whose layer counts have the smallest sum of squares."""
    n = len(prefix) - 1
    if stages == 1:
        return (n,)
    far = n * n * stages + 1
    score = [far] * (n + 1)
    score[0] = 0
    steps: list[list[int]] = []
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        row, back = [far] * (n + 1), [0] * (n + 1)
        ends = (n,) if stage == stages - 1 else range(stage + 1, n - (stages - 1 - stage) + 1)
        for b in ends:
            for a in range(b - 1, stage - 1, -1):
                if prefix[b] - prefix[a] + extra > limit:
                    break
                value = score[a] + (b - a) ** 2
                if value < row[b]:
                    row[b], back[b] = value, a
        score = row
        steps.append(back)
    out: list[int] = []
    end = n
    for back in reversed(steps):
        out.append(end - back[end])
        end = back[end]
    return tuple(reversed(out))
