"""What binds a step, and the sentences that say what a prediction rests on."""

from __future__ import annotations

from typing import Final

from meshwright.base.records import Prediction
from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import CollectiveTimes
from meshwright.cost.predict import fits
from meshwright.cost.units import group_shapes
from meshwright.layout.layout import Layout

BINDING_SHARE: Final = 0.15
"""Share of the step from which a cause other than compute is what binds."""


def binding(
    prediction: Prediction, layout: Layout, cluster: ClusterSpec, *, faster_does_not_fit: bool = False
) -> str:
    """Return what binds: "bubble", a link's name, "memory" or "compute"."""
    shares = {name: value / prediction.step_time_s for name, value in prediction.time.as_dict().items()}
    shards, copies, hop = group_shapes(layout, cluster.gpus_per_node)
    times = CollectiveTimes(cluster)
    data = shards if shards.size > 1 else copies
    link = {
        "data": times.link_name(data),
        "pipeline": times.link_name(hop),
        "tensor": cluster.intra.name,
        "context": times.link_name(shards),
        "expert": times.link_name(shards),
        "bubble": "bubble",
    }
    worst = max(link, key=lambda name: shares[name])
    if not fits(prediction):
        return "memory"
    if shares[worst] > BINDING_SHARE:
        return link[worst]
    return "memory" if faster_does_not_fit else "compute"


def time_sentence(prediction: Prediction) -> str:
    """Return the step's time with its largest causes."""
    parts = sorted(prediction.time.as_dict().items(), key=lambda kv: -kv[1])
    shown = [f"{name} {100 * value / prediction.step_time_s:.0f} %" for name, value in parts if value > 0]
    rate = f"{prediction.model_tflops_per_gpu:.3g} model TFLOP/s per device (causal)"
    if prediction.mfu_pct is not None:
        rate += f", {prediction.mfu_pct:.1f} % of the dense peak"
    return f"A step takes {format_seconds(prediction.step_time_s)}: {', '.join(shown[:4])}; {rate}."


def memory_sentence(prediction: Prediction, cluster: ClusterSpec) -> str:
    """Return the peak against the device's memory, and the largest categories."""
    capacity = cluster.device.memory.value
    peak = prediction.peak_memory_bytes
    parts = sorted(prediction.memory.as_dict().items(), key=lambda kv: -kv[1])
    shown = [f"{name} {format_bytes(value)}" for name, value in parts if value > 0]
    room = capacity - peak
    state = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
    return (
        f"The peak is {format_bytes(peak)} of {format_bytes(capacity)} per device ({state}; "
        f"P(out of memory) {100 * prediction.oom_probability:.1f} %): {', '.join(shown[:3])}."
    )
