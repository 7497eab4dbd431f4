"""The catalogue: devices and named clusters, each number with its source; nothing is made up.

Figures that no source prints are missing, or stand in with ``kind="assumed"`` and the reason.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from meshwright.cluster.spec import ClusterSpec, DeviceSpec, Figure, LinkSpec

LAUNCH_S: Final = 7e-6
"""Least seconds of one GPU operation; the constant of the AutoParallel cost model."""

INTRA_HOP_S: Final = 0.93e-6
"""Seconds per ring hop inside an NVSwitch node: 13 us for an 8-byte all-reduce of 8 ranks, 14 hops."""

INTER_HOP_S: Final = 10e-6
"""Seconds per hop between nodes (assumed; InfiniBand and RoCE; EFA has its own figure)."""

EFA_HOP_S: Final = 28e-6
"""Seconds per hop between EFA nodes: (69 - 13) us for an 8-byte all-reduce of two p5 nodes, 2 hops."""

MATMUL_SHARE: Final = 0.80
"""Reachable share of the peak where no matmul was measured: that of H100 (794.5 of 989 TFLOP/s)."""

PCIE_GB_PER_S: Final[Mapping[str, float]] = {"4": 32.0, "5": 64.0}
"""GB/s per direction of a x16 slot by PCIe generation."""

HOST_SHARE: Final = 0.8
"""Share of a slot's rate that copies from and to pinned host memory reach (assumed)."""

_COLLECTIVES = "collectives measured with nccl-tests (NVIDIA/dgxc-benchmarking, aws-samples)"


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """One named cluster: what one node is, and where its numbers come from.

    Attributes:
        gpu: name of the device row, or None where no source says.
        instance: the instance row whose links it has, or None for a bare device.
        fabric_of: for a bare device, the row whose network between nodes is assumed.
    """

    name: str
    gpu: str | None
    gpus_per_node: int
    instance: str | None
    fabric_of: str | None
    note: str


def _text(file: str) -> str:
    return (files("meshwright.cluster") / "data" / file).read_text(encoding="utf-8")


@cache
def device_rows() -> Mapping[str, Mapping[str, str]]:
    """Return the rows of the device table by name, with the cells as printed."""
    return {row["gpu"]: row for row in csv.DictReader(_text("devices.csv").splitlines())}


@cache
def instance_rows() -> Mapping[str, Mapping[str, str]]:
    """Return the rows of the instance table by name, with the cells as printed."""
    return {row["instance"]: row for row in csv.DictReader(_text("instances.csv").splitlines())}


@cache
def _supplement() -> Mapping[tuple[str, str], tuple[float, str, str]]:
    rows = csv.DictReader(_text("supplement.csv").splitlines())
    return {(r["gpu"], r["field"]): (float(r["value"]), r["source"], r["kind"]) for r in rows}


@cache
def _capacities() -> Mapping[str, Figure]:
    rows = csv.DictReader(_text("capacity.csv").splitlines())
    return {
        r["gpu"]: Figure(value=float(r["gib"]) * 2**30, unit="bytes", source=r["source"], kind=r["kind"])
        for r in rows
    }


def capacity(gpu: str) -> Figure | None:
    """Return the bytes that processes on a device can be given, as torch prints its total; None where not found.

    Makers print sizes in units of their own: an "80 GB" A100 has 80 GiB, of which the driver keeps about 1 %.
    """
    return _capacities().get(gpu)


@cache
def entries() -> tuple[ClusterEntry, ...]:
    """Return every named cluster."""
    raw: list[dict[str, Any]] = json.loads(_text("clusters.json"))
    return tuple(ClusterEntry(**row) for row in raw)


def device_names() -> tuple[str, ...]:
    """Return the names of every device that has a figure."""
    extra = [gpu for gpu, _ in _supplement()]
    return tuple(dict.fromkeys([*device_rows(), *extra]))


def _figure(gpu: str, column: str, scale: float, unit: str) -> Figure | None:
    row = device_rows().get(gpu, {})
    if row.get(column):
        kind = "measured" if column.startswith("measured") else "datasheet"
        return Figure(value=float(row[column]) * scale, unit=unit, source=row["source"], kind=kind)
    if (gpu, column) in _supplement():
        value, source, kind = _supplement()[gpu, column]
        return Figure(value=value * scale, unit=unit, source=source, kind=kind)
    return None


