"""One session of a run: from which checkpoint it goes on, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.errors import MeshwrightError, problem
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.manifest import steps_in
from meshwright.orchestrate.proving import write_json
from meshwright.train.loop import RankSummary
from meshwright.train.stop import STOPPED


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
