"""Small runs that save and load: the product's own model, optimizer and step, on fixed batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.save import save_checkpoint
from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.model.adapters import adapted
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import AdapterSpec
from meshwright.parallel.apply import ParallelModel, apply_plan, full_tensor, needs_tied_group
from meshwright.program.make import make_plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.train.loop import _placing
from meshwright.train.optim import Rate, build_optimizer
from meshwright.train.scale import loss_scale_for
from meshwright.train.step import train_step

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 18,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 26,
    "vocab_size": 37,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
"""Odd sizes on purpose: no row count but 18 is divided by 2, none by 4."""

TIED = LLAMA | {"tie_word_embeddings": True}
GLOBAL_BATCH, SEQ_LEN = 8, 8
ADAMW = SimpleNamespace(name="adamw", lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)
SGD = SimpleNamespace(name="sgd", lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, momentum=0.9)


class Run:
    """One rank's part of a run of ``config`` under ``layout``."""

    def __init__(
        self,
        rank: int,
        config: dict[str, Any],
        layout: str,
        *,
        seed: int,
        optimizer: Any = ADAMW,
        adapter: AdapterSpec | None = None,
    ) -> None:
        self.rank = rank
        self.spec = adapted(spec_from_config(config, "small"), adapter)
        self.plan = make_plan(self.spec, parse_layout(layout), GLOBAL_BATCH, SEQ_LEN, "small")
        view = build_mesh(self.plan.layout, rank, tied=needs_tied_group(self.plan, self.spec))
        self.model: ParallelModel = apply_plan(self.plan, self.spec, view, seed=seed)
        self.optimizer = build_optimizer(self.model.trainable(), self.model.decays, optimizer)
        self.scale = loss_scale_for(self.plan.layout.precision)
        self.rate = Rate(name="constant", peak=optimizer.lr, warmup_steps=0, total_steps=100)

    @property
    def tied(self) -> dict[str, str]:
        return {
            t.name: t.tied_to
            for t in self.spec.tensors()
            if t.tied_to is not None and t.name in self.model.params
        }

    def train(self, first: int, last: int) -> float:
        """Run updates ``first`` to ``last``; the batch of an update depends on its number only."""
        loss, batch = 0.0, self.plan.batch
        for step in range(first, last + 1):
            tokens = torch.randint(
                0, 37, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
            )
            mine = tokens.view(self.plan.layout.dp, batch.accumulation, batch.micro_batch, SEQ_LEN + 1)
            mine = mine[self.model.view.dp_rank]
            result = train_step(
                self.model,
                self.optimizer,
                mine[..., :-1].contiguous(),
                mine[..., 1:].contiguous(),
                step=step,
                rate=self.rate,
                max_norm=1.0,
                scale=self.scale,
            )
            loss = result.loss
        return loss

    def save(self, folder: Path, step: int, **extra: Any) -> Path:
        return save_checkpoint(
            folder=folder,
            step=step,
            params=self.model.params,
            optimizer=self.optimizer,
            tied=self.tied,
            extra={"step": step, "plan_hash": self.plan.hash} | extra,
            manifest={"plan": plan_to_dict(self.plan), "versions": {"torch": torch.__version__}},
            world_size=self.plan.world_size,
            rank=self.rank,
            place=_placing(self.model),
        )

    def load(self, path: Path, **options: Any) -> dict[str, Any]:
        return load_checkpoint(
            path=path,
            params=self.model.params,
            optimizer=self.optimizer,
            tied=self.tied,
            place=_placing(self.model),
            **options,
        )

    def state(self) -> dict[str, Tensor]:
        """Return this rank's parameters and optimizer state by name and entry, whole but for the tensor axis."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.model.params.items():
            out[name] = full_tensor(parameter.detach()).clone()
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{name}/{entry}"] = full_tensor(value).clone()
        return out


def same(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(one, two))


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Return the names of ``got`` whose tensors are not bit for bit those of ``want`` (a tied head: the embedding)."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in want:
        return [n for n, t in got.items() if n not in want or not same(t, want[n])]
    names = {n: n.replace(head, embedding) for n in got}
    return [n for n, t in got.items() if names[n] not in want or not same(t, want[names[n]])]
