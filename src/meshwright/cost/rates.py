"""What one device does per second, from a probe's shapes or from a datasheet; each rate with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cluster.spec import ClusterSpec

HALF_SHAPE: Final = 96.0
"""Size of a matmul's dim at which half of the ceiling is lost on a GPU (assumed until calibrated)."""

ATTENTION_FORWARD_SHARE: Final = 0.60
ATTENTION_BACKWARD_SHARE: Final = 0.45
"""Share of the matmul ceiling that fused attention reaches (assumed until calibrated)."""

MEMORY_SHARE: Final = 0.80
"""Share of the datasheet's memory rate that elementwise kernels reach (assumed until calibrated)."""


@dataclass(frozen=True)
class MeasuredShape:
    """One measured point: log sizes, and its value (FLOP/s, or seconds per FLOP)."""

    logs: tuple[float, ...]
    value: float


def _interpolate(points: Sequence[MeasuredShape], sizes: tuple[float, ...]) -> float:
    """Return the value at ``sizes``: weights fall with the fourth power of the distance in log space."""
    logs = tuple(math.log(max(1.0, s)) for s in sizes)
    total = weighted = 0.0
    for point in points:
        distance = sum((a - b) ** 2 for a, b in zip(point.logs, logs, strict=True))
        weight = 1.0 / (distance + 1e-4) ** 2
        total += weight
        weighted += weight * math.log(point.value)
    return math.exp(weighted / total)


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Prices work on one device in one precision.

    Attributes:
        matmul_peak: ceiling of a matmul, FLOP/s.
        matmul_points: measured (m, k, n) to FLOP/s; empty on a datasheet device.
        attention_forward: measured (batch * heads, seq, head_dim) to seconds per causal FLOP.
        copy_rate: bytes/s of elementwise kernels (bytes read + written).
        op_s: least seconds of one forward operation; ``backward_op_s`` of one in backward.
        overlaps: whether communication runs beside compute (not on a CPU, where both need the cores).
    """

    precision: str
    matmul_peak: float
    matmul_points: tuple[MeasuredShape, ...]
    attention_forward: tuple[MeasuredShape, ...]
    attention_backward: tuple[MeasuredShape, ...]
    copy_rate: float
    op_s: float
    backward_op_s: float
    optimizer_rate: float
    optimizer_tensor_s: float
    overlaps: bool
    sources: tuple[str, ...]

    def matmul_s(self, m: float, k: float, n: float) -> float:
        """Return the seconds of an [m, k] x [k, n] matmul."""
        if not m or not k or not n:
            return 0.0
        return 2.0 * m * k * n / self.matmul_rate(m, k, n)

    def matmul_rate(self, m: float, k: float, n: float) -> float:
        """Return the FLOP/s that an [m, k] x [k, n] matmul reaches."""
        if self.matmul_points:
            return _interpolate(self.matmul_points, (m, k, n))
        share = 1.0
        for size in (m, k, n):
            share *= size / (size + HALF_SHAPE)
        return self.matmul_peak * share

    def attention_s(self, batch: float, heads: float, seq: float, head_dim: float) -> tuple[float, float]:
        """Return (forward, backward) seconds of causal attention of ``seq`` queries and keys."""
        flops = attention_flops(batch, heads, seq, head_dim)
        if self.attention_forward:
            sizes = (batch * heads, seq, head_dim)
            forward = flops * _interpolate(self.attention_forward, sizes)
            return forward, flops * _interpolate(self.attention_backward, sizes)
        # backward runs 5 matmuls where forward runs 2
        return (
            flops / (self.matmul_peak * ATTENTION_FORWARD_SHARE),
            2.5 * flops / (self.matmul_peak * ATTENTION_BACKWARD_SHARE),
        )


def attention_flops(batch: float, heads: float, seq: float, head_dim: float) -> float:
    """Return the forward FLOPs of causal attention: scores and values over half of the square."""
    return 2.0 * batch * heads * seq * seq * head_dim


def device_rates(cluster: ClusterSpec, precision: str) -> DeviceRates:
    """Return the rates of the cluster's device in ``precision``.

    Raises:
        MeshwrightError: E405 when a figure that time needs is not known.
    """
    device = cluster.device
    missing: list[str] = []
    if precision not in device.matmul_flops:
        known = ", ".join(sorted(device.matmul_flops)) or "none"
        missing.append(f"the {precision} matmul rate (known: {known})")
    if device.memory_rate.value <= 0:
        missing.append("the memory rate")
    if missing:
        known = sorted(device.matmul_flops)
        near = "fp16" if precision == "bf16" and "fp16" in known else (known[0] if known else "")
        raise MeshwrightError(
            problem(
                "E405",
                where=f"device {device.name}",
                found=f"no source prints {' and '.join(missing)}",
                do=f"use precision={near}, or write a cluster file with the figure" if near else "",
            )
        )
    measured = cluster.measured
    matmul: list[MeasuredShape] = []
    forward: list[MeasuredShape] = []
    backward: list[MeasuredShape] = []
    for key, value in measured.items():
        kind, _, rest = key.partition("/")
        if kind == "matmul_flops_per_s" and rest.startswith(precision + "/"):
            matmul.append(MeasuredShape(_logs(rest), value))
        elif kind.startswith("attention_") and rest.startswith(precision + "/"):
            batch, heads, seq, head_dim = (float(x) for x in rest.split("/")[1].split("x"))
            logs = tuple(math.log(x) for x in (batch * heads, seq, head_dim))
            per_flop = value / attention_flops(batch, heads, seq, head_dim)
            (forward if kind == "attention_forward_s" else backward).append(MeasuredShape(logs, per_flop))
    rate = device.matmul_flops[precision]
    figures = {f"{precision} matmul": rate, "memory rate": device.memory_rate, "launch": device.launch_s}
    sources = [f"{name}: {f.source} ({f.kind})" for name, f in figures.items()]
    if not matmul:
        sources.append(
            f"matmul shapes lose n/(n+{HALF_SHAPE:.0f}) in each dim; attention at {ATTENTION_FORWARD_SHARE:.2f} and "
            f"{ATTENTION_BACKWARD_SHARE:.2f} of matmul; elementwise at {MEMORY_SHARE:.2f} of memory (assumed)"
        )
    share = 1.0 if measured else MEMORY_SHARE
    copy_rate = measured.get("elementwise_bytes_per_s", device.memory_rate.value * share)
    op_s = measured.get("op_s", device.launch_s.value)
    return DeviceRates(
        precision=precision,
        matmul_peak=rate.value,
        matmul_points=tuple(matmul),
        attention_forward=tuple(forward),
        attention_backward=tuple(backward) or tuple(forward),
        copy_rate=copy_rate,
        op_s=op_s,
        backward_op_s=measured.get("backward_op_s", op_s),
        optimizer_rate=measured.get("optimizer_bytes_per_s", copy_rate),
        optimizer_tensor_s=measured.get("optimizer_tensor_s", 0.0),
        overlaps=not device.is_cpu,
        sources=tuple(sources),
    )


def _logs(rest: str) -> tuple[float, ...]:
    return tuple(math.log(float(x)) for x in rest.split("/")[1].split("x"))
