"""Hugging Face folders of safetensors as they lie on the disk: headers, index, and one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.checkpoint.foreign import Foreign
from meshwright.checkpoint.manifest import is_plain_name, listed
from meshwright.checkpoint.stream import KINDS
from meshwright.checkpoint.torchfile import StoredTensor

INDEX: Final = "model.safetensors.index.json"
_MOST_HEADER: Final = 100_000_000
"""Bytes of the largest header that safetensors reads."""

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    **{name: dtype for dtype, name in KINDS.items()},
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def is_hf_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder with safetensors files or an index of such."""
    return path.is_dir() and ((path / INDEX).is_file() or any(path.glob("*.safetensors")))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return where each tensor of a safetensors file lies; reads the header alone.

    Raises:
        ValueError: a header that is not one, tensors that overlap, leave gaps or end beyond the file, with their names.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"{size} bytes, and no header that fits into them")
        header: Any = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping of names")
    begin = 8 + length
    out: dict[str, StoredTensor] = {}
    ends: list[tuple[int, int, str]] = []
    for name, row in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (first, end) = _row(name, row)
        if end - first != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{name} {list(shape)} has {end - first} bytes")
        ends.append((first, end, name))
        out[name] = StoredTensor(file=file, at=begin + first, dtype=kind, shape=shape, contiguous=True)
    ends.sort()
    beyond = [name for _, end, name in ends if begin + end > size]
    if beyond:
        raise ValueError(f"{size} bytes, {begin + ends[-1][1]} are needed; cut off: {listed(beyond)}")
    if [first for first, _, _ in ends] != [0, *(end for _, end, _ in ends)][: len(ends)]:
        raise ValueError("its tensors overlap, or leave gaps")
    if begin + (ends[-1][1] if ends else 0) != size:
        raise ValueError(f"{size} bytes, its tensors end after {begin + (ends[-1][1] if ends else 0)}")
    return out


def _row(name: str, row: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    try:
        kind, shape, (first, end) = _DTYPES[row["dtype"]], tuple(row["shape"]), row["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    if not all(type(n) is int and n >= 0 for n in (*shape, first, end)):
        raise ValueError(f"{name}: sizes and places that are no numbers")
    return kind, shape, (first, end)


def open_hf_folder(path: Path) -> Foreign:
    """Return the safetensors of a folder as tensors by name; reads headers alone.

    Raises:
        MeshwrightError: E580 files that the index names and that are not there, E582 files that cannot be read, E585
            tensors that are there twice, or elsewhere than the index says.
    """
    problems: list[Problem] = []
    index = _index(path / INDEX, problems)
    names = set(index.values()) or {p.name for p in path.glob("*.safetensors")}
    gone = sorted(n for n in names if not (path / n).is_file())
    if gone:
        lost = sum(1 for n in index.values() if n in gone)
        found = f"{len(gone)} of {len(names)} files are missing, with {lost} tensors: {listed(gone)}"
        problems.append(problem("E580", where=str(path), found=found))
    stored: dict[str, StoredTensor] = {}
    twice: list[str] = []
    unread: set[str] = set()
    for name in sorted(names - set(gone)):
        try:
            held = read_header(path / name)
        except (OSError, ValueError) as error:
            problems.append(problem("E582", where=str(path / name), found=str(error)))
            unread.add(name)
            continue
        twice += [f"{t} in {stored[t].file.name} and {name}" for t in held if t in stored]
        stored |= held
    wrong = [
        f"{t}: the index says {home}, it is in {stored[t].file.name if t in stored else 'none'}"
        for t, home in index.items()
        if home not in unread and home not in gone and (t not in stored or stored[t].file.name != home)
    ]
    spare = [t for t in stored if index and t not in index]
    wrong += [f"{t} is in {stored[t].file.name}, the index does not name it" for t in spare]
    if twice or wrong:
        found = f"{len(twice)} tensors twice, {len(wrong)} at another place: {listed([*twice, *wrong])}"
        problems.append(problem("E585", where=str(path), found=found))
    refuse(problems, ExitCode.ENVIRONMENT)
    return Foreign(
        kind="hugging-face",
        folder=path,
        files=tuple(path / n for n in sorted(names)),
        entries={n: (s.shape, s.dtype) for n, s in stored.items()},
        left_out=(),
        closed=False,
        step=None,
        world_size=None,
        read=lambda name: stored[name].read(),
    )


def _index(file: Path, problems: list[Problem]) -> dict[str, str]:
    """Return the file of each tensor, as the index says; empty without an index."""
    if not file.is_file():
        return {}
    try:
        told: Any = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(told, dict) or not all(
            isinstance(n, str) and is_plain_name(n) for n in told.values()
        ):
            raise ValueError("weight_map is not a mapping of names to files of this folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise MeshwrightError([*problems, problem("E582", where=str(file), found=found)]) from error
    return told


def missing_of_config(foreign: Foreign) -> tuple[int, list[str], list[tuple[str, str]]]:
    """Return how many tensors the model in a folder's config.json has, those not there, and (text, name) of other shapes.

    0 where transformers does not know the model: nothing was compared then.
    """
    from meshwright.checkpoint.hf_folder import expected_tensors

    try:
        config: Any = json.loads((foreign.folder / "config.json").read_text(encoding="utf-8"))
        expected, prefix = expected_tensors(config)
    except Exception:  # whatever transformers raises for a config that it does not know
        return 0, [], []
    if not any(name in foreign.entries for name in expected if name.startswith(prefix)):
        expected = {
            n.removeprefix(prefix): s for n, s in expected.items()
        }  # the base model's names, as in older files
    shapes = [
        (f"{n} is {list(foreign.entries[n][0])}, the model's is {list(s)}", n)
        for n, s in expected.items()
        if n in foreign.entries and foreign.entries[n][0] != s
    ]
    return len(expected), [n for n in expected if n not in foreign.entries], shapes
