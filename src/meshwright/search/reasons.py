"""Why this layout: what its neighbours cost, and which change would make a miss fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.load import with_gpus
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.fast import Columns, columns
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.predict import OOM_GATE, oom_probability
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import caps_logits, check
from meshwright.layout.layout import Layout

NOTEWORTHY: Final = 0.01
"""A faster layout that does not fit is worth a word from this gain on."""
MORE_NODES: Final = (2, 4, 8, 16)


@dataclass(frozen=True)
class Neighbours:
    """Sentences about the layouts beside one, and whether a faster one fails on memory."""

    sentences: tuple[str, ...]
    faster_does_not_fit: bool


def neighbours(
    priced: Columns,
    fitting: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    index: int,
    cluster: ClusterSpec,
) -> Neighbours:
    """Return what the nearest ZeRO stages, another pipeline degree and another micro-batch would give."""
    layout = priced.layouts[index]
    step = float(priced.step[index])
    capacity = cluster.device.memory.value
    known = {x: i for i, x in enumerate(priced.layouts)}
    sentences: list[str] = []
    for zero in (layout.zero - 1, layout.zero + 1):
        if not 0 <= zero <= 3:
            continue
        shard = 1 if zero == 0 else (layout.shard if layout.zero else layout.dp * layout.cp)
        other = known.get(replace(layout, zero=zero, shard=shard))
        if other is not None:
            sentences.append(_compare(f"zero={zero}", priced, fitting, other, step, capacity))
    for micro_batch in (layout.micro_batch * 2, layout.micro_batch // 2):
        other = known.get(replace(layout, micro_batch=micro_batch))
        if other is not None:
            text = f"micro_batch={micro_batch}"
            sentences.append(_compare(text, priced, fitting, other, step, capacity))
    others: dict[int, int] = {}
    for i, x in enumerate(priced.layouts):
        if x.pp == layout.pp or not fitting[i]:
            continue
        if x.pp not in others or priced.step[i] < priced.step[others[x.pp]]:
            others[x.pp] = i
    if others:
        pp = min(others, key=lambda p: float(priced.step[others[p]]))
        i = others[pp]
        bubble = f", bubble {100 * float(priced.bubble[i]):.0f} %" if pp > 1 else ""
        text = f"the best with pp={pp} ({priced.layouts[i].text()})"
        sentences.append(_compare(text, priced, fitting, i, step, capacity, bubble))
    blocked = ~fitting & (priced.step < step * (1.0 - NOTEWORTHY))
    return Neighbours(tuple(sentences), bool(blocked.any()))


def _compare(
    what: str,
    priced: Columns,
    fitting: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    other: int,
    step: float,
    capacity: float,
    extra: str = "",
) -> str:
    seconds = float(priced.step[other])
    change = 100.0 * (seconds / step - 1.0)
    word = "slower" if change >= 0 else "faster"
    peak = float(priced.peak[other])
    room = (
        "fits"
        if fitting[other]
        else f"does not fit: {format_bytes(peak)} of {format_bytes(capacity)} "
        f"(P(out of memory) {100 * oom_probability(peak, capacity):.0f} %)"
    )
    head = what[0].upper() + what[1:] if what.startswith("the ") else f"With {what} a step"
    return (
        f"{head} takes {format_seconds(seconds)}, {abs(change):.1f} % {word}, peak {format_bytes(peak)}{extra}; "
        f"it {room}."
    )


def change_that_fits(pricer: Pricer, layout: Layout, batch: Batch) -> str:
    """Return the cheapest change after which a layout fits: one policy, then more devices, then more memory."""
    capacity = pricer.cluster.device.memory.value
    plain = replace(layout, cut="auto")
    here = columns(pricer, [plain], [batch])
    peak, step = float(here.peak[0]), float(here.step[0])
    short = format_bytes(peak - capacity) if peak > capacity else "the safety margin"
    best: tuple[float, str] | None = None
    for name, changed in _changes(plain, batch):
        if name == "loss=chunked" and caps_logits(pricer.spec):
            continue
        priced = _price(pricer, changed, batch)
        if priced is None or oom_probability(float(priced.peak[0]), capacity) > OOM_GATE:
            continue
        slower = float(priced.step[0]) / step - 1.0
        word = "slower" if slower >= 0 else "faster"
        text = f"{name} would make it fit: peak {format_bytes(float(priced.peak[0]))}, {abs(100 * slower):.0f} % {word}"
        if best is None or slower < best[0]:
            best = (slower, text)
    if best is not None:
        return f"It is short of {short}. {best[1]}."
    more = _more_devices(pricer, plain, batch)
    if more:
        return f"It is short of {short}. {more}"
    return (
        f"It is short of {short}. No single change makes it fit: a device needs {format_bytes(peak * 1.08)} "
        "for this layout."
    )


def _changes(layout: Layout, batch: Batch) -> list[tuple[str, Layout]]:
    out: list[tuple[str, Layout]] = []
    if layout.dp * layout.cp > 1:
        for zero in range(layout.zero + 1, 4):
            out.append((f"zero={zero}", replace(layout, zero=zero, shard=layout.dp * layout.cp)))
        if layout.zero and layout.shard < layout.dp * layout.cp:
            whole = layout.dp * layout.cp
            out.append((f"shard={whole}", replace(layout, shard=whole)))
    smaller = layout.micro_batch // 2
    while smaller >= 1:
        if layout.micro_batch % smaller == 0:
            out.append((f"micro_batch={smaller}", replace(layout, micro_batch=smaller)))
        smaller //= 2
    if layout.schedule == "gpipe" and layout.pp > 1:
        out.append(("schedule=1f1b", replace(layout, schedule="1f1b")))
    if layout.recompute != "full":
        out.append(("recompute=full", replace(layout, recompute="full")))
    if layout.loss == "eager":
        out.append(("loss=chunked", replace(layout, loss="chunked")))
    return out


def _price(pricer: Pricer, layout: Layout, batch: Batch) -> Columns | None:
    try:
        changed = derive_batch(layout, batch.global_batch, batch.seq_len)
    except MeshwrightError:
        return None
    problems = check(pricer.spec, layout, changed, pricer.cluster, for_run=False)
    if any(p.severity == "error" for p in problems):
        return None
    return columns(pricer, [layout], [changed])


def _more_devices(pricer: Pricer, layout: Layout, batch: Batch) -> str:
    """Return the sentence for the fewest times as many devices on which the layout fits, fully sharded."""
    cluster = pricer.cluster
    for factor in MORE_NODES:
        try:
            larger = with_gpus(cluster, cluster.num_gpus * factor)
        except MeshwrightError:
            return ""
        wider = make_pricer(pricer.spec, larger, pricer.seq_len, pricer.precision, pricer.frozen)
        dp = layout.dp * factor
        for micro_batch in (layout.micro_batch, 1):
            grown = replace(layout, dp=dp, zero=3, shard=dp * layout.cp, micro_batch=micro_batch)
            priced = _price(wider, grown, batch)
            if priced is None:
                continue
            peak = float(priced.peak[0])
            if oom_probability(peak, cluster.device.memory.value) <= OOM_GATE:
                return (
                    f"{larger.num_gpus} GPUs ({larger.num_nodes} nodes) with {grown.text()} would make it fit: "
                    f"peak {format_bytes(peak)}, {format_seconds(float(priced.step[0]))} per step."
                )
    return ""
