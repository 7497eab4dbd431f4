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
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
"""Bytes that are checksummed together, between which the interpreter may turn to another thread."""

_TOGETHER: Final = 1 << 23
"""Bytes that wait to be written by one call."""

_MOST_PARTS: Final = 1024
"""Parts that one call of Linux writes (IOV_MAX)."""

_SMALL: Final = 1 << 16
"""A piece below so many bytes is checksummed where it is added."""

_BEHIND: Final = 1 << 26
"""Bytes by which checksums may be behind."""

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
    """Return what stands behind the bytes of ``tensor`` in a piece: objects, byte order, version, directory.

    The same for all tensors of its dtype and shape.
    """
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

    Pieces are checksummed in a thread of their own, beside the writing and behind it, and the system begins to bring
    them to the disk in another; at the end of the ``with`` block the file is on the disk.

    Attributes:
        stored: name, size and pieces with their CRC-32, at the end of the block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks: list[Callable[[], Chunk]] = []
        self._summing: deque[tuple[int, Future[int]]] = deque()
        self._behind = 0
        self._waiting: list[memoryview] = []
        self._gathered = 0
        self._tails: dict[tuple[torch.dtype, torch.Size], bytes] = {}
        self._at = 0
        self._there = self._begun = 0
        self.stored = StoredFile(file=path.name, bytes=0)

    def __enter__(self) -> PieceFile:
        """Open the file, which must not be there yet."""
        self._file = self._path.open("xb", buffering=0)
        self._pool = ThreadPoolExecutor(1)
        self._early = ThreadPoolExecutor(1)
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
                chunks = tuple(chunk() for chunk in self._chunks)
                self.stored = StoredFile(file=self._path.name, bytes=self._at, chunks=chunks)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._early.shutdown(cancel_futures=True)
            self._file.close()

    def add(self, key: str, tensor: Tensor) -> tuple[int, int]:
        """Append ``tensor`` (on the CPU) as one piece; return its offset and length in bytes.

        The tensor must keep its values until the end of the ``with`` block. At most ``_BEHIND`` bytes of pieces and one
        more piece are held while they wait to be written and checksummed.
        """
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype in _KINDS and size < _LARGEST:
            content = raw_bytes(tensor.contiguous())
            kind = tensor.dtype, tensor.shape
            tail = self._tails.get(kind) or self._tails.setdefault(kind, tail_of(tensor, size))
            parts = [memoryview(head_of(size)), content, memoryview(tail)]
        else:
            stream = io.BytesIO()
            torch.save(tensor.contiguous().clone(), stream)
            parts = [stream.getbuffer()]
        begin, length = self._at, sum(len(part) for part in parts)
        self._at += length
        crc = self._sum(parts, length)
        self._chunks.append(lambda: Chunk(key=key, offset=begin, length=length, crc32=crc()))
        self._waiting += parts
        self._gathered += length
        if self._gathered >= _TOGETHER:
            self._flush()
        return begin, length

    def _sum(self, parts: list[memoryview], length: int) -> Callable[[], int]:
        """Begin to checksum a piece; what is returned waits for it."""
        if length < _SMALL:
            done = _crc_of(parts)
            return lambda: done
        summing = self._pool.submit(_crc_of, parts)
        self._summing.append((length, summing))
        self._behind += length
        while self._behind > _BEHIND and len(self._summing) > 1:
            earlier, future = self._summing.popleft()
            future.result()
            self._behind -= earlier
        return summing.result

    def _flush(self) -> None:
        """Write the pieces that wait, many by one call."""
        waiting, self._waiting, self._gathered = self._waiting, [], 0
        while waiting:
            count = os.writev(self._file.fileno(), _first(waiting, _SYNC_EVERY))
            self._there += count
            if self._there - self._begun >= _SYNC_EVERY:
                self._early.submit(
                    _begin_writing, self._file.fileno(), self._begun, self._there - self._begun
                )
                self._begun = self._there
            waiting = _after(waiting, count)


def _first(parts: list[memoryview], most: int) -> list[memoryview]:
    """Return the first parts, of at most ``most`` bytes (the last one cut) and at most ``_MOST_PARTS``."""
    out: list[memoryview] = []
    for part in parts[:_MOST_PARTS]:
        if most <= 0:
            break
        out.append(part[:most])
        most -= len(part)
    return out


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``parts`` behind their first ``count`` bytes."""
    for k, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[k + 1 :]]
        count -= len(part)
    return []


def _crc_of(parts: list[memoryview]) -> int:
    """Return the CRC-32 of ``parts``, one behind the other."""
    crc = 0
    for part in parts:
        for at in range(0, len(part), _STEP):
            crc = zlib.crc32(part[at : at + _STEP], crc)
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
