"""``meshwright prove --resume``: N + M steps at once, against N steps, a save, a kill, and M steps from the checkpoint.

Both runs go through ``train_rank``, the loop of ``meshwright train``: its data order, dropout, learning rate, loss
scale and checkpoints. The second one is killed with SIGKILL in the forward of step N + 1, on all its ranks; new
processes go on, in the same layout or in another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.checkpoint.load import stored_tensors
from meshwright.checkpoint.manifest import MODEL, step_name
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.config.resolve import ClipSettings, GuardSettings, RunSettings, ScheduleSettings
from meshwright.mesh.env import RankFacts, torchrun_facts
from meshwright.mesh.imports import MODEL_CODE
from meshwright.mesh.launch import run_local
from meshwright.model.spec import ModelSpec
from meshwright.program.plan import Plan
from meshwright.program.plan_file import plan_to_dict
from meshwright.train.data import TokenData, TokenStream
from meshwright.train.loop import RankSummary, TrainTask, train_rank

Show = Callable[[str], None]

TIMEOUT_S = 900.0
BOUND_FP64 = 1e-9
"""Largest relative difference in float64 after a change of the layout, as in all proofs."""
OWN_ERROR = 2.0
"""In other precisions: how many times the two layouts' own difference, both unbroken, a change of layout may make."""
FLOOR = 1e-7
"""A bound of rounding that is always allowed after a change of layout in other precisions."""


@dataclasses.dataclass(frozen=True)
class _Work:
    task: TrainTask
    kill_at: int | None


def _rank(facts: RankFacts, work: _Work) -> list[RankSummary]:
    """Train; with ``kill_at``, end this process with SIGKILL in the first forward of that step."""
    told = facts.tell

    def tell(position: Mapping[str, Any]) -> None:
        told(position)
        if position.get("step") == work.kill_at and "F" in str(position.get("action")):
            os.kill(os.getpid(), signal.SIGKILL)

    if work.kill_at is not None:
        facts = dataclasses.replace(facts, tell=tell)
    return train_rank(facts, work.task)


