"""Weights in checkpoints of other programs: tensors by name, read one at a time.

``open_foreign`` knows torch's distributed checkpoints (FSDP's; the shards of our own are such too) and DeepSpeed's.
Which of the names are the model's, behind whatever prefix a wrapper gave them, is found by ``matched``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.checkpoint.deepspeed import is_deepspeed, open_deepspeed
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.manifest import MANIFEST, METADATA, MODEL, listed
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A checkpoint of another program.

    Attributes:
        kind: what wrote it: "torch-dcp" or "deepspeed-zero-N".
        folder: where its files lie.
        files: the files that hold tensors.
        entries: shape and dtype of every tensor, by the name in the checkpoint.
        left_out: names that are there and are no tensors, or no weights.
        closed: whether every tensor is a weight of the model (else optimizer state may be among them).
        step: the global step, where the files say it.
        world_size: ranks that wrote it, where the files say it.
        read: returns one tensor in its stored dtype on the CPU; holds it and at most one stored piece.
        archives: where archives of torch.save lie, which have checksums of their own: (file, offset, bytes).
        tensors_at: returns the tensors that have an element in these bytes of a file: (file, first, end).
    """

    kind: str
    folder: Path
    files: tuple[Path, ...]
    entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    left_out: tuple[str, ...]
    closed: bool
    step: int | None
    world_size: int | None
    read: Callable[[str], Tensor]
    archives: tuple[tuple[Path, int, int], ...] = ()
    tensors_at: Callable[[Path, int, int], list[str]] = lambda file, first, end: []


def is_foreign(path: Path) -> bool:
    """Return whether ``path`` is a folder that torch's distributed checkpoint or DeepSpeed wrote."""
    return (path / METADATA).is_file() or is_deepspeed(path)


def is_anothers(path: Path) -> bool:
    """Return whether ``path`` is another program's checkpoint, and not one of ours whose manifest is missing.

    Raises:
        MeshwrightError: E710 for an index that is not one of tensors.
    """
    if (path / MANIFEST).is_file() or not is_foreign(path):
        return False
    if not (path / METADATA).is_file():
        return True
    keys = read_index(path, only_tensors=False).state_dict_metadata
    return not any(str(key).startswith(MODEL) for key in keys)


def open_foreign(path: Path) -> Foreign:
    """Return the checkpoint in ``path``; looks at every file and reads no tensor.

    Raises:
        MeshwrightError: E580-E585, E710 for an index that is not one of tensors.
    """
    if not (path / METADATA).is_file():
        zero = open_deepspeed(path)
        return Foreign(
            kind=f"deepspeed-zero-{zero.stage}",
            folder=zero.folder,
            files=zero.files,
            entries={n: (p.shape, p.dtype) for n, p in zero.parts.items()},
            left_out=zero.left_out,
            closed=True,
            step=zero.step,
            world_size=zero.world_size,
            read=zero.read,
            archives=tuple((f, 0, f.stat().st_size) for f in zero.files),
            tensors_at=zero.tensors_at,
        )
    index = read_index(path, only_tensors=False)
    stored = stored_tensors(index)
    files = tuple(
        path / name for name in sorted({p.relative_path for p in (index.storage_data or {}).values()})
    )
    refuse(_missing(path, index, files), ExitCode.ENVIRONMENT)
    refuse(_holes(path, index))
    return Foreign(
        kind="torch-dcp",
        folder=path,
        files=files,
        entries={k: (tuple(e.size), e.properties.dtype) for k, e in stored.items()},
        left_out=tuple(sorted(index.state_dict_metadata.keys() - stored.keys())),
        closed=False,
        step=None,
        world_size=None,
        read=lambda key: read_tensor(path, index, key),
        archives=tuple(
            (path / p.relative_path, p.offset, p.length) for p in (index.storage_data or {}).values()
        ),
        tensors_at=lambda file, first, end: [
            where.fqn
            for where, p in (index.storage_data or {}).items()
            if p.relative_path == file.name and p.offset < end and first < p.offset + p.length
        ],
    )


def _missing(path: Path, index: Metadata, files: tuple[Path, ...]) -> list[Problem]:
    """Return E580 and E582 for files that are not there or shorter than the index says."""
    needed: dict[str, int] = {}
    for place in (index.storage_data or {}).values():
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    gone = [f.name for f in files if not f.is_file()]
    short = [f for f in files if f.is_file() and f.stat().st_size < needed[f.name]]
    out = [
        problem(
            "E582", where=str(f), found=f"{f.stat().st_size} bytes, the index says {needed[f.name]} at least"
        )
        for f in short
    ]
    if gone:
        found = f"{len(gone)} of {len(files)} files are missing: {listed(gone)}"
        out.append(problem("E580", where=str(path), found=found))
    return out


