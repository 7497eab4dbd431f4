"""A plan from what the user names: a plan.json, or a model with a layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import MeshwrightError, problem

if TYPE_CHECKING:
    from meshwright.program.plan import Plan

DEFAULT_SEQ_LEN = 2048


def one_layout(command: str, options: Mapping[str, str | None], sets: Iterable[str]) -> None:
    """Refuse a layout that is said twice, as an option and with ``--set``: one of the two would be passed over.

    Raises:
        MeshwrightError: E864.
    """
    given = [name for name, value in options.items() if value is not None]
    if given and any(text.partition("=")[0].strip() == "layout" for text in sets):
        found = f"--set layout and {given[0]}"
        raise MeshwrightError(
            problem("E864", where=f"meshwright {command}", found=found, do="give one of the two")
        )


def plan_of(
    target: str,
    layout: str | None,
    seq_len: int | None,
    global_batch: int | None,
    freeze: tuple[str, ...] = (),
    adapter: str | None = None,
) -> Plan:
    """Return the plan in the file ``target``, or the one that ``layout`` makes of the model ``target``.

    Without numbers a sequence has 2048 tokens (or what the model can take) and a step 2 x dp x pp x micro_batch
    sequences.

    Raises:
        MeshwrightError: E864 when options and target do not go together; what is wrong with the plan or layout.
    """
    if layout is None:
        return _from_file(target, seq_len, global_batch, freeze, adapter)
    if _is_plan_file(Path(target)):
        found = "--layout with a plan file, which has its layout in it"
        do = "leave --layout out, or give the model instead of the plan"
        raise MeshwrightError(problem("E864", where=target, found=found, do=do))
    from meshwright.layout.parse import parse_layout
    from meshwright.model.adapters import adapted, parse_adapter
    from meshwright.model.read_hf import read_model
    from meshwright.program.make import make_plan

    spec = adapted(read_model(target), parse_adapter(adapter) if adapter is not None else None)
    parsed = parse_layout(layout)
    length = seq_len or min(DEFAULT_SEQ_LEN, spec.max_position_embeddings)
    batch = global_batch or 2 * parsed.dp * parsed.pp * parsed.micro_batch
    return make_plan(spec, parsed, batch, length, target, frozen=freeze)


def _is_plan_file(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(held, dict) and {"model_config", "schedule_text"} <= held.keys()


def _from_file(
    target: str,
    seq_len: int | None,
    global_batch: int | None,
    freeze: tuple[str, ...],
    adapter: str | None,
) -> Plan:
    options = {
        "--seq-len": seq_len,
        "--global-batch": global_batch,
        "--freeze": freeze,
        "--adapter": adapter,
    }
    given = [name for name, value in options.items() if value]
    path = Path(target)
    if path.is_dir() or path.name == "config.json" or not path.suffix:
        where, found = target, "a model without --layout"
        do = 'add --layout, for instance --layout "dp=2,zero=3", or give a plan.json'
        raise MeshwrightError(
            problem("E864", where=where, found=found, needs="a plan.json or --layout", do=do)
        )
    if given:
        found = f"{', '.join(given)} with a plan file, which says it already"
        raise MeshwrightError(problem("E864", where=target, found=found, do="leave the options out"))
    from meshwright.program.plan_file import load_plan

    return load_plan(target)
