"""Which checkpoints stay: the newest k, every n-th step, the best; the newest complete one always."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import (
    MANIFEST,
    steps_in,
    temporary_name,
    why_incomplete,
)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept: the newest ``last`` (None keeps all), steps divided by ``every`` (0: none), and the ``best``."""

    last: int | None = None
    every: int = 0
    best: bool = False


def kept_steps(losses: Mapping[int, float | None], rule: Retention) -> set[int]:
    """Return which of the complete checkpoints ``losses`` (step -> held-out loss or None) stay.

    The best is the lowest loss, the earlier one of equals.
    """
    steps = sorted(losses)
    if rule.last is None:
        return set(steps)
    kept = set(steps[-max(1, rule.last) :])
    kept |= {s for s in steps if rule.every and s % rule.every == 0}
    best = best_step(losses) if rule.best else None
    return kept | ({best} if best is not None else set())


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """Return the step of the lowest loss, None where no checkpoint has one."""
    known = [(v, s) for s, v in losses.items() if v is not None and math.isfinite(v)]
    return min(known)[1] if known else None


def held_losses(folder: Path) -> dict[int, float | None]:
    """Return the steps of the complete checkpoints in ``folder`` with the held-out loss that each was saved with."""
    found: dict[int, float | None] = {}
    for step, path in steps_in(folder)["step"]:
        if not why_incomplete(path):
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            loss = (manifest.get("extra") or {}).get("eval_loss")
            found[step] = float(loss) if isinstance(loss, int | float) else None
    return found


def retain(folder: Path, rule: Retention) -> list[int]:
    """Remove the complete checkpoints that ``rule`` does not keep; return their steps. One rank calls it, after a save.

    A folder loses its name before its files, so that a removal that is cut short leaves no half checkpoint: the next
    save clears the rest. Incomplete folders are left alone: somebody may want to look at them.
    """
    if rule.last is None:
        return []
    losses = held_losses(folder)
    gone: list[int] = []
    for step in sorted(losses.keys() - kept_steps(losses, rule)):
        aside = folder / temporary_name(step, uuid.uuid4().hex[:12])
        with contextlib.suppress(OSError):  # what cannot be removed now stays until the next save
            os.rename(folder / f"step-{step}", aside)
            shutil.rmtree(aside, ignore_errors=True)
            gone.append(step)
    return gone
