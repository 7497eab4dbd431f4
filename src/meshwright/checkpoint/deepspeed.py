"""DeepSpeed's checkpoints (plain, ZeRO 1, 2, 3) as tensors by name, put together from the ranks' flat partitions.

A folder ``TAG`` holds one ``*model_states.pt`` (ZeRO 3: one per rank) and, with ZeRO, one ``*optim_states.pt`` per
rank. The float32 weights are the optimizer's: with ZeRO 1 and 2, each group of parameters is one flat vector in the
order of ``param_shapes``, cut evenly over the ranks (the last padded); with ZeRO 3, every parameter is cut by itself in
equal pieces (the last one padded), and a rank's pieces lie one behind the other through its groups. Frozen parameters
stand in the model files. Only the bytes of the tensor that is asked for are read.

Source: DeepSpeed's ``utils/zero_to_fp32.py`` and ``runtime/engine.py`` for names and order (read, not copied);
compared tensor by tensor with what that script makes of checkpoints of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.checkpoint.manifest import is_plain_name, listed
from meshwright.checkpoint.torchfile import Inert, StoredTensor, read_torch_file

LATEST: Final = "latest"
_MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIM = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_OTHER = re.compile(r"^(layer_\d+.*|expp_rank_\d+.*)_(model|optim)_states\.pt$|^layer_\d+-model_.*\.pt$")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor: its sizes, and from where its elements come, in order: (stored tensor, first, end)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[StoredTensor, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class ZeroCheckpoint:
    """A DeepSpeed checkpoint: its tensors by name, what was left out, and who wrote it."""

    folder: Path
    files: tuple[Path, ...]
    stage: int
    step: int | None
    world_size: int
    parts: Mapping[str, Part]
    left_out: tuple[str, ...]

    def read(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype, on the CPU; holds nothing else.

        Raises:
            MeshwrightError: E582 when a file does not hold its piece.
        """
        part = self.parts[name]
        out = torch.empty(math.prod(part.shape), dtype=part.dtype)
        at = 0
        for stored, first, end in part.pieces:
            stored.read_into(out[at : at + end - first], first)
            at += end - first
        return out.reshape(part.shape)

    def tensors_at(self, file: Path, first: int, end: int) -> list[str]:
        """Return the tensors of which bytes ``first`` to ``end`` of ``file`` hold an element."""
        return [
            name
            for name, part in self.parts.items()
            if any(
                t.file == file and t.at + a * t.dtype.itemsize < end and first < t.at + b * t.dtype.itemsize
                for t, a, b in part.pieces
            )
        ]


def is_deepspeed(path: Path) -> bool:
    """Return whether ``path`` is such a folder, or one with ``latest`` that names one."""
    if not path.is_dir():
        return False
    if (path / LATEST).is_file() and any(path.glob("*/*_states.pt")):
        return True
    return any(_MODEL.match(p.name) or _OPTIM.match(p.name) or _OTHER.match(p.name) for p in path.iterdir())


def _tagged(path: Path) -> Path:
    """Return the folder with the files: ``path``, or the one in it that ``latest`` names."""
    marker = path / LATEST
    if any(path.glob("*_states.pt")) or not marker.is_file():
        return path
    tag = marker.read_text(encoding="utf-8", errors="replace").strip()
    if not is_plain_name(tag) or not (path / tag).is_dir():
        found = f"it names {tag[:80]!r}, and there is no such folder beside it"
        raise MeshwrightError(problem("E580", where=str(marker), found=found))
    return path / tag


