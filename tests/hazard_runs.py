"""A small model under any layout, for tests of single hazards: the product's own model, optimizer and step."""

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
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import ParallelModel, apply_plan, full_tensor, needs_tied_group
from meshwright.parallel.tied import local
from meshwright.program.make import make_plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.train.data import rank_rows
from meshwright.train.optim import Rate, build_optimizer
from meshwright.train.scale import LossScale
from meshwright.train.step import StepResult, train_step

MINI = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 37,
    "max_position_embeddings": 32,
}
TIED = MINI | {"tie_word_embeddings": True}
SEQ_LEN = 8
SGD = SimpleNamespace(name="sgd", lr=1.0, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


class Rig:
    """One rank's part of ``config`` under ``layout`` (fp64 unless the text says otherwise)."""

    def __init__(
        self,
        rank: int,
        layout: str,
        *,
        config: dict[str, Any] = MINI,
        global_batch: int = 4,
        seed: int = 0,
        freeze: tuple[str, ...] = (),
        optimizer: Any = SGD,
    ) -> None:
        text = layout if "precision" in layout else f"{layout},precision=fp64"
        self.rank = rank
        self.spec = spec_from_config(config, "mini")
        self.plan = make_plan(self.spec, parse_layout(text), global_batch, SEQ_LEN, "mini", frozen=freeze)
        self.view = build_mesh(self.plan.layout, rank, tied=needs_tied_group(self.plan, self.spec))
        self.model: ParallelModel = apply_plan(self.plan, self.spec, self.view, seed=seed)
        self.settings = optimizer
        self.optimizer = build_optimizer(self.model.trainable(), self.model.decays, optimizer)
        self.scale = LossScale()

    def rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a global batch [G, T], as [accumulation, micro_batch, T]."""
        batch = self.plan.batch
        rows = rank_rows(
            batch.global_batch, batch.micro_batch, batch.accumulation, batch.dp, self.view.dp_rank
        )
        return whole[torch.from_numpy(rows)]

    def step(
        self,
        number: int = 1,
        *,
        batch: tuple[Tensor, Tensor] | None = None,
        max_norm: float | None = None,
        on_gradients: Any = None,
    ) -> StepResult:
        """Run one update on this rank's rows of a global batch; without one, a batch that depends on ``number``."""
        inputs, labels = batch if batch is not None else tokens(self.plan.batch.global_batch, number)
        return train_step(
            self.model,
            self.optimizer,
            self.rows(inputs),
            self.rows(labels),
            step=number,
            rate=Rate(name="constant", peak=self.settings.lr, warmup_steps=0, total_steps=100),
            max_norm=max_norm,
            scale=self.scale,
            on_gradients=on_gradients,
        )

    @property
    def tied(self) -> dict[str, str]:
        """Return the second copies that this rank holds, with the names that fill them."""
        held = self.model.params
        return {t.name: t.tied_to for t in self.spec.tensors() if t.tied_to is not None and t.name in held}

    def save(self, folder: Path, step: int) -> Path:
        """Save a checkpoint below ``folder``; return its path."""
        return save_checkpoint(
            folder=folder,
            step=step,
            params=self.model.params,
            optimizer=self.optimizer,
            tied=self.tied,
            extra={"step": step},
            manifest={"plan": plan_to_dict(self.plan)},
            world_size=self.plan.world_size,
            rank=self.rank,
        )

    def load(self, path: Path, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Load a checkpoint into this rank's part (with another optimizer than its own, if given)."""
        return load_checkpoint(
            path=path, params=self.model.params, optimizer=optimizer or self.optimizer, tied=self.tied
        )

    def params(self) -> dict[str, Tensor]:
        """Return whole copies of this rank's parameters by name. Every rank of a shard group calls it."""
        return {n: full_tensor(p.detach()).clone() for n, p in self.model.params.items()}

    def local_params(self) -> dict[str, Tensor]:
        """Return copies of what this rank holds of its parameters."""
        return {n: local(p.detach()).clone() for n, p in self.model.params.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return whole copies of this rank's gradients by name. Every rank of a shard group calls it."""
        return {n: full_tensor(g.detach()).clone() for n, g in self.model.gradients().items()}


def tokens(global_batch: int, number: int = 1, valid: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs and labels [G, T]; row g has ``valid[g]`` labels (all without ``valid``), the rest -100."""
    whole = torch.randint(0, 37, (global_batch, SEQ_LEN + 1), generator=torch.Generator().manual_seed(number))
    inputs, labels = whole[:, :-1].contiguous(), whole[:, 1:].clone()
    for row, count in enumerate(valid or ()):
        labels[row, count:] = -100
    return inputs, labels


def set_norm(model: ParallelModel, norm: float) -> None:
    """Make this rank's gradients all equal, with the given norm over what it holds."""
    grads = [local(g) for g in model.gradients().values()]
    count = sum(g.numel() for g in grads)
    for g in grads:
        g.fill_(norm / count**0.5)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over the tensors of ``a`` from those of ``b`` by name."""
    return max((a[n] - b[n]).abs().max().item() for n in a if a[n].numel())
