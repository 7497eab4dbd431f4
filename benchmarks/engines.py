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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.mesh.launch import run_local
from meshwright.model.read_hf import read_model
from meshwright.parallel.apply import apply_plan
from meshwright.parallel.build import build_model
from meshwright.program.make import make_plan
from meshwright.train.optim import Rate, build_optimizer
from meshwright.train.scale import LossScale
from meshwright.train.step import train_step

MODEL = "recipes/models/tiny-llama"
SEQ_LEN = 128
PAIRS = (("torch-ddp", "dp={n},zero=0"), ("torch-fsdp2", "dp={n},zero=3"))


@dataclass(frozen=True)
class Settings:
    """Optimizer settings that both sides use."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0


def plain(kind: str, accumulation: int) -> Any:
    """Return a step of plain PyTorch: DDP or FSDP2 by block, mean loss, clip_grad_norm_, fused AdamW."""
    spec = read_model(MODEL)
    model: Any = build_model(dict(spec.config), seed=0)
    world = dist.get_world_size()
    if kind == "torch-ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=False)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    params = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / world

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
        cases[name] = ours(name, rank, batch)
    generator = torch.Generator().manual_seed(1000 + rank)
    tokens = torch.randint(0, 2048, (accumulation, 1, SEQ_LEN + 1), generator=generator)
    inputs, labels = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    out: dict[str, Any] = {name: {"times": [], "losses": []} for name in cases}
    for number in range(num_rounds + 1):
        for name, step in cases.items():
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            losses = [step(inputs, labels) for _ in range(steps)]
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
    parser.add_argument("--accumulation", type=int, default=1)
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