def open_deepspeed(path: Path) -> ZeroCheckpoint:
    """Return the checkpoint in ``path`` (a tag's folder, or the one above it); reads no tensor but step counters.

    Raises:
        MeshwrightError: E580 missing files, E581 a file that is more than data, E582 a damaged one, E583 a cut that
            is not read (tensor parallel, experts, pipeline), E584 files of different saves, E585 partitions that do
            not add up.
    """
    folder = _tagged(path)
    names = sorted(p.name for p in folder.iterdir())
    _refuse_other_cuts(folder, names)
    models = {int(m[1] or 0): folder / n for n in names if (m := _MODEL.match(n))}
    optims: dict[int, Path] = {}
    for name in names:
        match = _OPTIM.match(name)
        if match and int(match[1]) in optims:
            found = f"{optims[int(match[1])].name} and {name} are of the same rank"
            raise MeshwrightError(problem("E584", where=str(folder), found=found))
        if match:
            optims[int(match[1])] = folder / name
    if 0 not in models:
        found = "no mp_rank_00_model_states.pt and no zero_pp_rank_0_mp_rank_00_model_states.pt"
        raise MeshwrightError(problem("E580", where=str(folder), found=found))
    states = {rank: _mapping(read_torch_file(file), file) for rank, file in sorted(models.items())}
    first = states[0]
    shapes = first.get("param_shapes")
    if shapes is None and not optims:
        return _plain(folder, models[0], first)
    saved = {rank: _mapping(read_torch_file(file), file) for rank, file in sorted(optims.items())}
    held = {rank: _optimizer(state, optims[rank]) for rank, state in saved.items()}
    world = _agree(folder, models, states, optims, held, _whole(first.get("dp_world_size")))
    stage = _whole(held[0].get("zero_stage")) or 0
    groups = _groups(shapes, models[0])
    vectors = {rank: _vectors(state, stage, optims[rank]) for rank, state in held.items()}
    if stage == 3:
        parts = _parts_by_parameter(groups, vectors, world, optims[0])
    else:
        parts = _parts_by_group(groups, vectors, held[0].get("param_alignment_paddings"), optims[0])
    parts |= _frozen(states, models, world if stage == 3 else 1)
    if (
        stage < 3
    ):  # the model file holds whole tensors; those that neither of the two above has are frozen ones
        module = _mapping(first.get("module"), models[0])
        parts |= _tensors(module, models[0], _unsaved(first) | parts.keys())
    return ZeroCheckpoint(
        folder=folder,
        files=(*models.values(), *optims.values()),
        stage=stage,
        step=_whole(first.get("global_steps")),
        world_size=world,
        parts=parts,
        left_out=_left_out(first, parts),
    )


def _refuse_other_cuts(folder: Path, names: Sequence[str]) -> None:
    other = [n for n in names if _OTHER.match(n)]
    other += [n for n in names if (m := _MODEL.match(n) or _OPTIM.match(n)) and int(m[2]) > 0]
    if other:
        found = f"{len(other)} files of a tensor parallel, pipeline or expert cut: {listed(other)}"
        raise MeshwrightError(problem("E583", where=str(folder), found=found))


def _plain(folder: Path, file: Path, state: Mapping[str, Any]) -> ZeroCheckpoint:
    """Return a checkpoint without ZeRO: the model file holds whole tensors."""
    module = _mapping(state.get("module"), file)
    parts = _tensors(module, file, _unsaved(state))
    return ZeroCheckpoint(
        folder=folder,
        files=(file,),
        stage=0,
        step=_whole(state.get("global_steps")),
        world_size=_whole(state.get("dp_world_size")) or 1,
        parts=parts,
        left_out=_left_out(state, parts),
    )


def _tensors(module: Mapping[str, Any], file: Path, without: frozenset[str]) -> dict[str, Part]:
    """Return the whole tensors of a module's state."""
    return {
        str(name): Part(shape=value.shape, dtype=value.dtype, pieces=((_flat(value, file), 0, value.numel),))
        for name, value in module.items()
        if isinstance(value, StoredTensor) and name not in without
    }


