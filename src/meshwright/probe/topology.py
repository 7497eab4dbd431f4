"""How devices hang together: the table of ``nvidia-smi topo -m`` as data, and what this machine has."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

_LINK = re.compile(r"^(X|SYS|NODE|PHB|PXB|PIX|C2C|NV\d+)$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PATH_RANK: Final = {"PIX": 5, "PXB": 4, "PHB": 3, "NODE": 2, "SYS": 1, "C2C": 6}
"""Closer paths have the higher number (legend of nvidia-smi); NVn counts 10 + n."""


@dataclass(frozen=True)
class Topology:
    """The link between every two devices.

    Attributes:
        devices: names in the order of the table ("GPU0", "NIC0", "mlx5_0").
        links: link name of each ordered pair of different devices, such as "NV12" or "SYS".
        numa: NUMA node of each GPU, where the table has it.
        nics: NIC name by its short name, from the legend.
    """

    devices: tuple[str, ...]
    links: dict[tuple[str, str], str]
    numa: dict[str, str]
    nics: dict[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs in order."""
        return tuple(d for d in self.devices if d.startswith("GPU"))

    @property
    def kind(self) -> str:
        """What joins the GPUs: "NVSwitch" (all pairs alike), "NVLink" (some pairs), "PCIe" or "one GPU"."""
        gpus = self.gpus
        found = [self.links[a, b] for a in gpus for b in gpus if a != b]
        if not found:
            return "one GPU"
        fast = [x for x in found if x.startswith("NV")]
        if len(fast) == len(found) and len(set(found)) == 1 and len(gpus) > 2:
            return "NVSwitch"
        return "NVLink" if fast else "PCIe"

    def nearest_nic(self, gpu: str) -> str | None:
        """Return the NIC with the shortest path to ``gpu``, or None without NICs."""
        nics = [d for d in self.devices if not d.startswith("GPU")]
        if not nics:
            return None
        best = max(nics, key=lambda n: closeness(self.links.get((gpu, n), "SYS")))
        return self.nics.get(best, best)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "gpus": list(self.gpus),
            "links": [[a, b, link] for (a, b), link in self.links.items() if a < b],
            "numa": dict(self.numa),
            "nearest_nic": {g: self.nearest_nic(g) for g in self.gpus},
        }


def closeness(link: str) -> int:
    """Return how near two devices are by their link's name: greater is nearer; NVLinks count by their number."""
    if link.startswith("NV"):
        return 10 + int(link[2:])
    return _PATH_RANK.get(link, 0)


def parse_topology(text: str) -> Topology:
    """Return the topology that ``nvidia-smi topo -m`` printed.

    Raises:
        ValueError: when the text holds no such table.
    """
    columns: list[str] = []
    has_numa = False
    links: dict[tuple[str, str], str] = {}
    numa: dict[str, str] = {}
    nics: dict[str, str] = {}
    devices: list[str] = []
    for line in _ANSI.sub("", text).splitlines():
        cells = line.split()
        if not columns:
            if cells and cells[0] == "GPU0" and not (len(cells) > 1 and _LINK.match(cells[1])):
                columns = cells[: cells.index("CPU")] if "CPU" in cells else cells
                has_numa = "NUMA" in cells
            continue
        nic = re.match(r"^\s*(NIC\d+):\s*(\S+)", line)
        if nic:
            nics[nic.group(1)] = nic.group(2)
            continue
        values = cells[1 : 1 + len(columns)]
        if not cells or cells[0] not in columns or len(values) < len(columns):
            continue
        if not all(_LINK.match(v) for v in values):
            continue
        devices.append(cells[0])
        links |= {(cells[0], other): v for other, v in zip(columns, values, strict=True) if v != "X"}
        rest = cells[1 + len(columns) :]
        if has_numa and len(rest) >= 2:
            numa[cells[0]] = rest[1]
    if not devices:
        raise ValueError("the text holds no table of `nvidia-smi topo -m`")
    return Topology(tuple(devices), links, numa, nics)


def topology_pair_rates(topology: Topology) -> dict[tuple[int, int], float]:
    """Return each GPU pair's closeness, for a ring order where no rate was measured."""
    gpus = topology.gpus
    return {
        (i, j): float(closeness(topology.links[a, b]))
        for i, a in enumerate(gpus)
        for j, b in enumerate(gpus)
        if i < j
    }


def effective_cores() -> float:
    """Return the cores that this process may use: its CPU set, cut by the control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, float(quota) / float(period))
    except (OSError, ValueError):
        return cores


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) bytes of this machine, cut by the control group's limit."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            total = min(total, int(limit))
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return total, available


def node_name() -> str:
    """Return this node's name."""
    return socket.gethostname()


def gpu_topology() -> Topology | None:
    """Return what ``nvidia-smi topo -m`` says on this node, or None where there is no such tool or table."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
        return parse_topology(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def describe_nodes(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the nodes of the ranks: how many, and the ranks of each, in order of appearance (names are left out)."""
    seen: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        seen.setdefault(host, []).append(rank)
    return {"nodes": len(seen), "ranks_of_node": list(seen.values())}


def machine_facts(device: str) -> dict[str, Any]:
    """Return what a profile of this machine depends on, with a fingerprint over it, and today's date.

    ``device`` is "cpu" or "cuda". Two probes with one fingerprint measured the same machine with the same libraries;
    the node's name is in the fingerprint only.
    """
    import torch
    from torch.cuda import nccl

    from meshwright.parallel.products import product_library

    facts: dict[str, Any] = {
        "device": _processor() if device == "cpu" else torch.cuda.get_device_name(0),
        "devices": os.cpu_count() if device == "cpu" else torch.cuda.device_count(),
        "cores": effective_cores(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "matmul": product_library("machine", device),
        "backend": "gloo" if device == "cpu" else f"nccl {'.'.join(map(str, nccl.version()))}",
    }
    text = json.dumps([facts, node_name()], sort_keys=True)
    day = datetime.now(UTC).date().isoformat()
    return facts | {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16], "date": day}


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