def device(gpu: str) -> DeviceSpec:
    """Return the device of the table; a precision whose peak no source prints is missing from its peaks.

    Raises:
        KeyError: when the table has no such device.
    """
    if gpu not in device_names():
        raise KeyError(gpu)
    peaks: dict[str, Figure] = {}
    half = _figure(gpu, "bf16_dense_tflops", 1e12, "FLOP/s")
    if half is not None:
        if not gpu.startswith("V100"):  # its 125 TFLOP/s are fp16; it has no bf16
            peaks["bf16"] = half
        peaks["fp16"] = half
    for precision, column in (("fp8", "fp8_dense_tflops"), ("fp32", "fp32_tflops")):
        peak = _figure(gpu, column, 1e12, "FLOP/s")
        if peak is not None:
            peaks[precision] = peak
    measured = _figure(gpu, "measured_matmul_tflops_bf16", 1e12, "FLOP/s")
    matmul: dict[str, Figure] = {}
    for precision, peak in peaks.items():
        if measured is not None and precision in ("bf16", "fp16"):
            matmul[precision] = measured
        else:
            matmul[precision] = Figure(
                value=peak.value * MATMUL_SHARE,
                unit="FLOP/s",
                source=f"assumed: {MATMUL_SHARE:.2f} of the peak, the share measured on H100",
                kind="assumed",
            )
    unknown = Figure(value=0.0, unit="bytes/s", source="not found", kind="assumed")
    # where no total was found: the printed size in 10^9 bytes, the smaller reading
    memory = capacity(gpu) or _figure(gpu, "memory_gb", 1e9, "bytes")
    row = device_rows().get(gpu, {})
    return DeviceSpec(
        name=gpu,
        memory=memory or Figure(value=0.0, unit="bytes", source="not found", kind="assumed"),
        peak_flops=peaks,
        matmul_flops=matmul,
        memory_rate=_figure(gpu, "hbm_gb_per_s", 1e9, "bytes/s") or unknown,
        launch_s=Figure(value=LAUNCH_S, unit="s", source="AutoParallel cost model", kind="assumed"),
        notes=row.get("notes", ""),
        host_rate=_host_rate(row),
    )


def _host_rate(row: Mapping[str, str]) -> Figure | None:
    """Return the rate to host memory of a device whose PCIe generation is known."""
    generation = row.get("pcie_gen", "")
    if generation not in PCIE_GB_PER_S:
        return None
    return Figure(
        value=HOST_SHARE * PCIE_GB_PER_S[generation] * 1e9,
        unit="bytes/s",
        source=f"assumed: {HOST_SHARE:.1f} of PCIe {generation} x16",
        kind="assumed",
    )


_FORM = ("PCIE", "SXM", "NVL")


def named_by_driver(name: str, total_bytes: float) -> str | None:
    """Return the device of the table that a driver calls ``name`` ("NVIDIA H100 80GB HBM3"), or None.

    Of the devices whose model stands in the name as a word of its own, the one whose form factor the name says, if it
    says one, and whose memory is nearest to ``total_bytes``.
    """
    words = name.upper().replace("-", " ").split()
    known: list[tuple[int, float, str]] = []
    for gpu in device_names():
        parts = gpu.upper().split("-")
        model = parts[1] if parts[0] == "RTX" and len(parts) > 1 else parts[0]
        if model not in words:
            continue
        form = next((f for f in _FORM if any(part.startswith(f) for part in parts)), "")
        said = next((f for f in _FORM if any(word.startswith(f) for word in words)), "")
        wrong_form = int(bool(said) and form != said) + 2 * int(not said and form == "PCIE")
        memory = _figure(gpu, "memory_gb", 1e9, "bytes")
        apart = abs(memory.value - total_bytes) if memory is not None else float("inf")
        known.append((wrong_form, apart, gpu))
    return min(known)[2] if known else None


