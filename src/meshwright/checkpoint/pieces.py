"""A rank's part of a logical tensor as pieces at their offsets, so that a checkpoint knows no axis.

A tensor that the tensor axis cuts (in segments, where q, k and v are fused; along any dim) and ZeRO cuts again by
rows is not one block of the logical tensor. Written and read piece by piece at logical offsets, a checkpoint of one
layout loads into any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard


class Pieces(Tensor):
    """A tensor of the logical shape that holds only this rank's pieces: (offsets, view) each.

    It answers what torch's distributed checkpoint asks of a sharded tensor, and nothing else.
    """

    pieces: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], like: Tensor, pieces: list[tuple[tuple[int, ...], Tensor]]
    ) -> Pieces:
        """Return a tensor of ``shape`` with ``like``'s dtype and device, and these pieces."""
        out: Pieces = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        out.pieces = pieces
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: there is no whole tensor here to compute with."""
        raise NotImplementedError(f"{func} of a tensor of which a rank holds pieces")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return one item per piece to write."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(piece),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk, (_, piece) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where the pieces lie."""
        return [ChunkStorageMetadata(torch.Size(at), torch.Size(piece.shape)) for at, piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece at ``index``."""
        return next(piece for at, piece in self.pieces if torch.Size(at) == index.offset)


def in_pieces(
    tensor: Tensor, shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]], *, row: int = 0
) -> Pieces:
    """Return a rank's ``tensor`` at its place in the logical tensor of ``shape``.

    Args:
        tensor: the parts named by ``ranges`` put together along ``dim``, or a DTensor of that cut by rows.
        shape: sizes of the logical tensor.
        dim: the dim that is cut.
        ranges: (start, size) of each part along ``dim`` of the logical tensor.
        row: the logical row at which ``tensor`` begins, where rows are cut beside ``dim`` (experts).
    """
    local, first = tensor, 0
    if isinstance(tensor, DTensor):
        local, first = tensor.to_local(), _first_row(tensor)
    pieces: list[tuple[tuple[int, ...], Tensor]] = []
    at = 0  # where a part begins in what the tensor axis left
    for start, size in ranges:
        offsets = [0] * len(shape)
        if dim == 0:  # rows first .. first + local of it are here
            low, high = max(at, first), min(at + size, first + local.shape[0])
            piece = local.narrow(0, low - first, high - low) if low < high else local.narrow(0, 0, 0)
            offsets[0] = start + low - at
        else:
            piece = local.narrow(dim, at, size)
            offsets[0], offsets[dim] = row + first, start
        if piece.numel():
            pieces.append((tuple(offsets), piece))
        at += size
    return Pieces(shape, local, pieces)


def _first_row(tensor: DTensor) -> int:
    """Return the first row that this rank holds of a tensor that is cut by rows as ``torch.chunk`` does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    rows, first = tensor.shape[0], 0
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            first = min(coordinate[axis] * -(-rows // tensor.device_mesh.size(axis)), rows)
    return first
