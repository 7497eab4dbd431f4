"""What a checkpoint folder holds and says of itself: names, the manifest, hashes, completeness. No torch.

A checkpoint is a folder ``step-N``. It is written aside as ``.step-N.tmp-ID``, ``manifest.json`` last, and gets
its name by one rename; so a folder without a manifest, or with a file of another size, is not a checkpoint.
A folder that is being replaced waits as ``.step-N.old-ID`` until the new one has its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.files import write_whole

FORMAT: Final = "meshwright-checkpoint"
FORMAT_VERSION: Final = 2
"""2: a file that its pieces fill has their CRC-32 and no SHA-256."""
MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
"""torch DCP's own index: which file holds which piece of which tensor."""

MODEL: Final = "model/"
OPTIMIZER: Final = "optimizer/"

_STEP = re.compile(r"^step-(\d+)$")
_TEMPORARY = re.compile(r"^\.step-(\d+)\.tmp-[0-9a-f]+$")
_OLD = re.compile(r"^\.step-(\d+)\.old-[0-9a-f]+$")
_PIECE: Final = 1 << 22
_CHECKED: Final = 1 << 20
"""Bytes that are read and checksummed together, while they are in the processor's cache."""

_THREADS: Final = 4
"""Pieces of a file that are checksummed at the same time (zlib lets other threads run)."""

