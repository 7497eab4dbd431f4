"""Read a cluster: a catalogue name, a probe's JSON or a JSON file written by hand.

By hand (strict keys; an unknown one is refused with the nearest name)::

    {"name": "mine", "gpus_per_node": 8, "num_nodes": 2, "source": "where the figures come from",
     "device": {"name": "X", "memory": "80GB", "peak_flops": {"bf16": 312e12},
                "matmul_flops": {"bf16": 250e12}, "memory_rate_bytes_per_s": 2.0e12,
                "launch_s": 7e-6, "is_cpu": false, "host_rate_bytes_per_s": 5e10,
                "disk_read_bytes_per_s": 3e9, "disk_write_bytes_per_s": 1.5e9},
     "intra": {"name": "NVLink", "rate_bytes_per_s": 3.0e11, "latency_s": 1e-6},
     "inter": {"name": "IB", "rate_bytes_per_s": 2.5e10, "latency_s": 1e-5},
     "price_per_device_hour": 2.0, "notes": ""}

``device`` may be the name of a device of the catalogue, ``intra`` and ``inter`` the name of a link ("NVLink 4",
"PCIe 4", "100 GbE", "8 x IB NDR": that many adapters on a node); rates are per direction and device; ``memory`` is a
size with its unit ("80GB" is 80 * 10^9, "80GiB" is 80 * 2^30) or bytes. The rates to host memory and to a local disk
(one device's share) may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Final, cast

from meshwright.base.errors import MeshwrightError, Problem, nearest, problem, refuse
from meshwright.base.units import format_bytes, parse_bytes
from meshwright.cluster import catalogue
from meshwright.cluster.links import link_named, nearest_links
from meshwright.cluster.spec import ClusterSpec, CollectiveFit, DeviceSpec, Figure, LinkSpec

SMALLEST: Final = 1e-15
LARGEST: Final = 1e30
PROBE_FORMAT: Final = 3
"""Version of a probe's JSON. 2 has what was measured in its place, 3 meetings beside; a file without a version is 1."""
"""Figures outside these are no rate, size or latency of a machine, and end in overflow."""
MAX_GPUS: Final = 1_000_000
_TOP = (
    "name",
    "device",
    "gpus_per_node",
    "num_nodes",
    "intra",
    "inter",
    "source",
    "price_per_device_hour",
    "notes",
)
_DEVICE = (
    "name",
    "memory",
    "peak_flops",
    "matmul_flops",
    "memory_rate_bytes_per_s",
    "launch_s",
    "is_cpu",
    "notes",
    "host_rate_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
)
_LINK = ("name", "rate_bytes_per_s", "latency_s")
_PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8")


def read_cluster(target: str, num_gpus: int | None = None) -> ClusterSpec:
    """Return the cluster named by ``target`` with ``num_gpus`` devices (None: as it is; a name is one node).

    Raises:
        MeshwrightError: E401 unknown, E402 impossible size, E403 or E404 a bad file, E406 no network known.
    """
    if target.endswith(".json") or "/" in target or Path(target).is_file():
        cluster = _read_file(Path(target))
    else:
        by_name = {entry.name: entry for entry in catalogue.entries()}
        entry = by_name.get(target)
        if entry is None:
            close = nearest(target, by_name)
            raise MeshwrightError(
                problem(
                    "E401",
                    where="cluster",
                    found=f"no cluster is called {target!r}, and no such file exists",
                    do=f"did you mean {', '.join(close)}? `meshwright clusters` lists all" if close else "",
                )
            )
        if entry.gpu is None:
            raise MeshwrightError(
                problem(
                    "E405",
                    where=f"cluster {entry.name}",
                    found="no source read prints its figures",
                    do=entry.note,
                )
            )
        cluster = catalogue.build(entry)
    return cluster if num_gpus is None else with_gpus(cluster, num_gpus)


