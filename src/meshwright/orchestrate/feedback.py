"""``probe --from-run``: a finished run's measurement becomes a row of its machine's ledger, and the fit is renewed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from meshwright.base.errors import MeshwrightError, Problem, problem, refuse
from meshwright.base.units import format_seconds
from meshwright.cluster.load import cluster_from_probe
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.ledger import LedgerRow, add_rows, ledger_path, read_ledger
from meshwright.cost.machine_fit import calibrated, predict_plan
from meshwright.cost.machine_profile import MachineProfile
from meshwright.orchestrate.machine import machine_fingerprint
from meshwright.orchestrate.preparing import device_type
from meshwright.parallel.products import product_library
from meshwright.program.plan_file import plan_from_dict


@dataclass(frozen=True, kw_only=True)
class FedBack:
    """What feeding a run back did.

    Attributes:
        row: the run as a row; ``added`` unless the ledger had it.
        probe_s, before_s, after_s: its step as predicted by the probe alone, by what was known before, and now.
        profile: the renewed fit.
    """

    row: LedgerRow
    added: bool
    ledger: Path
    probe_s: float
    before_s: float
    after_s: float
    profile: MachineProfile | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        measured = self.row.step_time_s

        def error(seconds: float) -> float:
            return 100.0 * (seconds / measured - 1.0)

        return {
            "machine": self.row.machine,
            "ledger": str(self.ledger),
            "added": self.added,
            "layout_text": self.row.plan.layout.text(),
            "measured_step_time_s": measured,
            "spread_s": self.row.spread_s,
            "predicted_step_time_s": {"probe": self.probe_s, "before": self.before_s, "after": self.after_s},
            "errors_pct": {
                "probe": error(self.probe_s),
                "before": error(self.before_s),
                "after": error(self.after_s),
            },
            "profile": None if self.profile is None else self.profile.as_dict(),
        }


def feed_back(folder: Path, cache: Path) -> FedBack:
    """Add the run in ``folder`` to the ledger of this machine and fit anew.

    Raises:
        MeshwrightError: E473 another machine, E475 nothing to feed back, E476 a disturbed run, E477 a ledger that
            cannot be read, E813 one that cannot be written.
    """
    probed, record = _read(folder)
    row = run_row(record, probed.machine, folder.resolve().name, str(folder))
    refuse(_disturbed(row, folder))
    path = ledger_path(cache, probed.machine)
    before, _ = calibrated(probed, cache)
    known = len(read_ledger(path))
    added = len(add_rows(path, [row])) > known
    after, profile = calibrated(probed, cache)
    return FedBack(
        row=row,
        added=added,
        ledger=path,
        probe_s=predict_plan(row.plan, probed).step_time_s,
        before_s=predict_plan(row.plan, before).step_time_s,
        after_s=predict_plan(row.plan, after).step_time_s,
        profile=profile,
    )


def _object(file: Path, folder: Path) -> dict[str, Any]:
    """Return the JSON object in a run folder's file. Raises MeshwrightError E475."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        found = f"{file.name} cannot be read: {reason}"
        raise MeshwrightError(problem("E475", where=str(folder), found=found)) from error
    if not isinstance(data, dict):
        raise MeshwrightError(problem("E475", where=str(folder), found=f"{file.name} holds no object"))
    return cast("dict[str, Any]", data)


def _read(folder: Path) -> tuple[ClusterSpec, dict[str, Any]]:
    """Return the probed cluster of a run and its record.

    Raises:
        MeshwrightError: E473, E475; E404 for a probe that lacks figures.
    """
    record = _object(folder / "run.json", folder)
    probed = cluster_from_probe(_object(folder / "probe.json", folder), f"{folder}/probe.json")
    here = machine_fingerprint()
    if probed.machine != here:
        held = probed.machine or "a machine that its probe does not name"
        found = f"the run was made on {held}, this is {here}"
        raise MeshwrightError(problem("E473", where=str(folder), found=found))
    ran, usual = record.get("matmul", "torch"), product_library("machine", device_type())
    if ran != usual:
        found = f"its matrices were multiplied by {ran}, the probe's and other runs' by {usual} (run.matmul)"
        raise MeshwrightError(problem("E475", where=str(folder), found=found))
    return probed, record


def run_row(record: Mapping[str, Any], machine: str, name: str, where: str) -> LedgerRow:
    """Return the row of a run's ``run.json``.

    Raises:
        MeshwrightError: E475 without a measurement or plan.
    """
    now = record.get("measurement")
    if not isinstance(now, Mapping):
        raise MeshwrightError(problem("E475", where=where, found="run.json has no measurement"))
    said = record.get("prediction")
    before = cast("Mapping[str, Any]", said) if isinstance(said, Mapping) else {}
    figures = cast("Mapping[str, Any]", now)
    try:
        plan = replace(plan_from_dict(record["plan"], f"{where}: plan"), prediction=None, why=(), binds="")
        return LedgerRow(
            machine=machine,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            source=name,
            plan=plan,
            step_time_s=float(figures["step_time_s"]),
            spread_s=float(figures["step_time_spread_s"]),
            steps=int(figures["steps"]),
            peak_memory_bytes=int(figures["peak_memory_bytes"]),
            predicted_s=float(before["step_time_s"]) if before else None,
            predicted_bytes=int(before["peak_memory_bytes"]) if before else None,
            processor_s=None,
            time_s=dict(figures["time_s"]),
            memory_bytes=dict(figures["memory_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        found = f"run.json lacks {error!r}"
        raise MeshwrightError(problem("E475", where=where, found=found)) from error


def _disturbed(row: LedgerRow, folder: Path) -> list[Problem]:
    if not row.disturbed:
        return []
    share = 100.0 * row.spread_s / row.step_time_s
    found = (
        f"the middle 80 % of {row.steps} steps lie within {format_seconds(row.spread_s)}, {share:.0f} % of their "
        f"median {format_seconds(row.step_time_s)}"
    )
    return [problem("E476", where=str(folder), found=found)]
