"""Runs under torchrun: restarted by it they go on by themselves; told to stop they save; another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kill_runs import STEPS, records, start, wait, write_inputs

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LAYOUT = "dp=2,zero=1,precision=fp64"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    return tmp_path


def torchrun(
    folder: Path, *sets: str, nproc: int = 2, restarts: int = 0, resume: bool = False
) -> subprocess.Popen[str]:
    words = ["train", str(folder / "run.yaml"), "--layout", LAYOUT, "--set", f"run.dir={folder / 'out'}"]
    words += [word for s in sets for word in ("--set", s)] + (["--resume"] if resume else [])
    with (folder / "torchrun.log").open("a") as log:
        return subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(nproc),
                ),
                *("--max-restarts", str(restarts), "--monitor-interval", "0.2", "-m", "meshwright", *words),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def until(condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def log(folder: Path) -> str:
    return (folder / "torchrun.log").read_text()


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children() if "meshwright" in p.cmdline()]


def test_a_worker_that_is_lost_is_started_again_and_goes_on(folder: Path) -> None:
    sets = ("run.steps=60", "run.checkpoint_async=false")
    assert wait(start(folder, "undisturbed", LAYOUT, None, *sets)) == 0
    home = folder / "out"
    process = torchrun(folder, *sets, restarts=2)
    until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 7, process)
    workers(process)[1].kill()
    assert process.wait(90) == 0, log(folder)
    got, want = records(home), records(folder / "undisturbed")
    for step, record in want.items():
        for key in ("loss", "grad_norm", "lr", "valid_tokens"):
            assert got[step][key] == record[key], (step, key)
    lines = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    (restart,) = [e for e in lines if e["event"] == "restart"]
    assert (restart["number"], restart["limit"]) == (1, 2)
    assert restart["step"] >= 6
    assert "W578  restart 1 of 2 (torchrun --max-restarts)" in log(folder)
    assert got[60]["restarts"] == 1
    # a rank that lost its peer says so, and does not take itself for the culprit
    assert "E574  rank 0" in log(folder)
    assert "E999" not in log(folder)

    # the folder of one job of torchrun is refused to another, which may then try as often as it likes
    again = torchrun(folder, *sets, restarts=1)
    assert again.wait(90) != 0
    assert log(folder).count("E541") >= 2
    assert "restart 2" not in log(folder)


def test_sigterm_to_torchrun_saves_and_the_run_can_go_on_with_fewer_ranks(folder: Path) -> None:
    home = folder / "out"
    process = torchrun(folder, "run.steps=100000", "run.checkpoint_every=0", "run.grace_s=40")
    until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 3, process)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(40)
    assert time.monotonic() - begin < 25
    marker = json.loads((home / "stopped.json").read_text())
    last = max(records(home))
    assert (marker["why"], marker["step"]) == ("SIGTERM", last)
    assert (home / "checkpoints" / f"step-{last}" / "manifest.json").exists()
    assert "W579  run.grace_s: run.grace_s = 40, torchrun kills its workers after 30 s" in log(folder)

    steps = f"run.steps={last + 2}"
    refused = torchrun(folder, steps, nproc=1, resume=True)
    assert refused.wait(60) != 0
    assert "E501" in log(folder)
    went_on = torchrun(folder, steps, "run.elastic=true", nproc=1, resume=True)
    assert went_on.wait(60) == 0, log(folder)
    assert max(records(home)) == last + 2
    assert "2 ranks were planned, 1 are left" in log(folder)
    assert json.loads((home / "plan.json").read_text()) == json.loads((home / "run.json").read_text())["plan"]
    assert STEPS  # the harness's model, of two layers
