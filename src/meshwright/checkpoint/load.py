"""Reading a checkpoint into any layout: keys are logical, so torch DCP cuts each tensor as the target is cut."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.checkpoint.agree import Ranks, this_world
from meshwright.checkpoint.manifest import (
    MODEL,
    OPTIMIZER,
    damage_problem,
    find_damage,
    listed,
    read_manifest,
    steps_in,
    why_incomplete,
)
from meshwright.checkpoint.metadata import SafeReader, read_index
from meshwright.checkpoint.state import Place, RankState, create_state, has_state, rank_state

PREFIXES = ("module.", "_orig_mod.", "model.", "transformer.", "_fsdp_wrapped_module.")
"""What wrappers put before a name; only used to say what differs."""


def latest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint in ``folder`` (None without one), and why newer ones were passed over.

    Completeness is the manifest, written last, and the size of every file; hashes are checked when it is loaded.
    """
    found = steps_in(folder)
    candidates = [(step, 2, path) for step, path in found["step"]]
    candidates += [(step, 1, path) for step, path in found["old"]]
    candidates += [(step, 0, path) for step, path in found["temporary"]]
    reasons: list[str] = []
    for _, kind, path in sorted(candidates, reverse=True):
        reason = why_incomplete(path) if kind else "a save that did not finish"
        if not reason:
            return path, reasons
        reasons.append(f"{path.name}: {reason}")
    return None, reasons


def load_checkpoint(
    *,
    path: Path,
    params: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    tied: Mapping[str, str],
    verify: bool = True,
    place: Place | None = None,
) -> dict[str, Any]:
    """Load the checkpoint at ``path`` into ``params`` and ``optimizer`` in place; return what was saved as ``extra``.

    The layout may be another than that of the save: other degrees of dp, other ZeRO stage, HSDP, other stages.
    Nothing is changed before every name, shape, dtype and hash is found right on all ranks. Every rank calls it.

    Args:
        path: a folder ``step-N``.
        params: this rank's parameters by logical name.
        optimizer: the optimizer over them, whose state is made and filled; None loads parameters only.
        tied: names in ``params`` that are second copies, mapped to the logical name that fills them.
        verify: read all files once before and compare every piece's CRC-32, the ranks sharing the work.
        place: puts a part of a tensor at its place in the logical tensor, where an axis cuts within it.

    Communication: gathers of names and plans on ``world``.

    Raises:
        MeshwrightError: E701, E702, E718 no complete checkpoint; E705 missing, E706 unexpected, E707 shapes,
            E708 dtypes; E709 damaged; E710 unsafe index; E711 a file that cannot be read.
    """
    ranks = this_world()
    problems: list[Problem] = []
    manifest: dict[str, Any] = {}
    index: Metadata | None = None
    state: RankState | None = None
    try:
        manifest = read_manifest(path)
        if verify:
            mine = manifest["files"][ranks.rank :: ranks.world_size]
            problems += [damage_problem(path, d) for d in find_damage(path, mine, quick=True)]
        if not problems:
            index = read_index(path)
    except MeshwrightError as error:
        problems += error.problems
    ranks.refuse(problems)
    assert index is not None
    stored = stored_tensors(index)
    with_state = any(key.startswith(OPTIMIZER) for key in stored)
    try:
        if optimizer is not None and with_state and not has_state(optimizer):
            create_state(optimizer)
        state = rank_state(params, optimizer if with_state else None, tied, with_copies=True, place=place)
        wanted = state.tensors | {key: t for key, t in state.copies if key not in state.tensors}
    except MeshwrightError as error:
        problems, wanted = list(error.problems), {}
    if optimizer is None:
        stored = {key: entry for key, entry in stored.items() if key.startswith(MODEL)}
    _refuse_differences(ranks, path, wanted, stored, problems)
    assert state is not None
    _read(ranks, path, index, state)
    if optimizer is not None and not with_state:
        optimizer.state.clear()  # it was saved before the first update
    return manifest["extra"]


def stored_tensors(index: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return what the index says of every tensor, by key."""
    return {k: e for k, e in index.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}


def _refuse_differences(
    ranks: Ranks,
    path: Path,
    wanted: Mapping[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata],
    before: Sequence[Problem],
) -> None:
    """Refuse, on all ranks alike, names that are missing or left over and tensors of another shape or dtype.

    ``before`` is what this rank found wrong earlier: the Problems of all ranks are raised on all.
    """
    mine = {key: (tuple(t.shape), t.dtype) for key, t in wanted.items()}
    union: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    told = ranks.all_gather((tuple(before), mine))
    refuse(list(dict.fromkeys(p for part in told for p in part[0])))
    for _, part in told:
        union |= part
    missing = sorted(key for key in union if key not in stored)
    unexpected = sorted(key for key in stored if key not in union)
    both = [key for key in union if key in stored]
    shapes = [
        f"{key} is {list(stored[key].size)}, the model's is {list(union[key][0])}"
        for key in both
        if tuple(stored[key].size) != union[key][0]
    ]
    dtypes = [
        f"{key} is {_name(stored[key].properties.dtype)}, the run's is {_name(union[key][1])}"
        for key in both
        if stored[key].properties.dtype != union[key][1]
    ]
    hint = _prefix_hint(missing, unexpected)
    problems = [
        problem(
            code,
            where=str(path),
            found=f"{len(names)} {what}: {listed(names)}; 0 of {len(union)} tensors were loaded{hint}",
        )
        for code, what, names in (
            ("E705", "tensors of the run are not in the checkpoint", missing),
            ("E706", "tensors of the checkpoint are not in the run", unexpected),
            ("E707", "tensors have another shape", shapes),
            ("E708", "tensors have another dtype", dtypes),
        )
        if names
    ]
    if problems:  # the same on every rank, from the same gathered names
        raise MeshwrightError(problems)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return what is said when the two lists differ by a wrapper's prefix, or ""."""
    short = {key.removeprefix(MODEL) for key in missing if key.startswith(MODEL)}
    spare = {key.removeprefix(MODEL) for key in unexpected if key.startswith(MODEL)}
    for prefix in PREFIXES:
        for longer, other, whose in ((spare, short, "checkpoint"), (short, spare, "run")):
            if other and {prefix + name for name in other} <= longer:
                return f"; the names of the {whose} have {prefix!r} before them"
    return ""


def _read(ranks: Ranks, path: Path, index: Metadata, state: RankState) -> None:
    """Fill the tensors of ``state`` in place: every rank plans and reads by itself, then all agree."""
    problems: list[Problem] = []
    try:
        with warnings.catch_warnings():  # torch warns that nothing is exchanged, which is meant here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(state.tensors), storage_reader=SafeReader(path, index), no_dist=True)
    except CheckpointException as error:
        problems = [
            problem("E711", where=str(path), found=f"rank {ranks.rank}: {type(cause).__name__}: {cause}")
            for _, (cause, _) in sorted(error.failures.items())
        ]
    ranks.refuse(problems, ExitCode.ENVIRONMENT)
    with torch.no_grad():
        for key, tensor in state.copies:
            tensor.copy_(state.tensors[key])
    for key, (entries, entry) in state.numbers.items():
        entries[entry] = state.tensors[key].item() if key in state.tensors else entries[entry]