def _holes(path: Path, index: Metadata) -> list[Problem]:
    """Return E585 for tensors whose pieces do not make them up."""
    wrong: list[str] = []
    for key, entry in stored_tensors(index).items():
        held = sum(math.prod(c.sizes) for c in entry.chunks)
        inside = all(
            len(c.sizes) == len(entry.size)
            and all(a >= 0 and a + n <= s for a, n, s in zip(c.offsets, c.sizes, entry.size, strict=True))
            for c in entry.chunks
        )
        distinct = len({MetadataIndex(key, c.offsets) for c in entry.chunks}) == len(entry.chunks)
        if held != math.prod(entry.size) or not inside or not distinct:
            wrong.append(f"{key} has {math.prod(entry.size)} elements, its pieces {held}")
    if not wrong:
        return []
    found = f"{len(wrong)} tensors: {listed(wrong)}"
    return [problem("E585", where=str(path / METADATA), found=found)]


def matched(foreign: Foreign, spec: ModelSpec, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return for each tensor of the model (a tied one once) its name in the checkpoint, and the names left out.

    Raises:
        MeshwrightError: E621 missing tensors, E622 tensors that are not the model's, E623 another shape.
    """
    stored = foreign.entries
    needed = {t.name: tuple(t.shape) for t in spec.tensors() if t.tied_to is None}
    tied = {t.name for t in spec.tensors() if t.tied_to is not None}
    prefix = common_prefix(list(needed), stored)
    keys = {name: prefix + name for name in needed}
    missing = [n for n, k in keys.items() if k not in stored]
    shapes = [
        f"{n} is {list(stored[k][0])}, the model's is {list(needed[n])}"
        for n, k in keys.items()
        if k in stored and stored[k][0] != needed[n]
    ]
    known = set(keys.values()) | {prefix + n for n in tied}
    spare = sorted(k for k in stored if k not in known) if foreign.closed else []
    refuse(
        [
            problem(
                code,
                where=where,
                found=f"{len(names)} of {len(needed)} tensors: {listed(names)} (prefix {prefix!r})",
            )
            for code, names in (("E621", missing), ("E622", spare), ("E623", shapes))
            if names
        ]
    )
    left = sorted({*foreign.left_out, *(k for k in stored if k not in set(keys.values()))})
    return keys, tuple(left)


def common_prefix(needed: list[str], stored: Mapping[str, object]) -> str:
    """Return what stands before the model's names: of all that occur, the one with most of them behind it."""
    found = {key.removesuffix(name) for name in needed[:3] for key in stored if key.endswith(name)}
    if not found:
        return ""
    return max(sorted(found, key=len), key=lambda p: sum(p + name in stored for name in needed))


def inspect_foreign(foreign: Foreign) -> dict[str, Any]:
    """Return what the checkpoint holds, as ``checkpoint inspect`` shows it; reads no tensor."""
    sizes = [(math.prod(shape), dtype) for shape, dtype in foreign.entries.values()]
    return {
        "path": str(foreign.folder),
        "kind": foreign.kind,
        "step": foreign.step,
        "world_size": foreign.world_size,
        "tensors": len(sizes),
        "elements": sum(count for count, _ in sizes),
        "tensor_bytes": sum(count * dtype.itemsize for count, dtype in sizes),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for _, dtype in sizes}),
        "left_out": len(foreign.left_out),
        "files": len(foreign.files),
        "bytes": sum(f.stat().st_size for f in foreign.files),
    }


def config_beside(folder: Path) -> Path | None:
    """Return the config.json in a checkpoint's folder or the one above it (where transformers' Trainer puts it)."""
    for place in (folder, folder.parent):
        if (place / "config.json").is_file():
            return place / "config.json"
    return None


def no_config(folder: Path) -> MeshwrightError:
    """Return E713 for a checkpoint that does not say what the model is."""
    return MeshwrightError(
        problem(
            "E713",
            where=str(folder),
            found="no config.json beside it: such a checkpoint does not say what the model is",
            do="name the model's folder or config.json with --config",
        )
    )
