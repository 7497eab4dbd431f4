"""The expert axis in a step: which elements a rank holds, and what a micro-batch's forward and backward exchange.

The rules are those of ``parallel.expert``: per mixture an all_to_all of the rows per expert, one of the rows out and
one of the results back; backward the last two transposed, where there is a gradient to send. A rank's own tokens are
tokens x k rows in each. What it holds of other ranks' tokens depends on the routing, so the bytes of a row exchange
are those of an even routing; summed over the group they are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from meshwright.layout.batch import Batch
from meshwright.layout.context import local_length
from meshwright.layout.layout import Layout
from meshwright.layout.precision import precision_table
from meshwright.layout.ranks import EP, EXPERT_SHARD, SHARD, expert_degrees, group
from meshwright.model.adapters import factors_beside
from meshwright.model.sharding import rule
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.program.step import Collective
from meshwright.program.units import Unit, stage_layers

COUNT_BYTES = 8
"""Rows of one expert: one int64."""


def split_units(units: Sequence[Unit], layout: Layout) -> tuple[Unit, ...]:
    """Return the units with each mixture's experts apart, in the shape that one rank of the expert axis holds."""
    if layout.ep == 1:
        return tuple(units)
    out: list[Unit] = []
    for unit in units:
        pairs = list(zip(unit.tensors, unit.trainable, strict=True))
        spread = [(_local(t, layout), train) for t, train in pairs if rule(t).ep_dim is not None]
        rest = [(t, train) for t, train in pairs if rule(t).ep_dim is None]
        out.append(_with(unit, unit.name, rest))
        if spread:
            out.append(replace(_with(unit, f"experts of {unit.name}", spread), experts=True))
    return tuple(out)


def _with(unit: Unit, name: str, pairs: Sequence[tuple[TensorSpec, bool]]) -> Unit:
    return replace(unit, name=name, tensors=tuple(t for t, _ in pairs), trainable=tuple(t for _, t in pairs))


def _local(tensor: TensorSpec, layout: Layout) -> TensorSpec:
    return replace(tensor, shape=(tensor.shape[0] // layout.ep, *tensor.shape[1:]))


def data_degrees(unit: Unit, layout: Layout) -> tuple[int, int]:
    """Return (replicas, shards): over how many ranks ``unit``'s gradients are summed and its state is spread."""
    if unit.experts:
        return expert_degrees(layout)
    if layout.zero:
        return layout.dp_replicate, layout.shard
    return layout.dp * layout.cp, 1


def shard_index(unit: Unit, layout: Layout, rank: int) -> int:
    """Return which shard of ``unit``'s state ``rank`` has."""
    if not layout.zero:
        return 0
    return group(layout, rank, EXPERT_SHARD if unit.experts else SHARD).index(rank)


def exchanges(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    stage: int,
    k: int | None,
    frozen: Collection[str],
    phase: Literal["forward", "backward"],
) -> Iterator[Collective]:
    """Yield what one micro-batch's ``phase`` through ``stage`` exchanges on ``ep``, in order."""
    if layout.ep == 1:
        return
    tokens = batch.micro_batch * local_length(layout, batch.seq_len)
    size = precision_table(layout).bytes_of("compute")

    def send(num_bytes: int, what: str) -> Collective:
        return Collective(
            kind="all_to_all",
            axis=EP,
            group_size=layout.ep,
            num_bytes=num_bytes,
            what=what,
            stage=stage,
            micro_batch=k,
        )

    def forward(layer: int, again: str) -> Iterator[Collective]:
        moe = spec.blocks[layer].moe
        assert moe is not None
        rows = tokens * moe.experts_per_token * spec.hidden_size * size
        yield send(moe.num_experts * COUNT_BYTES, f"rows per expert of layer {layer}{again}")
        yield send(rows, f"tokens to the experts of layer {layer}{again}")
        yield send(rows, f"results of the experts of layer {layer}{again}")

    layers = [i for i in stage_layers(layout, stage) if spec.blocks[i].moe is not None]
    if phase == "forward":
        for layer in layers:
            yield from forward(layer, "")
        return
    for layer in reversed(layers):
        moe = spec.blocks[layer].moe
        assert moe is not None
        rows = tokens * moe.experts_per_token * spec.hidden_size * size
        into, inside, anything = _flow(spec, layout, stage, layer, frozen)
        if layout.recompute != "none" and anything:
            yield from forward(layer, ", recomputed")
        if inside:
            yield send(rows, f"gradient of the results of layer {layer}")
        if into:
            yield send(rows, f"gradient of the tokens at the experts of layer {layer}")


def _flow(
    spec: ModelSpec, layout: Layout, stage: int, layer: int, frozen: Collection[str]
) -> tuple[bool, bool, bool]:
    """Return whether there is a gradient for the tokens at a mixture, for its results, and anywhere in its block."""

    def trains(tensors: Collection[TensorSpec]) -> bool:
        return any(t.name not in frozen for t in tensors)

    before = stage > 0 or trains(spec.embedding)
    before = before or any(trains(spec.blocks[i].tensors) for i in stage_layers(layout, stage) if i < layer)
    tensors = spec.blocks[layer].tensors
    roles = ("router", "expert_in", "expert_out", "shared_in", "shared_out")
    mixture = [t for t in tensors if t.role in roles]
    mixture += factors_beside(mixture, spec.blocks[layer])
    into = before or trains([t for t in tensors if t not in mixture])
    experts = trains([t for t in tensors if t.of_experts])
    return into, into or experts, into or trains(tensors)
