"""Units of parameters on one rank: their sizes by stage and shard group, and the shapes of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

import numpy as np

from meshwright.cost.collective import (
    GroupShape,
    neighbours_shape,
    plane_shape,
    shape_of,
    strided_shape,
)
from meshwright.cost.work import Facts, sharding_stage
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import expert_degrees, strides
from meshwright.model.quantised import held_bytes
from meshwright.model.sharding import rule, tp_local_shape
from meshwright.model.spec import AttentionSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """Elements of one unit on one rank after tp and ep, padded to equal rows of its shard group.

    ``resting`` and ``trainable_resting`` are what one rank of that group holds of them. Matrices in 4 bits are none of
    these: ``packed`` are their bytes (which stage 3 shards too), ``unpacked`` the elements of the largest one.
    """

    full: float
    trainable: float
    resting: float
    trainable_resting: float
    largest: float
    tensors: int
    trainable_tensors: int
    matmul: float
    packed: float
    unpacked: float


@lru_cache(maxsize=8192)
def unit_tensor_shape(tensor: TensorSpec, attention: AttentionSpec, tp: int, ep: int) -> tuple[int, ...]:
    """Return the sizes of a tensor on one rank of the tensor and expert axes."""
    if tp == 1 and ep == 1:
        return tensor.shape
    shape = tp_local_shape(tensor, tp, attention, "replicate", ep)
    if ep > 1 and tensor.of_experts and rule(tensor).ep_dim is None:
        return (max(1, shape[0] // ep), *shape[1:])
    return shape


def unit_size(
    tensors: Sequence[TensorSpec],
    trainable: Sequence[bool],
    attention: AttentionSpec,
    tp: int,
    ep: int,
    shards: int,
    double: bool = True,
) -> UnitSize:
    """Return the elements of a unit: each tensor is padded on dim 0 to a multiple of its shard group.

    That is ``shards`` ranks, and the shards / ep of them that hold the same experts for an expert's tensor. ``double``:
    scales of matrices in 4 bits are in 8 bits.
    """
    full = trained = resting = trained_resting = largest = matmul = packed = unpacked = 0.0
    count = trained_count = 0
    for tensor, trains in zip(tensors, trainable, strict=True):
        shape = unit_tensor_shape(tensor, attention, tp, ep)
        numel = float(prod(shape))
        if tensor.quantised:
            packed += held_bytes(prod(shape), double)
            unpacked = max(unpacked, numel)
            continue
        parts = max(1, shards // ep) if tensor.of_experts else shards
        if parts > 1:
            numel = ceil(shape[0] / parts) * parts * prod(shape[1:])
        full += numel
        resting += numel / parts
        count += 1
        if trains:
            trained += numel
            trained_resting += numel / parts
            trained_count += 1
            largest = max(largest, numel)
        if len(shape) >= 2 and tensor.role not in ("embedding", "position") and not tensor.of_experts:
            matmul += prod(shape)
    return UnitSize(
        full=full,
        trainable=trained,
        resting=resting,
        trainable_resting=trained_resting,
        largest=largest,
        tensors=count,
        trainable_tensors=trained_count,
        matmul=matmul,
        packed=packed,
        unpacked=unpacked,
    )


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """Units of each stage of one cut under one tp, ep and shard group: the root unit and kinds of blocks."""

    root: tuple[UnitSize, ...]
    kinds: tuple[UnitSize, ...]
    experts: tuple[UnitSize, ...] = ()
    """The part of each kind that the expert axis spreads; empty where nothing is spread."""
    rest: tuple[UnitSize, ...] = ()
    """The other part of each kind."""


def stage_tensors(facts: Facts, stage: int, stages: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a stage's root unit: embedding, final norm and head, as far as they are there."""
    spec = facts.spec
    out: list[TensorSpec] = []
    if stage == 0:
        out += spec.embedding
    if stage == stages - 1:
        out += spec.final
        # a tied head on the embedding's stage is the embedding; on another stage it is a tensor of its own
        out += [t for t in spec.head if t.tied_to is None or stages > 1]
    return tuple(out)


