"""The Python API: the same path as the command line.

``plan`` chooses a layout; ``parallelize`` makes a user's own module follow one (DDP and ZeRO on any module with
repeated blocks); ``rank_info`` says what a rank must know; ``inspect`` describes any module or config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.layout.layout import Layout
from meshwright.program.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn


def plan(
    model: str,
    *,
    seq_len: int,
    global_batch: int,
    layout: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    fix: str = "",
    objective: str = "time",
    precision: str | None = None,
) -> Plan:
    """Return the plan of a layout text, or the best plan that the search finds on ``cluster``.

    Args:
        model: folder or file of a Hugging Face config.json, or a name from ``meshwright models``.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step over the whole job.
        layout: layout text; then nothing is searched.
        cluster: name from ``meshwright clusters`` or a probe's file; needed without ``layout``.
        gpus: ranks to use; one node when not given.
        fix: layout text whose keys the search must keep.
        objective: "time", "memory" or "cost".
        precision: pins the compute precision.

    Raises:
        MeshwrightError: every Problem of the input at once; E4xx with the nearest misses when nothing fits.
    """
    from meshwright.cluster.load import read_cluster
    from meshwright.model.read_hf import read_model
    from meshwright.program.make import make_plan

    spec = read_model(model)
    if layout is not None:
        from meshwright.layout.batch import derive_batch
        from meshwright.layout.check import check
        from meshwright.layout.parse import parse_layout

        wanted = parse_layout(layout)
        refuse(check(spec, wanted, derive_batch(wanted, global_batch, seq_len), for_run=True))
        return make_plan(spec, wanted, global_batch, seq_len, model)
    if cluster is None:
        raise MeshwrightError(problem("E553", where="plan", found="neither layout nor cluster is given"))
    from meshwright.cost.machine_fit import calibrated
    from meshwright.mesh.env import cache_folder
    from meshwright.search.search import search

    where, _ = calibrated(read_cluster(cluster, gpus), cache_folder())
    found = search(
        spec,
        where,
        seq_len,
        global_batch,
        fix=fix,
        objective=objective,
        precision=precision,
        top=1,
        model_path=model,
    )
    if not found.plans:
        miss = found.misses[0] if found.misses else None
        raise MeshwrightError(
            problem(
                "E555",
                where="plan",
                found=f"none of {found.legal} legal layouts fits on {where.num_gpus} x {where.device.name}"
                + (f"; nearest: {miss.layout.text()}" if miss is not None else ""),
                do=miss.why[0] if miss is not None and miss.why else "",
            ),
            ExitCode.NO,
        )
    return found.plans[0]


def inspect(model: Any, seq_len: int | None = None) -> dict[str, Any]:
    """Return the description of a model: a module, or a config as for ``meshwright inspect``.

    For an ``nn.Module``: parameters (a shared one once), trainable ones, bytes, dtypes, the list of repeated
    blocks with parameters per block, what lies outside them, tied parameters, and flags.
    """
    if isinstance(model, str):
        from meshwright.model.describe import describe
        from meshwright.model.read_hf import read_model

        return describe(read_model(model), seq_len)
    from meshwright.parallel.module import describe_module

    return describe_module(model)


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What a rank must know.

    Attributes:
        rank: number in the job.
        world_size: ranks in the job.
        local_rank: index of its device within its node.
        coordinates: position on every axis of the mesh.
        groups: for each axis, the ranks that differ from this one on that axis only.
        stage: its pipeline stage.
        num_stages: pipeline stages in all.
        is_first_stage: whether it takes token ids.
        is_last_stage: whether it computes the loss.
    """

    rank: int
    world_size: int
    local_rank: int
    coordinates: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    stage: int
    num_stages: int
    is_first_stage: bool
    is_last_stage: bool


def rank_info(layout: Layout | Plan | str, rank: int | None = None) -> RankInfo:
    """Return who a rank is under ``layout``; ``rank`` defaults to the one that torchrun gave this process.

    Raises:
        MeshwrightError: E110-E119 for an unreadable layout, E454 for a rank outside it.
    """
    from meshwright.base.axes import MESH_AXES
    from meshwright.layout.parse import parse_layout
    from meshwright.layout.ranks import coordinates, group
    from meshwright.mesh.env import torchrun_facts

    if isinstance(layout, str):
        layout = parse_layout(layout)
    elif isinstance(layout, Plan):
        layout = layout.layout
    facts = torchrun_facts()
    number = rank if rank is not None else (facts.rank if facts is not None else 0)
    if not 0 <= number < layout.world_size:
        raise MeshwrightError(
            problem(
                "E454",
                where="rank",
                found=f"rank {number} of a layout with {layout.world_size} ranks",
                needs=f"0 <= rank < {layout.world_size}",
                do=f"rank 0 to {layout.world_size - 1}",
            )
        )
    coords = coordinates(layout, number)
    return RankInfo(
        rank=number,
        world_size=layout.world_size,
        local_rank=facts.local_rank if facts is not None and rank is None else number,
        coordinates=dict(coords),
        groups={axis: tuple(group(layout, number, axis)) for axis in MESH_AXES},
        stage=coords["pp"],
        num_stages=layout.num_stages,
        is_first_stage=coords["pp"] == 0,
        is_last_stage=coords["pp"] == layout.pp - 1,
    )


def parallelize(
    model: nn.Module,
    plan: Plan | Layout | str,
    *,
    lr: float = 3e-4,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    optimizer: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    rate: Callable[[int], float] | None = None,
    blocks: str | None = None,
    matmul: Literal["machine", "torch"] = "machine",
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return (model, optimizer, scheduler) for a user's own loop.

    The loop takes the mean over its own rank's tokens, as with DDP; gradients are averaged over the data-parallel
    ranks. Accumulate with ``with model.no_sync():`` around all but the last backward. Call it on every rank after
    ``torch.distributed.init_process_group``; rank 0's weights are sent to all.

    Args:
        model: any module with a list of repeated blocks.
        plan: a plan, layout or layout text with dp, zero and shard; other axes are refused (use ``meshwright train``).
        lr: peak learning rate.
        weight_decay: decay of matrices; norms and biases have none.
        betas: AdamW's averages.
        eps: AdamW's denominator term.
        optimizer: makes the optimizer from parameter groups; AdamW when not given.
        rate: factor on ``lr`` for a step counted from 0; constant when not given.
        blocks: dotted path of the block list when it cannot be found.
        matmul: who multiplies float32 matrices on a CPU, in this process and as long as the model lives: oneDNN where
            torch's own library leaves the processor's widest instructions unused ("machine"), or that library ("torch").

    Communication: broadcasts of the weights now; each step as the ZeRO stage says.

    Raises:
        MeshwrightError: E549 no blocks, E900 an axis that a user's own loop cannot have yet, E501 wrong world size.
    """
    from meshwright.parallel.module import parallelize_module

    return parallelize_module(
        model,
        plan,
        lr=lr,
        weight_decay=weight_decay,
        betas=betas,
        eps=eps,
        optimizer=optimizer,
        rate=rate,
        blocks=blocks,
        matmul=matmul,
    )
