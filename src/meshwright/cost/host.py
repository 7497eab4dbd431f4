"""Host memory of one node beside the devices: start-up, checkpoints written beside the training, and the data."""

from __future__ import annotations

from meshwright.base.records import Prediction
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.state import load_host_bytes
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.program.units import stage_units

_FP32 = 4
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
