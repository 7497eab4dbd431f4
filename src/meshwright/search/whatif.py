"""Sensitivity: what the best plan would be on a cluster that is better in one respect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from meshwright.base.units import format_seconds
from meshwright.cluster.spec import ClusterSpec, Figure
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.search.search import search

MORE_MEMORY: Final = 4 * 2**30
"""Bytes of memory that are added per device."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The best plan when one thing is better: its change, step time, gain over today's plan, and layout."""

    change: str
    step_time_s: float | None
    gain_pct: float | None
    layout_text: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "change": self.change,
            "step_time_s": self.step_time_s,
            "gain_pct": self.gain_pct,
            "layout_text": self.layout_text,
            "why": self.sentence,
        }


def better_clusters(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    """Return the cluster with twice a link's bandwidth, more memory or twice the compute, each named.

    A probed cluster keeps its measured collectives, which a link's figure does not change: only memory is varied.
    """
    more = _scaled(cluster.device.memory, 1.0, MORE_MEMORY)
    out = [("4 more GiB per device", replace(cluster, device=replace(cluster.device, memory=more)))]
    if cluster.measured:
        return out
    if cluster.inter is not None and cluster.num_nodes > 1:
        faster = replace(cluster.inter, rate=_scaled(cluster.inter.rate, 2.0))
        out.append(("twice the bandwidth between nodes", replace(cluster, inter=faster)))
    faster = replace(cluster.intra, rate=_scaled(cluster.intra.rate, 2.0))
    out.append(("twice the bandwidth inside a node", replace(cluster, intra=faster)))
    rates = {name: _scaled(f, 2.0) for name, f in cluster.device.matmul_flops.items()}
    peaks = {name: _scaled(f, 2.0) for name, f in cluster.device.peak_flops.items()}
    device = replace(cluster.device, matmul_flops=rates, peak_flops=peaks)
    out.append(("twice the matrix rate", replace(cluster, device=device)))
    return out


def _scaled(figure: Figure, factor: float, more: float = 0.0) -> Figure:
    return replace(figure, value=figure.value * factor + more, kind="assumed")


def sensitivity(
    spec: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int,
    best: Plan | None,
    fix: str = "",
    objective: str = "time",
    precision: str | None = None,
    include_unbuilt: bool = False,
) -> list[WhatIf]:
    """Return what each better cluster would give; the last arguments are those of ``search``."""
    out: list[WhatIf] = []
    for change, better in better_clusters(cluster):
        found = search(
            spec, better, seq_len, global_batch, fix, objective, precision, 1, include_unbuilt=include_unbuilt
        )
        plan = found.plans[0] if found.plans else None
        out.append(_answer(change, plan, best))
    return out


def _answer(change: str, plan: Plan | None, best: Plan | None) -> WhatIf:
    if plan is None or plan.prediction is None:
        said = f"With {change} still nothing fits."
        return WhatIf(change=change, step_time_s=None, gain_pct=None, layout_text="", sentence=said)
    text, seconds = replace(plan.layout, cut="auto").text(), plan.prediction.step_time_s
    if best is None or best.prediction is None:
        said = f"With {change} {text} would fit, {format_seconds(seconds)} per step."
        return WhatIf(change=change, step_time_s=seconds, gain_pct=None, layout_text=text, sentence=said)
    gain = 100.0 * (best.prediction.step_time_s / seconds - 1.0)
    same = replace(best.layout, cut="auto") == replace(plan.layout, cut="auto")
    with_ = "the same layout" if same else text
    said = (
        f"With {change} a step would take {format_seconds(seconds)}, {gain:.1f} % faster, with {with_}."
        if gain >= 0.1
        else f"With {change} nothing would change."
    )
    return WhatIf(change=change, step_time_s=seconds, gain_pct=gain, layout_text=text, sentence=said)