def with_gpus(cluster: ClusterSpec, num_gpus: int) -> ClusterSpec:
    """Return the cluster with ``num_gpus`` devices: whole nodes, or a part of one.

    Raises:
        MeshwrightError: E402 when they do not fill whole nodes, E406 when the network between is unknown.
    """
    node = cluster.gpus_per_node
    if num_gpus < 1 or num_gpus > MAX_GPUS:
        low = num_gpus < 1
        raise MeshwrightError(
            problem(
                "E402",
                where="gpus",
                found=f"{num_gpus:,} GPUs",
                needs=f"between 1 and {MAX_GPUS:,} GPUs",
                do=f"the nearest is {1 if low else MAX_GPUS // node * node:,}; one node has {node}",
            )
        )
    if num_gpus > node and num_gpus % node:
        options = [num_gpus // node * node, (num_gpus // node + 1) * node]
        raise MeshwrightError(
            problem(
                "E402",
                where="gpus",
                found=f"{num_gpus} GPUs on {cluster.name}, which has {node} per node",
                do="the nearest are " + " and ".join(str(n) for n in options),
            )
        )
    nodes = max(1, num_gpus // node)
    if nodes > 1 and cluster.inter is None:
        raise MeshwrightError(
            problem(
                "E406",
                where=f"cluster {cluster.name}",
                found=f"{num_gpus} GPUs are {nodes} nodes, and no rate between nodes is known",
                do=f'use at most {node} GPUs, or write a cluster file with {{"device": "{cluster.device.name}", '
                f'"gpus_per_node": {node}, "num_nodes": {nodes}, "intra": ..., "inter": "100 GbE"}}',
            )
        )
    return replace(cluster, gpus_per_node=min(node, num_gpus), num_nodes=nodes)


def _read_file(path: Path) -> ClusterSpec:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        code = "E401" if not path.exists() else "E403"
        reason = "there is no such file" if code == "E401" else f"the file cannot be read ({error})"
        raise MeshwrightError(problem(code, where=str(path), found=reason)) from error
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(problem("E403", where=str(path), found=f"it is not JSON: {error}")) from error
    if not isinstance(data, dict):
        raise MeshwrightError(
            problem("E403", where=str(path), found=f"it holds a {type(data).__name__}, not an object")
        )
    found = cast("dict[str, Any]", data)
    if "links" in found or "matmul" in found:
        return cluster_from_probe(found, name=path.stem)
    return cluster_from_dict(found, source=path.name)


_LEAST: Final = {"bytes": 2.0**20, "FLOP/s": 1e8, "bytes/s": 1e5}
_MOST: Final = {"s": 10.0}
"""Figures beyond these are in another unit: no device has 80 bytes, no hop takes 30 s."""


def _implausible(value: float, unit: str) -> str:
    """Return what a figure would be, where no device or link has it; "" for one that can be."""
    return f"{value:g} {unit}" if value < _LEAST.get(unit, 0.0) or value > _MOST.get(unit, LARGEST) else ""


def _in_units(value: object, unit: str) -> str:
    return {
        "bytes": f'write the unit, such as "{value}GB"',
        "FLOP/s": f"{value}e12 if TFLOP/s are meant",
        "bytes/s": f"{value}e9 if GB/s are meant",
    }.get(unit, f"{value}e-6 if microseconds are meant")


class _Reader:
    """Reads keys and collects what is wrong with them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def bad(self, key: str, found: str, needs: str, do: str = "") -> None:
        self.problems.append(problem("E404", where=f"{self.where}: {key}", found=found, needs=needs, do=do))

    def known(self, data: Mapping[str, Any], keys: tuple[str, ...], prefix: str = "") -> None:
        for key in data:
            if key not in keys:
                close = nearest(str(key), keys)
                self.bad(
                    prefix + str(key),
                    "an unknown key",
                    f"one of {', '.join(keys)}",
                    f"did you mean {close[0]}?" if close else "remove it",
                )

    def number(
        self,
        data: Mapping[str, Any],
        key: str,
        prefix: str,
        default: float | None = None,
        allow: Callable[[float], bool] = lambda v: v > 0,
        unit: str = "",
    ) -> float:
        value = data.get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
        if not good or 0 < value < SMALLEST:
            self.bad(prefix + key, "missing" if value is None else f"{value!r}", "a positive number")
            return 1.0
        if not allow(float(value)):
            self.bad(prefix + key, f"{value!r}", "a positive number")
            return 1.0
        if unit and key in data and (wrong := _implausible(float(value), unit)):
            self.bad(
                prefix + key, f"{value!r}, which is {wrong}", f"a number of {unit}", _in_units(value, unit)
            )
            return 1.0
        return float(value)

    def whole(self, data: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value > MAX_GPUS:
            self.bad(key, "missing" if value is None else f"{value!r}", f"a whole number, 1 to {MAX_GPUS:,}")
            return 1
        return value

    def word(self, data: Mapping[str, Any], key: str, prefix: str = "", default: str | None = None) -> str:
        value = data.get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            self.bad(prefix + key, "missing" if value is None else f"{value!r}", "a text")
            return ""
        return value

    def part(self, data: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict):
            self.bad(key, "missing" if value is None else f"{value!r}", "an object")
            return {}
        return cast("dict[str, Any]", value)


def _read_rates(reader: _Reader, data: Mapping[str, Any], key: str, source: str) -> dict[str, Figure]:
    raw = data.get(key, {})
    if not isinstance(raw, dict):
        reader.bad(f"device.{key}", f"{raw!r}", "an object of precision to FLOP/s")
        return {}
    rates = cast("dict[str, Any]", raw)
    reader.known(rates, _PRECISIONS, f"device.{key}.")
    return {
        p: Figure(
            value=reader.number(rates, p, f"device.{key}.", unit="FLOP/s"), unit="FLOP/s", source=source
        )
        for p in rates
        if p in _PRECISIONS
    }


def _read_device(reader: _Reader, data: Mapping[str, Any], source: str) -> DeviceSpec:
    if isinstance(data.get("device"), str):
        name = str(data["device"])
        if name in catalogue.device_names():
            return catalogue.device(name)
        close = nearest(name, catalogue.device_names())
        reader.bad(
            "device",
            f"no device is called {name!r}",
            "a device of the catalogue, or an object",
            f"did you mean {', '.join(close)}?" if close else "",
        )
        return catalogue.device("A100-80GB-SXM4")
    raw = reader.part(data, "device")
    reader.known(raw, _DEVICE, "device.")
    memory = raw.get("memory")
    num_bytes = 1.0
    if isinstance(memory, str):
        try:
            num_bytes = float(parse_bytes(memory))
        except ValueError as error:
            reader.bad("device.memory", str(error), "a size such as 80GB, 80GiB, or bytes")
    else:
        num_bytes = reader.number(raw, "memory", "device.", unit="bytes")
    peaks = _read_rates(reader, raw, "peak_flops", source)
    matmul = _read_rates(reader, raw, "matmul_flops", source)
    for precision, peak in peaks.items():
        matmul.setdefault(
            precision,
            Figure(
                value=peak.value * catalogue.MATMUL_SHARE,
                unit="FLOP/s",
                source=f"assumed: {catalogue.MATMUL_SHARE:.2f} of the peak, the share measured on H100",
                kind="assumed",
            ),
        )
    is_cpu = raw.get("is_cpu", False)
    if not isinstance(is_cpu, bool):
        reader.bad("device.is_cpu", f"{is_cpu!r}", "true or false")
        is_cpu = False
    launch = reader.number(raw, "launch_s", "device.", catalogue.LAUNCH_S, allow=lambda v: v >= 0, unit="s")
    return DeviceSpec(
        name=reader.word(raw, "name", "device."),
        memory=Figure(value=num_bytes, unit="bytes", source=source),
        peak_flops=peaks,
        matmul_flops=matmul,
        memory_rate=Figure(
            value=reader.number(raw, "memory_rate_bytes_per_s", "device.", unit="bytes/s"),
            unit="bytes/s",
            source=source,
        ),
        launch_s=Figure(value=launch, unit="s", source=source),
        is_cpu=is_cpu,
        notes=reader.word(raw, "notes", "device.", ""),
        **_away_rates(reader, raw, source),
    )


def _away_rates(reader: _Reader, raw: Mapping[str, Any], source: str) -> dict[str, Figure]:
    """Return the rates to host memory and disk that a device's object has."""
    names = ("host_rate", "disk_read", "disk_write")
    return {
        name: Figure(
            value=reader.number(raw, f"{name}_bytes_per_s", "device.", unit="bytes/s"),
            unit="bytes/s",
            source=source,
        )
        for name in names
        if f"{name}_bytes_per_s" in raw
    }


def _read_link(reader: _Reader, data: Mapping[str, Any], key: str, hop_s: float, source: str) -> LinkSpec:
    if isinstance(data.get(key), str):
        text, node = str(data[key]), data.get("gpus_per_node")
        link = link_named(text, node if isinstance(node, int) and node > 0 else 1)
        if link is not None:
            return link
        do = f"did you mean {', '.join(nearest_links(text))}?"
        reader.bad(
            key, f"no link is called {text!r}", "a link of `meshwright explain E404`, or an object", do
        )
    raw = {} if isinstance(data.get(key), str) else reader.part(data, key)
    reader.known(raw, _LINK, f"{key}.")
    if not raw:
        return LinkSpec(
            name="",
            rate=Figure(value=1.0, unit="bytes/s", source=source),
            latency=Figure(value=0.0, unit="s", source=source),
        )
    given = "latency_s" in raw
    latency = reader.number(raw, "latency_s", f"{key}.", hop_s, allow=lambda v: v >= 0, unit="s")
    return LinkSpec(
        name=reader.word(raw, "name", f"{key}.", key),
        rate=Figure(
            value=reader.number(raw, "rate_bytes_per_s", f"{key}.", unit="bytes/s"),
            unit="bytes/s",
            source=source,
        ),
        latency=Figure(
            value=latency,
            unit="s",
            source=source if given else "assumed: the catalogue's latency",
            kind="datasheet" if given else "assumed",
        ),
    )


def cluster_from_dict(data: Mapping[str, Any], source: str = "by hand") -> ClusterSpec:
    """Return the cluster of a hand-written object (keys in the module's docstring).

    Raises:
        MeshwrightError: E404 with every key that is unknown, missing or of a wrong kind.
    """
    reader = _Reader(source)
    reader.known(data, _TOP)
    said = reader.word(data, "source", default=source) or source
    nodes = reader.whole(data, "num_nodes", 1)
    intra = _read_link(reader, data, "intra", catalogue.INTRA_HOP_S, said)
    inter = None
    if data.get("inter") is not None:
        inter = _read_link(reader, data, "inter", catalogue.INTER_HOP_S, said)
    elif nodes > 1:
        reader.bad(
            "inter",
            "missing",
            f"the network between the {nodes} nodes",
            'add {"name": ..., "rate_bytes_per_s": ..., "latency_s": ...}',
        )
    price = None
    if data.get("price_per_device_hour") is not None:
        value = reader.number(data, "price_per_device_hour", "")
        price = Figure(value=value, unit="per device hour", source=said)
    cluster = ClusterSpec(
        name=reader.word(data, "name"),
        device=_read_device(reader, data, said),
        gpus_per_node=reader.whole(data, "gpus_per_node"),
        num_nodes=nodes,
        intra=intra,
        inter=inter,
        source=said,
        price_per_device_hour=price,
        notes=reader.word(data, "notes", default=""),
    )
    refuse(reader.problems)
    return cluster


def cluster_from_probe(probe: Mapping[str, Any], name: str = "probed") -> ClusterSpec:
    """Return the cluster that ``meshwright probe`` measured: one node of ``world_size`` ranks.

    ``measured`` holds, in SI units, ``matmul_flops_per_s/PRECISION/MxKxN``,
    ``attention_forward_s/PRECISION/BATCHxHEADSxSEQxDIM`` (and ``attention_backward_s``),
    ``collective_s/KIND/RANKS/BYTES``, ``op_s``, ``backward_op_s``, ``optimizer_bytes_per_s``,
    ``optimizer_tensor_s``, ``copy_bytes_per_s``, ``elementwise_bytes_per_s`` and ``cores``, as far as it has them; and
    what was measured in its place: ``forward_in_place`` and ``backward_in_place`` (factors on a block's pieces; with
    ``head_`` before them on the head's), ``pass_forward_s`` and ``pass_backward_s`` of a micro-batch beside its parts,
    ``accumulate_s`` of a tensor, ``checkpoint_s`` of a block, ``region_s`` of a collective of the tensor axis,
    ``shard_s/PART/RANKS/BYTES`` of an FSDP2 unit and ``tensor_s/PART/RANKS/BYTES`` of the tensor axis' collectives,
    ``meet_s/RANKS/MICROSECONDS`` of a collective after so much work, and ``apart_s/PART/RANKS``, the work before those.

    Raises:
        MeshwrightError: E404 when what every prediction needs is missing.
    """
    try:
        return _from_probe(probe, name)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise MeshwrightError(
            problem(
                "E404",
                where=name,
                found=f"the probe lacks, or has in another form, what a prediction needs: {error!r}",
                needs="world_size, links, matmul, memory and overhead as `meshwright probe` writes them",
                do="write it again with `meshwright probe --out FILE`",
            )
        ) from error


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < 1e30:
        raise ValueError(f"{value!r} is not a positive number")
    return number


def _datasheet_peaks(probe: Mapping[str, Any]) -> Mapping[str, Figure]:
    """Return the peaks of the catalogue's device that the driver named; {} for a device that it does not know."""
    gpu = catalogue.named_by_driver(str(probe["device"]), float(probe["memory"].get("total_bytes") or 0.0))
    return catalogue.device(gpu).peak_flops if gpu is not None else {}


def _in_place(probe: Mapping[str, Any]) -> dict[str, float]:
    """Return what a probe measured in its place; {} for one of before."""
    if int(probe.get("format", 1)) > PROBE_FORMAT:
        raise ValueError(f"format {probe['format']} is newer than {PROBE_FORMAT}")
    found: Mapping[str, Any] = probe.get("in_place") or {}
    names = ("forward", "backward", "head_forward", "head_backward")
    out = {f"{name}_in_place": _positive(found[name]) for name in names if name in found}
    out |= {name: _positive(found[name]) for name in ("pass_forward_s", "pass_backward_s") if name in found}
    kinds = (
        ("sharding", "shard_s", ("unit", "gather", "scatter")),
        ("tensor", "tensor_s", ("pair", "reduce")),
    )
    for kind, key, parts in kinds:
        for one in found.get(kind, []):
            for point in one["points"]:
                for part in parts:
                    slot = f"{key}/{part}/{len(one['ranks'])}/{int(point['bytes'])}"
                    out[slot] = max(_positive(point[f"{part}_s"]), out.get(slot, 0.0))
    return out | _meetings(found, kinds)


def _meetings(found: Mapping[str, Any], kinds: Sequence[tuple[str, str, Sequence[str]]]) -> dict[str, float]:
    """Return seconds of meetings by ranks and microseconds of work, and the work before what is measured in its place.

    Several groups of one size: their means, since a step's meetings are of all groups. {} for a probe without them.
    """
    met: dict[str, list[float]] = {}
    works: dict[tuple[int, int], list[float]] = {}
    for one in found.get("meetings", []):
        for number, point in enumerate(one["points"]):
            works.setdefault((len(one["ranks"]), number), []).append(_positive(point["apart_s"]))
            met.setdefault(f"{len(one['ranks'])}/{number}", []).append(_positive(point["meet_s"]))
    out: dict[str, float] = {}
    for (ranks, number), work in works.items():
        out[f"meet_s/{ranks}/{1e6 * fmean(work):.6g}"] = fmean(met[f"{ranks}/{number}"])
    if not out:
        return {}
    apart: dict[str, list[float]] = {}
    for one in found["meetings"]:
        apart.setdefault(f"apart_s/link/{len(one['ranks'])}", []).append(_positive(one["link_apart_s"]))
    for kind, _, parts in kinds:
        for one in found.get(kind, []):
            for point, part in product(one["points"], parts):
                if "apart_s" in point:
                    slot = f"apart_s/{part}/{len(one['ranks'])}"
                    apart.setdefault(slot, []).append(_positive(point["apart_s"]))
    return out | {slot: geometric_mean(seconds) for slot, seconds in apart.items()}


def _from_probe(probe: Mapping[str, Any], name: str) -> ClusterSpec:
    world = int(probe["world_size"])
    if world < 1:
        raise ValueError(f"world_size {world}")
    is_cpu = str(probe.get("device", "cpu")).startswith("cpu")
    source = f"probe of {probe.get('device', 'cpu')}, {world} ranks, {probe.get('backend', 'gloo')}"
    measured: dict[str, float] = {}
    best: dict[str, float] = {}
    for row in probe["matmul"]:
        rate = _positive(row["flops_per_s"])
        shape = f"{int(row['m'])}x{int(row['k'])}x{int(row['n'])}"
        measured[f"matmul_flops_per_s/{row['precision']}/{shape}"] = rate
        best[row["precision"]] = max(rate, best.get(row["precision"], 0.0))
    if not best:
        raise ValueError("no matmul was measured")
    for row in probe.get("attention", []):
        shape = "x".join(str(int(row[k])) for k in ("batch", "heads", "seq", "head_dim"))
        measured[f"attention_forward_s/{row['precision']}/{shape}"] = _positive(row["forward_s"])
        measured[f"attention_backward_s/{row['precision']}/{shape}"] = _positive(row["backward_s"])
    memory: Mapping[str, Any] = probe["memory"]
    overhead: Mapping[str, Any] = probe.get("overhead", {})
    for part in (overhead, memory):
        measured |= {
            key: _positive(value)
            for key, value in part.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        }
    measured["cores"] = _positive(probe.get("cores") or world)
    measured |= _in_place(probe)
    fits: dict[str, CollectiveFit] = {}
    for link in probe["links"]:
        ranks = link["ranks"]
        size = len(cast("list[int]", ranks)) if isinstance(ranks, list) else int(ranks)
        if size < 2:
            continue
        key = f"{link['collective']}/{size}"
        fits[key] = CollectiveFit(
            latency_s=max(0.0, float(link["latency_s"])),
            busbw_bytes_per_s=_positive(link["peak_busbw_bytes_per_s"]),
        )
        for point in link["points"]:
            slot = f"collective_s/{key}/{int(point['bytes'])}"
            # several groups of one size: the slowest paces a step
            measured[slot] = max(_positive(point["time_s"]), measured.get(slot, 0.0))
    if world > 1 and not fits:
        raise ValueError("no link was measured")
    slowest = (
        min(fits.values(), key=lambda f: f.busbw_bytes_per_s)
        if fits
        else CollectiveFit(latency_s=0.0, busbw_bytes_per_s=1e9)
    )
    available = _positive(memory["available_bytes"]) / (world if is_cpu else 1)
    rate = _positive(memory.get("copy_bytes_per_s") or memory["elementwise_bytes_per_s"])
    launch = float(overhead.get("op_s") or 0.0)
    return ClusterSpec(
        name=name,
        device=DeviceSpec(
            name=str(probe.get("device", "cpu")),
            memory=Figure(value=available, unit="bytes", source=source, kind="measured"),
            peak_flops={} if is_cpu else _datasheet_peaks(probe),
            matmul_flops={
                p: Figure(value=r, unit="FLOP/s", source=source, kind="measured") for p, r in best.items()
            },
            memory_rate=Figure(value=rate, unit="bytes/s", source=source, kind="measured"),
            launch_s=Figure(value=launch, unit="s", source=source, kind="measured"),
            is_cpu=is_cpu,
            notes=f"{format_bytes(available)} for each rank",
        ),
        gpus_per_node=world,
        num_nodes=1,
        intra=LinkSpec(
            name=str(probe.get("backend", "gloo")),
            rate=Figure(value=slowest.busbw_bytes_per_s, unit="bytes/s", source=source, kind="measured"),
            latency=Figure(value=slowest.latency_s, unit="s", source=source, kind="measured"),
            fits=fits,
        ),
        inter=None,
        source=source,
        measured=measured,
        machine=str(cast("Mapping[str, Any]", probe.get("machine") or {}).get("fingerprint", "")),
    )
