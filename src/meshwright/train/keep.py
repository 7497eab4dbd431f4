"""A run's checkpoints: what is stored beside the tensors, saving (beside the training or not), and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.base.errors import Problem, problem, refuse
from meshwright.checkpoint.background import BackgroundWriter, writer_ranks
from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.manifest import step_name, why_incomplete
from meshwright.checkpoint.retain import Retention, retain
from meshwright.checkpoint.save import capture
from meshwright.checkpoint.state import Place
from meshwright.train.guards import Spikes
from meshwright.train.offload import OffloadedAdamW
from meshwright.train.optim import Rate
from meshwright.train.randomness import SCHEME
from meshwright.train.scale import LossScale
from meshwright.train.task import TrainTask

RESUMED = (
    "step",
    "seed",
    "seq_len",
    "loss_scale",
    "data_position",
    "data_hash",
    "plan_hash",
    "rng",
    "schedule",
    "best",
)
"""What a checkpoint's ``extra`` holds beside tensors. The learning rate and all random numbers are functions of step and
seed, so their settings are stored and no state is. ``recent`` (what guards compare with) may be missing."""


@dataclass
class Best:
    """The lowest held-out loss of a run so far, and the step it was measured after."""

    eval_loss: float | None = None
    step: int | None = None

    def update(self, step: int, eval_loss: float | None) -> None:
        """Take the held-out loss after ``step`` (the same number on every rank)."""
        if eval_loss is not None and (self.eval_loss is None or eval_loss < self.eval_loss):
            self.eval_loss, self.step = eval_loss, step


@dataclass
class Keeper:
    """Saves and restores one rank's part of a run.

    Attributes:
        spikes: the losses that the guard against spikes compares with.
        empty_in_row: steps in a row that had no token with a loss.
        base: what tells a base in 4 bits from another, which a checkpoint does not hold; "" where there is none.
        finished: steps whose checkpoints have their names since ``news`` was last asked, and what retention removed.
    """

    task: TrainTask
    rank: int
    params: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    tied: Mapping[str, str]
    place: Place | None
    scale: LossScale
    rate: Rate
    spikes: Spikes
    base: str = ""
    empty_in_row: int = 0
    best: Best = field(default_factory=Best)
    finished: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])

    def __post_init__(self) -> None:
        """Make the writer. Communication: creates a process group."""
        self._writer = BackgroundWriter(writer_ranks(self.rank, self.task.plan.world_size))
        self._started: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self.task.run_dir / "checkpoints"

    def save(self, step: int, eval_loss: float | None, *, wait: bool) -> None:
        """Save the state after ``step``; return when it is copied, or with ``wait`` when it has its name.

        A checkpoint of this step that this run just wrote, or started from, is not written again.

        Raises:
            MeshwrightError: E277 for offloaded state that is not what was written; E703, E704 and others of writing; of
                an earlier save that went on beside the training too.
        """
        if self._started != step:
            run = self.task.run.run
            rule = Retention(last=run.keep_last, every=run.keep_every, best=run.keep_best)

            def after(path: Path) -> None:
                if self.rank == 0:
                    self.finished.append((step, retain(path.parent, rule)))

            if isinstance(self.optimizer, OffloadedAdamW):
                self.optimizer.verify()
            self._writer.start(
                folder=self.folder,
                step=step,
                captured=capture(self.params, self.optimizer, self.tied, self.place),
                extra=self.extra(step, eval_loss),
                manifest=self.task.manifest,
                after=after,
            )
            self._started = step
        if wait or not self.task.run.run.checkpoint_async:
            self._writer.wait()

    @property
    def stall_s(self) -> float:
        """How long the last save kept the training waiting before it went on beside it."""
        return self._writer.stall_s

    def news(self) -> list[tuple[int, list[int]]]:
        """Return (step, removed steps) of the saves that ended since the last call (rank 0; elsewhere none)."""
        told, self.finished = self.finished, []
        return told

    def extra(self, step: int, eval_loss: float | None) -> dict[str, Any]:
        """Return what a checkpoint after ``step`` holds beside the tensors (``RESUMED``, and its held-out loss)."""
        plan, scale = self.task.plan, self.scale
        return {
            "step": step,
            "seed": self.task.run.run.seed,
            "seq_len": plan.batch.seq_len,
            "loss_scale": {
                "value": scale.value,
                "good_steps": scale.good_steps,
                "skipped_in_row": scale.skipped_in_row,
            },
            "data_position": step * plan.batch.global_batch,
            "data_hash": self.task.data.hash,
            "plan_hash": plan.hash,
            "rng": {"scheme": SCHEME, "seed": self.task.run.run.seed},
            "schedule": asdict(self.rate),
            "best": asdict(self.best),
            "recent": {"losses": self.spikes.losses(), "empty_in_row": self.empty_in_row},
            "eval_loss": eval_loss,
            **({"base": self.base} if self.base else {}),
        }

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Load the checkpoint of the task into this rank's part; return the step it was saved after and its ``extra``.

        Raises:
            MeshwrightError: what ``load_checkpoint`` and ``check_resumed`` find; E288 for factors of another base.
        """
        path = self.task.resume_from
        assert path is not None
        extra = load_checkpoint(
            path=path, params=self.params, optimizer=self.optimizer, tied=self.tied, place=self.place
        )
        refuse(check_resumed(extra, self.task))
        if extra.get("base", "") != self.base:
            saved, here = (base or "not in 4 bits" for base in (extra.get("base"), self.base))
            found = f"the checkpoint's base is {saved}, this run's is {here}"
            refuse([problem("E288", where=str(path), found=found)])
        if isinstance(self.optimizer, OffloadedAdamW):
            self.optimizer.seal()
        saved = extra["loss_scale"]
        self.scale.value, self.scale.good_steps = saved["value"], saved["good_steps"]
        self.scale.skipped_in_row = saved["skipped_in_row"]
        self.best = Best(**extra["best"])
        recent = extra.get("recent", {"losses": [], "empty_in_row": 0})  # a checkpoint of before has none
        self.spikes.remember(recent["losses"])
        self.empty_in_row = int(recent["empty_in_row"])
        step = int(extra["step"])
        if path == self.folder / step_name(step) and not why_incomplete(path):
            self._started = step
        return step, extra


def check_resumed(extra: Mapping[str, Any], task: TrainTask) -> list[Problem]:
    """Return what a checkpoint lacks (E556), and where its data or masks would not go on in this run (E551)."""
    missing = [name for name in RESUMED if name not in extra]
    if missing:
        return [
            problem(
                "E556",
                where=str(task.resume_from),
                found=f"{len(missing)} of {len(RESUMED)} parts are not in it: " + ", ".join(missing),
            )
        ]
    batch, step = task.plan.batch, extra["step"]
    pairs = [
        ("data.path", "data", extra["data_hash"], task.data.hash),
        ("run.seed", "the order of seed", extra["seed"], task.run.run.seed),
        ("data.seq_len", "sequences of", extra["seq_len"], batch.seq_len),
        (
            "batch.sequences",
            f"after step {step}, position",
            extra["data_position"],
            step * batch.global_batch,
        ),
        ("dropout", "masks drawn by", extra["rng"]["scheme"], SCHEME),
    ]
    return [
        problem("E551", where=where, found=f"the checkpoint has {what} {saved}, this run {now}")
        for where, what, saved, now in pairs
        if saved != now
    ]
