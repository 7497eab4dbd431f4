"""``plan.json``: a plan as canonical JSON, written whole or not at all, and verified when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, cast

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.files import write_whole
from meshwright.base.records import Prediction
from meshwright.layout.batch import Batch, check_actions, check_batch
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import adapter_from_dict, adapter_to_dict
from meshwright.model.spec import AdapterSpec
from meshwright.program.plan import Plan

FORMAT: Final = 1
"""Version of the file format."""

_TYPES: Final[tuple[tuple[str, type], ...]] = (
    ("format", int),
    ("hash", str),
    ("world_size", int),
    ("model_name", str),
    ("model_path", str),
    ("model_config", dict),
    ("layout", dict),
    ("batch", dict),
    ("schedule_text", str),
    ("cluster", str),
    ("why", list),
    ("binds", str),
    ("frozen", list),
    ("warnings", list),
)
_BATCH: Final = tuple(f.name for f in fields(Batch))
_LAYOUT: Final = tuple(f.name for f in fields(Layout))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the JSON form of ``plan``, with its hash, world size and the format version."""
    facts = {
        "format": FORMAT,
        "hash": plan.hash,
        "world_size": plan.world_size,
        "model_name": plan.model_name,
        "model_path": plan.model_path,
        "model_config": dict(plan.model_config),
        "layout": plan.layout.as_dict(),
        "batch": asdict(plan.batch),
        "schedule_text": plan.schedule_text,
        "cluster": plan.cluster,
        "prediction": plan.prediction.as_dict() if plan.prediction is not None else None,
        "why": list(plan.why),
        "binds": plan.binds,
        "frozen": list(plan.frozen),
        "warnings": list(plan.warnings),
    }
    if plan.adapter is not None:
        facts["adapter"] = adapter_to_dict(plan.adapter)
    return facts


def plan_from_dict(data: Mapping[str, Any], where: str = "plan") -> Plan:
    """Return the Plan whose ``plan_to_dict`` is ``data``.

    Raises:
        MeshwrightError: E451 keys or types of another thing, E452 another format, E453 content without its hash.
    """
    version = data.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version != FORMAT:
        raise MeshwrightError(
            problem("E452", where=where, found=f"format {version}, this is format {FORMAT}")
        )
    refuse(_check_keys(data, where))
    layout_text = ",".join(f"{key}={value}" for key, value in data["layout"].items())
    prediction = data["prediction"]
    try:
        plan = Plan(
            model_name=data["model_name"],
            model_path=data["model_path"],
            model_config=dict(data["model_config"]),
            layout=parse_layout(layout_text, f"{where}.layout"),
            batch=Batch(**data["batch"]),
            schedule_text=data["schedule_text"],
            cluster=data["cluster"],
            prediction=Prediction.from_dict(prediction) if prediction is not None else None,
            why=tuple(data["why"]),
            binds=data["binds"],
            frozen=tuple(data["frozen"]),
            warnings=tuple(data["warnings"]),
            adapter=_adapter(data, where),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise MeshwrightError(
            problem("E451", where=f"{where}.prediction", found=f"it cannot be read: {error}")
        ) from error
    refuse(_check_sense(plan, where))
    if plan.hash != data["hash"]:
        raise MeshwrightError(
            problem("E453", where=where, found=f"the file says {data['hash']}, its content has {plan.hash}")
        )
    return plan


def _adapter(data: Mapping[str, Any], where: str) -> AdapterSpec | None:
    """Return the plan's adapter, which only plans of adapters have. Raises MeshwrightError E451."""
    if data.get("adapter") is None:
        return None
    try:
        return adapter_from_dict(data["adapter"])
    except (KeyError, TypeError, ValueError) as error:
        raise MeshwrightError(
            problem("E451", where=f"{where}.adapter", found=f"it cannot be read: {error}")
        ) from error


def canonical_json(plan: Plan) -> str:
    """Return the text of the plan file: the same plan gives the same bytes."""
    return json.dumps(plan_to_dict(plan), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to ``path`` (a temporary file beside it, synced, then renamed).

    Raises:
        MeshwrightError: E867 when the file cannot be written.
    """
    target = Path(path)
    try:
        write_whole(target, canonical_json(plan))
    except OSError as error:
        found = error.strerror or str(error)
        raise MeshwrightError(problem("E867", where=str(path), found=found), ExitCode.ENVIRONMENT) from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in the file ``path``.

    Raises:
        MeshwrightError: E450 missing, unreadable or not JSON; E451, E452, E453 as ``plan_from_dict``.
    """
    where = str(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise MeshwrightError(problem("E450", where=where, found=found)) from error
    except UnicodeDecodeError as error:
        raise MeshwrightError(problem("E450", where=where, found="is not text")) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise MeshwrightError(problem("E450", where=where, found=f"is not JSON: {error}")) from error
    if not isinstance(data, dict):
        found = "holds JSON, but not an object"
        raise MeshwrightError(problem("E451", where=where, found=found))
    return plan_from_dict(cast("dict[str, Any]", data), where)


def _check_keys(data: Mapping[str, Any], where: str) -> list[Problem]:
    known = {name for name, _ in _TYPES} | {"prediction"}
    wrong = [f"no {key!r}" for key in sorted(known - data.keys())]
    wrong += [f"unknown {key!r}" for key in sorted(data.keys() - known - {"adapter"})]
    for name, kind in _TYPES:
        if name in data and not _is(data[name], kind):
            wrong.append(f"{name!r} is {type(data[name]).__name__}, not {kind.__name__}")
    if not wrong:
        wrong += _check_parts(data)
    if not wrong:
        return []
    return [problem("E451", where=where, found="; ".join(wrong))]


def _check_parts(data: Mapping[str, Any]) -> list[str]:
    wrong: list[str] = []
    for part, keys in (("layout", _LAYOUT), ("batch", _BATCH)):
        found = cast("dict[str, Any]", data[part])
        wrong += [f"no '{part}.{key}'" for key in keys if key not in found]
        wrong += [f"unknown '{part}.{key}'" for key in found if key not in keys]
    batch = cast("dict[str, Any]", data["batch"])
    wrong += [f"'batch.{k}' is not a positive number" for k, v in batch.items() if not _is(v, int) or v < 1]
    for name in ("why", "frozen", "warnings"):
        if not all(isinstance(item, str) for item in data[name]):
            wrong.append(f"{name!r} holds something that is not text")
    if data["prediction"] is not None and not isinstance(data["prediction"], dict):
        wrong.append("'prediction' is not an object")
    return wrong


def _check_sense(plan: Plan, where: str) -> list[Problem]:
    """Return E451 for a batch that is not the layout's, or a cut without a number for each stage."""
    batch, layout = plan.batch, plan.layout
    wrong: list[str] = []
    for name, held, wanted in (
        ("dp", batch.dp, layout.dp),
        ("micro_batch", batch.micro_batch, layout.micro_batch),
        ("global_batch", batch.global_batch, batch.dp * batch.micro_batch * batch.accumulation),
    ):
        if held != wanted:
            wrong.append(f"'batch.{name}' is {held}, but layout and accumulation make {wanted}")
    counted = check_batch(layout, batch.global_batch, batch.seq_len)
    wrong += [p.found for p in (*counted, *check_actions(layout, batch.accumulation))]
    stages = len(layout.cut_layers) if layout.cut not in ("auto", "even") else 0
    if stages != layout.num_stages:
        wrong.append(f"'layout.cut' is {layout.cut}, but there are {layout.num_stages} stages")
    return [problem("E451", where=where, found="; ".join(wrong))] if wrong else []


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
