"""Homes for state that rests away from the device: flat pieces in host memory, or in memory-mapped files.

A piece is a flat tensor; ``store.make`` gives it a home, zero at first. Files are named by rank and piece, so that a run
after a crash takes over the same names; ``close`` removes them. Space on the disk is reserved when a file is made: a full
disk is an error then, not a dead process later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.layout.layout import Layout
from meshwright.mesh.device_mesh import MeshView


class Store(Protocol):
    """Where pieces rest. ``checks`` says whether what is read is held against a checksum."""

    checks: bool

    def make(self, index: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the flat home of piece ``index``, filled with zeros."""
        ...

    def settle(self, index: int) -> None:
        """Let go of the memory that a piece's home took while it was copied."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass
class HostStore:
    """Pieces in host memory, pinned where there is a GPU to copy to."""

    pinned: bool
    checks: bool = False

    def make(self, index: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self.pinned and numel > 0)

    def settle(self, index: int) -> None:
        """Nothing: host memory is their home."""

    def close(self) -> None:
        """Nothing: the tensors go with their owner."""


@dataclass
class FileStore:
    """Pieces in files of ``folder``, one each, mapped into memory; ``kind`` is a part of their names."""

    folder: Path
    rank: int
    kind: str = "piece"
    checks: bool = True
    maps: dict[int, mmap.mmap] = field(default_factory=dict[int, mmap.mmap])
    paths: dict[int, Path] = field(default_factory=dict[int, Path])

    def make(self, index: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a mapped file of zeros.

        Raises:
            MeshwrightError: E278 when the folder cannot be written or the disk has no room.
        """
        size = numel * dtype.itemsize
        if size == 0:
            return torch.zeros(0, dtype=dtype)
        path = self.folder / f"rank-{self.rank:05d}-{self.kind}-{index:04d}.state"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                self.paths[index] = path
                os.posix_fallocate(file.fileno(), 0, size)
                held = mmap.mmap(file.fileno(), size)
        except OSError as error:
            self.close()
            found = f"{size} bytes for {path.name}: {error.strerror or error}"
            raise MeshwrightError(
                problem("E278", where=str(self.folder), found=found), ExitCode.ENVIRONMENT
            ) from error
        self.maps[index] = held
        return torch.frombuffer(held, dtype=dtype)

    def settle(self, index: int) -> None:
        """Drop the pages of a piece from this process; the file keeps them."""
        if index in self.maps:
            self.maps[index].madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Remove the files, and the folder when nothing else is in it."""
        for path in self.paths.values():
            path.unlink(missing_ok=True)
        self.maps.clear()
        self.paths.clear()
        with contextlib.suppress(OSError):  # other ranks still have files in it
            self.folder.rmdir()


@dataclass(frozen=True)
class Slot:
    """The place of one tensor's entries in a piece: its name, first element and elements of one entry."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """Tensors whose entries rest, travel and are updated together; ``numel`` counts all entries of all of them."""

    index: int
    slots: tuple[Slot, ...]
    numel: int


def parameters_away(layout: Layout) -> bool:
    """Return whether parameters (with gradients and the optimizer's state) rest away from the device."""
    return layout.offload.startswith("parameters")


def pinned(layout: Layout, view: MeshView) -> bool:
    """Return whether parameters rest in pinned memory: on a GPU, unless they rest in files."""
    return view.device.type == "cuda" and layout.offload == "parameters"


def home_store(layout: Layout, view: MeshView, folder: Path | None, stage: int) -> HostStore | FileStore:
    """Return the store of one stage's parameters on one rank; files go to ``folder``."""
    if layout.offload == "parameters":
        return HostStore(pinned(layout, view))
    assert folder is not None
    return FileStore(folder, view.rank, f"stage-{stage}-unit")


def cut_pieces(sizes: Sequence[tuple[str, int]], entries: int) -> tuple[Piece, ...]:
    """Return pieces of (name, elements) in order, each at most as large as the largest tensor alone.

    A piece holds all ``entries`` of a tensor one after the other, then those of the next.
    """
    limit = max((n for _, n in sizes), default=0) * entries
    pieces: list[Piece] = []
    slots: list[Slot] = []
    used = 0
    for name, numel in sizes:
        if slots and used + numel * entries > limit:
            pieces.append(Piece(len(pieces), tuple(slots), used))
            slots, used = [], 0
        slots.append(Slot(name, used, numel))
        used += numel * entries
    if slots:
        pieces.append(Piece(len(pieces), tuple(slots), used))
    return tuple(pieces)


def checksum(flat: Tensor) -> int:
    """Return the CRC-32 of a flat CPU tensor's bytes."""
    content: Any = flat.view(
        torch.uint8
    ).numpy()  # an array is a buffer, which its stub for Python 3.11 does not say
    return zlib.crc32(content) if flat.numel() else 0


class Seals:
    """The checksums of a piece that holds parameters: one per name, whose (start, elements) ``places`` says.

    Where the store checks nothing, nothing is done.
    """

    def __init__(self, store: Store, index: int, places: Mapping[str, tuple[int, int]], home: Tensor) -> None:
        self._store, self._index, self._places, self._home = store, index, dict(places), home
        self._sums: dict[str, int] = {}

    def seal(self, names: Sequence[str] | None = None) -> None:
        """Take what is at home now as right (of ``names``; by default all of it), and let its memory go."""
        wanted = self._places if names is None else [n for n in names if n in self._places]
        if self._store.checks and wanted:
            for name in wanted:
                self._sums[name] = checksum(self._part(name))
            self.settle()

    def check(self) -> None:
        """Hold what is at home against its checksums. Raises MeshwrightError E277."""
        for name, seal in self._sums.items():
            if checksum(self._part(name)) != seal:
                raise MeshwrightError(
                    problem("E277", where=name, found="its checksum is another one"), ExitCode.ENVIRONMENT
                )

    def settle(self) -> None:
        """Let go of the memory that the home took while it was read or written."""
        self._store.settle(self._index)

    def _part(self, name: str) -> Tensor:
        start, numel = self._places[name]
        return self._home[start : start + numel]