def _unsaved(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the module's state that are no parameters of their own: buffers and tied copies."""
    buffers = state.get("buffer_names")
    names = [n for n in buffers if isinstance(n, str)] if isinstance(buffers, list) else []
    shared = state.get("shared_params")
    return frozenset([*names, *(map(str, shared) if isinstance(shared, Mapping) else ())])


def _agree(
    folder: Path,
    models: Mapping[int, Path],
    states: Mapping[int, Mapping[str, Any]],
    optims: Mapping[int, Path],
    held: Mapping[int, Mapping[str, Any]],
    world: int | None,
) -> int:
    """Return how many ranks wrote the files, when all are there and of one save."""
    counts = held[min(held)].get("partition_count") if held else None
    told = [c for c in (counts if isinstance(counts, list) else [counts]) if type(c) is int]
    ranks = max(told, default=world or 1)
    missing = [f"(bf16_)zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(ranks) if r not in optims]
    if models[0].name.startswith("zero_pp_rank"):
        missing += [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(ranks) if r not in models]
    if missing:
        found = f"{ranks} ranks wrote it; missing: {listed(missing)}"
        raise MeshwrightError(problem("E580", where=str(folder), found=found))
    surplus = [optims[r].name for r in optims if r >= ranks] + [models[r].name for r in models if r >= ranks]
    if surplus:
        found = f"{ranks} ranks wrote it, and there is more: {listed(surplus)}"
        raise MeshwrightError(problem("E584", where=str(folder), found=found))
    said = [(models[r], "global_steps", s.get("global_steps")) for r, s in states.items()]
    said += [(models[r], "ds_version", s.get("ds_version")) for r, s in states.items()]
    for rank, state in held.items():
        said.append((optims[rank], "ds_version", states[0].get("ds_version") and state.get("ds_version")))
        said.append((optims[rank], "zero_stage", _whole(state.get("zero_stage"))))
        said.append((optims[rank], "partition_count", state.get("partition_count")))
        said.append((optims[rank], "optimizer step", _step(state)))
    first: dict[str, tuple[Path, Any]] = {}
    for file, what, value in said:
        other, known = first.setdefault(what, (file, value))
        if value is not None and known is not None and value != known:
            found = f"{what} is {value}, in {other.name} it is {known}"
            raise MeshwrightError(problem("E584", where=str(file), found=found))
    return ranks


def _step(state: Mapping[str, Any]) -> int | None:
    """Return the optimizer's step counter of one rank, where it is where torch's optimizers keep it."""
    inner: Any = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
    entries = inner.get("state") if isinstance(inner, Mapping) else inner
    values = (
        entries.values() if isinstance(entries, Mapping) else entries if isinstance(entries, list) else ()
    )
    for entry in values:
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if isinstance(step, StoredTensor) and step.numel == 1:
            return int(step.read().item())
        if type(step) is int:
            return step
    return None


def _groups(shapes: Any, file: Path) -> list[dict[str, tuple[int, ...]]]:
    """Return name and shape of the parameters of each group, in the order of the flat vectors."""
    listed_groups = [shapes] if isinstance(shapes, Mapping) else shapes
    if not isinstance(listed_groups, list) or not all(isinstance(g, Mapping) for g in listed_groups):
        raise MeshwrightError(
            problem("E585", where=str(file), found="it has no param_shapes, but there are partitions")
        )
    groups: list[dict[str, tuple[int, ...]]] = []
    for group in listed_groups:
        sizes = {str(n): tuple(s) for n, s in group.items() if isinstance(s, tuple | list)}
        if len(sizes) != len(group) or not all(type(v) is int for s in sizes.values() for v in s):
            raise MeshwrightError(
                problem("E585", where=str(file), found="param_shapes holds something else than sizes")
            )
        groups.append(sizes)
    return groups


def _vectors(state: Mapping[str, Any], stage: int, file: Path) -> list[StoredTensor]:
    """Return one rank's flat partitions, by group."""
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    found = state.get(key)
    if stage not in (1, 2, 3) or not isinstance(found, list) or not found:
        text = f"ZeRO stage {stage} and {key} of type {type(found).__name__}"
        raise MeshwrightError(problem("E585", where=str(file), found=text))
    wrong = [type(v).__name__ for v in found if not isinstance(v, StoredTensor)]
    if wrong:
        raise MeshwrightError(
            problem("E585", where=str(file), found=f"{key} holds {listed(wrong)}, not tensors")
        )
    return [_flat(v, file) for v in found]


def _flat(value: StoredTensor, file: Path) -> StoredTensor:
    if not value.contiguous:
        found = f"a tensor of {list(value.shape)} whose elements are not in order"
        raise MeshwrightError(problem("E585", where=str(file), found=found))
    return value


def _parts_by_group(
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    vectors: Mapping[int, list[StoredTensor]],
    paddings: Any,
    file: Path,
) -> dict[str, Part]:
    """Return the tensors of ZeRO 1 and 2: group by group, one vector over the ranks."""
    counts = {len(v) for v in vectors.values()}
    if counts != {len(groups)}:
        found = f"{len(groups)} groups of parameters, and {sorted(counts)} flat vectors"
        raise MeshwrightError(problem("E585", where=str(file), found=found))
    parts: dict[str, Part] = {}
    for number, group in enumerate(groups):
        line = _Line([v[number] for _, v in sorted(vectors.items())])
        gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else [0] * len(group)
        if not isinstance(gaps, list) or len(gaps) != len(group) or not all(type(g) is int for g in gaps):
            found = f"{len(group)} parameters in group {number}, and other paddings between them"
            raise MeshwrightError(problem("E585", where=str(file), found=found))
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            parts[name] = line.part(shape, [(at, at + math.prod(shape))], name, file)
            at += math.prod(shape) + gap
        # what is left over pads the vector to a multiple of twice the ranks (of the ranks, in older versions)
        if not 0 <= line.length - at < 2 * len(vectors):
            found = f"group {number} has {line.length} elements, its parameters {at}"
            raise MeshwrightError(problem("E585", where=str(file), found=found))
    return parts


def _parts_by_parameter(
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    vectors: Mapping[int, list[StoredTensor]],
    world: int,
    file: Path,
) -> dict[str, Part]:
    """Return the tensors of ZeRO 3: every parameter in equal pieces, a rank's pieces one behind the other."""
    lines = [_Line(v) for _, v in sorted(vectors.items())]
    parts: dict[str, Part] = {}
    at = 0
    for name, shape in ((n, s) for group in groups for n, s in group.items()):
        total = math.prod(shape)
        piece = -(-total // world)
        found: list[tuple[StoredTensor, int, int]] = []
        for rank, line in enumerate(lines):
            count = max(0, min(piece, total - rank * piece))
            found += line.part((count,), [(at, at + count)], name, file).pieces
        parts[name] = Part(shape=shape, dtype=lines[0].dtype, pieces=tuple(found))
        at += piece
    lengths = {line.length for line in lines}
    if lengths != {at}:
        text = f"the parameters take {at} elements of every rank, the ranks have {sorted(lengths)}"
        raise MeshwrightError(problem("E585", where=str(file), found=text))
    return parts


class _Line:
    """Flat tensors one behind the other, addressed as one."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self._tensors = tensors
        self.dtype = tensors[0].dtype
        self.length = sum(t.numel for t in tensors)

    def part(self, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]], name: str, file: Path) -> Part:
        """Return the elements of ``ranges`` as one part.

        Raises:
            MeshwrightError: E585 when they are not all here, or not of one dtype.
        """
        pieces = tuple(piece for first, end in ranges for piece in self._cut(first, end))
        held = sum(end - first for _, first, end in pieces)
        if held != math.prod(shape) or any(t.dtype != self.dtype for t, _, _ in pieces):
            found = (
                f"{name} {list(shape)} takes {math.prod(shape)} elements, the partitions hold {held} of them"
            )
            raise MeshwrightError(problem("E585", where=str(file), found=found))
        return Part(shape=shape, dtype=self.dtype, pieces=pieces)

    def _cut(self, first: int, end: int) -> Iterator[tuple[StoredTensor, int, int]]:
        at = 0
        for tensor in self._tensors:
            low, high = max(first - at, 0), min(end - at, tensor.numel)
            if low < high:
                yield tensor, low, high
            at += tensor.numel


def _frozen(
    states: Mapping[int, Mapping[str, Any]], models: Mapping[int, Path], world: int
) -> dict[str, Part]:
    """Return the parameters that the optimizer does not hold: whole, or with ZeRO 3 in one fragment per rank."""
    parts: dict[str, Part] = {}
    shapes = states[0].get("frozen_param_shapes") or {}
    for name, size in _mapping(shapes, models[0]).items():
        shape = tuple(size)
        found: list[StoredTensor] = []
        for rank in range(world):
            file = models.get(rank, models[0])
            fragment = _mapping(states.get(rank, {}).get("frozen_param_fragments") or {}, file).get(name)
            if not isinstance(fragment, StoredTensor):
                raise MeshwrightError(problem("E585", where=str(file), found=f"it has no fragment of {name}"))
            found.append(_flat(fragment, file))
        parts[str(name)] = _Line(found).part(shape, [(0, math.prod(shape))], str(name), models[0])
    return parts


def _left_out(state: Mapping[str, Any], parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Return the names of the module that are not among the parameters."""
    module = state.get("module")
    return tuple(sorted({str(n) for n in module} - parts.keys())) if isinstance(module, Mapping) else ()


def _optimizer(state: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    return _mapping(state.get("optimizer_state_dict"), file)


def _mapping(value: Any, file: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        found = f"a {type(value).__name__} where DeepSpeed keeps a mapping of names"
        raise MeshwrightError(problem("E582", where=str(file), found=found), ExitCode.ENVIRONMENT)
    return value


def _whole(value: Any) -> int | None:
    """Return an integer, written as one or as a member of an enumeration of integers."""
    if isinstance(value, Inert) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None
