"""Looking at a checkpoint without loading it: what it holds, and whether its bytes are still those written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_bytes
from meshwright.checkpoint.foreign import Foreign, inspect_foreign, is_anothers, open_foreign
from meshwright.checkpoint.hf_files import is_hf_folder, open_hf_folder
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.manifest import (
    MANIFEST,
    Damage,
    find_damage,
    manifest_or_reason,
    read_manifest,
    steps_in,
    why_incomplete,
)
from meshwright.checkpoint.verify_foreign import verify_foreign


def find_checkpoint(target: Path) -> Path:
    """Return ``target`` when it is a checkpoint, else the newest complete one of a run folder or checkpoints folder.

    Raises:
        MeshwrightError: E701 when there is none, with why those that are there do not count.
    """
    if (target / MANIFEST).is_file() or target.name.startswith("step-"):
        return target
    reasons: list[str] = []
    for folder in (target / "checkpoints", target):
        newest, skipped = latest_checkpoint(folder)
        if newest is not None:
            return newest
        reasons += skipped
    found = (
        "there is no such folder" if not target.is_dir() else "; ".join(reasons) or "no step-N folder in it"
    )
    raise MeshwrightError(problem("E701", where=str(target), found=found))


def _opener(path: Path) -> Callable[[Path], Foreign] | None:
    """Return what reads another program's checkpoint in ``path``, or None where there is none."""
    if is_anothers(path):
        return open_foreign
    return open_hf_folder if is_hf_folder(path) and not (path / MANIFEST).is_file() else None


def passed_over(target: Path, chosen: Path) -> list[tuple[str, str]]:
    """Return the newer checkpoints that ``find_checkpoint`` left aside for ``chosen``, by name, each with its fault.

    Saves that did not finish are none: a run that was ended leaves them, and what it saved before is whole.
    """
    if chosen == target:
        return []
    there = steps_in(chosen.parent)
    at = next((step for found in there.values() for step, path in found if path == chosen), 0)
    newer = [(path.name, why_incomplete(path)) for step, path in there["step"] if step > at]
    return [(name, reason) for name, reason in newer if reason]


def passed_over_warnings(dir: str) -> list[Problem]:
    """Return W655 for each damaged checkpoint in ``dir`` that is newer than the one a command takes from it.

    Where there is none to take the command itself says so.
    """
    target = Path(dir)
    try:
        chosen = find_checkpoint(target)
    except MeshwrightError:
        return []
    return [
        problem("W655", where=str(chosen.parent / name), found=f"{reason}; taken is {chosen.name}")
        for name, reason in passed_over(target, chosen)
    ]


def inspect_command(dir: str) -> dict[str, Any]:
    """Return what the checkpoint at ``dir`` (or the newest of a run folder) holds, from its manifest.

    A checkpoint of torch (FSDP) or DeepSpeed, or a Hugging Face folder, is told from its index; no tensor is read.

    Raises:
        MeshwrightError: E701, E702, E718; of another program's checkpoint E580-E585, E710.
    """
    opened = _opener(Path(dir))
    if opened is not None:
        return inspect_foreign(opened(Path(dir)))
    path = find_checkpoint(Path(dir))
    manifest = read_manifest(path)
    tensors: list[Mapping[str, Any]] = manifest["tensors"]
    parameters = [t for t in tensors if t["entry"] == "parameter"]
    state = [t for t in tensors if t["entry"] != "parameter"]
    plan: Mapping[str, Any] = manifest.get("plan") or {}
    size = sum(f["bytes"] for f in manifest["files"])
    entries: dict[str, int] = {}
    for row in state:
        entries[row["entry"]] = entries.get(row["entry"], 0) + 1
    return {
        "path": str(path),
        "complete": True,
        "step": manifest["step"],
        "world_size": manifest["world_size"],
        "plan_hash": manifest["plan_hash"],
        "layout": plan.get("layout"),
        "model": plan.get("model_name"),
        "tensors": len(tensors),
        "parameters": {
            "tensors": len(parameters),
            "elements": sum(prod(t["shape"]) for t in parameters),
            "bytes": sum(t["bytes"] for t in parameters),
            "dtypes": sorted({t["dtype"] for t in parameters}),
        },
        "optimizer": {
            "class": manifest["optimizer"]["class"],
            "entries": entries,
            "bytes": sum(t["bytes"] for t in state),
        },
        "tied": manifest["tied"],
        "files": len(manifest["files"]),
        "bytes": size,
        "size": format_bytes(size),
        "extra": manifest["extra"],
        "versions": manifest.get("versions", {}),
    }


def verify_command(dir: str) -> dict[str, Any]:
    """Return whether every byte of the checkpoint is still the one written, and what is damaged by file and tensor.

    A checkpoint that is incomplete is not ok either; a folder without any is refused. What can be said of another
    program's checkpoint is in ``verify_foreign``.

    Raises:
        MeshwrightError: E701, E718; of another program's checkpoint E581, E583, E710.
    """
    opened = _opener(Path(dir))
    if opened is not None:
        return verify_foreign(Path(dir), opened)
    path = find_checkpoint(Path(dir))
    if not path.is_dir():
        raise MeshwrightError(problem("E701", where=str(path), found="there is no such folder"))
    answer: dict[str, Any] = {"path": str(path), "ok": False, "step": None, "files": 0, "bytes": 0}
    manifest, reason = manifest_or_reason(path)
    if manifest is None:
        return answer | {"incomplete": reason, "damaged": []}
    damage = find_damage(path, manifest["files"])
    damage += [Damage(file=name, why=reason) for name, reason in passed_over(Path(dir), path)]
    return answer | {
        "ok": not damage,
        "step": manifest["step"],
        "files": len(manifest["files"]),
        "bytes": sum(f["bytes"] for f in manifest["files"]),
        "tensors": len(manifest["tensors"]),
        "incomplete": "",
        "damaged": [{"file": d.file, "why": d.why, "tensors": list(d.tensors)} for d in damage],
    }
