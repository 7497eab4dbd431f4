"""One GPU: our training step beside a plain PyTorch loop over the same Hugging Face model, and beside its prediction.

    python benchmarks/gpu.py [--shapes 0.5b 1b 8b] [--steps 6] [--out FILE]

Every case is a process of its own, so that no case inherits another's memory. Per case: seconds per step (median,
spread of the middle 80 %), tokens/s, MFU with causal attention and no recompute counted, the allocator's peak, the loss
of the first step, and for ours the planner's prediction from the catalogue's H200 (or ``--cluster``). Cases of one group
do the same work: their first losses must agree, or the times say nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 32000},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Llama shapes; the last two are those of Llama 3.2 1B (head not tied here) and Llama 3.1 8B."""

CASES: tuple[tuple[str, str, int, int, str, str], ...] = (
    # shape, optimizer, seq_len, micro_batch, plain variant, our layout
    ("0.5b", "adamw", 2048, 8, "none", ""),
    ("0.5b", "adamw", 2048, 8, "", "recompute=none"),
    ("0.5b", "adamw", 2048, 8, "", "recompute=none,loss=chunked"),
    ("0.5b", "adamw", 2048, 8, "", "recompute=selective,loss=chunked"),
    ("0.5b", "adamw", 2048, 8, "", "recompute=full,loss=chunked"),
    ("1b", "adamw", 4096, 2, "none", ""),
    ("1b", "adamw", 4096, 2, "compile", ""),
    ("1b", "adamw", 4096, 2, "", "recompute=none"),
    ("1b", "adamw", 4096, 2, "", "recompute=none,loss=chunked"),
    ("1b", "adamw", 4096, 2, "", "recompute=none,loss=chunked,compile=blocks"),
    ("1b", "adamw", 4096, 2, "", "recompute=full,loss=chunked"),
    ("1b", "adamw", 4096, 2, "", "recompute=none,loss=chunked,offload=optimizer"),
    ("8b", "sgd", 4096, 1, "full", ""),
    ("8b", "sgd", 4096, 1, "", "recompute=full,loss=chunked"),
    ("8b", "adamw", 4096, 1, "full", ""),
    ("8b", "adamw", 4096, 1, "", "recompute=full,loss=chunked"),
)


