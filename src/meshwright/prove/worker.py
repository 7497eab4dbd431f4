"""What one rank does in a proof: run the plan's step on its rows and compare each result with the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.base.axes import TIED
from meshwright.mesh.device_mesh import build_mesh
from meshwright.model.randomness import at_rest, draws_alike
from meshwright.model.spec import ModelSpec
from meshwright.parallel.apply import ParallelModel, apply_plan, needs_tied_group
from meshwright.parallel.compiled import PROOF_BACKEND
from meshwright.parallel.placement import check_placement
from meshwright.parallel.record import CollectiveRecorder
from meshwright.parallel.tied import local
from meshwright.program.derive import derive
from meshwright.program.plan import Plan
from meshwright.program.step import LedgerLine, ledger
from meshwright.prove.parity import TensorDiff, compare
from meshwright.prove.reference import Reference, TokenBatch
from meshwright.schedule.text import parse_schedule
from meshwright.train.data import rank_rows
from meshwright.train.offload import close_optimizer, make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import loss_scale_for
from meshwright.train.step import train_step

Fault = Callable[[ParallelModel, int], None]
"""A planted mistake: changes a rank's finished gradients at a step (tests of the proof itself)."""


@dataclass(frozen=True, kw_only=True)
class ProofTask:
    """What every rank of a proof is given."""

    plan: Plan
    spec: ModelSpec
    reference: Reference
    batches: Sequence[TokenBatch]
    optimizer: Any
    rate: Rate
    max_norm: float | None
    seed: int
    weights: Mapping[str, Tensor] | None = None
    fault: Fault | None = None
    matmul: str = "machine"


@dataclass(frozen=True, kw_only=True)
class RankProof:
    """What one rank found."""

    rank: int
    stage_of: dict[str, int]
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, TensorDiff]]
    weights: list[dict[str, TensorDiff]]
    missing: list[str]
    tied_copies_equal: bool
    expected: tuple[LedgerLine, ...]
    recorded: tuple[LedgerLine, ...]
    order_matches: bool
    placement: dict[str, Any]


def prove_rank(rank: int, task: ProofTask, at: Callable[..., None], device_type: str = "cpu") -> RankProof:
    """Run all steps of ``task`` on this rank. ``at(step=..., action=...)`` reports where it is."""
    plan, spec = task.plan, task.spec
    view = build_mesh(plan.layout, rank, device_type, tied=needs_tied_group(plan, spec))
    at(coordinates=" ".join(f"{a}={c}" for a, c in view.coords.items()), step=0, action="build")
    model = apply_plan(
        plan,
        spec,
        view,
        seed=task.seed,
        weights=task.weights,
        on_action=lambda action: at(action=action),
        compile_backend=PROOF_BACKEND,
        offload_dir=Path(task.reference.folder) / "offload",
        matmul=task.matmul,
    )
    if not draws_alike(spec):
        model.module.eval()
    placement = check_placement(spec, view, model.placeable(), model.stage_of)
    optimizer = make_optimizer(
        model.trainable(),
        model.decays,
        task.optimizer,
        offload=plan.layout.offload,
        folder=Path(task.reference.folder) / "offload",
        rank=rank,
        on_updated=model.put_away,
    )
    scale = loss_scale_for(plan.layout.precision)
    rename = {t.name: t.tied_to for t in spec.tensors() if t.tied_to is not None and t.name in model.params}
    rows = torch.from_numpy(
        rank_rows(
            plan.batch.global_batch,
            plan.batch.micro_batch,
            plan.batch.accumulation,
            plan.layout.dp,
            view.dp_rank,
        )
    )
    losses: list[float] = []
    norms: list[float] = []
    gradients: list[dict[str, TensorDiff]] = []
    weights: list[dict[str, TensorDiff]] = []
    missing: set[str] = set()
    recorder = CollectiveRecorder(view.group_names())
    order_matches = True
    for k, (inputs_GT, labels_GT, positions_GT) in enumerate(task.batches):
        at(step=k + 1, action="start")
        rows_of = inputs_GT[rows].to(view.device), labels_GT[rows].to(view.device)
        file = Path(task.reference.folder) / f"step-{k}.safetensors"
        found: dict[str, TensorDiff] = {}

        def on_gradients(model: ParallelModel, k: int = k, file: Path = file, found: Any = found) -> None:
            if task.fault is not None:
                task.fault(model, k)
            got = model.gradients()
            missing.update(model.without_gradient())
            unscaled = got if scale.value == 1.0 else {n: g / scale.value for n, g in got.items()}
            found.update(compare(unscaled, "gradient", file, rename, model.part))

        last = k == len(task.batches) - 1
        context = recorder if last else None
        arguments: dict[str, Any] = {
            "step": k + 1,
            "rate": task.rate,
            "max_norm": task.max_norm,
            "scale": scale,
            "on_gradients": on_gradients,
            "positions_ABT": None if positions_GT is None else positions_GT[rows].to(view.device),
        }
        if context is not None:
            with context:
                result = train_step(model, optimizer, *rows_of, **arguments)
        else:
            result = train_step(model, optimizer, *rows_of, **arguments)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        gradients.append(found)
        weights.append(compare(model.params, "weight", file, rename, model.part))
        for name, packed in model.packed.items():  # one unpacked at a time
            weights[-1] |= compare({name: packed.weight(torch.float64)}, "weight", file, rename, model.part)
        order_matches = order_matches and model.executed == _expected_order(plan, view.pp_rank)
    close_optimizer(optimizer)
    model.close()
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    ran = spec if draws_alike(spec) else at_rest(spec)  # dropout that rests leaves no mask to wait for
    program = derive(ran, plan.layout, plan.batch, schedule, rank, frozen=plan.frozen)
    return RankProof(
        rank=rank,
        stage_of=model.stage_of,
        losses=losses,
        norms=norms,
        gradients=gradients,
        weights=weights,
        missing=sorted(missing),
        tied_copies_equal=_tied_equal(model),
        expected=ledger((c.kind, c.axis, c.num_bytes) for c in program.collectives),
        recorded=ledger((r.kind, r.axis, r.num_bytes) for r in recorder.records),
        order_matches=order_matches,
        placement=placement,
    )


def _expected_order(plan: Plan, pp_rank: int) -> list[str]:
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    return [str(a) for a in schedule.rows[pp_rank]]


def _tied_equal(model: ParallelModel) -> bool:
    """Return whether both ends of a tied pair hold the same bits. Communication: one all_reduce on ``tied``."""
    if model.tied_pair is not None:
        one, other = (local(p.detach()) for p in model.tied_pair)
        return bool(torch.equal(one, other))
    if model.tied_weight is None:
        return True
    import torch.distributed as dist

    mine = local(model.tied_weight.detach()).clone()
    high, low = mine.clone(), mine.clone()
    group = model.view.groups[TIED]
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    return bool(torch.equal(high, low))
