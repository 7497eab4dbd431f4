"""Reading torch DCP's files without running what is in them.

``.metadata`` is a pickle, and torch reads it with plain ``pickle.load``, which runs any code that a crafted file
asks for. Here an unpickler knows only the classes that such an index is made of, and the index is checked:
tensors only (object entries would be loaded with pickle too), files in the folder only, no transforms.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from meshwright.base.errors import MeshwrightError, problem
from meshwright.checkpoint.manifest import METADATA, is_plain_name
from meshwright.checkpoint.piece_files import read_rows

_INDEX = "torch.distributed.checkpoint.metadata"
ALLOWED: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        *(
            (_INDEX, name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),  # where torch wrote it; a path is a name, and nothing is done with it
        ("pathlib._local", "PosixPath"),
        ("torch.serialization", "_get_layout"),
        *(
            ("torch", str(dtype).removeprefix("torch."))
            for dtype in (
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.float8_e5m2,
                torch.int64,
                torch.int32,
                torch.int16,
                torch.int8,
                torch.uint8,
                torch.bool,
            )
        ),
    }
)
"""Every name that an index of tensors may use, by module."""


class _Unpickler(pickle.Unpickler):
    """An unpickler of DCP's index; any name that is not in ``ALLOWED`` ends it before anything is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which no index of tensors uses"
            )
        return getattr(importlib.import_module(module_name), global_name)


def read_index(folder: Path, *, only_tensors: bool = True) -> Metadata:
    """Return DCP's index of the checkpoint in ``folder``.

    ``only_tensors=False``: entries that are objects may be there (foreign checkpoints have them); they are never read.

    Raises:
        MeshwrightError: E710 for an index that holds more than tensors in this folder, E702 when it is not there.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MeshwrightError(
            problem("E702", where=str(folder), found=f"{METADATA}: {type(error).__name__}: {error}")
        ) from error
    try:
        index = _Unpickler(io.BytesIO(content)).load()
        _check(index, only_tensors)
    except Exception as error:  # a crafted or cut-off pickle can raise anything; nothing of it was called
        raise MeshwrightError(problem("E710", where=str(path), found=str(error))) from error
    return index


def _check(index: Any, only_tensors: bool) -> None:
    """Raise ValueError unless ``index`` describes tensors in plain files, each piece once."""
    if type(index) is not Metadata:
        raise ValueError(f"it holds a {type(index).__name__}, not an index")
    for key, entry in index.state_dict_metadata.items():
        if not only_tensors and type(key) is str and type(entry) is BytesStorageMetadata:
            continue
        if type(key) is not str or type(entry) is not TensorStorageMetadata:
            raise ValueError(f"entry {key!r} is not a tensor; objects are not read")
        for chunk in entry.chunks:
            place = index.storage_data.get(MetadataIndex(key, chunk.offsets))
            if place is None:
                raise ValueError(f"a piece of {key} has no place in a file")
    for where, place in index.storage_data.items():
        if type(place.relative_path) is not str or not is_plain_name(place.relative_path):
            raise ValueError(f"{where.fqn} lies outside the folder, in {place.relative_path!r}")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{where.fqn} is stored through a transform, which is not read")


class SafeReader(FileSystemReader):
    """DCP's file reader with the checked index; what can be is read straight into the memory that it is for."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index
        self._pieces: dict[tuple[str, torch.Size | None], tuple[int, ...]] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was read and checked before."""
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of ``plan``: rows of a piece straight into place, the rest as torch reads it."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        rest: list[ReadItem] = []
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb", buffering=0) as stream:
                rest += [item for item in items if not self._direct(stream.fileno(), item, planner)]
        if rest:
            return super().read_data(replace(plan, items=rest), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _direct(self, handle: int, item: ReadItem, planner: LoadPlanner) -> bool:
        entry = self._index.state_dict_metadata[item.storage_index.fqn]
        if item.type != LoadItemType.TENSOR or not isinstance(entry, TensorStorageMetadata):
            return False
        shape = self._shapes().get((item.storage_index.fqn, item.storage_index.offset))
        if shape is None or any(item.storage_offsets[1:]) or tuple(item.lengths[1:]) != shape[1:]:
            return False
        place = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        first = item.storage_offsets[0] if shape else 0
        if not read_rows(handle, place.offset, shape, entry.properties.dtype, first, target):
            return False
        planner.commit_tensor(item, target)
        return True

    def _shapes(self) -> dict[tuple[str, torch.Size | None], tuple[int, ...]]:
        """Return the sizes of each piece, by key and offsets."""
        if self._pieces is None:
            self._pieces = {
                (key, chunk.offsets): tuple(chunk.sizes)
                for key, entry in self._index.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
                for chunk in entry.chunks
            }
        return self._pieces


def read_tensor(folder: Path, index: Metadata, key: str) -> Tensor:
    """Return the whole tensor ``key``, put together from its pieces on the CPU.

    Holds the tensor, and one of its pieces where it has several; needs no process group.

    Raises:
        MeshwrightError: E711 when a piece cannot be read or has another shape than the index says.
    """
    entry = index.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return read_part(folder, index, key, (0,) * len(entry.size), tuple(entry.size))


def read_part(
    folder: Path, index: Metadata, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """Return the part of tensor ``key`` of ``sizes`` at ``offsets``; holds it and one stored piece.

    Raises:
        MeshwrightError: E711 when a piece cannot be read or has another shape than the index says.
    """
    entry = index.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    part: Tensor | None = None
    for chunk in entry.chunks:
        common = overlaps(chunk.offsets, chunk.sizes, offsets, sizes)
        if common is None:
            continue
        piece = _read_piece(folder, index, key, entry, chunk)
        if tuple(chunk.offsets) == offsets and tuple(chunk.sizes) == sizes:
            return piece
        if part is None:
            part = torch.empty(sizes, dtype=entry.properties.dtype)
        to, of = part, piece
        for dim, (start, size) in enumerate(common):
            to = to.narrow(dim, start - offsets[dim], size)
            of = of.narrow(dim, start - chunk.offsets[dim], size)
        to.copy_(of)
    return torch.empty(sizes, dtype=entry.properties.dtype) if part is None else part


def overlaps(
    at: Sequence[int], size: Sequence[int], other_at: Sequence[int], other_size: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return (start, size) per dim of what two boxes share, or None when they share nothing."""
    common: list[tuple[int, int]] = []
    for a, n, b, m in zip(at, size, other_at, other_size, strict=True):
        start, end = max(a, b), min(a + n, b + m)
        if end <= start:
            return None
        common.append((start, end - start))
    return common


