"""What a run writes down and shows: metrics.jsonl, events.jsonl, a line on the terminal, TensorBoard if installed.

Rank 0 writes; files are append-only, one JSON object a line, flushed each step.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any, Protocol

from meshwright.base.units import format_bytes


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...

    def close(self) -> None: ...


def _clean(value: Any) -> Any:
    """Return ``value`` with non-finite numbers as None, so that the line is JSON for every reader."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_clean(record), separators=(",", ":"), allow_nan=False) + "\n")


def write_event(folder: Path, event: str, **facts: Any) -> None:
    """Add an event with the time of day (seconds since 1970) to the run folder's ``events.jsonl``."""
    _append(folder / "events.jsonl", {"time": time.time(), "event": event, **facts})


def last_loss(folder: Path, step: int) -> float:
    """Return the loss that ``metrics.jsonl`` has of ``step``; NaN where it has none."""
    found = math.nan
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # a kill cut the line short
            continue
        if record.get("step") == step and record.get("loss") is not None:
            found = float(record["loss"])
    return found


class RunLog:
    """The files of a run folder that grow while it runs. A rank other than 0 makes one that writes nothing."""

    def __init__(self, folder: Path, *, writes: bool, total_steps: int) -> None:
        self.folder = folder
        self.writes = writes
        self.total_steps = total_steps
        self._started = time.monotonic()
        self._done = 0
        self._board: _Writer | None = _tensorboard(folder) if writes else None

    def event(self, event: str, **facts: Any) -> None:
        """Write an event with the time of day (seconds since 1970)."""
        if self.writes:
            write_event(self.folder, event, **facts)

    def step(self, record: dict[str, Any]) -> None:
        """Write one step's record and show its line."""
        if not self.writes:
            return
        _append(self.folder / "metrics.jsonl", record)
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "eval_loss"):
                value = record.get(name)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._board.add_scalar(name, float(value), int(record["step"]))
        self._done += 1
        print(self.line(record), flush=True)

    def line(self, record: dict[str, Any]) -> str:
        """Return a step's line for people: step, loss, gradient norm, rate, tokens/s, memory, time left."""
        left = (
            (self.total_steps - int(record["step"])) * (time.monotonic() - self._started) / max(1, self._done)
        )
        memory = record["memory_bytes"]
        peak = memory.get("peak") or sum(memory.get(k, 0) for k in ("parameters", "gradients", "optimizer"))
        text = (
            f"step {record['step']:>{len(str(self.total_steps))}}/{self.total_steps}  "
            f"loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_s']:,.0f} tokens/s  {format_bytes(peak)}/rank  ETA {left // 60:.0f}:{left % 60:02.0f}"
        )
        if "eval_loss" in record:
            text += f"  eval {record['eval_loss']:.4f}"
        if record.get("skipped"):
            text += f"  SKIPPED: {record['skipped']}"
        return text

    def close(self) -> None:
        """Finish what was opened."""
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path) -> _Writer | None:
    """Return a TensorBoard writer below the run folder where tensorboard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard.writer import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))
    return writer
