"""The collectives of the context axis in a step: what a micro-batch's attention sends on one rank.

The rules are those of ``parallel.ring`` and ``parallel.ulysses``: per layer a ring sends keys and values on cp - 1
times forward and again backward, where their gradients follow as often; Ulysses swaps queries, keys and values, and
then the output, forward and backward. Backward sends only where there is a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from meshwright.layout.batch import Batch
from meshwright.layout.context import kv_heads_sent, local_length
from meshwright.layout.layout import Layout
from meshwright.layout.precision import precision_table
from meshwright.model.adapters import factors_beside
from meshwright.model.spec import BlockSpec, ModelSpec
from meshwright.program.step import Collective, CollectiveKind
from meshwright.program.units import stage_layers


def attention_collectives(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    stage: int,
    k: int | None,
    index: int,
    frozen: Collection[str],
    phase: Literal["forward", "backward"],
) -> Iterator[Collective]:
    """Yield what one micro-batch's ``phase`` through ``stage`` sends on ``cp`` from coordinate ``index``, in order.

    A recomputed layer exchanges as in its forward before its backward. ``peer`` of a send or recv is the other
    coordinate on ``cp``.
    """
    if layout.cp == 1:
        return
    flows = stage > 0 or any(t.name not in frozen for t in spec.embedding)
    steps: list[tuple[int, str]] = []
    for layer in stage_layers(layout, stage):
        inside, flows = _flow(spec.blocks[layer], flows, frozen)
        if phase == "forward":
            steps.append((layer, "forward"))
            continue
        if inside:
            steps.append((layer, "backward"))
        if flows and layout.recompute != "none":
            steps.append((layer, "forward"))
    for layer, what in steps if phase == "forward" else reversed(steps):
        again = ", again" if what != phase else ""
        yield from _layer(spec, layout, batch, stage, k, index, what, f"of layer {layer}{again}")


def _layer(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    stage: int,
    k: int | None,
    index: int,
    phase: str,
    where: str,
) -> Iterator[Collective]:
    def send(kind: CollectiveKind, num_bytes: int, what: str, peer: int | None = None) -> Collective:
        return Collective(
            kind=kind,
            axis="cp",
            group_size=layout.cp,
            num_bytes=num_bytes,
            what=f"{what} {where}",
            stage=stage,
            micro_batch=k,
            peer=peer,
        )

    if layout.cp_style == "ulysses":
        qkv, out = swapped_bytes(spec, layout, batch)
        rows = [(qkv, "queries, keys and values"), (out, "attention output")]
        gradient = "" if phase == "forward" else "gradients of the "
        for num_bytes, what in rows if phase == "forward" else reversed(rows):
            yield send("all_to_all", num_bytes, gradient + what)
        return
    there, back = (index + 1) % layout.cp, (index - 1) % layout.cp
    rows = [(block_bytes(spec, layout, batch), "keys and values")]
    if phase == "backward":
        wide = max(4, precision_table(layout).bytes_of("compute"))
        rows.append((block_bytes(spec, layout, batch, wide), "gradients of keys and values"))
    for _ in range(layout.cp - 1):
        for num_bytes, what in rows:
            yield send("send", num_bytes, what, there)
            yield send("recv", num_bytes, what, back)


def block_bytes(spec: ModelSpec, layout: Layout, batch: Batch, size: int | None = None) -> int:
    """Return the bytes of a rank's keys and values of one layer and micro-batch, elements of ``size`` bytes."""
    size = size or precision_table(layout).bytes_of("compute")
    kv = max(1, spec.num_kv_heads // layout.tp)
    return _tokens(layout, batch) * kv * _widths(spec)[2] * size


def swapped_bytes(spec: ModelSpec, layout: Layout, batch: Batch) -> tuple[int, int]:
    """Return the bytes that a rank puts in the two all-to-alls of Ulysses, of one layer and micro-batch."""
    size = precision_table(layout).bytes_of("compute")
    heads, kv = spec.num_heads // layout.tp, max(1, spec.num_kv_heads // layout.tp)
    query, value, both = _widths(spec)
    tokens = _tokens(layout, batch)
    sent = heads * query + len(kv_heads_sent(heads, kv, layout.cp)) * both
    return tokens * sent * size, tokens * heads * value * size


def _tokens(layout: Layout, batch: Batch) -> int:
    return batch.micro_batch * local_length(layout, batch.seq_len)


def _widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the sizes of a query's or key's head, of a value's, and of both together."""
    query = spec.attention.head_dim
    value = spec.attention.value_head_dim or query
    return query, value, query + value


def _flow(block: BlockSpec, before: bool, frozen: Collection[str]) -> tuple[bool, bool]:
    """Return whether there is a gradient for a block's queries, keys or values, and for what follows the block."""

    def trains(names: Collection[str]) -> bool:
        return any(name not in frozen for name in names)

    into = list(block.norm_tensors("attention")[0])
    into += [t for t in block.tensors if t.role == "norm" and t.dims != ("hidden",)]
    into += [t for t in block.tensors if t.role == "attention_in"]
    into += factors_beside(into, block)
    return before or trains([t.name for t in into]), before or trains([t.name for t in block.tensors])
