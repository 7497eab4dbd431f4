"""Writing a checkpoint: every rank its own shards, aside, then one rename.

Order: agree on a folder -> torch DCP plans, every rank writes its shards with their checksums and brings them to the
disk -> rank 0 hears that all have, writes the index and the manifest, and renames once -> all hear of it. A fault on
any rank ends the save on all ranks with the same error and leaves the checkpoints that were there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.files import sync
from meshwright.checkpoint.agree import Ranks
from meshwright.checkpoint.manifest import (
    FORMAT,
    FORMAT_VERSION,
    METADATA,
    MODEL,
    OPTIMIZER,
    StoredFile,
    hash_file,
    old_name,
    step_name,
    steps_in,
    temporary_name,
    why_incomplete,
    write_manifest,
)
from meshwright.checkpoint.piece_files import PieceFile
from meshwright.checkpoint.state import Place, describe_optimizer, rank_state


class _Writes(list[WriteResult]):
    """What one rank wrote: torch's results, and the files with their checksums, which travel to rank 0 with them."""

    files: tuple[StoredFile, ...] = ()


class _Writer(FileSystemWriter):
    """DCP's file writer, with one file per rank that is checksummed while it is written.

    The folder's path is left out of the index (it is a machine's, and it will be renamed). On rank 0, ``finish`` ends
    with the manifest and the rename, so that the answer to all ranks is that the checkpoint has its name.
    """

    def __init__(self, folder: Path, rank: int, facts: dict[str, Any]) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self._rank, self._facts = rank, facts

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return ``plan``, when this rank sees the folder that rank 0 made (torch would make another one here)."""
        folder = Path(self.path)
        if not folder.is_dir():
            found = f"rank {self._rank} does not see the folder that rank 0 made"
            raise MeshwrightError(problem("E704", where=str(folder.parent), found=found))
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of ``plan`` (all items are tensors: ``state`` refuses others) and bring them to the disk."""
        results = _Writes()
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with PieceFile(Path(self.path) / name) as file:
                for item in plan.items:
                    tensor = cast("Tensor", planner.resolve_data(item)).detach().cpu()
                    offset, length = file.add(item.index.fqn, tensor)
                    place = _StorageInfo(name, offset, length)
                    results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
            results.files = (file.stored,)
        results.files = tuple(sealed_files(Path(self.path), list(results.files)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and give the folder its name. Rank 0 calls it when all have written."""
        super().finish(metadata, results)
        files = [file for part in results for file in cast("_Writes", part).files]
        refuse(finish_checkpoint(Path(self.path), files, self._facts, metadata), ExitCode.ENVIRONMENT)


def save_checkpoint(
    *,
    folder: Path,
    step: int,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    tied: Mapping[str, str],
    extra: dict[str, Any],
    manifest: dict[str, Any],
    world_size: int,
    rank: int,
    place: Place | None = None,
) -> Path:
    """Write ``folder/step-N`` and return its path on every rank. Every rank calls it.

    Replicated tensors are written once, spread over the ranks that hold them. A ``step-N`` that is there already
    is replaced by the rename.

    Args:
        folder: where the run keeps its checkpoints.
        step: the step after which the state is saved.
        params: this rank's parameters by logical name.
        optimizer: the optimizer over them.
        tied: names in ``params`` that are second copies, mapped to the logical name; copies are not stored.
        extra: JSON values that resuming needs (step, seed, loss scale, data position, plan hash).
        manifest: JSON facts for people and for the export (plan, versions, tokenizer).
        world_size: ranks that call this.
        rank: this rank.
        place: puts a part of a tensor at its place in the logical tensor, where an axis cuts within it.

    Communication: one all_gather of names, then torch's: plans to rank 0 and back, what was written to rank 0 and the
        index back, on ``world``.

    Raises:
        MeshwrightError: E703 when writing failed on a rank, E704 when the ranks do not see each other's files,
            E716 and E717 for state that cannot be stored.
    """
    captured = Captured(tensors={}, optimizer={}, tied={})
    problems: list[Problem] = []
    try:
        captured = capture(params, optimizer, tied, place)
    except MeshwrightError as error:
        problems += error.problems
    return write_checkpoint(
        Ranks(rank, world_size),
        folder=folder,
        step=step,
        captured=captured,
        extra=extra,
        manifest=manifest,
        problems=problems,
    )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What one rank holds at one moment: tensors by key, what the optimizer is, and which names are copies."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    tied: dict[str, str]


def capture(
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    tied: Mapping[str, str],
    place: Place | None = None,
) -> Captured:
    """Return this rank's state; the tensors are the live ones, not copies (see ``background.copied``).

    Raises:
        MeshwrightError: E716 for optimizer state without a logical name.
    """
    held = rank_state(params, optimizer, tied, with_copies=False, place=place)
    return Captured(tensors=held.tensors, optimizer=describe_optimizer(optimizer), tied=dict(tied))


def write_checkpoint(
    ranks: Ranks,
    *,
    folder: Path,
    step: int,
    captured: Captured,
    extra: dict[str, Any],
    manifest: dict[str, Any],
    problems: Sequence[Problem] = (),
) -> Path:
    """Write what the ranks captured as ``folder/step-N`` and return its path on every rank (see ``save_checkpoint``).

    ``problems`` are this rank's reasons not to write; all ranks raise those of all.
    """
    problems = [*problems, *_json_problems(extra, "extra"), *_json_problems(manifest, "manifest")]
    name, tied = _begin(ranks, folder, step, problems, captured.tied)
    facts = {"extra": extra, "optimizer": captured.optimizer, "tied": tied, "step": step}
    temporary = folder / name
    try:
        writer = _Writer(temporary, ranks.rank, manifest | facts | {"world_size": ranks.world_size})
        _write_shards(ranks, temporary, captured.tensors, writer)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder / step_name(step)


def _json_problems(values: Mapping[str, Any], where: str) -> list[Problem]:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        return [problem("E717", where=where, found=str(error))]
    return []


def _begin(
    ranks: Ranks, folder: Path, step: int, problems: Sequence[Problem], tied: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Make the temporary folder on rank 0; return its name, and the tied copies of all ranks, on every rank."""
    name, failed = temporary_name(step, uuid.uuid4().hex[:12]), ""
    if ranks.rank == 0 and not problems:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
            (folder / name).mkdir()
        except OSError as error:
            failed = f"rank 0: {type(error).__name__}: {error}"
    told = ranks.all_gather((name, failed, tuple(problems), dict(tied)))
    name, failed = told[0][:2]
    found = list(dict.fromkeys(p for part in told for p in part[2]))
    if found and ranks.rank == 0:
        shutil.rmtree(folder / name, ignore_errors=True)
    refuse(found)
    if failed:
        refuse([problem("E703", where=str(folder), found=failed)], ExitCode.ENVIRONMENT)
    return name, {copy: original for part in told for copy, original in part[3].items()}


def clean(folder: Path) -> None:
    """Remove what saves left in ``folder`` that did not finish; a replaced checkpoint without successor comes back."""
    found = steps_in(folder)
    for _, path in found["temporary"]:
        shutil.rmtree(path, ignore_errors=True)
    for step, path in found["old"]:
        final = folder / step_name(step)
        if not final.exists() and not why_incomplete(path):
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _write_shards(ranks: Ranks, temporary: Path, tensors: dict[str, Tensor], writer: _Writer) -> None:
    """Let DCP plan and write this rank's shards and, on rank 0, finish the checkpoint."""
    try:
        with warnings.catch_warnings():
            if ranks.world_size == 1:  # torch warns that it saves in one process, which is meant here
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                dict(tensors),
                storage_writer=writer,
                process_group=ranks.group,
                no_dist=ranks.world_size == 1,
            )
    except CheckpointException as error:
        problems = [
            found
            for guilty, (cause, _) in sorted(error.failures.items())
            for found in _problems_of(cause, guilty, temporary.parent)
        ]
        raise MeshwrightError(list(dict.fromkeys(problems)), ExitCode.ENVIRONMENT) from error


def _problems_of(cause: BaseException, guilty: int, folder: Path) -> tuple[Problem, ...]:
    """Return what went wrong on the rank ``guilty``."""
    if isinstance(cause, MeshwrightError):
        return cause.problems
    return (problem("E703", where=str(folder), found=f"rank {guilty}: {type(cause).__name__}: {cause}"),)


def sealed_files(temporary: Path, files: list[StoredFile]) -> list[StoredFile]:
    """Return the files that this rank wrote, each as long as was counted; their names reach the disk with the manifest's.

    Raises:
        OSError: a file that is not there, or has another length.
    """
    for file in files:
        size = (temporary / file.file).stat().st_size
        if size != file.bytes:
            raise OSError(f"{file.file} has {size} bytes, {file.bytes} were written")
    return files


def finish_checkpoint(
    temporary: Path, files: list[StoredFile], facts: dict[str, Any], index: Metadata
) -> list[Problem]:
    """Check that all files are here, write the manifest and give the folder its name; return what went wrong.

    ``index`` is what ``METADATA`` holds.
    """
    folder = temporary.parent
    try:
        unseen = [
            f.file
            for f in files
            if not (temporary / f.file).is_file() or (temporary / f.file).stat().st_size != f.bytes
        ]
        if unseen:
            return [problem("E704", where=str(folder), found=f"rank 0 does not see {', '.join(unseen[:5])}")]
        files = [*files, hash_file(temporary / METADATA)]
        extra = facts["extra"]
        write_manifest(
            temporary,
            facts
            | {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "plan_hash": extra.get("plan_hash", facts.get("plan_hash", "")),
                "tensors": tensor_rows(index),
                "files": [f.as_dict() for f in files],
                "complete": True,
            },
        )
        publish(temporary, folder / step_name(facts["step"]))
    except OSError as error:
        return [problem("E703", where=str(folder), found=f"rank 0: {type(error).__name__}: {error}")]
    return []


def publish(temporary: Path, final: Path) -> None:
    """Give ``temporary`` the name ``final``; a folder of that name steps aside first and is removed after."""
    aside: Path | None = None
    if final.exists():
        step = int(final.name.rpartition("-")[2])
        aside = final.with_name(old_name(step, uuid.uuid4().hex[:12]))
        os.rename(final, aside)
    os.rename(temporary, final)
    sync(final.parent)
    if aside is not None:
        with contextlib.suppress(OSError):  # the next save tries again
            shutil.rmtree(aside)


def tensor_rows(index: Metadata) -> list[dict[str, Any]]:
    """Return one row per stored tensor: key, name, entry ("parameter" or the optimizer's), shape, dtype, bytes."""
    rows: list[dict[str, Any]] = []
    for key, stored in index.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if key.startswith(MODEL):
            name, entry = key.removeprefix(MODEL), "parameter"
        else:
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
        dtype = stored.properties.dtype
        rows.append(
            {
                "key": key,
                "name": name,
                "entry": entry,
                "shape": list(stored.size),
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": stored.size.numel() * dtype.itemsize,
            }
        )
    return rows
