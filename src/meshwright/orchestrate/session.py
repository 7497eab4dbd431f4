"""One session of a run: from which checkpoint it goes on, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.manifest import listed, read_manifest, steps_in
from meshwright.orchestrate.proving import write_json
from meshwright.train.keep import check_resumed
from meshwright.train.loop import RankSummary
from meshwright.train.stop import STOPPED
from meshwright.train.task import TrainTask


def checkpoint_to_resume(folder: Path, show: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint of a run folder; None for a run that was ended before its first one.

    Raises:
        MeshwrightError: E542 when there are checkpoints and none is complete.
    """
    newest, skipped = latest_checkpoint(folder / "checkpoints")
    for reason in skipped:
        show(f"checkpoint passed over: {reason}")
    if newest is None:
        if steps_in(folder / "checkpoints")["step"]:
            raise MeshwrightError(problem("E542", where=str(folder), found="it has no complete checkpoint"))
        show("the run was ended before its first checkpoint: it starts at step 1 again")
    return newest


def read_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder, whatever stands before or behind it."""
    return int(checkpoint.name.removeprefix(".").split("-")[1].partition(".")[0])


def step_of(checkpoint: Path | None) -> int:
    """Return the step that a checkpoint was saved after, 0 for none."""
    return 0 if checkpoint is None else read_step(checkpoint)


def resume_problems(task: TrainTask) -> list[Problem]:
    """Return why the task's checkpoint is not one of its run: other data or masks (E551), other tensors (E705-E707).

    Only the manifest is read. What it cannot tell, such as damage, is found when the ranks load.
    """
    if task.resume_from is None:
        return []
    manifest = read_manifest(task.resume_from)
    found = check_resumed(manifest["extra"], task)
    stored = {str(r["name"]): list(r["shape"]) for r in manifest["tensors"] if r["entry"] == "parameter"}
    wanted = {
        t.name: list(t.shape) for t in task.spec.tensors() if t.tied_to is None and not t.quantised
    }  # a base in 4 bits is packed again from the model's own weights
    missing = sorted(wanted.keys() - stored.keys())
    unexpected = sorted(stored.keys() - wanted.keys())
    shapes = [
        f"{name} is {stored[name]}, the model's is {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    for code, what, names in (
        ("E705", "tensors of the run are not in the checkpoint", missing),
        ("E706", "tensors of the checkpoint are not in the run", unexpected),
        ("E707", "tensors have another shape", shapes),
    ):
        if names:
            listing = f"{len(names)} {what}: {listed(names)}"
            found.append(problem(code, where=str(task.resume_from), found=listing))
    return found


def note_end(folder: Path, first: RankSummary, stop_at: int) -> dict[str, Any] | None:
    """Write (or remove) the marker of a run that was asked to stop; return what it says.

    ``first`` is rank 0's summary, ``stop_at`` the step at which the session was to end.
    """
    marker = folder / STOPPED
    if not first.stopped:
        marker.unlink(missing_ok=True)
        return None
    said = {
        "why": first.stopped,
        "step": first.steps,
        "steps_left": stop_at - first.steps,
        "checkpoint": f"checkpoints/step-{first.steps}",
        "time": time.time(),
    }
    write_json(marker, said)
    return said


def nothing_left(checkpoint: Path, stop_at: int) -> list[Problem]:
    """Return E559 when the checkpoint is at, or after, the last step of this session."""
    step = step_of(checkpoint)
    if step < stop_at:
        return []
    return [
        problem(
            "E559",
            where="--resume",
            found=f"{checkpoint.name} is at step {step}, and this session ends after step {stop_at}",
            needs=f"a last step above {step}",
            do=f"--set run.steps=N with N above {step}, and --steps likewise where it is given",
        )
    ]


def beyond_horizon(steps: int | None, horizon: int) -> list[Problem]:
    """Return W101 for --steps behind run.steps."""
    if steps is None or steps <= horizon:
        return []
    return [
        problem(
            "W101",
            where="--steps",
            found=f"--steps {steps} has no effect: the run ends after run.steps = {horizon}",
            why="run.steps is the horizon of the learning-rate schedule, and no run goes beyond it",
            do=f"--set run.steps={steps}",
        )
    ]
