"""What one device does per second, from a probe's shapes or from a datasheet; each rate with its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.kernels import attention_share, generation, wave_factor
from meshwright.cost.shipped import factors
from meshwright.cost.shipped import source as shipped_source

MOST_WAVES: Final = 4.0
"""A product has at most this loss to whole waves: small ones run on smaller tiles."""
HOST_LINK: Final = 25.6e9
"""Bytes a second between a GPU and pinned host memory where no link is known (assumed: 0.8 of 16 lanes of PCIe 4)."""
FILE_READ: Final = 3.0e9
FILE_WRITE: Final = 1.5e9
"""Bytes a second of sequential access to one rank's share of an NVMe disk, where no disk is known (assumed)."""
ELEMENT_BYTES: Final = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}

RUNTIME_ATTENTION: Final = "fa2"
"""The fused attention kernel that torch runs on a GPU."""


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
        sustained: seconds of matmuls in long runs over those of short benchmarks, for the generations where it is known.
        memory_rate, element_bytes: of operands that move through memory.
        host_rate: bytes/s to or from pinned host memory; ``disk_read`` and ``disk_write`` of a rank's share of a disk.
        forward_scale, backward_scale: seconds of a block in its place over those of its pieces; ``head_scale`` forward
            and backward of head and loss.
        pass_s: of a micro-batch's pass through a stage beside its parts, forward and backward.
        accumulate_s: of adding one tensor's gradient to what is there, beside its bytes; ``checkpoint_s`` of a block's
            recompute beside its second forward; ``region_s`` of what stands around a collective of the tensor axis, in
            forward and backward together. 0 where nothing has measured them.
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
    generation: str
    sustained: float
    memory_rate: float
    element_bytes: float
    host_rate: float
    disk_read: float
    disk_write: float
    sources: tuple[str, ...]
    forward_scale: float = 1.0
    backward_scale: float = 1.0
    head_scale: tuple[float, float] = (1.0, 1.0)
    pass_s: tuple[float, float] = (0.0, 0.0)
    accumulate_s: float = 0.0
    checkpoint_s: float = 0.0
    region_s: float = 0.0

    def matmul_s(self, m: float, k: float, n: float) -> float:
        """Return the seconds of an [m, k] x [k, n] matmul."""
        if not m or not k or not n:
            return 0.0
        return 2.0 * m * k * n / self.matmul_rate(m, k, n)

    def matmul_rate(self, m: float, k: float, n: float) -> float:
        """Return the FLOP/s that an [m, k] x [k, n] matmul reaches."""
        if self.matmul_points:
            return _interpolate(self.matmul_points, (m, k, n))
        flops = 2.0 * m * k * n
        known = factors()
        waves = min(MOST_WAVES, wave_factor(m, n, 1.0, self.generation) - 1.0)
        # FLOPs at the rate of long runs, whole waves of tiles, and the operands through memory
        seconds = flops / self.matmul_peak * (known["matmul"] * self.sustained + known["waves"] * waves)
        seconds += self.element_bytes * (m * k + k * n + m * n) / self.memory_rate * known["moved"]
        return flops / seconds

    def attention_s(
        self, batch: float, heads: float, seq: float, head_dim: float, ranks: float = 1.0
    ) -> tuple[float, float]:
        """Return (forward, backward) seconds of causal attention of ``seq`` queries and keys.

        ``ranks`` share the queries or the heads among them: the seconds are of all of it at the rate of such a part.
        """
        flops = attention_flops(batch, heads, seq, head_dim)
        if self.attention_forward:
            sizes = (batch * heads, seq, head_dim)
            forward = flops * _interpolate(self.attention_forward, sizes)
            return forward, flops * _interpolate(self.attention_backward, sizes)
        ahead, behind = attention_share(
            RUNTIME_ATTENTION, self.generation, head_dim, seq, batch * heads / ranks
        )
        seconds = flops / self.matmul_peak * self.sustained
        # backward runs 5 matmuls where forward runs 2
        known = factors()
        return seconds / ahead * known["attention_f"], 2.5 * seconds / behind * known["attention_b"]


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
        wide = next((p for p in ("bf16", "fp16") if p in known), "")
        near = wide if precision in ("bf16", "fp8") and wide else (known[0] if known else "")
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
        sources.append(f"matmul and attention shares, elementwise rate: {shipped_source()}")
    share = 1.0 if measured else 1.0 / factors()["elementwise"]
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
        generation=generation(device.name),
        sustained=factors()["blackwell"] if generation(device.name) == "blackwell" else 1.0,
        memory_rate=device.memory_rate.value,
        element_bytes=ELEMENT_BYTES.get(precision, 4.0),
        host_rate=device.host_rate.value if device.host_rate else HOST_LINK,
        disk_read=device.disk_read.value if device.disk_read else FILE_READ,
        disk_write=device.disk_write.value if device.disk_write else FILE_WRITE,
        sources=tuple(sources),
        forward_scale=measured.get("forward_in_place", 1.0),
        backward_scale=measured.get("backward_in_place", 1.0),
        head_scale=(measured.get("head_forward_in_place", 1.0), measured.get("head_backward_in_place", 1.0)),
        pass_s=(measured.get("pass_forward_s", 0.0), measured.get("pass_backward_s", 0.0)),
        accumulate_s=measured.get("accumulate_s", 0.0),
        checkpoint_s=measured.get("checkpoint_s", 0.0),
        region_s=measured.get("region_s", 0.0),
    )


def _logs(rest: str) -> tuple[float, ...]:
    return tuple(math.log(float(x)) for x in rest.split("/")[1].split("x"))
