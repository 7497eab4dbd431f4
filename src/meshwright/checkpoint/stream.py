"""Writing safetensors files tensor by tensor: the header first, from shapes alone, then each tensor as it comes.

safetensors' own writer takes a whole file's tensors at once and copies them; this one holds none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

KINDS: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of dtypes."""

_PIECE: Final = 1 << 24


@dataclass(frozen=True)
class Row:
    """One tensor to come: name, dtype, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def rows_of(tensors: Mapping[str, Tensor]) -> list[Row]:
    """Return the rows of ``tensors`` (on any device, meta too)."""
    return [Row(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


class ShardFiles:
    """safetensors files of at most ``limit`` bytes of tensors (one tensor may be larger), filled in order of ``rows``.

    Attributes:
        places: the file number (from 1) of each tensor.
        bytes: bytes of all tensors.
    """

    def __init__(self, folder: Path, limit: int, rows: Iterable[Row]) -> None:
        self.folder = folder
        self.shards: list[list[Row]] = []
        size = 0
        for row in rows:
            if not self.shards or size + row.bytes > limit:
                self.shards.append([])
                size = 0
            self.shards[-1].append(row)
            size += row.bytes
        self.places = {row.name: k for k, shard in enumerate(self.shards, 1) for row in shard}
        self.bytes = sum(row.bytes for shard in self.shards for row in shard)
        self._coming = [(k, row) for k, shard in enumerate(self.shards, 1) for row in shard]
        self._next = 0
        self._file: IO[bytes] | None = None

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors``, which must be the next rows.

        Raises:
            ValueError: another tensor was announced here.
        """
        for name, tensor in tensors.items():
            shard, row = self._coming[self._next]
            if Row(name, tensor.dtype, tuple(tensor.shape)) != row:
                raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} comes, {row} was announced")
            if self._next == 0 or self._coming[self._next - 1][0] != shard:
                self._open(shard)
            assert self._file is not None
            try:
                _write(self._file, tensor)
            except BaseException:
                self._close()
                raise
            self._next += 1

    def _open(self, shard: int) -> None:
        self._close()
        self._file = (self.folder / f"part-{shard}").open("wb")
        self._file.write(header(self.shards[shard - 1]))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self) -> list[str]:
        """Give the files their names, write the index of several; return the names.

        Raises:
            ValueError: announced tensors did not come.
        """
        self._close()
        if self._next != len(self._coming):
            raise ValueError(f"{len(self._coming) - self._next} announced tensors did not come")
        count = len(self.shards)
        if count == 1:
            names = ["model.safetensors"]
        else:
            names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
            index: dict[str, Any] = {
                "metadata": {"total_size": self.bytes},
                "weight_map": {name: names[k - 1] for name, k in sorted(self.places.items())},
            }
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for k, name in enumerate(names, 1):
            (self.folder / f"part-{k}").rename(self.folder / name)
        return names


def header(rows: Sequence[Row]) -> bytes:
    """Return the head of a safetensors file of ``rows`` in this order: its length, JSON, spaces up to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for row in rows:
        entries[row.name] = {
            "dtype": KINDS[row.dtype],
            "shape": list(row.shape),
            "data_offsets": [at, at + row.bytes],
        }
        at += row.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(stream: IO[bytes], tensor: Tensor) -> None:
    """Write the bytes of ``tensor``, little-endian as they lie in memory, without a second copy of it."""
    if not tensor.numel():
        return
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    for at in range(0, flat.size, _PIECE):
        stream.write(flat[at : at + _PIECE].data)
