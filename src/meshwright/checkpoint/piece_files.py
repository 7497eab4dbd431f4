"""Writing and reading the pieces of a checkpoint: each byte passes once, checksums on the way, straight to its place.

A piece is what ``torch.save`` makes of one tensor, so that any reader of torch's distributed checkpoints takes it: a zip
archive with the objects (``data.pkl``) and the bytes of the storage. Here the bytes come first, 64 bytes from the
piece's beginning, so that a reader that finds the head it expects reads the tensor straight into the memory it is for.
The archive's own checksum of those bytes is left out (torch does not compare it): the manifest has a CRC-32 of the
whole piece. Tensors of other dtypes, or of 2 GiB and more, are written by ``torch.save``.

While a file grows, the system is told to begin with what is there already (Linux), so that little is left for the end.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]

from meshwright.checkpoint.manifest import Chunk, StoredFile
from meshwright.checkpoint.torchfile import STORAGES

HEAD_BYTES: Final = 64
"""Where the elements begin in a piece; torch aligns storages so too."""

_DATA: Final = b"archive/data/0"
_LARGEST: Final = 1 << 31
_STEP: Final = 1 << 20
"""Bytes that are checksummed and written together, while they are in the processor's cache."""

_SYNC_EVERY: Final = 1 << 25
_BEGIN: Final = 2
"""SYNC_FILE_RANGE_WRITE of Linux."""

_KINDS: Final = {dtype: name for name, dtype in STORAGES.items()}
_DATE: Final = 0x21
"""1 January 1980, the first day that an archive can name."""


def _local(name: bytes, crc: int, size: int, extra: bytes = b"") -> bytes:
    return (
        struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
        + name
        + extra
    )


def _central(name: bytes, crc: int, size: int, at: int) -> bytes:
    fixed = (b"PK\1\2", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", *fixed) + name


def head_of(size: int) -> bytes:
    """Return the first ``HEAD_BYTES`` bytes of a piece whose tensor has ``size`` bytes."""
    padding = HEAD_BYTES - 30 - len(_DATA)
    return _local(_DATA, 0, size, struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4))


def tail_of(tensor: Tensor, size: int) -> bytes:
    """Return what stands behind the bytes of ``tensor`` in a piece: objects, byte order, version, directory."""
    at = HEAD_BYTES + size
    out, directory = b"", _central(_DATA, 0, size, 0)
    members = {
        b"archive/data.pkl": _objects(tensor),
        b"archive/byteorder": sys.byteorder.encode(),
        b"archive/version": b"3\n",
    }
    for name, content in members.items():
        crc = zlib.crc32(content)
        directory += _central(name, crc, len(content), at + len(out))
        out += _local(name, crc, len(content)) + content
    count = len(members) + 1
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), at + len(out), 0)
    return out + directory + end


class _Bytes:
    """Stands for a tensor's storage in the pickle."""

    def __init__(self, kind: Any, numel: int) -> None:
        self.kind, self.numel = kind, numel


class _Made:
    """Pickles as a tensor that torch makes of a storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        t = self.tensor
        storage = _Bytes(getattr(torch, _KINDS[t.dtype]), t.numel())
        strides = torch.empty(t.shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (storage, 0, tuple(t.shape), strides, False, hooks)
        return _rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """Return torch's name of a storage."""
        return ("storage", obj.kind, "0", "cpu", obj.numel) if isinstance(obj, _Bytes) else None


def _objects(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Made(tensor))
    return stream.getvalue()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; nothing is copied."""
    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


class PieceFile:
    """One file of pieces while it is written: ``with PieceFile(path) as file``, then ``file.stored``.

    At the end of the ``with`` block the file is on the disk.

    Attributes:
        stored: name, size and pieces with their CRC-32, at the end of the block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks: list[Chunk] = []
        self._small = bytearray()
        self._at = 0
        self._there = self._begun = 0
        self.stored = StoredFile(file=path.name, bytes=0)

    def __enter__(self) -> PieceFile:
        """Open the file, which must not be there yet."""
        self._file = self._path.open("xb", buffering=0)
        self._pool = ThreadPoolExecutor(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Bring the file to the disk, and close it.

        Raises:
            OSError: what writing ended with.
        """
        try:
            if kind is None:
                self._flush()
                os.fsync(self._file.fileno())
                self.stored = StoredFile(file=self._path.name, bytes=self._at, chunks=tuple(self._chunks))
        finally:
            self._pool.shutdown()
            self._file.close()

    def add(self, key: str, tensor: Tensor) -> tuple[int, int]:
        """Append ``tensor`` (on the CPU) as one piece; return its offset and length in bytes."""
        begin = self._at
        crc = 0
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype in _KINDS and size < _LARGEST:
            content = raw_bytes(tensor.contiguous())
            parts = [memoryview(head_of(size)), content, memoryview(tail_of(tensor, size))]
        else:
            stream = io.BytesIO()
            torch.save(tensor.contiguous().clone(), stream)
            parts = [stream.getbuffer()]
        for part in parts:
            if len(part) > 4 * _STEP:  # summed and written at the same time: neither holds the interpreter
                summed = self._pool.submit(_crc_of, part, crc)
                self._write(part)
                crc = summed.result()
            else:
                crc = zlib.crc32(part, crc)
                self._write(part)
        self._chunks.append(Chunk(key=key, offset=begin, length=self._at - begin, crc32=crc))
        return begin, self._at - begin

    def _write(self, content: memoryview) -> None:
        self._at += len(content)
        if len(self._small) + len(content) <= _STEP:
            self._small += content
            return
        self._flush()
        self._put(content)

    def _flush(self) -> None:
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, content: memoryview) -> None:
        done = 0
        while done < len(content):
            count = self._file.write(content[done : done + _SYNC_EVERY])
            done += count
            self._there += count
            if self._there - self._begun >= _SYNC_EVERY:
                _begin_writing(self._file.fileno(), self._begun, self._there - self._begun)
                self._begun = self._there


def _crc_of(content: memoryview, crc: int) -> int:
    """Return the CRC-32 of what was summed before and ``content``."""
    for at in range(0, len(content), _STEP):
        crc = zlib.crc32(content[at : at + _STEP], crc)
    return crc


def _begin_writing(handle: int, offset: int, length: int) -> None:
    """Let the system begin to bring a part of a file to the disk; waits for nothing, promises nothing (Linux)."""
    call: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(handle, ctypes.c_int64(offset), ctypes.c_int64(length), _BEGIN)


def read_rows(
    handle: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, first: int, out: Tensor
) -> bool:
    """Fill ``out`` with rows of a piece of ``shape`` from row ``first``; return False, having done nothing, if it cannot.

    It can where the piece begins with the head of such a tensor and ``out`` is contiguous memory of the CPU whose rows
    are whole rows of the piece.

    Raises:
        OSError: the file ends too early.
    """
    width = dtype.itemsize
    size = torch.Size(shape).numel() * width
    if dtype not in _KINDS or size >= _LARGEST or out.device.type != "cpu" or out.dtype != dtype:
        return False
    if not out.is_contiguous() or tuple(out.shape[1:]) != shape[1:] or len(out.shape) != len(shape):
        return False
    if os.pread(handle, HEAD_BYTES, offset) != head_of(size):
        return False
    row = torch.Size(shape[1:]).numel() * width
    view = raw_bytes(out)
    at, done = offset + HEAD_BYTES + first * row, 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], at + done)
        if not count:
            raise OSError(f"the file ends {len(view) - done} bytes too early")
        done += count
    return True
