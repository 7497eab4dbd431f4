"""ClusterSpec: devices, the links between them and how they are grouped in nodes; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its unit and where it came from.

    ``kind`` is "datasheet", "measured", "fitted" or "assumed".
    """

    value: float
    unit: str
    source: str
    kind: str = "datasheet"


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU process).

    Attributes:
        memory: bytes that a rank may use.
        peak_flops: dense peak per precision ("fp32", "bf16", "fp16", "fp64", "fp8"), FLOP/s.
        matmul_flops: reachable matmul rate per precision, FLOP/s (measured where it is known).
        memory_rate: bytes/s of device memory.
        launch_s: least seconds one operation takes.
        is_cpu: a gloo process: no memory outside the allocator.
        host_rate: bytes/s per direction between the device and pinned host memory; None where it is not known.
        disk_read, disk_write: bytes/s of one device's share of a node's local disks; None where it is not known.
    """

    name: str
    memory: Figure
    peak_flops: Mapping[str, Figure]
    matmul_flops: Mapping[str, Figure]
    memory_rate: Figure
    launch_s: Figure
    is_cpu: bool = False
    notes: str = ""
    host_rate: Figure | None = None
    disk_read: Figure | None = None
    disk_write: Figure | None = None


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """Latency and bus bandwidth of one collective over one group size; bus bandwidth as nccl-tests define it."""

    latency_s: float
    busbw_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """What connects devices.

    Attributes:
        rate: bytes/s per direction per device.
        latency: seconds per hop.
        fits: measured collectives, keyed ``"all_reduce/4"`` (kind / group size); empty for datasheets.
    """

    name: str
    rate: Figure
    latency: Figure
    fits: Mapping[str, CollectiveFit] = field(default_factory=dict[str, CollectiveFit])


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices. Ranks are numbered node by node.

    ``processor_share`` is the share of a device that one rank gets when all ranks compute at once (1.0 for
    GPUs; a CPU cluster with more ranks than cores has its rates measured under that load, so also 1.0 there).
    ``price_per_device_hour`` is None where no price is known.
    """

    name: str
    device: DeviceSpec
    gpus_per_node: int
    num_nodes: int
    intra: LinkSpec
    inter: LinkSpec | None
    source: str
    price_per_device_hour: Figure | None = None
    notes: str = ""
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    """Other measured rates by name (for instance ``"seconds_per_step_overhead"``), SI units in the name."""
    machine: str = ""
    """Fingerprint of the machine that a probe measured; "" where the figures are not a machine's own."""

    @property
    def num_gpus(self) -> int:
        """Devices in all."""
        return self.gpus_per_node * self.num_nodes