def prove_resume(
    plan: Plan,
    resumed: Plan,
    spec: ModelSpec,
    *,
    steps: int,
    seed: int,
    optimizer: Any,
    max_norm: float | None,
    show: Show,
    matmul: str = "machine",
) -> dict[str, Any]:
    """Return the verdict: ``steps`` steps of ``plan``, a kill, ``steps`` more of ``resumed``, against an unbroken run.

    In the same layout every loss, norm, rate, parameter and optimizer entry must have the same bits; in another one
    the differences must lie within the bound that the verdict states.

    Raises:
        MeshwrightError: what a run ends with; E900 under torchrun, whose ranks are not ours to kill.
    """
    if torchrun_facts() is not None:
        raise MeshwrightError(
            problem(
                "E900",
                where="--resume",
                found="under torchrun, which ends the job when a rank is killed",
                do="run meshwright prove --resume without torchrun; it starts its own ranks",
            )
        )
    folder = Path(tempfile.mkdtemp(prefix="meshwright-resume-"))
    try:
        setting = _Setting(spec, folder, steps, seed, optimizer, max_norm, show, matmul)
        whole = setting.run("whole", plan, None, kill_at=None)
        setting.run("broken", plan, None, kill_at=steps + 1)
        source = folder / "broken" / "checkpoints" / step_name(steps)
        after = setting.run("broken", resumed, source, kill_at=None)
        same = plan.hash == resumed.hash
        figures = _compare(whole, after, steps)
        bound = 0.0
        if not same:
            bound = BOUND_FP64
            if "fp64" not in (plan.layout.precision, resumed.layout.precision):
                other = setting.run("other", resumed, None, kill_at=None)
                own = _compare(whole, other, 0)
                bound = max(FLOOR, *(OWN_ERROR * v for v in _relative(own)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passed = all(v <= bound for v in _relative(figures)) and (figures["bit_equal"] or not same)
    return {
        "passed": passed,
        "world_size": max(plan.world_size, resumed.world_size),
        "steps": 2 * steps,
        "resume": {
            "after": steps,
            "layout": plan.layout.text(),
            "resumed_layout": resumed.layout.text(),
            "same_layout": same,
            "ended_by": "SIGKILL",
            "bit_equal": figures["bit_equal"],
        },
        "loss": figures["loss"],
        "grad_norm": figures["grad_norm"],
        "weights": figures["weights"],
        "optimizer": figures["optimizer"],
        "tolerance": dict.fromkeys(("loss", "grad_norm", "weights", "optimizer"), bound),
    }


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What all runs of a proof have in common."""

    spec: ModelSpec
    folder: Path
    steps: int
    seed: int
    optimizer: Any
    max_norm: float | None
    show: Show
    matmul: str

    def run(self, name: str, plan: Plan, source: Path | None, *, kill_at: int | None) -> Path:
        """Run one of them and return its folder."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        what = f"steps {1 if source is None else self.steps + 1} to {2 * self.steps}"
        if kill_at is not None:
            what = f"steps 1 to {self.steps}, killed in step {kill_at}"
        self.show(f"{plan.world_size} ranks: {plan.layout.text()}: {what}")
        task = TrainTask(
            run=self._settings(),
            plan=plan,
            spec=self.spec,
            data=self._data(plan),
            run_dir=home,
            stop_at=2 * self.steps,
            resume_from=source,
            offload_dir=home / "offload",
            manifest={"plan": plan_to_dict(plan)},
        )
        try:
            run_local(
                _rank,
                plan.world_size,
                _Work(task, kill_at),
                timeout_s=TIMEOUT_S,
                on_line=lambda line: None,
                preload=MODEL_CODE if self.spec.adapter is None else (*MODEL_CODE, "peft"),
            )
        except MeshwrightError as error:
            if kill_at is None or error.problems[0].code not in ("E510", "E511"):
                raise
        else:
            if kill_at is not None:
                raise MeshwrightError(
                    problem("E573", where="--resume", found="the ranks that were to be killed ended well"),
                    ExitCode.FAULT,
                )
        return home

    def _settings(self) -> Any:
        """Return what ``train_rank`` reads of a run file: real settings, so that a new one cannot be left out."""
        return SimpleNamespace(
            run=RunSettings(
                dir=str(self.folder),
                steps=2 * self.steps,
                seed=self.seed,
                checkpoint_every=self.steps,
                checkpoint_async=False,
                keep_last=None,
                keep_every=0,
                keep_best=False,
                eval_every=self.steps,
                eval_batches=1,
                offload_dir=None,
                max_minutes=None,
                grace_s=0.0,
                elastic=False,
                max_restarts=0,
                deterministic=False,
                matmul=self.matmul,
            ),
            optimizer=self.optimizer,
            schedule=ScheduleSettings(name="cosine", warmup_steps=1, min_lr_ratio=0.1),
            clip=ClipSettings(max_norm=self.max_norm),
            guards=GuardSettings(
                nonfinite="stop",
                spike=None,
                on_spike="report",
                replicas_every=1,
                straggler=None,
                slow_link=None,
                silence_s=0.0,
                heartbeat_s=0.0,
            ),
        )

    def _data(self, plan: Plan) -> TokenData:
        """Return random text of an odd number of samples, so that an epoch ends inside a batch, and a held-out part."""
        batch = plan.batch
        parts: dict[str, TokenStream] = {}
        for k, (name, samples) in enumerate((("train", 3 * batch.global_batch + 1), ("eval", 3))):
            count = samples * batch.seq_len + 1
            file = self.folder / f"{name}.npy"
            if not file.exists():
                rng = np.random.default_rng([self.seed, k])
                np.save(file, rng.integers(0, self.spec.vocab_size, count, dtype=np.uint32))
            parts[name] = TokenStream(
                file=file, num_tokens=count, seq_len=batch.seq_len, pad_id=0, keep_partial=False
            )
        return TokenData(
            folder=self.folder,
            train=parts["train"],
            eval=parts["eval"],
            tokenizer_file=self.folder / "tokenizer.json",
            tokenizer_size=self.spec.vocab_size,
            eos_id=0,
            seq_len=batch.seq_len,
            hash="random",
            report={},
        )


def _records(home: Path) -> dict[int, dict[str, Any]]:
    lines = (home / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def _compare(whole: Path, other: Path, after: int) -> dict[str, Any]:
    """Return the differences of two runs: records after step ``after``, and every tensor of the last checkpoints."""
    one, two = _records(whole), _records(other)
    steps = [s for s in one if s > after]
    loss = max(abs(one[s]["loss"] - two[s]["loss"]) for s in steps)
    scale = max(abs(one[s]["loss"]) for s in steps)
    norm = max(abs(one[s]["grad_norm"] - two[s]["grad_norm"]) / one[s]["grad_norm"] for s in steps)
    keys = ("loss", "grad_norm", "lr", "valid_tokens", "eval_loss")
    equal = all(one[s].get(k) == two[s].get(k) for s in steps for k in keys)
    last = step_name(max(steps))
    tensors = _tensors(whole / "checkpoints" / last, other / "checkpoints" / last)
    return {
        "bit_equal": equal and all(tensors[kind]["bit_equal"] for kind in tensors),
        "loss": {"max_abs_diff": loss, "max_rel_diff": loss / scale},
        "grad_norm": {"max_rel_diff": norm},
        "weights": tensors["weights"],
        "optimizer": tensors["optimizer"],
    }


def _tensors(one: Path, two: Path) -> dict[str, dict[str, Any]]:
    """Return, for parameters and optimizer entries, the largest difference over the tensor's largest value, and where."""
    left, right = read_index(one), read_index(two)
    out: dict[str, dict[str, Any]] = {
        kind: {"max_rel_diff": 0.0, "worst": None, "tensors": 0, "bit_equal": True}
        for kind in ("weights", "optimizer")
    }
    if set(stored_tensors(left)) != set(stored_tensors(right)):
        raise MeshwrightError(
            problem("E573", where="--resume", found="the two runs saved tensors of different names"),
            ExitCode.FAULT,
        )
    for key in sorted(stored_tensors(left)):
        a, b = read_tensor(one, left, key), read_tensor(two, right, key)
        held = out["weights" if key.startswith(MODEL) else "optimizer"]
        held["tensors"] += 1
        held["bit_equal"] &= bool(torch.equal(a, b))
        largest = max(a.double().abs().max().item(), torch.finfo(torch.float64).tiny)
        off = (a.double() - b.double()).abs().max().item() / largest
        if not off <= held["max_rel_diff"]:
            held |= {"max_rel_diff": off, "worst": key}
    return out


def _relative(figures: Mapping[str, Any]) -> list[float]:
    return [figures[k]["max_rel_diff"] for k in ("loss", "grad_norm", "weights", "optimizer")]


def verdict_text(result: Mapping[str, Any]) -> str:
    """Return the verdict for people."""
    told = result["resume"]
    lines = [
        f"{told['after']} steps of {told['layout']}, SIGKILL, {told['after']} more of {told['resumed_layout']}",
        "",
    ]
    for name in ("loss", "grad_norm", "weights", "optimizer"):
        part = result[name]
        worst = f"  {part['worst']}" if part.get("worst") else ""
        lines.append(f"{name:<10} {part['max_rel_diff']:.3e}  (bound {result['tolerance'][name]:.1e}){worst}")
    lines.append(f"bit-equal: {'yes' if told['bit_equal'] else 'no'}")
    verdict = "PASSED" if result["passed"] else "FAILED"
    lines.append(f"{verdict}: a run that was killed and resumed against one that was not")
    return "\n".join(lines)
