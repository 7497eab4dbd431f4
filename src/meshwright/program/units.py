"""Units: the parameters of a stage in the groups that data parallelism gathers and reduces together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshwright.layout.layout import Layout
from meshwright.model.adapters import base_names
from meshwright.model.quantised import row_bytes
from meshwright.model.spec import ModelSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together: one block, or all that is outside the blocks ("root").

    Attributes:
        name: "root" or "block 3" (the layer's global index).
        tensors: real tensors of this stage; a tied head whose embedding lives elsewhere is one of them. Matrices that
            are held in 4 bits are not: nothing gathers them, and they have no gradient.
        trainable: for each tensor whether it has a gradient.
        rows: bytes of each matrix in 4 bits here, in one row; ZeRO-3 cuts and gathers them with the unit.
        experts: whether it holds one mixture's experts, which the expert axis spreads.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    trainable: tuple[bool, ...]
    rows: tuple[int, ...] = ()
    experts: bool = False

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(t.numel for t in self.tensors)

    @property
    def trainable_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that have a gradient."""
        return tuple(t for t, train in zip(self.tensors, self.trainable, strict=True) if train)

    @property
    def trainable_numel(self) -> int:
        """Elements that have a gradient."""
        return sum(t.numel for t in self.trainable_tensors)

    def padded_numel(self, num_shards: int, *, trainable: bool = False) -> int:
        """Return the elements with every tensor's dim 0 padded to a multiple of ``num_shards``."""
        tensors = self.trainable_tensors if trainable else self.tensors
        return sum(padded_numel(t.shape, num_shards) for t in tensors)

    def padded_rows(self, num_shards: int) -> int:
        """Return the bytes of the rows of matrices in 4 bits, each padded to a multiple of ``num_shards``."""
        return sum(-(-size // num_shards) * num_shards for size in self.rows)

    def shard_numel(self, num_shards: int, index: int, *, trainable: bool = False) -> int:
        """Return the elements that shard ``index`` holds, without padding."""
        tensors = self.trainable_tensors if trainable else self.tensors
        return sum(shard_numel(t.shape, num_shards, index) for t in tensors)


def padded_numel(shape: Sequence[int], num_shards: int) -> int:
    """Return the elements of a tensor whose dim 0 is padded to a multiple of ``num_shards``."""
    rows = -(-shape[0] // num_shards) * num_shards
    out = rows
    for size in shape[1:]:
        out *= size
    return out


def shard_numel(shape: Sequence[int], num_shards: int, index: int) -> int:
    """Return the elements in chunk ``index`` of dim 0: ceil(d0 / N) rows each, fewer or none at the end."""
    each = -(-shape[0] // num_shards)
    out = max(0, min(each, shape[0] - index * each))
    for size in shape[1:]:
        out *= size
    return out


def frozen_names(spec: ModelSpec, patterns: Sequence[str]) -> frozenset[str]:
    """Return the tensor names that ``patterns`` (shell wildcards) freeze; tied tensors are frozen together.

    With an adapter, all that is not the adapter's is frozen too.
    """
    names = {t.name for t in spec.tensors() if any(fnmatchcase(t.name, p) for p in patterns)}
    names |= base_names(spec)
    for tensor in spec.tensors():
        if tensor.tied_to is not None and (tensor.tied_to in names or tensor.name in names):
            names |= {tensor.name, tensor.tied_to}
    return frozenset(names)


def row_of(whole: TensorSpec, held: TensorSpec, spec: ModelSpec) -> int:
    """Return the bytes of ``held``, all or a part of the matrix ``whole`` in 4 bits, in one row."""
    assert spec.adapter is not None
    return row_bytes(held.numel, whole.numel, spec.adapter.double)


def stage_layers(layout: Layout, stage: int) -> range:
    """Return the global indices of the layers of ``stage``; the layout's cut must be written as numbers."""
    layers = layout.cut_layers
    start = sum(layers[:stage])
    return range(start, start + layers[stage])


def stage_units(spec: ModelSpec, layout: Layout, stage: int, frozen: Sequence[str] = ()) -> tuple[Unit, ...]:
    """Return the units of ``stage``: the root first (empty on a middle stage), then one per block.

    The root holds embedding and positions on the first stage, final norm and head on the last. A tied head shares
    the embedding's tensor when both are on one stage; else it is a tensor of its own, named by the head. ``frozen``
    are name patterns; ``layout.cut`` must be written as layers per stage.
    """
    held: list[TensorSpec] = []
    if stage == 0:
        held += spec.embedding
    if stage == layout.num_stages - 1:
        held += spec.final
        held += [t for t in spec.head if t.tied_to is None or layout.num_stages > 1]
    stopped = frozen_names(spec, frozen)

    def unit(name: str, tensors: Sequence[TensorSpec]) -> Unit:
        plain = [t for t in tensors if not t.quantised]
        return Unit(
            name=name,
            tensors=tuple(plain),
            trainable=tuple(t.name not in stopped for t in plain),
            rows=tuple(row_of(t, t, spec) for t in tensors if t.quantised),
        )

    blocks = [spec.blocks[i] for i in stage_layers(layout, stage)]
    return (unit("root", held), *(unit(f"block {b.index}", b.tensors) for b in blocks))


def leading_frozen(spec: ModelSpec, layout: Layout, stage: int, frozen: Sequence[str] = ()) -> int:
    """Return how many blocks at the start of ``stage`` no gradient flows into, so that their backward does not run.

    That is the first stage's run of blocks without a trainable parameter, when nothing before them trains either;
    a later stage always sends the gradient of its input back.
    """
    if stage != 0:
        return 0
    stopped = frozen_names(spec, frozen)
    if any(t.name not in stopped for t in spec.embedding):
        return 0
    blocks = [spec.blocks[i] for i in stage_layers(layout, stage)]
    trains = (i for i, b in enumerate(blocks) if any(t.name not in stopped for t in b.tensors))
    return next(trains, len(blocks))


def tied_tensor(spec: ModelSpec) -> TensorSpec | None:
    """Return the embedding tensor that the head shares, or None when nothing is tied."""
    names = {t.tied_to for t in spec.head if t.tied_to is not None}
    return next((t for t in spec.embedding if t.name in names), None)
