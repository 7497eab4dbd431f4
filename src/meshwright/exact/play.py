"""One rank of a layout played through a whole step, by the runtime's own code."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.exact.stand_ins import Shapes, job_of, replace_peers
from meshwright.exact.timeline import Timeline, blocks_of, placed
from meshwright.exact.trace import Place, Trace
from meshwright.exact.values import WholeNumbers, faked
from meshwright.mesh.device_mesh import build_mesh
from meshwright.model.spec import ModelSpec
from meshwright.parallel.apply import ParallelModel, apply_plan, needs_tied_group
from meshwright.program.plan import Plan
from meshwright.train.memory import resting_bytes, watch_step
from meshwright.train.offload import make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import loss_scale_for
from meshwright.train.step import train_step


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings of the optimizer of a played step; only its kind changes what is held."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0


class Player:
    """Plays steps of one rank, one after the other, in a process that is given up afterwards."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        replace_peers(self.mode)

    def trace(self, plan: Plan, spec: ModelSpec, rank: int, *, gloo: bool) -> Trace:
        """Return the live bytes of one step of ``rank``, as if there had been steps before it.

        ``gloo``: collectives are gloo's.

        Raises:
            MeshwrightError: what the runtime refuses.
        """
        with job_of(plan.world_size, rank):
            return self._trace(plan, spec, rank, gloo)

    def _trace(self, plan: Plan, spec: ModelSpec, rank: int, gloo: bool) -> Trace:
        view = build_mesh(plan.layout, rank, tied=needs_tied_group(plan, spec))
        model = apply_plan(plan, spec, view, seed=0, played=Shapes(self.mode))
        offload = "optimizer" if plan.layout.offload == "optimizer-nvme" else plan.layout.offload
        self._fake_positions(model)
        blocks = blocks_of(model)
        with self.mode, WholeNumbers():
            optimizer = make_optimizer(
                model.trainable(), model.decays, Optimizer(), offload=offload, folder=None, rank=rank
            )
            _update_once(model, optimizer)
            batch = _batch(plan)
            timeline = Timeline(copies_input=gloo)
            with placed(timeline, model, blocks), watch_step(model, optimizer, batch, timeline):
                optimizer.register_step_pre_hook(lambda *_: timeline.at(Place("update")))
                train_step(
                    model,
                    optimizer,
                    *batch,
                    step=2,
                    rate=Rate(name="constant", peak=1e-3, warmup_steps=0, total_steps=2),
                    max_norm=1.0,
                    scale=loss_scale_for(plan.layout.precision),
                    on_gradients=lambda _: timeline.at(Place("norm")),
                )
            rest = resting_bytes(model, optimizer)
        return Trace(
            blocks=len(blocks[0]),
            micro_batches=plan.batch.accumulation,
            segments=dict(timeline.segments),
            rest_bytes=rest,
        )

    def _fake_positions(self, model: ParallelModel) -> None:
        """Make the positions that a rank holds fakes with values: those of a real rank count while they are used."""
        if model.dropout is not None:
            held = model.dropout.positions
            held |= {length: faked(self.mode, tensor) for length, tensor in held.items()}
        if model.context is None:
            return
        fakes = {
            name: faked(self.mode, getattr(model.context, name)) for name in ("positions", "position_ids")
        }
        model.context = replace(model.context, **fakes)
        for stage in model.stages.values():
            stage.position_ids = model.context.position_ids


def _update_once(model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """Leave what an earlier step leaves: the optimizer's state, and gradients until the next step drops them."""
    for p in model.trainable().values():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()


def _batch(plan: Plan) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, [accumulation, micro_batch, T] each: every position has a loss."""
    b = plan.batch
    inputs = torch.zeros(b.accumulation, b.micro_batch, b.seq_len, dtype=torch.int64)
    return inputs, torch.zeros_like(inputs)
