"""A harness that kills training jobs with SIGKILL: one rank or all of the job, at named moments or at any time.

A job is a process group of its own: the launcher and its ranks, through the product's own door. A plant is set in the
launcher before its ranks are forked, so that a rank kills itself (or its whole group) exactly there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch.distributed as dist

from meshwright.checkpoint import load as load_module
from meshwright.checkpoint import retain as retain_module
from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.inspect import verify_command
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.mesh import launch as launch_module
from meshwright.orchestrate.training import train_command
from meshwright.train import loop as loop_module
from meshwright.train import scale as scale_module

STEPS, EVERY = 10, 2
STEP_MOMENTS = ("forward", "backward", "update")
SAVE_MOMENTS = ("shards", "hash", "manifest", "manifest written", "rename", "renamed", "retention")
MOMENTS = (*STEP_MOMENTS, *SAVE_MOMENTS, "resume", "any time")
LIMIT_S = 120.0

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 260,
    "max_position_embeddings": 32,
}
DROPOUT = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 260,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
}
CLUSTER = {
    "name": "two cores",
    "gpus_per_node": 8,
    "num_nodes": 1,
    "source": "made up for tests",
    "device": {
        "name": "core",
        "memory": "4GiB",
        "peak_flops": {"fp32": 1e11, "fp64": 5e10},
        "matmul_flops": {"fp32": 5e10, "fp64": 2e10},
        "memory_rate_bytes_per_s": 5e9,
        "launch_s": 1e-5,
        "is_cpu": True,
    },
    "intra": {"name": "loop-back", "rate_bytes_per_s": 1e9, "latency_s": 1e-4},
}


@dataclass(frozen=True)
class Kill:
    """One kill: where, whose, and at which step for the moments of a step; once only, where a ``flag`` file is named."""

    moment: str
    rank: int
    whole_job: bool
    step: int
    flag: str = ""

    def now(self) -> None:
        """End this rank, or the whole job that it belongs to, as the system's out-of-memory killer does."""
        if self.flag:
            if os.path.exists(self.flag):
                return
            Path(self.flag).touch()
        if self.whole_job:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def write_inputs(folder: Path, config: dict[str, Any] = MODEL) -> None:
    """Write a model, a text, a cluster and a run file into ``folder``."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    (folder / "text.txt").write_text("".join(f"line {i} of {i % 7} words\n" for i in range(400)))
    (folder / "run.yaml").write_text(
        "model: {config: model}\n"
        "data: {path: text.txt, seq_len: 8, eval_fraction: 0}\n"
        "batch: {sequences: 4}\n"
        "optimizer: {lr: 1.0e-3}\n"
        "cluster: cluster.json\n"
        f"run: {{steps: {STEPS}, checkpoint_every: {EVERY}, keep_last: 2}}\n"
    )


def start(folder: Path, name: str, layout: str, kill: Kill | None = None, *sets: str) -> int:
    """Start (or resume) the job ``name`` in a process group of its own; return the launcher's process id."""
    out = folder / name
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)  # pytest's own are other files
        run = resolve(load_run(str(folder / "run.yaml"), [f"run.dir={out}", *sets]), layout=layout)
        with planted(kill):
            train_command(run, layout=layout, resume=(out / "run.json").exists())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Wait for a job and everything in its process group to end; return the launcher's exit status (-9 when killed)."""
    until = time.monotonic() + LIMIT_S
    status: int | None = None
    while status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the job did not end within {LIMIT_S:g} s")
        else:
            time.sleep(0.01)
    while time.monotonic() < until:
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            break
        time.sleep(0.01)
    return status


@contextlib.contextmanager
def planted(kill: Kill | None) -> Iterator[None]:
    """Set what makes a rank of a job that is started now kill itself at the moment of ``kill``."""
    if kill is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(launch_module, "GRACE_S", 0.2)
        )  # ranks need not explain themselves
        stack.enter_context(mock.patch.object(launch_module, "TERM_S", 0.1))
        if kill.moment in STEP_MOMENTS:
            _plant_step(stack, kill)
        elif kill.moment != "any time":
            for module, name, after in {
                "shards": [(save_module._Writer, "write_data", True)],
                "hash": [(save_module, "sealed_files", False)],
                "manifest": [(save_module, "write_manifest", False)],
                "manifest written": [(save_module, "write_manifest", True)],
                "rename": [(save_module, "publish", False)],
                "renamed": [(save_module, "publish", True)],
                "retention": [(retain_module.shutil, "rmtree", False)],
                "resume": [(load_module, "_read", False)],
            }[kill.moment]:
                stack.enter_context(
                    mock.patch.object(module, name, _ending(getattr(module, name), kill, after))
                )
        yield


