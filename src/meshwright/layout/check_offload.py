"""What cannot run so far of parameters that rest away from the device, and of fp8."""

from __future__ import annotations

from meshwright.base.errors import Problem, problem
from meshwright.layout.layout import Layout
from meshwright.layout.precision import FP8
from meshwright.schedule.generate import SPLIT


def offload_built(layout: Layout) -> list[Problem]:
    """Return E290 where backwards come in two halves and whole parameters rest away from the device."""
    sharded = layout.zero >= 1 and layout.shard > 1
    split = layout.schedule in SPLIT or layout.schedule.startswith("@")
    if not layout.offload.startswith("parameters") or sharded or not split or layout.pp == 1:
        return []
    whole = "interleaved" if layout.chunks > 1 else "1f1b"
    less = layout.offload.replace("parameters", "optimizer")
    ways = [f"schedule={whole}", f"offload={less}"]
    if layout.dp * layout.cp > 1:
        ways.insert(0, f"zero = 1,shard = {layout.dp * layout.cp}")
    found = f"offload={layout.offload} with schedule={layout.schedule} and nothing sharded"
    return [problem("E290", where="layout.schedule", found=found, do=" | ".join(ways))]


def precision_built(layout: Layout) -> list[Problem]:
    """Return E291 for a precision that is priced and not run."""
    if layout.precision not in FP8:
        return []
    return [problem("E291", where="layout.precision", found=f"precision={layout.precision} cannot run yet")]