def _intra(entry: ClusterEntry, gpu: str) -> LinkSpec:
    row = device_rows().get(gpu, {})
    instance = instance_rows().get(entry.instance or "", {})
    name = instance.get("intra_node_link") or row.get("link_generation") or "PCIe"
    if instance.get("intra_gb_per_s_per_direction_per_gpu"):
        rate = Figure(
            value=float(instance["intra_gb_per_s_per_direction_per_gpu"]) * 1e9,
            unit="bytes/s",
            source=instance["source"],
        )
    elif row.get("nvlink_gb_per_s_per_direction"):
        rate = Figure(
            value=float(row["nvlink_gb_per_s_per_direction"]) * 1e9, unit="bytes/s", source=row["source"]
        )
    elif gpu == "RTX-4090":
        name = "PCIe without peer-to-peer"
        rate = Figure(value=3e9, unit="bytes/s", source=row["notes"], kind="measured")
    else:
        name = "PCIe"
        generation = row.get("pcie_gen") or "4"
        rate = Figure(
            value=PCIE_GB_PER_S[generation] * 1e9,
            unit="bytes/s",
            source=f"assumed: PCIe {generation} x16, both directions apart",
            kind="assumed",
        )
    if name == "none":
        name = "PCIe"
    latency = Figure(value=INTRA_HOP_S, unit="s", source=_COLLECTIVES, kind="fitted")
    return LinkSpec(name=name, rate=rate, latency=latency)


def _inter(entry: ClusterEntry) -> LinkSpec | None:
    instance = instance_rows().get(entry.instance or entry.fabric_of or "", {})
    if not instance.get("inter_gb_per_s_per_gpu"):
        return None
    assumed = entry.instance is None
    source = instance["source"]
    if assumed:
        source = f"assumed: the network of {instance['instance']} ({source}), as a bare cluster has none"
    nics = instance["inter_nics"]
    if "EFA" in nics:
        latency = Figure(value=EFA_HOP_S, unit="s", source=_COLLECTIVES, kind="fitted")
    else:
        latency = Figure(value=INTER_HOP_S, unit="s", source="assumed for RDMA networks", kind="assumed")
    return LinkSpec(
        name=nics,
        rate=Figure(
            # the table rounds the share of a GPU to two digits; the node's figure is what was read
            value=float(instance["inter_gb_per_s_per_node_per_direction"]) / entry.gpus_per_node * 1e9,
            unit="bytes/s",
            source=source,
            kind="assumed" if assumed else "datasheet",
        ),
        latency=latency,
    )


def build(entry: ClusterEntry) -> ClusterSpec:
    """Return one node of a named cluster.

    Raises:
        KeyError: when no source says which device it has.
    """
    if entry.gpu is None:
        raise KeyError(entry.name)
    spec = device(entry.gpu)
    row = device_rows().get(entry.gpu, {})
    instance = instance_rows().get(entry.instance or "", {})
    notes = " ".join(n for n in (entry.note, instance.get("notes", "")) if n)
    return ClusterSpec(
        name=entry.name,
        device=spec,
        gpus_per_node=entry.gpus_per_node,
        num_nodes=1,
        intra=_intra(entry, entry.gpu),
        inter=_inter(entry),
        source=instance.get("source") or row.get("source") or spec.memory.source,
        notes=notes,
    )


def _row(entry: ClusterEntry) -> dict[str, Any]:
    if entry.gpu is None:
        return {"name": entry.name, "device": None, "gpus_per_node": None, "figures": {}, "notes": entry.note}
    spec = build(entry)
    figures: dict[str, Figure] = {"memory": spec.device.memory, "memory_rate": spec.device.memory_rate}
    figures |= {f"peak_flops_{p}": f for p, f in spec.device.peak_flops.items()}
    figures |= {f"matmul_flops_{p}": f for p, f in spec.device.matmul_flops.items()}
    figures |= {"launch": spec.device.launch_s}
    if spec.device.host_rate is not None:
        figures["host_rate"] = spec.device.host_rate
    figures |= {"intra_rate": spec.intra.rate, "intra_latency": spec.intra.latency}
    if spec.inter is not None:
        figures |= {"inter_rate": spec.inter.rate, "inter_latency": spec.inter.latency}
    return {
        "name": spec.name,
        "device": spec.device.name,
        "gpus_per_node": spec.gpus_per_node,
        "intra": spec.intra.name,
        "inter": spec.inter.name if spec.inter else None,
        "figures": {
            name: {"value": f.value, "unit": f.unit, "source": f.source, "kind": f.kind}
            for name, f in figures.items()
            if f.value > 0
        },
        "notes": spec.notes,
    }


def describe_clusters() -> list[dict[str, Any]]:
    """Return one row per named cluster for ``meshwright clusters``: every number with unit, source and kind.

    A figure that no source prints is absent.
    """
    return [_row(entry) for entry in entries()]