def _read_piece(
    folder: Path, index: Metadata, key: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata
) -> Tensor:
    assert index.storage_data is not None
    place = index.storage_data[MetadataIndex(key, chunk.offsets)]
    try:
        with (folder / place.relative_path).open("rb") as stream:
            piece = torch.empty(chunk.sizes, dtype=entry.properties.dtype)
            if not read_rows(stream.fileno(), place.offset, tuple(chunk.sizes), piece.dtype, 0, piece):
                held: Any = io.BufferedReader(FilePart(stream, place.offset, place.length))
                piece = torch.load(held, map_location="cpu", weights_only=True)
        if piece.shape != chunk.sizes or piece.dtype != entry.properties.dtype:
            raise ValueError(
                f"a piece is {list(piece.shape)} {piece.dtype}, the index says {list(chunk.sizes)} "
                f"{entry.properties.dtype}"
            )
    except Exception as error:  # what torch raises for a broken file is not one class
        raise MeshwrightError(
            problem(
                "E711",
                where=str(folder / place.relative_path),
                found=f"{key}: {type(error).__name__}: {error}",
            )
        ) from error
    return piece


class FilePart(io.RawIOBase):
    """``length`` bytes of an open file from ``offset``, read as a file of its own; nothing is held."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place in the part; return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        """Return the place in the part."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` as far as the part goes; return how many bytes there were."""
        self._stream.seek(self._offset + self._at)
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = self._stream.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]
        self._at += count
        return count