def _ending(real: Callable[..., Any], kill: Kill, after: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        mine = not dist.is_initialized() or dist.get_rank() == kill.rank
        if kill.moment == "retention" and ".step-" not in str(args[0]):
            mine = False
        if mine and not after:
            kill.now()
        result = real(*args, **kwargs)
        if mine:
            kill.now()
        return result

    return call


def _plant_step(stack: contextlib.ExitStack, kill: Kill) -> None:
    at = {"step": 0, "first": 0}

    def on_action(real: Any) -> Any:
        def call(self: Any, action: str) -> None:
            here = self.facts.position["step"] >= kill.step and self.facts.rank == kill.rank
            letter = {"forward": "F", "backward": "B"}.get(kill.moment, "?")
            real(self, action)
            if here and letter in action:
                kill.now()

        return call

    def update(real: Any) -> Any:
        def call(self: Any, overflow: bool) -> None:
            real(self, overflow)
            at["step"] += 1
            if at["step"] >= kill.step and dist.get_rank() == kill.rank:
                kill.now()

        return call

    if kill.moment == "update":
        real = scale_module.LossScale.update
        stack.enter_context(mock.patch.object(scale_module.LossScale, "update", update(real)))
    else:
        session = loop_module._Session
        stack.enter_context(mock.patch.object(session, "_on_action", on_action(session._on_action)))


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last record of each step; a line that a kill cut short is not one."""
    out: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            out[record["step"]] = record
    return out


def told(folder: Path) -> int:
    """Return the newest step that the run said it had saved, 0 when it said nothing."""
    file = folder / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max((e["step"] for e in events if e["event"] == "checkpoint"), default=0)


@dataclass
class Survivor:
    """Runs jobs to their end through kills, and checks after each that nothing was lost."""

    folder: Path
    seed: int
    moments: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    jobs: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def undisturbed(self, layout: str) -> dict[int, dict[str, Any]]:
        """Return the records of a run that nothing happens to."""
        assert wait(start(self.folder, "undisturbed", layout)) == 0
        return records(self.folder / "undisturbed")

    def survive(
        self, layouts: list[str], kills: int, check: Callable[[dict[int, dict[str, Any]]], None]
    ) -> None:
        """Kill jobs until ``kills`` are reached and the last job has ended; ``check`` gets the records of each job."""
        while self.kills < kills:
            name = f"job-{self.jobs}"
            self.jobs += 1
            while not self._session(name, self.random.choice(layouts), plant=self.kills < kills):
                pass
            check(records(self.folder / name))

    def _session(self, name: str, layout: str, *, plant: bool) -> bool:
        """Run one session of a job; return whether the job is at its end."""
        home = self.folder / name
        newest, _ = latest_checkpoint(home / "checkpoints")
        before = int(newest.name.split("-")[1]) if newest is not None else 0
        if before == STEPS:  # killed after its last save: nothing is left to train
            return True
        kill = self._choose(before) if plant else None
        file = self.folder / f"{name}.log"
        said = len(file.read_text()) if file.exists() else 0
        pid = start(self.folder, name, layout, kill)
        if kill is not None and kill.moment == "any time":
            self._kill_some_time(pid, kill)
        status = wait(pid)
        log = file.read_text()[said:]  # of this session: a refusal is no kill
        if status == 0:  # ended by itself; a kill that came later met a process that was over
            assert told(home) == STEPS
            return True
        assert kill is not None, log
        assert status == -signal.SIGKILL or "SIGKILL" in log, log
        self.kills += 1
        self.moments[f"{kill.moment}, {'whole job' if kill.whole_job else 'one rank'}"] += 1
        self._nothing_lost(home, before)
        return False

    def _choose(self, done: int) -> Kill:
        never = {"resume"} if done == 0 else set[str]()
        never |= {"retention"} if done < 2 * EVERY else set()
        can = [m for m in MOMENTS if m not in never]
        moment = self.random.choice([m for m in can if self.moments_of(m) == min(map(self.moments_of, can))])
        rank = self.random.randrange(2) if moment in (*STEP_MOMENTS, "shards", "hash", "resume") else 0
        step = self.random.randint(1, 3) + (done if moment != "update" else 0)
        return Kill(moment, rank, self.random.random() < 0.5, min(step, STEPS))

    def moments_of(self, moment: str) -> int:
        """Return how often a moment was hit."""
        return sum(n for name, n in self.moments.items() if name.rpartition(",")[0] == moment)

    def _kill_some_time(self, pid: int, kill: Kill) -> None:
        """Kill after a random time, if the job is still there."""
        time.sleep(self.random.uniform(0.05, 2.5))
        try:
            if kill.whole_job:
                os.killpg(pid, signal.SIGKILL)
                return
            ranks = psutil.Process(pid).children(recursive=True)
            if ranks:
                self.random.choice(ranks).kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass  # the job is over

    def _nothing_lost(self, home: Path, before: int) -> None:
        """The checkpoint that a resume would choose is whole, and none that was there or told of is gone."""
        newest, reasons = latest_checkpoint(home / "checkpoints")
        step = int(newest.name.split("-")[1]) if newest is not None else 0
        assert step >= before, (reasons, before)
        assert step >= told(home), reasons
        if newest is not None:
            verdict = verify_command(str(newest))
            assert verdict["ok"], verdict
