"""The tensor axis with all its shards in one process: the cut matrices without processes, ranks or a pipeline.

Each shard is a thread with its own part of the model; they meet in collectives of a group that lives in this process.
What differs here differs in the maths of the cut; what differs only with processes differs in how they are joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.layout.ranks import coordinates
from meshwright.mesh.device_mesh import MeshView
from meshwright.model.randomness import draws_alike
from meshwright.model.spec import ModelSpec
from meshwright.parallel.apply import ParallelModel, apply_plan
from meshwright.program.plan import Plan
from meshwright.prove.parity import TensorDiff, compare, merge_ranks, relative, worst_of
from meshwright.prove.reference import Reference, TokenBatch

TIMEOUT = timedelta(seconds=120)


def simulate_tensor_axis(
    plan: Plan,
    spec: ModelSpec,
    reference: Reference,
    batch: TokenBatch,
    seed: int,
    fault: Callable[[ParallelModel, int], None] | None = None,
    matmul: str = "machine",
) -> dict[str, Any]:
    """Return {loss_diff, max_rel_diff, worst} of the first step's loss and gradients against ``reference``.

    ``plan`` has a tensor axis alone. ``batch``: the global batch of the step.

    Communication: that of the tensor axis, between threads of this process.

    Raises:
        Exception: the first that a shard's thread raised.
    """
    degree = plan.layout.tp
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(TIMEOUT)
    models: list[ParallelModel] = []
    groups: list[Any] = [None] * degree
    _in_threads(degree, lambda i: groups.__setitem__(i, dist.ProcessGroupGloo(store, i, degree, TIMEOUT)))
    for i in range(degree):  # one after another: building draws from the process's random numbers
        view = MeshView(plan.layout, i, coordinates(plan.layout, i), None, {"tp": groups[i]})
        models.append(apply_plan(plan, spec, view, seed=seed, matmul=matmul))
        if not draws_alike(spec):
            models[-1].module.eval()
    found: list[dict[str, TensorDiff]] = [{} for _ in range(degree)]
    losses = [0.0] * degree
    ids_GT, labels_GT, positions_GT = batch
    shape = (plan.batch.accumulation, plan.batch.micro_batch, plan.batch.seq_len)
    positions_ABT = None if positions_GT is None else positions_GT.view(shape)
    valid = int((labels_GT != -100).sum())
    file = Path(reference.folder) / "step-0.safetensors"

    def shard(i: int) -> None:
        model = models[i]
        model.zero_grad()
        model.begin_step(1, torch.arange(plan.batch.global_batch).view(shape[:2]))
        loss = model.forward_backward(ids_GT.view(shape), labels_GT.view(shape), 1.0 / valid, positions_ABT)
        model.finish_gradients()
        if fault is not None:
            fault(model, 0)
        losses[i] = loss.item() / valid
        found[i] = compare(model.gradients(), "gradient", file, {}, model.part)

    _in_threads(degree, shard)
    diffs = relative(merge_ranks(found), reference.gradient_max[0], {})
    return {
        "loss_diff": abs(sum(losses) - reference.losses[0]),  # the loss is counted by one shard
        "max_rel_diff": max(diffs.values(), default=0.0),
        "worst": worst_of([diffs]),
    }


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(i)`` in a thread each and wait for all of them; raise the first error."""
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT.total_seconds() + 10.0)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a shard of the tensor axis did not finish in {TIMEOUT.total_seconds():.0f} s")
