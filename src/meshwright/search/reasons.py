"""Why this layout: what its neighbours cost, and which change would make a miss fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from meshwright.base.errors import MeshwrightError
from meshwright.base.records import Prediction
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.load import with_gpus
from meshwright.cost.fast import columns
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.predict import OOM_GATE, oom_probability, predict_with
from meshwright.cost.replay import part_of
from meshwright.layout.batch import Batch, derive_batch
from meshwright.layout.check import check
from meshwright.layout.check_offload import offload_built
from meshwright.layout.cut import resolve
from meshwright.layout.layout import Layout
from meshwright.schedule.generate import GENERATORS, generate

NOTEWORTHY: Final = 0.01
"""A faster layout that does not fit is worth a word from this gain on."""
MORE_NODES: Final = (2, 4, 8, 16)


@dataclass(frozen=True)
class Neighbours:
    """Sentences about the layouts beside one, and whether a faster one fails on memory."""

    sentences: tuple[str, ...]
    faster_does_not_fit: bool


@dataclass(frozen=True)
class Priced:
    """Seconds of a step, bytes at its peak, share of its time in which ranks wait."""

    step: float
    peak: float
    bubble: float


def neighbours(
    pricer: Pricer, layout: Layout, batch: Batch, prediction: Prediction, others: Sequence[Layout] = ()
) -> Neighbours:
    """Return what the nearest ZeRO stages, micro-batches, less recompute and other pipeline degrees would give.

    Args:
        pricer: of the layout's precision.
        layout: the layout.
        batch: its batch arithmetic.
        prediction: what it costs.
        others: the best layouts of other pipeline degrees, fastest first, of which the first is named.
    """
    step, capacity = prediction.step_time_s, pricer.cluster.device.memory.value
    sentences: list[str] = []
    blocked = False
    for name, changed in beside(layout):
        priced = _price(pricer, changed, batch)
        if priced is None:
            continue
        fits_too = oom_probability(priced.peak, capacity) <= OOM_GATE
        blocked |= not fits_too and priced.step < step * (1.0 - NOTEWORTHY)
        sentences.append(_compare(name, priced, step, capacity))
    for other in others:
        priced = _price(pricer, other, batch)
        if priced is None:
            continue
        bubble = f", bubble {100 * priced.bubble:.0f} %" if other.pp > 1 else ""
        text = f"the best with pp={other.pp} ({replace(other, cut='auto').text()})"
        sentences.append(_compare(text, priced, step, capacity, bubble))
        break
    return Neighbours(tuple(sentences), blocked)


def beside(layout: Layout) -> list[tuple[str, Layout]]:
    """Return the layouts one step away: ZeRO stage, micro-batch, recompute, each with its text."""
    plain = replace(layout, cut="auto")
    out: list[tuple[str, Layout]] = []
    for zero in (layout.zero - 1, layout.zero + 1):
        if 0 <= zero <= 3 and layout.dp * layout.cp > 1:
            shard = 1 if zero == 0 else (layout.shard if layout.zero else layout.dp * layout.cp)
            out.append((f"zero={zero}", replace(plain, zero=zero, shard=shard)))
    for micro_batch in (layout.micro_batch * 2, layout.micro_batch // 2):
        if micro_batch:
            out.append((f"micro_batch={micro_batch}", replace(plain, micro_batch=micro_batch)))
    order = ("none", "selective", "full")
    less = order[: order.index(layout.recompute)]
    out += [(f"recompute={kind}", replace(plain, recompute=kind)) for kind in less]
    return out


def _compare(what: str, priced: Priced, step: float, capacity: float, extra: str = "") -> str:
    seconds = priced.step
    change = 100.0 * (seconds / step - 1.0)
    word = "slower" if change >= 0 else "faster"
    peak = priced.peak
    chance = oom_probability(peak, capacity)
    room = (
        "fits"
        if chance <= OOM_GATE
        else f"does not fit: {format_bytes(peak)} of {format_bytes(capacity)} "
        f"(P(out of memory) {100 * chance:.0f} %)"
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
    here = _played(pricer, plain, batch)
    peak, step = here.peak, here.step
    short = format_bytes(peak - capacity) if peak > capacity else "the safety margin"
    best: tuple[float, str] | None = None
    for name, changed in _changes(plain, batch):
        if changed.offload != plain.offload and offload_built(changed):
            continue
        priced = _price(pricer, changed, batch)
        if priced is None or oom_probability(priced.peak, capacity) > OOM_GATE:
            continue
        slower = priced.step / step - 1.0
        word = "slower" if slower >= 0 else "faster"
        text = f"{name} would make it fit: peak {format_bytes(priced.peak)}, {abs(100 * slower):.0f} % {word}"
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
    if layout.offload == "none":
        out += [(f"offload={home}", replace(layout, offload=home)) for home in ("optimizer", "parameters")]
    return out


def _price(pricer: Pricer, layout: Layout, batch: Batch) -> Priced | None:
    try:
        changed = derive_batch(layout, batch.global_batch, batch.seq_len)
    except MeshwrightError:
        return None
    problems = check(pricer.spec, layout, changed, pricer.cluster, for_run=False)
    if any(p.severity == "error" for p in problems):
        return None
    return _played(pricer, layout, changed)


def _played(pricer: Pricer, layout: Layout, batch: Batch) -> Priced:
    """Return what a layout costs, its schedule played as for a prediction."""
    if layout.pp == 1 or layout.schedule not in GENERATORS:
        found = columns(pricer, [layout], [batch])
        return Priced(float(found.step[0]), float(found.peak[0]), float(found.bubble[0]))
    fixed = resolve(pricer.spec, layout, batch.seq_len)
    part = part_of(layout.schedule, layout.pp, layout.chunks, batch.accumulation)
    made = predict_with(pricer, fixed, batch, generate(layout.schedule, layout.pp, part, layout.chunks))
    return Priced(made.step_time_s, float(made.peak_memory_bytes), made.bubble_share_of_total or 0.0)


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
            peak = priced.peak
            if oom_probability(peak, cluster.device.memory.value) <= OOM_GATE:
                return (
                    f"{larger.num_gpus} GPUs ({larger.num_nodes} nodes) with {grown.text()} would make it fit: "
                    f"peak {format_bytes(peak)}, {format_seconds(priced.step)} per step."
                )
    return ""
