"""A file of ``torch.save`` as plain data, without running its pickle and without reading its tensors.

The file is a zip archive, its members stored as they are: ``NAME/data.pkl`` (the objects; a pickle, which may call
whatever it names) and ``NAME/data/KEY`` (the bytes of each storage). Here the pickle is read by an unpickler that
imports nothing: tensors become places in the file, objects of a few libraries become inert records of what the
file says of them, and any other name ends the reading before anything is built.

Source of the format: torch.save's documentation (zip archive, storages by persistent id) and the pickle protocol.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import Tensor

from meshwright.base.errors import ExitCode, MeshwrightError, problem

STORAGES: Final[Mapping[str, torch.dtype]] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""torch's names of storages, by which a file says the dtype of its tensors."""

INERT: Final = (
    "_codecs",
    "accelerate",
    "argparse",
    "collections",
    "copy_reg",
    "copyreg",
    "datetime",
    "deepspeed",
    "enum",
    "megatron",
    "numpy",
    "pathlib",
    "torch",
    "transformers",
)
"""Packages whose names occur in checkpoints of other programs; what they name is kept as a record and never built."""

PLAIN: Final = ("bytearray", "complex", "frozenset", "object", "range", "set", "slice")
"""Python's own types that occur in checkpoints, kept as records too; any other builtin ends the reading."""

_BUILTINS: Final = ("builtins", "__builtin__")
_LOCAL_HEADER: Final = 30


