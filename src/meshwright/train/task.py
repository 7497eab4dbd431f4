"""What a training run is given and what it returns, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.base.records import MemoryBytes
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.train.data import TokenData


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What every rank of a training run is given.

    Attributes:
        run: the resolved run file.
        data: the corpus as tokens.
        weights: pretrained weights by logical name, or None for fresh ones drawn from the seed.
        stop_at: last global step of this session (the rate's horizon stays ``run.run.steps``).
        resume_from: checkpoint to start from, or None.
        offload_dir: where state that is offloaded to files goes.
        manifest: facts that a checkpoint's manifest keeps (plan, versions).
        restarts: how often the run began again by itself before this.
        started: monotonic time from which ``run.max_minutes`` counts, restarts included; None is the rank's own start.
    """

    run: Any
    plan: Plan
    spec: ModelSpec
    data: TokenData
    run_dir: Path
    stop_at: int
    resume_from: Path | None = None
    weights: Mapping[str, Tensor] | None = None
    offload_dir: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict[str, Any])
    restarts: int = 0
    started: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """What one rank measured over its run; ``stopped`` is "" or why it ended before ``TrainTask.stop_at``."""

    rank: int
    stage: int
    memory: MemoryBytes
    step_times_s: list[float]
    phases_s: dict[str, float]
    steps: int
    final_loss: float
    eval_loss: float | None
    first_eval_loss: float | None
    placement: dict[str, Any]
    stopped: str = ""
