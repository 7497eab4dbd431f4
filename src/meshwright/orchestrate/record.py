"""What a run says of itself in its folder, and says anew when the plan changes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.layout.precision import precision_table
from meshwright.orchestrate.elastic import Restart
from meshwright.orchestrate.preparing import Show
from meshwright.orchestrate.proving import write_json
from meshwright.parallel.recompute import REENTRANT
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict, save_plan
from meshwright.program.tensor_classes import states_of, tensor_classes
from meshwright.train.metrics import write_event
from meshwright.train.task import TrainTask


def recompute_record(plan: Plan) -> dict[str, Any] | None:
    """Return how blocks are recomputed, for ``run.json``; None where none is."""
    mode = plan.layout.recompute
    return None if mode == "none" else {"mode": mode, "use_reentrant": REENTRANT}


def number_formats(plan: Plan, task: TrainTask) -> dict[str, Any]:
    """Return which number format is used where, by use and by class of tensors."""
    states = states_of(task.run.optimizer)
    return {
        "precision_table": precision_table(plan.layout).rows(),
        "tensor_classes": [
            asdict(found) for found in tensor_classes(task.spec, plan.layout, plan.frozen, states)
        ],
    }


class Book:
    """The files that say what a run is: ``run.json`` and ``plan.json``, written again when the plan changes."""

    def __init__(self, folder: Path, record: dict[str, Any], show: Show) -> None:
        self._folder = folder
        self._record = record
        self._show = show

    def begin(self, plan: Plan, probe: dict[str, Any] | None) -> None:
        """Write what is known before the first step."""
        write_json(self._folder / "run.json", self._record)
        save_plan(plan, str(self._folder / "plan.json"))
        if probe is not None:
            write_json(self._folder / "probe.json", probe)

    def told(self, restart: Restart, task: TrainTask) -> None:
        """Say that the run begins again, and in which plan."""
        self._show(restart.text())
        self._record["restarts"] = [*self._record["restarts"], restart.as_dict()]
        write_event(self._folder, "restart", **restart.as_dict(), code="W578")
        if restart.changed:
            self.plan_changed(restart.changed, task)
        else:
            self.begin(task.plan, None)

    def plan_changed(self, why: str, task: TrainTask) -> None:
        """Say that the run has another plan than before, and write down which."""
        plan = task.plan
        self._show(f"W577  {why}")
        self._record |= {
            "plan": plan_to_dict(plan),
            "plan_hash": plan.hash,
            **number_formats(plan, task),
            "recompute": recompute_record(plan),
            "prediction": plan.prediction.as_dict() if plan.prediction else None,
        }
        self.begin(plan, None)
        write_event(self._folder, "plan changed", why=why, plan_hash=plan.hash, code="W577")
