"""The ladder of a proof: from one device to a layout, one axis more on each rung, so that the first to differ is named.

One device, then the tensor axis with all its shards in one process, then its ranks, sequence parallelism, pipeline,
context, data and expert parallelism (experts borrow their ranks from data, so the replicas they need come first),
and ZeRO at last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.layout.layout import Layout


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        adds: what it adds to the rung below, in words.
        layout: what is proven.
        simulated: all shards of the tensor axis run in one process, as threads, instead of one process each.
    """

    adds: str
    layout: Layout
    simulated: bool = False


def rungs(layout: Layout) -> list[Rung]:
    """Return the ladder to ``layout``, whose last rung is ``layout`` itself."""
    one = replace(
        layout,
        dp=1,
        zero=0,
        shard=1,
        tp=1,
        sp=False,
        kv_heads="split",
        pp=1,
        cut="auto",
        schedule="1f1b",
        chunks=1,
        cp=1,
        ep=1,
        loss="eager" if layout.loss == "parallel" else layout.loss,
    )
    steps = [Rung("one device", one)]

    def add(adds: str, simulated: bool = False, **changes: Any) -> None:
        new = replace(steps[-1].layout, **changes)
        if simulated or new != steps[-1].layout or steps[-1].simulated:
            steps.append(Rung(adds, new, simulated))

    if layout.tp > 1:
        sharded = {"tp": layout.tp, "kv_heads": layout.kv_heads, "loss": layout.loss}
        add(f"tp={layout.tp}, its shards in one process", simulated=True, **sharded)
        add(f"tp={layout.tp}")
        add("sequence parallel", sp=layout.sp)
    if layout.pp > 1:
        add(
            f"pp={layout.pp}",
            pp=layout.pp,
            cut=layout.cut,
            schedule=layout.schedule,
            chunks=layout.chunks,
        )
    add(f"cp={layout.cp}", cp=layout.cp)
    if layout.ep > 1:
        fewest = min(
            d for d in range(1, layout.dp + 1) if layout.dp % d == 0 and d * layout.cp % layout.ep == 0
        )
        add(f"dp={fewest}", dp=fewest)
        add(f"ep={layout.ep}", ep=layout.ep)
    add(f"dp={layout.dp}", dp=layout.dp)
    if layout.zero > 0:
        add(f"zero={layout.zero}", zero=layout.zero, shard=layout.dp * layout.cp)
        add(f"shard={layout.shard}", shard=layout.shard)
    if steps[-1].layout != layout:
        add("what is left", **{k: getattr(layout, k) for k in layout.__dataclass_fields__})
    return steps


def climb(
    layout: Layout, prove: Callable[[Rung], dict[str, Any]], show: Callable[[str], None]
) -> dict[str, Any]:
    """Prove each rung in turn and stop at the first that differs.

    Returns the verdict of the last rung reached, with ``ladder`` (a line for each) and ``first_failing_rung``, which
    names the rung and its worst tensor, or is None.
    """
    lines: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for rung in rungs(layout):
        show(f"rung {len(lines) + 1}, {rung.adds}: {rung.layout.text()}")
        found = prove(rung)
        lines.append(
            {
                "adds": rung.adds,
                "layout": rung.layout.text(),
                "simulated": rung.simulated,
                "passed": found["passed"],
                "max_rel_diff": found["gradients"]["max_rel_diff"],
                "worst": found["gradients"]["worst"],
            }
        )
        if not rung.simulated or not found["passed"]:
            result = found
        if not found["passed"]:
            break
    failed = next((line for line in lines if not line["passed"]), None)
    return result | {"ladder": lines, "first_failing_rung": failed}
