"""The ledger of a machine: what was predicted and what was measured, one JSON object a line, never rewritten.

A row holds the whole plan, so that any later cost model can predict it again. Rows of one machine lie in
``machines/FINGERPRINT/ledger.jsonl`` below the user's cache folder; the file is replaced whole (written beside,
synced, renamed) under a lock, so that a reader never sees half a row.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.files import write_whole
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_from_dict, plan_to_dict

FORMAT: Final = 1
"""Version of a row's format."""
DISTURBED: Final = 0.5
"""Width of the middle 80 % of step times over their median from which a run says little about its layout."""
STOLEN: Final = 0.1
"""Share of a step that ranks with a core each waited for a core, from which other programs had too much of it."""


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """One plan that ran on one machine.

    Attributes:
        machine: fingerprint of the machine.
        when: date and time (UTC, ISO 8601).
        source: "try", or the run folder's name.
        plan: what ran, without its prediction and reasons.
        step_time_s, spread_s: median, and width of the middle 80 %, of ``steps`` timed steps.
        peak_memory_bytes: of the rank with the highest peak.
        predicted_s, predicted_bytes: what was predicted before it ran; None where nothing was.
        processor_s: processor seconds of one step over all ranks, None where they were not measured.
        time_s, memory_bytes: the measured parts, by name.
        stolen_share: share of a step that its ranks waited for a core of their own, None where that is not known.
    """

    machine: str
    when: str
    source: str
    plan: Plan
    step_time_s: float
    spread_s: float
    steps: int
    peak_memory_bytes: int
    predicted_s: float | None
    predicted_bytes: int | None
    processor_s: float | None
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    stolen_share: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether its steps differ so much, or waited so long for a core, that they are not used in a fit."""
        return self.spread_s > DISTURBED * self.step_time_s or (self.stolen_share or 0.0) > STOLEN

    @property
    def key(self) -> tuple[str, str, float]:
        """What makes two rows the same measurement."""
        return self.plan.hash, self.source, self.step_time_s

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "when": self.when,
            "source": self.source,
            "layout_text": self.plan.layout.text(),
            "step_time_s": self.step_time_s,
            "spread_s": self.spread_s,
            "steps": self.steps,
            "peak_memory_bytes": self.peak_memory_bytes,
            "predicted_s": self.predicted_s,
            "predicted_bytes": self.predicted_bytes,
            "processor_s": self.processor_s,
            "time_s": dict(self.time_s),
            "memory_bytes": dict(self.memory_bytes),
            "stolen_share": self.stolen_share,
            "plan": plan_to_dict(self.plan) | {"prediction": None, "why": [], "binds": ""},
        }


def row_from_dict(data: Mapping[str, Any], where: str) -> LedgerRow:
    """Return the row whose ``as_dict`` is ``data``.

    Raises:
        MeshwrightError: E477 for keys or values of something else.
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this is format {FORMAT}")
        predicted, size, used = data["predicted_s"], data["predicted_bytes"], data["processor_s"]
        stolen = data["stolen_share"]
        row = LedgerRow(
            machine=str(data["machine"]),
            when=str(data["when"]),
            source=str(data["source"]),
            plan=plan_from_dict(data["plan"], f"{where}: plan"),
            step_time_s=float(data["step_time_s"]),
            spread_s=float(data["spread_s"]),
            steps=int(data["steps"]),
            peak_memory_bytes=int(data["peak_memory_bytes"]),
            predicted_s=None if predicted is None else float(predicted),
            predicted_bytes=None if size is None else int(size),
            processor_s=None if used is None else float(used),
            time_s={str(k): float(v) for k, v in data["time_s"].items()},
            memory_bytes={str(k): int(v) for k, v in data["memory_bytes"].items()},
            stolen_share=None if stolen is None else float(stolen),
        )
        if not 0.0 < row.step_time_s < 1e9 or not 0.0 <= row.spread_s < 1e9 or row.peak_memory_bytes < 1:
            raise ValueError("a step time, spread or peak that cannot be")
    except MeshwrightError as error:
        found = "; ".join(p.found for p in error.problems)
        raise MeshwrightError(problem("E477", where=where, found=found)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeshwrightError(problem("E477", where=where, found=f"{error!r}")) from error
    return row


def ledger_path(cache: Path, machine: str) -> Path:
    """Return where the ledger of a machine lies below the user's cache folder."""
    return cache / "machines" / machine / "ledger.jsonl"


def read_ledger(path: Path) -> list[LedgerRow]:
    """Return the rows of a ledger, oldest first; none where there is no file.

    Raises:
        MeshwrightError: E477 for a file that cannot be read, or a line that is not a row.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(
            problem("E477", where=str(path), found=f"it cannot be read: {error}")
        ) from error
    rows: list[LedgerRow] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            data: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MeshwrightError(problem("E477", where=where, found=f"it is not JSON: {error}")) from error
        if not isinstance(data, dict):
            raise MeshwrightError(problem("E477", where=where, found="it is not an object"))
        rows.append(row_from_dict(cast("dict[str, Any]", data), where))
    return rows


def add_rows(path: Path, rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Add rows that are not there yet and return all; a row that is there (same plan, source and time) is not doubled.

    Raises:
        MeshwrightError: E477 for a ledger that cannot be read, E813 for a folder that takes no file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(".lock")):
            held = read_ledger(path)
            known = {row.key for row in held}
            new = [row for row in rows if row.key not in known]
            if new:
                write_whole(path, "".join(json.dumps(row.as_dict()) + "\n" for row in [*held, *new]))
            return [*held, *new]
    except OSError as error:
        found = f"{path.parent}: {error.strerror or error}"
        raise MeshwrightError(problem("E813", where=str(path), found=found), ExitCode.ENVIRONMENT) from error


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