SHOWN: Final = 5
"""Names that a message lists before it only counts."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One piece of a tensor in a file: ``length`` bytes from ``offset``, with their CRC-32."""

    key: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint: its size, the pieces of tensors in it, and its SHA-256 where they do not fill it."""

    file: str
    bytes: int
    sha256: str = ""
    chunks: tuple[Chunk, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return vars(self) | {"chunks": [dict(vars(c)) for c in self.chunks]}


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One file that is not what the manifest says, and the tensors with bytes in the damaged part."""

    file: str
    why: str
    tensors: tuple[str, ...] = ()


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step``."""
    return f"step-{step}"


def temporary_name(step: int, unique: str) -> str:
    """Return the name under which a save of ``step`` is written."""
    return f".step-{step}.tmp-{unique}"


def old_name(step: int, unique: str) -> str:
    """Return the name that a folder has while the new checkpoint of ``step`` takes its place."""
    return f".step-{step}.old-{unique}"


def steps_in(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return the folders in ``folder`` as (step, path), newest first: "step", "temporary" and "old" ones."""
    found: dict[str, list[tuple[int, Path]]] = {"step": [], "temporary": [], "old": []}
    for path in folder.iterdir() if folder.is_dir() else ():
        for kind, pattern in (("step", _STEP), ("temporary", _TEMPORARY), ("old", _OLD)):
            match = pattern.match(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found[kind].append((int(match.group(1)), path))
    return {kind: sorted(paths, reverse=True) for kind, paths in found.items()}


# -- writing ------------------------------------------------------------------------------------------------


def hash_file(path: Path, pieces: Iterable[tuple[str, int, int]] = ()) -> StoredFile:
    """Return size and SHA-256 of ``path`` and the CRC-32 of each of its ``pieces`` (key, offset, length).

    The file is read once, and never more than a few MiB of it are held.
    """
    digest = hashlib.sha256()
    size = 0
    chunks: list[Chunk] = []
    with path.open("rb") as stream:
        for key, offset, length in sorted(pieces, key=lambda p: p[1]):
            size += _read(stream, offset - size, digest)[0]
            got, crc = _read(stream, length, digest)
            size += got
            chunks.append(Chunk(key=key, offset=offset, length=length, crc32=crc))
        size += _read(stream, None, digest)[0]
    return StoredFile(file=path.name, bytes=size, sha256=digest.hexdigest(), chunks=tuple(chunks))


def _read(stream: Any, length: int | None, digest: Any) -> tuple[int, int]:
    """Read ``length`` bytes (all that is left when None) into ``digest``; return how many there were and their CRC."""
    done, crc = 0, 0
    while length is None or done < length:
        piece = stream.read(_PIECE if length is None else min(_PIECE, length - done))
        if not piece:
            break
        digest.update(piece)
        crc = zlib.crc32(piece, crc)
        done += len(piece)
    return done, crc


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` and bring file and folder to the disk."""
    write_whole(folder / MANIFEST, manifest_text(manifest))


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return the JSON of a manifest: a line per entry, and per row of a list of mappings.

    Rows are written by C code, which an indented text is not; a manifest may have tens of thousands of pieces.
    """

    def text(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    def entry(value: Any) -> str:
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            return "[\n  " + ",\n  ".join(map(row_text, value)) + "\n ]"
        return text(value)

    def row_text(row: Mapping[str, Any]) -> str:
        if any(isinstance(v, list) and v and isinstance(v[0], Mapping) for v in row.values()):
            return "{" + ", ".join(f"{text(k)}: {entry(v)}" for k, v in row.items()) + "}"
        return text(row)

    return "{\n" + ",\n".join(f" {text(k)}: {entry(v)}" for k, v in manifest.items()) + "\n}\n"


# -- reading ------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a complete checkpoint.

    Raises:
        MeshwrightError: E701 no such folder, E702 incomplete, E718 a newer format.
    """
    if not folder.is_dir():
        raise MeshwrightError(problem("E701", where=str(folder), found="there is no such folder"))
    manifest, reason = manifest_or_reason(folder)
    if manifest is None:
        raise MeshwrightError(problem("E702", where=str(folder), found=reason))
    if manifest.get("format_version", 0) > FORMAT_VERSION:
        raise MeshwrightError(
            problem(
                "E718",
                where=str(folder),
                found=f"format version {manifest['format_version']}, this program reads up to {FORMAT_VERSION}",
            )
        )
    return manifest


def why_incomplete(folder: Path) -> str:
    """Return why ``folder`` is not a complete checkpoint, by manifest and file sizes; "" when it is one."""
    return manifest_or_reason(folder)[1]


def manifest_or_reason(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the manifest of a complete checkpoint and "", or None and why ``folder`` is not one."""
    path = folder / MANIFEST
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return None, f"{MANIFEST} is not that of a checkpoint"
        if manifest.get("complete") is not True:
            return None, f"{MANIFEST} does not say that the checkpoint is complete"
        files = [(str(f["file"]), int(f["bytes"])) for f in manifest["files"]]
        int(manifest["step"])
    except FileNotFoundError:
        return None, f"it has no {MANIFEST}, which is written last: the save did not finish"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    for name, size in files:
        if not is_plain_name(name):
            return None, f"{MANIFEST} names a file outside the folder: {name!r}"
        try:
            there = (folder / name).stat().st_size
        except OSError:
            return None, f"{name} is missing"
        if there != size:
            return None, f"{name} has {there} bytes, the manifest says {size}"
    return manifest, ""


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` is a file name without a folder."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def find_damage(folder: Path, files: Sequence[Mapping[str, Any]], *, quick: bool = False) -> list[Damage]:
    """Return every one of ``files`` (manifest entries) that is missing or whose size or checksums differ.

    A file that its pieces fill without a gap has the CRC-32 of each piece; others have a SHA-256 of the whole. ``quick``:
    where a file has both (older checkpoints), only the pieces are compared, which is six times as fast.
    """
    damage: list[Damage] = []
    for entry in files:
        name, chunks = str(entry["file"]), list(entry["chunks"])
        path = folder / name
        if (quick or not entry["sha256"]) and _pieces_intact(path, entry):
            continue
        everything = tuple(dict.fromkeys(str(c["key"]) for c in chunks))
        try:
            found = hash_file(path, [(c["key"], c["offset"], c["length"]) for c in chunks])
        except OSError as error:
            damage.append(Damage(file=name, why=f"{type(error).__name__}: {error}", tensors=everything))
            continue
        if entry["sha256"] and found.sha256 == entry["sha256"] and found.bytes == entry["bytes"]:
            continue
        wrong = tuple(
            dict.fromkeys(
                now.key
                for now, was in zip(found.chunks, sorted(chunks, key=lambda c: c["offset"]), strict=True)
                if now.crc32 != was["crc32"]
            )
        )
        why = (
            f"{found.bytes} bytes, the manifest says {entry['bytes']}"
            if found.bytes != entry["bytes"]
            else f"its bytes changed: another {'SHA-256' if entry['sha256'] else 'CRC-32'} than the manifest's"
        )
        if name == METADATA:
            why += " (the index of all tensors)"
        damage.append(Damage(file=name, why=why, tensors=wrong))
    return damage


def _pieces_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    """Return whether a file that its pieces fill without a gap has its size and the CRC-32 of every piece."""
    chunks = sorted(entry["chunks"], key=lambda c: c["offset"])
    ends = [0, *(c["offset"] + c["length"] for c in chunks)]
    if not chunks or [c["offset"] for c in chunks] != ends[:-1] or ends[-1] != entry["bytes"]:
        return False
    try:
        with path.open("rb") as stream, ThreadPoolExecutor(_THREADS) as pool:
            if os.fstat(stream.fileno()).st_size != ends[-1]:
                return False
            runs = [chunks[k::_THREADS] for k in range(_THREADS)]
            return all(pool.map(lambda run: _run_intact(stream.fileno(), run), runs))
    except OSError:
        return False


def _run_intact(handle: int, chunks: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each of ``chunks`` of an open file has its CRC-32; holds one MiB."""
    view = memoryview(bytearray(_CHECKED))
    for chunk in chunks:
        crc, at, end = 0, int(chunk["offset"]), int(chunk["offset"]) + int(chunk["length"])
        while at < end:
            count = os.preadv(handle, [view[: min(_CHECKED, end - at)]], at)
            if not count:
                return False
            crc, at = zlib.crc32(view[:count], crc), at + count
        if crc != chunk["crc32"]:
            return False
    return True


def damage_problem(folder: Path, damage: Damage) -> Problem:
    """Return E709 for one damaged file."""
    held = f"; tensors: {listed(damage.tensors)}" if damage.tensors else ""
    return problem("E709", where=str(folder / damage.file), found=damage.why + held)


def listed(names: Sequence[str]) -> str:
    """Return up to ``SHOWN`` names and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
