"""Reads what a report shows: a run folder's files or a plan.json, each as it is, and says what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.base.errors import MeshwrightError, problem
from meshwright.program.plan_file import plan_from_dict

RUN_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "prove.json", "probe.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything that was found, as JSON values.

    Attributes:
        path: the run folder, or the plan file.
        is_run: whether ``path`` is a run folder.
        run: content of run.json ({} when absent).
        plan: the plan's dict form, from run.json or plan.json ({} when absent).
        metrics: one mapping a step, in step order; a step that was run twice keeps its last record.
        repeated_steps: records replaced by a later one of the same step (a resumed run).
        events: lines of events.jsonl.
        prove: content of prove.json.
        probe: content of probe.json.
        missing: names of files that are not there.
        unreadable: file name to reason, for files that are there and cannot be read.
        damaged: file name to number of lines that are not JSON objects.
    """

    path: Path
    is_run: bool
    run: Mapping[str, Any]
    plan: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    repeated_steps: int
    events: tuple[Mapping[str, Any], ...]
    prove: Mapping[str, Any]
    probe: Mapping[str, Any]
    missing: tuple[str, ...]
    unreadable: Mapping[str, str]
    damaged: Mapping[str, int]

    @property
    def prediction(self) -> Mapping[str, Any]:
        """The prediction: run.json's, else the plan's, else empty."""
        return table(self.run.get("prediction")) or table(self.plan.get("prediction"))

    @property
    def measurement(self) -> Mapping[str, Any]:
        """The measurement of run.json, or empty."""
        return table(self.run.get("measurement"))

    @property
    def layout(self) -> Mapping[str, Any]:
        """The layout's keys, or empty."""
        return table(self.plan.get("layout"))


def table(value: Any) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object, else an empty one."""
    if not isinstance(value, Mapping):
        return {}
    return {str(k): v for k, v in cast("Mapping[Any, Any]", value).items()}


def listed(value: Any) -> list[Any]:
    """Return ``value`` as a list if it is a JSON array, else an empty list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return []
    return list(cast("Sequence[Any]", value))


def tables(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in the array ``value``."""
    return [table(v) for v in listed(value) if isinstance(v, Mapping)]


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def _read_object(path: Path, unreadable: dict[str, str]) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        unreadable[path.name] = str(error)
        return {}
    if not isinstance(value, Mapping):
        unreadable[path.name] = "it is JSON, but not an object"
    return table(value)


def _read_lines(path: Path, unreadable: dict[str, str], damaged: dict[str, int]) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        unreadable[path.name] = str(error)
        return []
    rows: list[dict[str, Any]] = []
    bad = 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, Mapping):
            rows.append(table(value))
        else:
            bad += 1
    if bad:
        damaged[path.name] = bad
    return rows


def read_source(target: str) -> Source:
    """Return what the run folder or plan file ``target`` holds.

    Raises:
        MeshwrightError: E850 it does not exist; E451-E453 it is a plan that was edited;
            E851 it is neither a run folder nor a plan; E852 its files
            hold nothing that a page could show.
    """
    path = Path(target)
    if not path.exists():
        raise MeshwrightError(problem("E850", where=target, found="there is no such file or folder"))
    return _read_run(path) if path.is_dir() else _read_plan(path)


def _read_plan(path: Path) -> Source:
    unreadable: dict[str, str] = {}
    plan = _read_object(path, unreadable)
    if unreadable:
        raise MeshwrightError(
            problem("E851", where=str(path), found=f"the file is not a plan: {unreadable[path.name]}")
        )
    if not table(plan.get("layout")):
        shown = ", ".join(list(plan)[:6]) or "nothing"
        raise MeshwrightError(
            problem(
                "E851",
                where=str(path),
                found=f"the file has no layout, so it is not a plan; it holds {shown}",
            )
        )
    plan_from_dict(plan, str(path))  # an edited plan would be drawn as what it is not
    return Source(
        path=path,
        is_run=False,
        run={},
        plan=plan,
        metrics=(),
        repeated_steps=0,
        events=(),
        prove={},
        probe={},
        missing=(),
        unreadable={},
        damaged={},
    )


def _read_run(path: Path) -> Source:
    missing = tuple(name for name in RUN_FILES if not (path / name).is_file())
    plan_file = path / "plan.json"
    if len(missing) == len(RUN_FILES) and not plan_file.is_file():
        shown = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        raise MeshwrightError(
            problem(
                "E851", where=str(path), found=f"the folder holds none of a run's files; it holds {shown}"
            )
        )
    unreadable: dict[str, str] = {}
    damaged: dict[str, int] = {}

    def read(name: str) -> dict[str, Any]:
        return {} if name in missing else _read_object(path / name, unreadable)

    def read_lines(name: str) -> list[dict[str, Any]]:
        return [] if name in missing else _read_lines(path / name, unreadable, damaged)

    run = read("run.json")
    plan = table(run.get("plan"))
    if not plan and plan_file.is_file():
        plan = _read_object(plan_file, unreadable)
    by_step: dict[float, dict[str, Any]] = {}
    unnumbered = repeated = 0
    for row in read_lines("metrics.jsonl"):
        step = number(row.get("step"))
        if step is None:
            unnumbered += 1
            continue
        repeated += step in by_step
        by_step[step] = row
    if unnumbered:
        damaged["metrics.jsonl"] = damaged.get("metrics.jsonl", 0) + unnumbered
    source = Source(
        path=path,
        is_run=True,
        run=run,
        plan=plan,
        metrics=tuple(by_step[s] for s in sorted(by_step)),
        repeated_steps=repeated,
        events=tuple(read_lines("events.jsonl")),
        prove=read("prove.json"),
        probe=read("probe.json"),
        missing=missing,
        unreadable=unreadable,
        damaged=damaged,
    )
    if not (source.run or source.plan or source.metrics or source.events or source.prove or source.probe):
        reasons = [f"{name}: {why}" for name, why in unreadable.items()]
        reasons += [f"{name}: {count} damaged lines" for name, count in damaged.items()]
        raise MeshwrightError(
            problem("E852", where=str(path), found="; ".join(reasons) or "all of its files are empty")
        )
    return source