def _sizes(facts: Facts, tensors: Sequence[TensorSpec], tp: int, ep: int, shards: int) -> UnitSize:
    trains = [t.name not in facts.stopped for t in tensors]
    double = facts.spec.adapter is None or facts.spec.adapter.double
    return unit_size(tensors, trains, facts.spec.attention, tp, ep, shards, double)


def stage_units(facts: Facts, stages: int, tp: int, ep: int, shards: int) -> StageUnits:
    """Return the unit sizes of every stage."""
    ends = {0, stages - 1}
    inner = _sizes(facts, (), tp, ep, shards)
    root = [
        _sizes(facts, stage_tensors(facts, s, stages), tp, ep, shards) if s in ends else inner
        for s in range(stages)
    ]
    if stages == 1:  # a tied head is no tensor of its own, but a matrix that is multiplied with
        tied = [replace(t, tied_to=None) for t in facts.spec.head if t.tied_to is not None]
        root[0] = replace(root[0], matmul=root[0].matmul + _sizes(facts, tied, tp, ep, 1).matmul)
    kinds = [_sizes(facts, b.tensors, tp, ep, shards) for b in facts.kinds]
    if ep == 1:
        return StageUnits(root=tuple(root), kinds=tuple(kinds))
    spread = [[t for t in b.tensors if t.of_experts] for b in facts.kinds]
    rest = [[t for t in b.tensors if not t.of_experts] for b in facts.kinds]
    return StageUnits(
        root=tuple(root),
        kinds=tuple(kinds),
        experts=tuple(_sizes(facts, tensors, tp, ep, shards) for tensors in spread),
        rest=tuple(_sizes(facts, tensors, tp, ep, shards) for tensors in rest),
    )


def group_shapes(layout: Layout, gpus_per_node: int) -> tuple[GroupShape, GroupShape, GroupShape]:
    """Return the shapes of the group that shards (or, in stage 0, reduces), of the replicas, and of a pipeline's hops."""
    step = strides(layout)
    stage = sharding_stage(layout)
    node = gpus_per_node
    if not stage:
        shards = plane_shape(((layout.dp, step["dp_shard"]), (layout.cp, step["cp"])), node)
        return shards, GroupShape(1, 1, 1), neighbours_shape(layout.pp, step["pp"], node)
    shards = plane_shape(((layout.dp_shard, step["dp_shard"]), (layout.cp, step["cp"])), node)
    return (
        shards,
        strided_shape(layout.dp_replicate, step["dp_replicate"], node),
        neighbours_shape(layout.pp, step["pp"], node),
    )


def expert_shapes(layout: Layout, gpus_per_node: int) -> tuple[GroupShape, GroupShape]:
    """Return the shapes of the group that shards (or, in stage 0, reduces) an expert, and of its replicas."""
    replicas, shards = expert_degrees(layout)
    sharded = sharding_stage(layout) > 0
    step = strides(layout)
    if step["dp_shard"] == step["cp"] * layout.cp:  # dp x cp is one row of ranks, equally far apart
        apart = step["cp"] * layout.ep
        inner = strided_shape(shards if sharded else replicas, apart, gpus_per_node)
        return inner, strided_shape(replicas if sharded else 1, apart * shards, gpus_per_node)
    same = np.arange(replicas * shards) * layout.ep  # places in dp x cp of rank 0's experts
    (near, degree), (far, _) = sorted(((step["cp"], layout.cp), (step["dp_shard"], layout.dp)))
    ranks = same // degree * far + same % degree * near
    inner = shape_of([int(r) for r in (ranks[:shards] if sharded else ranks)], gpus_per_node)
    return inner, shape_of([int(r) for r in ranks[::shards]] if sharded else [0], gpus_per_node)
