"""The run folder: whether a run may have it, the lock that holds it, and what lies beside its checkpoints."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.checkpoint.manifest import steps_in
from meshwright.mesh.env import TorchrunJob
from meshwright.program.plan import Plan


def unwritable(folder: Path) -> list[Problem]:
    """Return E813 when the run folder, or the nearest folder above it that exists, cannot take files."""
    found = refuses_files(folder)
    return [problem("E813", where=f"run.dir={folder}", found=found)] if found else []


def refuses_files(folder: Path) -> str:
    """Return why no file can be made in a folder, or in the nearest one above it that exists; "" where one can.

    A folder is made there and removed again: permissions say nothing about a file system that makes no files (/proc),
    nor about a disk without room for a name.
    """
    there: Path | None = None
    try:
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not there.is_dir():
            return f"{there} is a file, not a folder"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"no permission to write in {there}"
        os.rmdir(tempfile.mkdtemp(prefix=".meshwright-", dir=there))
    except OSError as error:
        return f"nothing can be made in {there}: {error.strerror or error}" if there else str(error)
    except ValueError as error:
        return str(error)
    return ""


def make_folder(folder: Path) -> None:
    """Make the run folder. Raises MeshwrightError E813 when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"the folder cannot be made: {error.strerror or error}"
        raise MeshwrightError(
            problem("E813", where=f"run.dir={folder}", found=found), ExitCode.ENVIRONMENT
        ) from error


def trained(folder: Path) -> bool:
    """Return whether a run in the folder did a step: what was ended before its first one may be started anew."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(steps_in(folder / "checkpoints").values())


def continues(folder: Path, job: TorchrunJob | None) -> bool:
    """Return whether the run in the folder was begun by this very job of torchrun, which has started its ranks anew."""
    return job is not None and read_record(folder).get("job") == job.job


def read_record(folder: Path) -> dict[str, Any]:
    """Return what ``run.json`` says; {} without one that can be read."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def folder_problems(folder: Path, plan: Plan, resume: bool) -> list[Problem]:
    """Return E542 where there is nothing to resume, E541 where a run that did a step would be mixed with another."""
    record = folder / "run.json"
    if not record.exists():
        if resume:
            return [problem("E542", where=str(folder), found="there is no run.json")]
        return []
    if not resume and trained(folder):
        try:
            held = json.loads(record.read_text(encoding="utf-8")).get("plan_hash", "?")
        except (OSError, ValueError):
            held = "unreadable"
        same = "this very plan" if held == plan.hash else f"another plan ({held}, not {plan.hash})"
        return [problem("E541", where=str(folder), found=f"it holds a run of {same}")]
    return []


def locked(folder: Path, patience_s: float = 0.0) -> IO[str]:
    """Return the folder's lock file, held until it is closed or this process ends.

    ``patience_s``: a run that goes on by itself waits so long for the one before it to end.

    Raises:
        MeshwrightError: E541 when another process trains in the folder at this moment.
    """
    lock = (folder / ".lock").open("w", encoding="utf-8")
    until = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
    except BlockingIOError:
        lock.close()
        raise MeshwrightError(
            problem(
                "E541",
                where=str(folder),
                found="another process trains in it at this moment",
                do="wait for it or stop it, or choose another folder with --set run.dir=...",
            )
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def records(folder: Path) -> dict[Path, bytes]:
    """Return the files about the run that a resumed run writes anew, as they are."""
    files = [folder / name for name in ("run.json", "plan.json", "probe.json")]
    return {file: file.read_bytes() for file in files if file.is_file()}


def offload_dir(run: Any, folder: Path) -> Path:
    """Return the folder of this run's offloaded state: in the run folder, or its own one in ``run.offload_dir``."""
    if run.run.offload_dir is None:
        return folder / "offload"
    own = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
    return Path(run.run.offload_dir) / f"{folder.name}-{own}"


def offload_problems(run: Any, plan: Plan, folder: Path) -> list[Problem]:
    """Return E278 when the files of offloaded state could not be made, before a run folder is claimed."""
    if not plan.layout.offload.endswith("-nvme"):
        return []
    target = offload_dir(run, folder)
    found = refuses_files(target)
    return [problem("E278", where="run.offload_dir", found=f"{target}: {found}")] if found else []
