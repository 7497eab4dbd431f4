"""Rewriting a checkpoint as another layout would have saved it: one process, piece by piece, no process group.

Loading does not need this: every checkpoint loads under every layout. Rewritten, each rank of the new layout reads its
own file only. The logical tensors are compared afterwards, by SHA-256.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.base.files import sync
from meshwright.checkpoint.inspect import find_checkpoint
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.manifest import (
    METADATA,
    MODEL,
    OPTIMIZER,
    StoredFile,
    damage_problem,
    find_damage,
    hash_file,
    read_manifest,
    step_name,
    temporary_name,
)
from meshwright.checkpoint.metadata import read_index, read_part, read_tensor
from meshwright.checkpoint.save import finish_checkpoint
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import EP, EXPERT_SHARD, SHARD, coordinates, group, rank_of
from meshwright.model.adapters import adapted, adapter_from_dict
from meshwright.model.read_hf import spec_from_config
from meshwright.model.sharding import rule, tp_ranges
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.program.units import stage_units
from meshwright.schedule.text import parse_schedule

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a piece of a logical tensor."""


def boxes(tensor: TensorSpec, spec: ModelSpec, layout: Layout, coords: Mapping[str, int]) -> list[Box]:
    """Return the pieces of ``tensor`` that the rank at ``coords`` holds: its part on the tensor axis, cut by rows.

    ZeRO's rows lie over ``dp_shard`` and, within it, ``cp`` (``layout.ranks.SHARD``). Of a stack of experts a rank of
    the expert axis holds its own, and ZeRO's rows of those lie over the ranks that hold the same ones.
    """
    cut, shape, rank = rule(tensor), tensor.shape, rank_of(layout, coords)
    dim = cut.tp_dim if layout.tp > 1 else None
    base, count, members = 0, shape[0], group(layout, rank, SHARD)
    if layout.ep > 1 and cut.ep_dim is not None:
        count = shape[0] // layout.ep
        base = group(layout, rank, EP).index(rank) * count
        members = group(layout, rank, EXPERT_SHARD)
    ranges: Sequence[tuple[int, int]] = [(base, count)]
    if dim is not None:
        ranges = tp_ranges(tensor, layout.tp, coords["tp"], spec.attention)
    rows = sum(size for _, size in ranges) if dim in (None, 0) else count
    first, last = 0, rows
    if layout.zero >= 1 and len(members) > 1:
        each = -(-rows // len(members))
        first = min(members.index(rank) * each, rows)
        last = min(first + each, rows)
    found: list[Box] = []
    at = 0  # where a range begins in what the tensor axis left
    for start, size in ranges:
        offsets, sizes = [0] * len(shape), list(shape)
        if dim in (None, 0):
            low, high = max(at, first), min(at + size, last)
            offsets[0], sizes[0] = start + low - at, max(0, high - low)
            at += size
        else:
            offsets[0], sizes[0] = base + first, last - first
            offsets[dim], sizes[dim] = start, size
        if all(sizes):
            found.append((tuple(offsets), tuple(sizes)))
    return found


def rank_boxes(spec: ModelSpec, plan: Plan) -> Iterator[tuple[int, str, Box]]:
    """Yield (rank, tensor, piece) of every piece once: by the first rank that holds it. Tied copies are not stored."""
    layout = plan.layout
    homes = parse_schedule(plan.schedule_text, name=layout.schedule).stage_ranks
    seen: set[tuple[str, Box]] = set()
    for rank in range(layout.world_size):
        coords = coordinates(layout, rank)
        for stage in (s for s, home in enumerate(homes) if home == coords["pp"]):
            for unit in stage_units(spec, layout, stage):
                for tensor in unit.tensors:
                    if tensor.tied_to is not None:
                        continue
                    for box in boxes(tensor, spec, layout, coords):
                        if (tensor.name, box) not in seen:
                            seen.add((tensor.name, box))
                            yield rank, tensor.name, box


@dataclass
class _Files:
    """The files of the new checkpoint, one per rank, while they are written."""

    folder: Path
    source: Path
    index: Metadata
    chunks: dict[str, list[ChunkStorageMetadata]] = field(
        default_factory=dict[str, list[ChunkStorageMetadata]]
    )
    storage: dict[MetadataIndex, Any] = field(default_factory=dict[MetadataIndex, Any])
    pieces: dict[str, list[tuple[str, int, int]]] = field(
        default_factory=dict[str, list[tuple[str, int, int]]]
    )

    def add(self, rank: int, key: str, box: Box) -> None:
        """Append one piece of ``key`` to the file of ``rank``. Holds the piece and one piece of the source."""
        tensor = read_part(self.source, self.index, key, *box)
        name = f"__{rank}_0.distcp"
        with (self.folder / name).open("ab") as stream:
            begin = stream.tell()
            torch.save(tensor, stream)
            length = stream.tell() - begin
        offsets = torch.Size(box[0])
        self.chunks.setdefault(key, []).append(ChunkStorageMetadata(offsets, torch.Size(box[1])))
        self.storage[MetadataIndex(key, offsets)] = _StorageInfo(name, begin, length)
        self.pieces.setdefault(name, []).append((key, begin, length))

    def finish(self) -> tuple[list[StoredFile], Metadata]:
        """Write the index, bring all files to the disk, return them with their hashes, and the index."""
        entries = {
            key: TensorStorageMetadata(entry.properties, entry.size, self.chunks[key])
            for key, entry in stored_tensors(self.index).items()
        }
        made = replace(self.index, state_dict_metadata=entries, storage_data=self.storage)
        (self.folder / METADATA).write_bytes(pickle.dumps(made))
        for path in self.folder.iterdir():
            sync(path)
        sync(self.folder)
        return [hash_file(self.folder / name, held) for name, held in sorted(self.pieces.items())], made


def reshard(checkpoint: Path, layout: Layout, out: Path) -> dict[str, Any]:
    """Write ``checkpoint`` as ``layout`` would have saved it, as ``out/step-N``; return what was written.

    Raises:
        MeshwrightError: E701, E702, E709, E710, E711 as in loading; what is illegal about the layout; E712 ``out`` has
            that step already, E713 no model config, E720 tensors differ afterwards, E703 ``out`` cannot be written.
    """
    manifest = read_manifest(checkpoint)
    plan, spec = _new_plan(checkpoint, manifest, layout)
    final = out / step_name(manifest["step"])
    if final.exists():
        raise MeshwrightError(problem("E712", where=str(final), found="it exists"))
    refuse([damage_problem(checkpoint, d) for d in find_damage(checkpoint, manifest["files"])])
    index = read_index(checkpoint)
    temporary = out / temporary_name(manifest["step"], uuid.uuid4().hex[:12])
    try:
        temporary.mkdir(parents=True)
        files = _Files(temporary, checkpoint, index)
        _fill(files, spec, plan)
        stored, made = files.finish()
        facts = {k: v for k, v in manifest.items() if k not in ("files", "tensors", "complete")}
        facts |= {"plan": plan_to_dict(plan), "world_size": plan.world_size}
        facts["extra"] = {**manifest["extra"], "plan_hash": plan.hash}
        refuse(finish_checkpoint(temporary, stored, facts, made), ExitCode.ENVIRONMENT)
    except OSError as error:
        raise MeshwrightError(
            problem("E703", where=str(out), found=f"{type(error).__name__}: {error}"), ExitCode.ENVIRONMENT
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    equal = logical_hashes(final)
    differ = [key for key, value in logical_hashes(checkpoint).items() if equal.get(key) != value]
    if differ:
        raise MeshwrightError(
            problem("E720", where=str(final), found=f"{len(differ)} tensors differ: {', '.join(differ[:5])}"),
            ExitCode.FAULT,
        )
    return {
        "checkpoint": str(checkpoint),
        "out": str(final),
        "step": manifest["step"],
        "layout": plan.layout.text(),
        "plan_hash": plan.hash,
        "files": len(stored) + 1,
        "bytes": sum(f.bytes for f in stored),
        "tensors_equal": len(equal),
    }


def reshard_command(dir: str, layout: str, out: str) -> dict[str, Any]:
    """Reshard the checkpoint at ``dir`` (or the newest of a run folder); see ``reshard``."""
    return reshard(find_checkpoint(Path(dir)), parse_layout(layout), Path(out))


def logical_hashes(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every whole tensor's bytes by key: the same for every layout. Holds one tensor at a time."""
    index = read_index(checkpoint)
    return {key: _hash(read_tensor(checkpoint, index, key)) for key in sorted(stored_tensors(index))}


def _hash(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _new_plan(checkpoint: Path, manifest: Mapping[str, Any], layout: Layout) -> tuple[Plan, ModelSpec]:
    old: Mapping[str, Any] = manifest.get("plan") or {}
    config = old.get("model_config")
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise MeshwrightError(
            problem("E713", where=str(checkpoint), found="the manifest has no plan.model_config")
        )
    spec = spec_from_config(config, name=str(old.get("model_name", "")), source=str(checkpoint))
    if old.get("adapter") is not None:
        spec = adapted(spec, adapter_from_dict(old["adapter"]))
    batch: Mapping[str, Any] = old["batch"]
    size, length = batch["global_batch"], batch["seq_len"]
    refuse(check(spec, layout, derive_batch(layout, size, length), None, for_run=True))
    frozen = tuple(old.get("frozen") or ())
    return make_plan(spec, layout, size, length, str(old.get("model_path", "")), frozen=frozen), spec


def _fill(files: _Files, spec: ModelSpec, plan: Plan) -> None:
    """Write every piece of every tensor: a parameter, then what the optimizer keeps for it."""
    stored = stored_tensors(files.index)
    whole: set[str] = set()
    of: dict[str, list[str]] = {}
    for key in stored:
        name = (
            key.removeprefix(MODEL)
            if key.startswith(MODEL)
            else key.removeprefix(OPTIMIZER).rpartition("/")[0]
        )
        of.setdefault(name, []).append(key)
    for rank, name, box in rank_boxes(spec, plan):
        shape = stored[f"{MODEL}{name}"].size if f"{MODEL}{name}" in stored else None
        for key in sorted(of.get(name, [])):
            size = tuple(stored[key].size)
            if size == shape:
                files.add(rank, key, box)
            elif key not in whole:
                whole.add(key)
                files.add(rank, key, ((0,) * len(size), size))
    left = sorted(k for k in stored if k not in files.chunks)
    if left:
        raise MeshwrightError(
            problem(
                "E719",
                where=str(files.source),
                found=f"{len(left)} stored tensors do not belong to the model: {', '.join(left[:5])}",
            )
        )
