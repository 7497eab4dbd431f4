"""Our training step beside plain PyTorch's, on the same model, tokens, optimizer and ranks, in one run.

    python benchmarks/engines.py [--rounds 10] [--steps 4] [--ranks 2]

Cases take turns within every round, so a busy moment does not fall on one of them alone. Printed per pair: the median
over rounds of the ratio of processor seconds per step (all ranks) and of wall seconds per step, with the range of the
middle 80 %. A ratio below 1 means that ours needs less. Losses must agree, or the times say nothing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.mesh.launch import run_local
from meshwright.model.read_hf import read_model
from meshwright.parallel.apply import apply_plan
from meshwright.parallel.build import build_model
from meshwright.parallel.stage import cut_stage
from meshwright.program.make import make_plan
from meshwright.train.optim import Rate, build_optimizer
from meshwright.train.scale import LossScale
from meshwright.train.step import train_step

MODEL = "recipes/models/tiny-llama"
SEQ_LEN = 128
PAIRS = (
    ("torch-ddp", "dp={n},zero=0"),
    ("torch-fsdp2", "dp={n},zero=3"),
    ("torch-tp", "tp={n},sp=off,loss=chunked"),
    ("torch-pp", "pp={n},loss=chunked"),
)
SHARED_ROWS = ("torch-tp", "torch-pp")
"""Cases whose ranks work on the same rows."""


@dataclass(frozen=True)
class Settings:
    """Optimizer settings that both sides use."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0


def over_tensors(model: Any, world: int) -> None:
    """Cut a Llama as PyTorch's tensor-parallel tutorial does: columns, then rows; the head's logits gathered."""
    mesh = init_device_mesh("cpu", (world,))
    inner = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    inner |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    inner["mlp.down_proj"] = RowwiseParallel()
    for block in model.model.layers:
        parallelize_module(block, mesh, inner)
    ends: Any = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def plain_pipeline(model: Any, accumulation: int) -> Any:
    """Return a step of torch's own 1F1B over stages of equal blocks."""
    spec = read_model(MODEL)
    rank, world = dist.get_rank(), dist.get_world_size()
    each, left = divmod(spec.num_layers, world)
    stage_module = cut_stage(model, spec, [each + (i < left) for i in range(world)], rank, torch.float32)
    stage = PipelineStage(_Logits(stage_module), rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        n_microbatches=accumulation,
        loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    )
    optimizer = _adamw(stage_module)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs.flatten(0, 1))
        elif rank == world - 1:
            schedule.step(target=labels.flatten(0, 1), losses=losses)
        else:
            schedule.step()
        params = [p for p in stage_module.parameters() if p.grad is not None]
        square = torch.stack([p.grad.square().sum() for p in params if p.grad is not None]).sum()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(params, 1.0, square.sqrt())
        optimizer.step()
        total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item()

    return step


def clip(model: Any) -> None:
    """Clip the norm to 1; torch's function refuses plain and sharded gradients together, so each kind is summed apart."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    kinds = [[g for g in grads if isinstance(g, DTensor)], [g for g in grads if not isinstance(g, DTensor)]]
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    factor = (1.0 / (torch.stack(whole).norm() + 1e-6)).clamp(max=1.0).item()
    for kind in kinds:
        if kind and factor < 1.0:
            torch._foreach_mul_(kind, factor)


class _Logits(torch.nn.Module):
    """A stage of the user's model without our loss: hidden states or logits."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x)


def _adamw(model: Any) -> torch.optim.Optimizer:
    params = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def plain(kind: str, accumulation: int) -> Any:
    """Return a step of plain PyTorch: mean loss, clip_grad_norm_, fused AdamW."""
    spec = read_model(MODEL)
    model: Any = build_model(dict(spec.config), seed=0)
    world = dist.get_world_size()
    if kind == "torch-pp":
        return plain_pipeline(model, accumulation)
    if kind == "torch-tp":
        over_tensors(model, world)
    elif kind == "torch-ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=False)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = _adamw(model)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for k in range(accumulation):
            last = k == accumulation - 1
            if kind == "torch-ddp":
                model.require_backward_grad_sync = last
            logits = model(input_ids=inputs[k], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels[k].flatten()) / accumulation
            loss.backward()
            total += loss.detach()
        clip(model)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / world  # the same on all ranks of a tensor axis

    return step


def ours(layout: str, rank: int, global_batch: int) -> Any:
    """Return a step of our own."""
    spec = read_model(MODEL)
    plan = make_plan(spec, parse_layout(f"{layout},precision=fp32"), global_batch, SEQ_LEN, MODEL)
    model = apply_plan(plan, spec, build_mesh(plan.layout, rank), seed=0)
    optimizer = build_optimizer(model.trainable(), model.decays, Settings())
    rate = Rate(name="constant", peak=1e-3, warmup_steps=0, total_steps=1)
    count = [0]

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        count[0] += 1
        result = train_step(
            model, optimizer, inputs, labels, step=count[0], rate=rate, max_norm=1.0, scale=LossScale()
        )
        return result.loss

    return step


def rounds_of(rank: int, world: int, num_rounds: int, steps: int, accumulation: int) -> dict[str, Any]:
    """Run all cases on this rank; return (cpu_s, wall_s) per step and round, and the losses, by case."""
    batch = world * accumulation
    cases: dict[str, Any] = {}
    for kind, layout in PAIRS:
        cases[kind] = plain(kind, accumulation)
        name = layout.format(n=world)
        cases[name] = ours(name, rank, accumulation if kind in SHARED_ROWS else batch)
    rows: dict[str, Any] = {}
    for name in cases:
        shared = name.startswith(("torch-tp", "torch-pp", "tp=", "pp="))
        generator = torch.Generator().manual_seed(1000 + (0 if shared else rank))
        tokens = torch.randint(0, 2048, (accumulation, 1, SEQ_LEN + 1), generator=generator)
        rows[name] = (tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
    out: dict[str, Any] = {name: {"times": [], "losses": []} for name in cases}
    for number in range(num_rounds + 1):
        for name, step in cases.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            losses = [step(*rows[name]) for _ in range(steps)]
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number:  # the first round warms up
                out[name]["times"].append((cpu / steps, wall / steps))
            out[name]["losses"] += losses
    return out


def on_rank(facts: RankFacts, args: argparse.Namespace) -> dict[str, Any]:
    """Run this rank's part."""
    return rounds_of(facts.rank, facts.world_size, args.rounds, args.steps, args.accumulation)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    ranks = run_local(on_rank, args.ranks, args, timeout_s=1800.0, preload=("transformers",))
    for kind, layout in PAIRS:
        name = layout.format(n=args.ranks)
        a, b = ranks[0][name]["losses"][0], ranks[0][kind]["losses"][0]
        print(f"{name} / {kind}: first loss {a:.6f} and {b:.6f}")
        for index, what in enumerate(("processor s per step", "wall s per step")):
            ratios = []
            for k in range(args.rounds):
                mine = sum(r[name]["times"][k][index] for r in ranks)
                theirs = sum(r[kind]["times"][k][index] for r in ranks)
                ratios.append(mine / theirs)
            low, high = (
                (quantiles(ratios, n=10)[0], quantiles(ratios, n=10)[-1]) if len(ratios) > 1 else (0, 0)
            )
            seconds = median(sum(r[name]["times"][k][index] for r in ranks) for k in range(args.rounds))
            print(
                f"  {what:<22} ratio {median(ratios):.3f}  (80 %: {low:.3f} to {high:.3f})   ours {seconds:.4f}"
            )


if __name__ == "__main__":
    main()
