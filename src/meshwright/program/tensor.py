"""The collectives of the tensor axis in a step: what a micro-batch's forward and backward send on one rank.

The rules are those of ``parallel.tensor``: with sequence parallelism an all_gather before and a reduce_scatter after
each column-row pair of a block and one all_gather at the end of the stage's blocks, else an all_reduce after each
pair (after a mixture of experts in the dtype of the hidden states); one all_reduce for the looked-up embedding, and two
small ones per token for the loss. Backward runs the
transposes, where there is a gradient to send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from meshwright.layout.batch import Batch
from meshwright.layout.context import local_length
from meshwright.layout.layout import Layout, loss_chunks
from meshwright.layout.precision import precision_table
from meshwright.model.adapters import factors_beside
from meshwright.model.randomness import drops_residual
from meshwright.model.sharding import gradient_sum, shared_norms, tp_shape
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec
from meshwright.program.step import Collective, CollectiveKind
from meshwright.program.units import Unit, row_of, shard_numel, stage_layers

Pair: TypeAlias = Literal["attention", "mlp"]
PAIRS: Final[tuple[Pair, ...]] = ("attention", "mlp")
MIXTURE_ROLES: Final = ("router", "expert_in", "expert_out", "shared_in", "shared_out")


def on_rank(unit: Unit, spec: ModelSpec, layout: Layout, index: int) -> Unit:
    """Return ``unit`` with the shapes that coordinate ``index`` of the tensor axis holds."""
    if layout.tp == 1:
        return unit
    tensors = tuple(_local(t, spec, layout, index) for t in unit.tensors)
    if not unit.rows:
        return replace(unit, tensors=tensors)
    block = next(b for b in spec.blocks if unit.name == f"block {b.index}")
    held = ((t, _local(t, spec, layout, index)) for t in block.tensors if t.quantised)
    return replace(unit, tensors=tensors, rows=tuple(row_of(whole, part, spec) for whole, part in held))


def _local(tensor: TensorSpec, spec: ModelSpec, layout: Layout, index: int) -> TensorSpec:
    return replace(tensor, shape=tp_shape(tensor, layout.tp, index, spec.attention))


def micro_batch_collectives(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    stage: int,
    k: int | None,
    frozen: Collection[str],
    phase: Literal["forward", "backward"],
) -> Iterator[Collective]:
    """Yield what one micro-batch's ``phase`` through ``stage`` sends on ``tp``, in order."""
    if layout.tp == 1:
        return
    table = precision_table(layout)
    tokens = batch.micro_batch * local_length(layout, batch.seq_len)
    hidden, compute = tokens * spec.hidden_size * table.bytes_of("wire"), table.bytes_of("compute")
    last = stage == layout.num_stages - 1

    def send(kind: CollectiveKind, num_bytes: int, what: str) -> Collective:
        return Collective(
            kind=kind,
            axis="tp",
            group_size=layout.tp,
            num_bytes=num_bytes,
            what=what,
            stage=stage,
            micro_batch=k,
        )

    summed = tokens * spec.hidden_size * compute
    squares = tokens * max(4, compute)
    if phase == "forward":
        if stage == 0:
            yield send("all_reduce", hidden, "looked-up embedding")
        for layer in stage_layers(layout, stage):
            for pair in PAIRS:
                name = f"{pair} of layer {layer}"
                if layout.sp:
                    yield send("all_gather", hidden, f"hidden states into {name}")
                if pair == "attention":
                    for norm in shared_norms(spec.blocks[layer]):
                        yield send("all_reduce", squares, f"squares under {norm.name}")
                out = hidden if pair == "mlp" and spec.blocks[layer].moe else summed
                yield send(
                    "reduce_scatter" if layout.sp else "all_reduce", out, f"partial sums out of {name}"
                )
        if layout.sp:
            yield send("all_gather", hidden, "hidden states after the last layer of the stage")
        if last:
            size = 8 if layout.precision == "fp64" else 4
            for rows in _loss_rows(layout, tokens):
                yield send("all_reduce", rows * size, "largest logit of each token")
                yield send(
                    "all_reduce", 2 * rows * size, "sum of exponentials and target's logit of each token"
                )
        return
    if last:
        yield send("all_reduce", hidden, "gradient of the head's input")
    flows = stage > 0 or any(t.name not in frozen for t in spec.embedding)
    entry = flows
    steps: list[tuple[str, bool, bool, int]] = []
    for layer in stage_layers(layout, stage):
        block, entered = spec.blocks[layer], flows
        for pair in PAIRS:
            into, inside, after = _flow(block, pair, entered if block.parallel else flows, frozen)
            flows = flows or after
            out = hidden if pair == "mlp" and block.moe else summed
            steps.append((f"{pair} of layer {layer}", into, inside, out))
    for i, (name, into, inside, out) in reversed(list(enumerate(steps))):
        ends_block = i % len(PAIRS) == len(PAIRS) - 1
        if layout.recompute != "none" and ends_block and (inside or steps[i - 1][2]):
            norms = [
                (n.name, squares) for n in shared_norms(spec.blocks[stage_layers(layout, stage)[i // 2]])
            ]
            yield from _recomputed(layout, steps[i - 1][0], name, send, hidden, summed, norms)
            # a norm behind the block's last sum reads it; so does dropout, whose mask is saved behind it
            if drops_residual(spec) or spec.blocks[stage_layers(layout, stage)[i // len(PAIRS)]].ends_in_norm:
                kind = "reduce_scatter" if layout.sp else "all_reduce"
                yield send(kind, out, f"partial sums out of {name}, recomputed")
        if layout.sp and inside:
            yield send("all_gather", out, f"gradient of the partial sums of {name}")
        if not ends_block:
            for norm in _with_gradient(spec.blocks[stage_layers(layout, stage)[i // 2]], into, frozen):
                yield send("all_reduce", squares, f"gradient of the squares under {norm.name}")
        if into:
            kind = "reduce_scatter" if layout.sp else "all_reduce"
            yield send(kind, hidden, f"gradient of the input of {name}")
    if layout.sp and entry:
        yield send("all_gather", hidden, "gradient of the hidden states before the first layer of the stage")


def _with_gradient(block: BlockSpec, into: bool, frozen: Collection[str]) -> Iterator[TensorSpec]:
    """Yield the norms over all heads whose input has a gradient: from the matrix before, or from what that reads."""
    for norm in shared_norms(block):
        matrix = norm.name.replace("_norm.weight", "_proj.")
        trains = any(t.name.startswith(matrix) and t.name not in frozen for t in block.tensors)
        if into or trains:
            yield norm


def _loss_rows(layout: Layout, tokens: int) -> list[int]:
    """Return the tokens of each chunk of the loss."""
    rows = -(-tokens // loss_chunks(layout.tp)) if layout.loss == "chunked" else tokens
    return [min(rows, tokens - start) for start in range(0, tokens, rows)]


def _recomputed(
    layout: Layout,
    first: str,
    second: str,
    send: Callable[..., Collective],
    hidden: int,
    summed: int,
    norms: Sequence[tuple[str, int]],
) -> Iterator[Collective]:
    """Yield what a block's second forward sends: all but the sum at its very end, which nothing there needs."""
    if layout.sp:
        yield send("all_gather", hidden, f"hidden states into {first}, recomputed")
    for norm, squares in norms:
        yield send("all_reduce", squares, f"squares under {norm}, recomputed")
    yield send(
        "reduce_scatter" if layout.sp else "all_reduce", summed, f"partial sums out of {first}, recomputed"
    )
    if layout.sp:
        yield send("all_gather", hidden, f"hidden states into {second}, recomputed")


def _flow(block: BlockSpec, pair: Pair, before: bool, frozen: Collection[str]) -> tuple[bool, bool, bool]:
    """Return whether there is a gradient for a pair's input, for its partial sums and for what follows it."""
    ahead, behind = block.norm_tensors(pair)

    def trains(tensors: list[TensorSpec]) -> bool:
        return any(t.name not in frozen for t in tensors)

    into = before or trains(ahead)
    roles = (f"{pair}_in", f"{pair}_out", *(MIXTURE_ROLES if pair == "mlp" else ()))
    own = [t for t in block.tensors if t.role in roles]
    if pair == "attention":
        own += [t for t in block.tensors if t.role == "norm" and t.dims != ("hidden",)]
    own += factors_beside(own, block)
    added = [t for t in own if t.role == f"{pair}_out" and t.is_bias]
    inside = into or trains([t for t in own if t not in added])
    return into, inside, inside or before or trains(added + behind)


def step_collectives(
    spec: ModelSpec,
    layout: Layout,
    stages: Collection[int],
    rank_shard: tuple[int, int],
    expert_shard: tuple[int, int],
    frozen: Collection[str],
) -> Iterator[Collective]:
    """Yield the all_reduce of the gradients that are partial sums on ``tp``, once per step.

    ``rank_shard`` is (ZeRO shards, this rank's index among them), ``expert_shard`` the same among the ranks that hold
    the same experts. All ranks of ``tp`` send the same.
    """
    if layout.tp == 1:
        return
    numel = 0
    for stage in sorted(stages):
        for layer in stage_layers(layout, stage):
            for tensor in spec.blocks[layer].tensors:
                where = gradient_sum(tensor, layout.tp, layout.sp, spec.attention)
                if where and tensor.name not in frozen:
                    shape, shard = _local(tensor, spec, layout, 0).shape, rank_shard
                    if tensor.of_experts and layout.ep > 1:
                        shape, shard = (shape[0] // layout.ep, *shape[1:]), expert_shard
                    held = shard_numel(shape, *shard)
                    numel += held * (spec.attention.num_kv_heads if where == "heads" else 1)
    if numel:
        yield Collective(
            kind="all_reduce",
            axis="tp",
            group_size=layout.tp,
            num_bytes=numel * precision_table(layout).bytes_of("gradient"),
            what="gradients that are partial sums on the tensor axis",
            stage=min(stages),
        )