def config_of(shape: str) -> dict[str, Any]:
    """Return the ``config.json`` of a shape."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        **SHAPES[shape],
    }


class Plain:
    """The loop that a user writes: autocast to bf16, transformers' own loss, clipping, a fused optimizer."""

    def __init__(self, config: dict[str, Any], variant: str, optimizer: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.torch = torch
        with torch.device("cuda"):
            hf = LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
            self.model: Any = LlamaForCausalLM._from_config(hf, attn_implementation="sdpa")
        self.model.float().train()
        self.model.load_state_dict(_drawn(config, "cuda"))
        if variant == "full":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.run = torch.compile(self.model) if variant == "compile" else self.model
        if optimizer == "adamw":
            self.optimizer: Any = torch.optim.AdamW(
                self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, ids: Any, labels: Any) -> float:
        """Do one update; return the loss."""
        torch = self.torch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.run(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


class Ours:
    """A plan of one rank."""

    def __init__(
        self, config: dict[str, Any], layout: str, optimizer: str, batch: int, seq_len: int, cluster: str
    ) -> None:
        from meshwright.cluster.load import read_cluster
        from meshwright.cost.predict import predict
        from meshwright.layout.parse import parse_layout
        from meshwright.mesh.device_mesh import build_mesh
        from meshwright.model.read_hf import spec_from_config
        from meshwright.parallel.apply import apply_plan
        from meshwright.program.make import make_plan
        from meshwright.schedule.text import parse_schedule
        from meshwright.train.offload import make_optimizer
        from meshwright.train.optim import Rate
        from meshwright.train.scale import LossScale

        spec = spec_from_config(config, "shape", "benchmark")
        wanted = parse_layout(f"dp=1,micro_batch={batch},precision=bf16,{layout}")
        plan = make_plan(spec, wanted, batch, seq_len, "shape")
        schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
        self.prediction = predict(spec, plan.layout, plan.batch, schedule, read_cluster(cluster, 1))
        self.model = apply_plan(
            plan, spec, build_mesh(plan.layout, 0, "cuda"), seed=0, weights=_drawn(config, "cpu")
        )
        settings = SimpleNamespace(
            name=optimizer, lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, momentum=0.0
        )
        self.optimizer = make_optimizer(
            self.model.trainable(),
            self.model.decays,
            settings,
            offload=plan.layout.offload,
            folder=Path("/tmp/offload"),
            rank=0,
        )
        self.rate = Rate(name="constant", peak=1e-4, warmup_steps=0, total_steps=1)
        self.scale = LossScale()
        self.count = 0

    def step(self, ids: Any, labels: Any) -> float:
        """Do one update; return the loss."""
        from meshwright.train.step import train_step

        self.count += 1
        result = train_step(
            self.model,
            self.optimizer,
            ids[None],
            labels[None],
            step=self.count,
            rate=self.rate,
            max_norm=1.0,
            scale=self.scale,
        )
        return result.loss


def _drawn(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the same initial weights for every case, drawn on the GPU: a CPU takes minutes at 8B."""
    import torch

    from meshwright.model.read_hf import spec_from_config

    generator = torch.Generator("cuda").manual_seed(0)
    out: dict[str, Any] = {}
    for tensor in spec_from_config(config, "shape", "benchmark").tensors():
        shape = tuple(tensor.shape)
        if len(shape) == 1:
            out[tensor.name] = torch.ones(shape, device=device)
        else:
            out[tensor.name] = (torch.randn(shape, device="cuda", generator=generator) * 0.02).to(device)
    return out


def run_case(args: argparse.Namespace) -> None:
    """Run one case and print its JSON."""
    import torch

    from meshwright.model.counts import flops_per_token
    from meshwright.model.read_hf import spec_from_config

    shape, optimizer, seq_len, batch, variant, layout = CASES[args.case]
    config = config_of(shape)
    begin = time.perf_counter()
    who: Any = (
        Plain(config, variant, optimizer)
        if variant
        else Ours(config, layout, optimizer, batch, seq_len, args.cluster)
    )
    torch.cuda.synchronize()
    built_s = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config["vocab_size"], (batch, seq_len + 1), generator=generator).cuda()
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses = [who.step(ids, labels) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(who.step(ids, labels))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    spec = spec_from_config(config, "shape", "benchmark")
    step_s = median(times)
    flops = flops_per_token(spec, seq_len).causal * batch * seq_len
    free, total = torch.cuda.mem_get_info()
    row: dict[str, Any] = {
        "group": f"{shape} {optimizer} {batch}x{seq_len}",
        "case": f"plain {variant}" if variant else layout,
        "step_s": step_s,
        "spread_s": quantiles(times, n=10)[-1] - quantiles(times, n=10)[0],
        "tokens_per_s": batch * seq_len / step_s,
        "mfu_pct": 100.0 * flops / step_s / args.peak_flops,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
        "losses": losses[:3],
        "built_s": built_s,
    }
    if not variant:
        row |= {
            "predicted_step_s": who.prediction.step_time_s,
            "predicted_peak_bytes": who.prediction.peak_memory_bytes,
            "predicted_memory": who.prediction.memory.as_dict(),
            "predicted_time": who.prediction.time.as_dict(),
        }
    print("ROW " + json.dumps(row), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cluster", default="h200-x8")
    parser.add_argument("--peak-flops", type=float, default=989e12, help="dense bf16 peak of the device")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--out", default="")
    parser.add_argument("--case", type=int, default=None, help="run one case in this process")
    args = parser.parse_args()
    if args.case is not None:
        run_case(args)
        return
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        if case[0] not in args.shapes:
            continue
        command = [sys.executable, __file__, "--case", str(number), "--steps", str(args.steps)]
        command += ["--cluster", args.cluster, "--peak-flops", str(args.peak_flops)]
        name = f"{case[0]} {case[1]} {case[3]}x{case[2]} {'plain ' + case[4] if case[4] else case[5]}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit_s, check=False)
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            text = f"stopped after {args.limit_s:.0f} s"
        found = [line for line in text.splitlines() if line.startswith("ROW ")]
        if not found:
            error = next((x for x in reversed(text.splitlines()) if "Error" in x), text[-300:])
            rows.append({"group": name, "error": error})
            print(f"{name:<70} {error[:200]}", flush=True)
            continue
        row = json.loads(found[0][4:])
        rows.append(row)
        line = (
            f"{name:<70} {row['step_s'] * 1e3:8.1f} ms  MFU {row['mfu_pct']:5.1f} %  "
            f"peak {row['peak_bytes'] / 2**30:6.2f} GiB  loss {row['losses'][0]:.4f}"
        )
        if "predicted_step_s" in row:
            line += (
                f"  predicted {row['predicted_step_s'] * 1e3:8.1f} ms ({_off(row, 'step_s')})"
                f" {row['predicted_peak_bytes'] / 2**30:6.2f} GiB ({_off(row, 'peak_bytes')})"
            )
        print(line, flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _off(row: dict[str, Any], name: str) -> str:
    return f"{100 * (row['predicted_' + name] / row[name] - 1):+.1f} %"


if __name__ == "__main__":
    main()
