"""A node beside its devices: host memory at start-up, for checkpoints and data, and seconds of those two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.base.records import Prediction
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.offload import file_seconds
from meshwright.cost.rates import FILE_READ, FILE_WRITE, HOST_LINK, DeviceRates, device_rates
from meshwright.cost.state import load_host_bytes
from meshwright.cost.work import STATE_BYTES
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.layout.precision import wide_precision
from meshwright.model.spec import ModelSpec
from meshwright.program.units import stage_units

_FP32 = 4
_MOMENTS = 2
"""AdamW's, each as wide as the parameter."""
_ROW = 3 * 8
"""Bytes of one token of a row: its id, its label and its position, 64 bits each."""


def host_bytes(
    spec: ModelSpec, layout: Layout, batch: Batch, cluster: ClusterSpec, prediction: Prediction
) -> dict[str, float]:
    """Return bytes of host memory per node, by what holds them. Source: hazards H104 and H198.

    ``load``: while the model is built, one unit per process (the runtime makes and cuts unit by unit).
    ``load_naive``: what a whole model in every process would take, which the runtime never does.
    ``checkpoint``: the copy of every rank's state that a checkpoint written beside the training keeps.
    ``data``: the rows of one step per process. There are no worker processes and nothing is prefetched, so nothing
    grows with them; tokens are mapped from their files, and their pages belong to the system.

    Args:
        spec: the model.
        layout: with its cut as layers per stage.
        batch: the step's batch.
        cluster: its GPUs per node are the processes of a node.
        prediction: whose parameters and optimizer state of the fullest rank are taken.
    """
    processes = min(cluster.gpus_per_node, layout.world_size)
    units = [u for stage in range(layout.num_stages) for u in stage_units(spec, layout, stage)]
    largest = max((sum(t.numel for t in unit.tensors) for unit in units), default=0)
    state = max((r.memory.parameters + r.memory.optimizer for r in prediction.ranks), default=0)
    rows = batch.micro_batch * batch.accumulation
    return {
        "load": processes * largest * float(_FP32),
        "load_naive": load_host_bytes(spec.num_parameters, processes, _FP32, broadcast=False),
        "checkpoint": float(processes * state),
        "data": float(processes * rows * batch.seq_len * _ROW),
    }


def host_seconds(
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    cluster: ClusterSpec,
    prediction: Prediction,
    stage_ranks: Sequence[int],
    frozen: Sequence[str] = (),
) -> dict[str, float]:
    """Return seconds of one rank beside its step, by what they are for.

    ``checkpoint_copy``: the copy of the fullest rank's state to host memory, for which the step waits where
    checkpoints are written beside the training. ``checkpoint_write``: writing a checkpoint, for which the step waits
    otherwise. Ranks that hold the same share the writing, so each of a stage writes its part of the stage once.
    ``checkpoint_read``: reading what the fullest rank holds. Both with their checksums, on local disks. ``data``: the
    rows of a step on their way to the device.

    Args:
        spec: the model.
        layout: with its cut as layers per stage.
        batch: the step's batch.
        cluster: whose disks and host links are taken, assumed where they are not known.
        prediction: whose parameters and optimizer state of the fullest rank are taken.
        stage_ranks: the pipeline rank of each stage.
        frozen: patterns of parameters that do not train; they have no moments.

    Raises:
        MeshwrightError: E405 when a rate that time needs is not known.
    """
    rates = device_rates(cluster, wide_precision(layout.precision))
    held = float(max((r.memory.parameters + r.memory.optimizer for r in prediction.ranks), default=0))
    rows = float(batch.micro_batch * batch.accumulation * batch.seq_len * _ROW)
    return {
        "checkpoint_copy": _copied_s(held, rates),
        "checkpoint_write": _file_s(0.0, saved_bytes(spec, layout, stage_ranks, frozen), rates),
        "checkpoint_read": _file_s(held, 0.0, rates),
        "data": _copied_s(rows, rates),
    }


def saved_bytes(
    spec: ModelSpec, layout: Layout, stage_ranks: Sequence[int], frozen: Sequence[str] = ()
) -> float:
    """Return the bytes of a checkpoint that each rank of the fullest pipeline rank's group writes.

    Those are the parameters and AdamW's moments of its stages, shared by the ranks that differ in other axes.
    """
    numel = [0] * layout.pp
    for stage, rank in enumerate(stage_ranks):
        units = stage_units(spec, layout, stage, frozen)
        numel[rank] += sum(u.numel + _MOMENTS * u.trainable_numel for u in units)
    return float(max(numel) * STATE_BYTES[layout.precision]) / (layout.world_size // layout.pp)


def assumed_rates(cluster: ClusterSpec) -> list[str]:
    """Return what ``host_seconds`` assumes because the cluster does not say it, with the values."""
    device, out = cluster.device, list[str]()
    if device.disk_write is None:
        out.append(f"disks write {FILE_WRITE / 1e9:g} GB/s a rank")
    if device.disk_read is None:
        out.append(f"disks read {FILE_READ / 1e9:g} GB/s a rank")
    if device.host_rate is None and not device.is_cpu:
        out.append(f"{HOST_LINK / 1e9:g} GB/s between device and host")
    return out


def _file_s(read: float, written: float, rates: DeviceRates) -> float:
    return float(file_seconds(np.asarray(read), np.asarray(written), rates))


def _copied_s(num_bytes: float, rates: DeviceRates) -> float:
    """Return the seconds of a copy between device and host; a CPU reads and writes each byte."""
    return num_bytes / rates.host_rate if rates.overlaps else 2.0 * num_bytes / rates.copy_rate