class NotData(Exception):
    """The file names something that no checkpoint needs."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: nothing of it is read before it is asked for.

    Attributes:
        file: the file.
        at: byte of the file at which the tensor's first element lies.
        shape: sizes.
        contiguous: whether the elements lie in order without gaps; others are not read.
    """

    file: Path
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill the flat tensor ``out`` with the elements from ``start``; holds nothing else.

        Raises:
            MeshwrightError: E582 when the file does not hold them.
        """
        if not out.numel():
            return
        view = memoryview(cast("Any", out.view(torch.uint8).numpy()))
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.at + start * self.dtype.itemsize)
                done = 0
                while done < len(view):
                    count = stream.readinto(view[done:])
                    if not count:
                        raise OSError(f"it ends {len(view) - done} bytes too early")
                    done += count
        except OSError as error:
            raise MeshwrightError(
                problem("E582", where=str(self.file), found=str(error)), ExitCode.ENVIRONMENT
            ) from error

    def read(self) -> Tensor:
        """Return the tensor, on the CPU.

        Raises:
            MeshwrightError: E582 when the file does not hold it.
        """
        out = torch.empty(self.numel, dtype=self.dtype)
        self.read_into(out, 0)
        return out.reshape(self.shape)


class Inert:
    """What a file says of an object whose class is not built: the arguments of its making, and nothing that acts."""

    named = ""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Keep nothing: what the object held is not needed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def append(self, value: Any) -> None:
        """Keep nothing."""

    def extend(self, values: Iterable[Any]) -> None:
        """Keep nothing."""

    def add(self, value: Any) -> None:
        """Keep nothing."""


@dataclass(frozen=True)
class _Storage:
    """Bytes of one storage: where they begin and how many there are."""

    at: int
    length: int
    dtype: torch.dtype


class _Unpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, texts, places of tensors and inert records; imports nothing."""

    def __init__(self, stream: IO[bytes], path: Path, storage: Callable[[Any], _Storage]) -> None:
        super().__init__(stream)
        self._path, self._storage = path, storage

    def persistent_load(self, pid: Any, /) -> Any:
        """Return the storage that the file refers to."""
        return self._storage(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return our own maker for a name; nothing is imported."""
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module_name, global_name) == ("torch", "Size"):
            return _size
        if module_name == "torch" and global_name in STORAGES:
            return STORAGES[global_name]
        if module_name == "torch._utils" and global_name == "_rebuild_tensor_v2":
            return self._tensor
        if module_name == "torch._utils" and global_name == "_rebuild_parameter":
            return _first
        if module_name == "torch._tensor" and global_name == "_rebuild_from_type_v2":
            return _of_type
        plain = module_name in _BUILTINS and global_name in PLAIN
        if not plain and module_name.partition(".")[0] not in INERT:
            raise NotData(f"it names {module_name}.{global_name}, which no checkpoint of weights needs")
        return type("Inert", (Inert,), {"named": f"{module_name}.{global_name}"})

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor without a storage")
        shape, steps = _size(size), _size(stride)
        if type(offset) is not int or offset < 0 or len(shape) != len(steps):
            raise ValueError("a tensor whose place is not made of numbers")
        contiguous = _in_order(shape, steps)
        width = storage.dtype.itemsize
        if contiguous and (offset + math.prod(shape)) * width > storage.length:
            raise ValueError(
                f"a tensor of {list(shape)} reaches beyond its storage of {storage.length} bytes"
            )
        return StoredTensor(
            file=self._path,
            at=storage.at + offset * width,
            dtype=storage.dtype,
            shape=shape,
            contiguous=contiguous,
        )


def _size(values: Any = ()) -> tuple[int, ...]:
    out = tuple(values)
    if not all(type(v) is int and v >= 0 for v in out):
        raise ValueError(f"{out!r} are no sizes")
    return out


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_type(make: Any, _: Any, args: Any, __: Any) -> Any:
    """Return a tensor that has attributes of its own, without them."""
    if getattr(make, "__func__", None) is not _Unpickler._tensor:  # pyright: ignore[reportPrivateUsage]
        raise ValueError("a tensor that is made by something else than torch's own maker")
    return make(*args)


def _in_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= size
    return True


def read_torch_file(path: Path) -> Any:
    """Return what ``torch.save`` wrote to ``path``, tensors as ``StoredTensor`` and unknown objects as ``Inert``.

    Reads the pickle and the archive's directory; memory is what they take, without any tensor.

    Raises:
        MeshwrightError: E581 when it names something that is not data, E582 when it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            members = {i.filename.partition("/")[2]: i for i in archive.infolist()}
            order = members.get("byteorder")
            if order is not None and _content(archive, raw, order).strip() != sys.byteorder.encode():
                raise ValueError("it was written on a machine of another byte order")
            content = _content(archive, raw, members["data.pkl"])

            def storage(pid: Any) -> _Storage:
                kind, dtype, key, _, numel = pid
                if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int:
                    raise ValueError(f"a storage of an unknown kind: {kind!r}")
                info = members[f"data/{key}"]
                length = numel * dtype.itemsize
                if info.compress_type != zipfile.ZIP_STORED or not 0 <= length <= info.file_size:
                    raise ValueError(
                        f"storage {key} should have {length} bytes, the archive has {info.file_size}"
                    )
                return _Storage(member_begin(raw, info), length, dtype)

            return _Unpickler(io.BytesIO(content), path, storage).load()
    except NotData as error:
        raise MeshwrightError(problem("E581", where=str(path), found=str(error))) from error
    except Exception as error:  # a cut-off or crafted file can raise anything; nothing of it was called
        found = f"{type(error).__name__}: {error}"
        raise MeshwrightError(problem("E582", where=str(path), found=found), ExitCode.ENVIRONMENT) from error


def _content(archive: zipfile.ZipFile, raw: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes; where torch was told to write no checksums (it writes 0), none is compared."""
    if info.CRC or info.compress_type != zipfile.ZIP_STORED:
        return archive.read(info)
    raw.seek(member_begin(raw, info))
    return raw.read(info.file_size)


def member_begin(raw: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return at which byte of the file a member's content begins (behind its own header, which has its own length)."""
    raw.seek(info.header_offset)
    head = raw.read(_LOCAL_HEADER)
    if len(head) < _LOCAL_HEADER or head[:4] != b"PK\x03\x04":
        raise ValueError(f"no header of {info.filename} where the archive says it is")
    name, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + name + extra
