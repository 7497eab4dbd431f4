"""What one rank of our case runs (see ``ours.py``)."""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import Meter, batch, load_config
from tiny_llama import build

from meshwright import api
from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import apply_plan, needs_tied_group
from meshwright.program.make import make_plan
from meshwright.train.optim import Rate, build_optimizer
from meshwright.train.scale import LossScale
from meshwright.train.step import train_step


def hf_config(model: Any, seq_len: int) -> dict[str, Any]:
    """Return the ``config.json`` of the shared model."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": seq_len,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def engine(
    facts: RankFacts, layout_text: str, model: Any, train: Any, meter: Any, matmul: str = "machine"
) -> None:
    """Train through a plan."""
    spec = spec_from_config(hf_config(model, train.seq_len), "tiny-llama", "benchmark")
    layout = parse_layout(f"{layout_text},micro_batch={train.micro_batch},precision=fp32,loss=chunked")
    shared = layout.dp == 1  # every rank works on the same rows
    accumulation = layout.pp  # as many micro-batches as stages, as the plain pipeline has
    plan = make_plan(spec, layout, train.micro_batch * layout.dp * accumulation, train.seq_len, "benchmark")
    weights = {
        (n if n.startswith("lm_head") else f"model.{n}"): p.detach()
        for n, p in build(model, train).named_parameters()
    }
    view = build_mesh(plan.layout, facts.rank, tied=needs_tied_group(plan, spec))
    parts = apply_plan(plan, spec, view, seed=0, weights=weights, matmul=matmul)
    del weights
    settings = SimpleNamespace(
        name="adamw",
        lr=train.lr,
        weight_decay=train.weight_decay,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        momentum=0.0,
    )
    optimizer = build_optimizer(
        parts.trainable(), tuple(parts.trainable()), settings
    )  # all decay, as the peers'
    rate = Rate(name="constant", peak=train.lr, warmup_steps=0, total_steps=1)
    scale = LossScale()
    meter.start()
    for step in range(train.steps):
        rows = [batch(step, k if shared else facts.rank, model, train) for k in range(accumulation)]
        ids, labels = (torch.stack([r[i] for r in rows]) for i in range(2))
        result = train_step(
            parts, optimizer, ids, labels, step=step + 1, rate=rate, max_norm=None, scale=scale
        )
        meter.step(result.loss)


def loop(
    facts: RankFacts, layout_text: str, model: Any, train: Any, meter: Any, matmul: Any = "machine"
) -> None:
    """Train the shared module in the loop that every user writes."""

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [p for g in groups for p in g["params"]],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )

    wrapped, optimizer, _ = api.parallelize(
        build(model, train), f"{layout_text},precision=fp32", lr=train.lr, optimizer=make, matmul=matmul
    )
    meter.start()
    for step in range(train.steps):
        ids, labels = batch(step, facts.rank, model, train)
        loss = wrapped(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        meter.step(mean.item() / facts.world_size)


def on_rank(facts: RankFacts, args: argparse.Namespace) -> None:
    """Run this rank and write its file."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(facts.rank), str(facts.world_size)
    model, train = load_config()
    layout = parse_layout(args.layout)
    tokens = train.micro_batch * train.seq_len * layout.dp * layout.pp
    meter = Meter(f"ours {args.layout} {args.via}", train, tokens)
    (engine if args.via == "engine" else loop)(facts, args.layout, model, train, meter, args.matmul)
    meter.write(rss_imports_mb=args.rss_imports_mb)
