"""Whether another program's checkpoint is whole and as it was written, as far as its own files say.

Looked at: every rank's file and its size against the index; shapes, pieces and names against the index and against
config.json where there is one; the CRC-32 that torch.save keeps of every part of its archives; every tensor once, with
how many of its elements are not finite. No object of a file is built.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import torch

from meshwright.base.errors import MeshwrightError, Problem
from meshwright.checkpoint.foreign import Foreign, config_beside, matched
from meshwright.checkpoint.foreign_export import read_config
from meshwright.checkpoint.hf_files import missing_of_config
from meshwright.checkpoint.manifest import listed
from meshwright.checkpoint.metadata import FilePart
from meshwright.checkpoint.torchfile import member_begin
from meshwright.model.read_hf import spec_from_config

_FOUND: Final = ("E580", "E582", "E584", "E585")
"""Problems of opening that are the answer; what is unsafe or not read is refused."""

_STEP: Final = 1 << 20


@dataclass
class _Seen:
    """What was found so far: damage by file, tensors that are not finite, and archives with checksums."""

    damaged: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    not_finite: dict[str, int] = field(default_factory=dict[str, int])
    checked: int = 0

    def add(self, file: str, why: str, *tensors: str) -> None:
        """Note damage; the tensors of one file with the same damage are put together."""
        for item in self.damaged:
            if (item["file"], item["why"]) == (file, why):
                item["tensors"] += [t for t in tensors if t not in item["tensors"]]
                return
        self.damaged.append({"file": file, "why": why, "tensors": list(tensors)})


def verify_foreign(path: Path, opened: Callable[[Path], Foreign]) -> dict[str, Any]:
    """Return whether the checkpoint in ``path`` is whole, what is damaged, and what was compared.

    Holds one tensor at a time. Elements that are not finite are counted and are no damage.

    Args:
        path: the folder.
        opened: what reads it: ``open_foreign`` or ``open_hf_folder``.

    Raises:
        MeshwrightError: E581 and E710 for files that name more than data, E583 for a cut that is not read.
    """
    answer: dict[str, Any] = {
        "path": str(path),
        "ok": False,
        "step": None,
        "files": 0,
        "bytes": 0,
        "tensors": 0,
    }
    try:
        foreign = opened(path)
    except MeshwrightError as error:
        if any(p.code not in _FOUND for p in error.problems):
            raise
        return answer | _structure(error.problems, path)
    seen = _Seen()
    for archive in foreign.archives:
        _check_archive(foreign, *archive, seen)
    _read_all(foreign, seen)
    incomplete, compared = _against_config(foreign, seen)
    return answer | {
        "kind": foreign.kind,
        "ok": not seen.damaged and not incomplete,
        "step": foreign.step,
        "files": len(foreign.files),
        "bytes": sum(f.stat().st_size for f in foreign.files),
        "tensors": len(foreign.entries),
        "checksums": f"{seen.checked} of {len(foreign.archives)} archives have them"
        if foreign.archives
        else "none",
        "compared_with": compared,
        "not_finite": seen.not_finite,
        "incomplete": incomplete,
        "damaged": seen.damaged,
    }


def _structure(problems: tuple[Problem, ...], path: Path) -> dict[str, Any]:
    """Return the answer for files that are missing, cut off, of several saves, or do not add up."""
    rest = [p for p in problems if p.code != "E580"]
    return {
        "kind": "",
        "incomplete": "; ".join(p.found for p in problems if p.code == "E580"),
        "damaged": [
            {"file": "" if p.where == str(path) else Path(p.where).name, "why": p.found, "tensors": []}
            for p in rest
        ],
    }


def _check_archive(foreign: Foreign, file: Path, offset: int, length: int, seen: _Seen) -> None:
    """Compare the parts of one archive with its CRC-32s; an archive whose directory has none is passed over."""
    found = False
    try:
        with file.open("rb") as stream:
            for first, end, intact in _members(stream, offset, length):
                found = True
                if not intact:
                    tensors = foreign.tensors_at(file, first, end)
                    seen.add(file.name, "its bytes changed: another CRC-32 than the archive's", *tensors)
    except (OSError, zipfile.BadZipFile, ValueError, zlib.error, NotImplementedError) as error:
        tensors = foreign.tensors_at(file, offset, offset + length)
        seen.add(file.name, f"{type(error).__name__}: {error}", *tensors)
    seen.checked += found


def _members(stream: IO[bytes], offset: int, length: int) -> Iterator[tuple[int, int, bool]]:
    """Yield first byte, end and whether it is intact of each member that has a checksum; nothing for no archive."""
    held: Any = io.BufferedReader(FilePart(stream, offset, length), _STEP)
    if held.read(2) != b"PK":
        return
    with zipfile.ZipFile(held) as archive:
        for info in archive.infolist():
            if not info.CRC and info.file_size:  # torch was told to leave them out
                continue
            intact = True
            try:
                with archive.open(info) as member:
                    while member.read(_STEP):
                        pass
            except zipfile.BadZipFile:
                intact = False
            begin = offset + member_begin(held, info)
            yield begin, begin + info.compress_size, intact


def _read_all(foreign: Foreign, seen: _Seen) -> None:
    """Read every tensor once: what cannot be read is damage, what is not finite is counted."""
    known = {t for item in seen.damaged for t in item["tensors"]}
    for name in foreign.entries:
        if name in known:
            continue
        try:
            tensor = foreign.read(name)
        except MeshwrightError as error:
            for p in error.problems:
                seen.add(Path(p.where).name, p.found, name)
            continue
        if tensor.is_floating_point():
            plain = tensor.float() if tensor.element_size() < 2 else tensor
            count = int((~torch.isfinite(plain)).sum())
            if count:
                seen.not_finite[name] = count


def _against_config(foreign: Foreign, seen: _Seen) -> tuple[str, str]:
    """Return which tensors of the model are not there, and what was compared ("" for nothing); notes other shapes."""
    beside = config_beside(foreign.folder)
    if beside is None:
        return "", ""
    if foreign.kind == "hugging-face":
        expected, missing, shapes = missing_of_config(foreign)
        if not expected:
            return "", ""
        for text, name in shapes:
            seen.add("", text, name)
        return f"{len(missing)} of {expected} tensors: {listed(missing)}" if missing else "", beside.name
    try:
        config = read_config(beside)
        spec = spec_from_config(config.content, name=config.content["model_type"], source=str(beside))
    except MeshwrightError:
        return "", ""
    try:
        matched(foreign, spec, str(foreign.folder))
    except MeshwrightError as error:
        for p in (p for p in error.problems if p.code != "E621"):
            seen.add("", p.found)
        return "; ".join(f"missing: {p.found}" for p in error.problems if p.code == "E621"), beside.name
    return "", beside.name
