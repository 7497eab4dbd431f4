"""Runs that go on by themselves after a rank was lost: same losses, fewer ranks where one is lost again and again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kill_runs import DROPOUT, STEPS, Kill, records, start, wait, write_inputs

pytestmark = pytest.mark.gloo

FP64 = "precision=fp64"
AT_ONCE = "run.checkpoint_async=false"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def events(home: Path, name: str) -> list[dict]:
    lines = [json.loads(line) for line in (home / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_rank_starts_the_run_again_from_its_checkpoint(folder: Path) -> None:
    """Killed once in step 7: the run ends well by itself, nothing of the first 6 steps is done again, bits are equal."""
    write_inputs(folder, DROPOUT)
    layout = "dp=2,zero=1,precision=fp32"
    assert wait(start(folder, "undisturbed", layout)) == 0
    once = Kill("backward", 1, False, 7, flag=str(folder / "killed"))
    assert wait(start(folder, "out", layout, once, "run.elastic=true", "run.max_restarts=2", AT_ONCE)) == 0
    home = folder / "out"
    got, want = records(home), records(folder / "undisturbed")
    assert sorted(got) == list(range(1, STEPS + 1))
    for step, record in want.items():
        for key in ("loss", "grad_norm", "lr", "valid_tokens"):
            assert got[step][key] == record[key], (step, key)
    (restart,) = events(home, "restart")
    assert (restart["number"], restart["limit"], restart["rank"], restart["step"]) == (1, 2, 1, 6)
    assert restart["why"].startswith("E511 rank 1")
    assert got[STEPS]["restarts"] == 1
    assert "restarts" not in got[6]
    assert json.loads((home / "run.json").read_text())["restarts"][0]["step"] == 6
    log = (folder / "out.log").read_text()
    assert "W578  restart 1 of 2 (run.max_restarts): E511 rank 1" in log
    assert "from the checkpoint of step 6, dp=2" in log


def test_a_rank_that_is_lost_twice_is_left_out_and_the_planner_chooses(folder: Path) -> None:
    """Rank 1 dies at its first step each time: one rank is left, whose layout the planner finds; float64 to 1e-9."""
    write_inputs(folder)
    assert wait(start(folder, "undisturbed", f"dp=2,zero=3,{FP64}")) == 0
    always = Kill("forward", 1, False, 5)
    assert wait(start(folder, "out", f"dp=2,zero=3,{FP64}", always, "run.elastic=true", AT_ONCE)) == 0
    home = folder / "out"
    got, want = records(home), records(folder / "undisturbed")
    for step, record in want.items():
        assert got[step]["loss"] == pytest.approx(record["loss"], abs=1e-9), step
        assert got[step]["valid_tokens"] == record["valid_tokens"]
    first, second = events(home, "restart")
    assert (first["step"], first["changed"]) == (4, "")
    assert second["step"] == 4
    assert "rank 1 was lost twice" in second["changed"]
    assert "dp=2,zero=3" in second["changed"]
    (change,) = events(home, "plan changed")
    plan = json.loads((home / "plan.json").read_text())
    record = json.loads((home / "run.json").read_text())
    assert record["plan_hash"] == change["plan_hash"]
    assert record["plan"] == plan
    assert (
        plan["layout"].get("precision") == "fp64"
        if isinstance(plan["layout"], dict)
        else FP64 in plan["layout"]
    )
    last = json.loads((home / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())
    assert last["world_size"] == 1


@pytest.mark.slow
def test_restarts_are_bounded(folder: Path) -> None:
    write_inputs(folder)
    always = Kill("forward", 0, False, 3)
    sets = ("run.elastic=true", "run.max_restarts=1")
    assert wait(start(folder, "out", f"dp=2,{FP64}", always, *sets)) == 1
    log = (folder / "out.log").read_text()
    assert "E577  run.max_restarts: 1 of 1 restarts were made, and a rank was lost again" in log
    assert "E511" in log
    assert max(records(folder / "out")) == 2


@pytest.mark.slow
def test_a_rank_whose_process_is_stopped_is_found_and_the_run_goes_on(folder: Path) -> None:
    """SIGSTOP: nothing is closed and nothing fails; the roll call finds it, and the run starts again."""
    write_inputs(folder)
    sets = ("run.elastic=true", "guards.silence_s=1.5", "run.steps=40", AT_ONCE)
    pid = start(folder, "out", f"dp=2,{FP64}", None, *sets)
    home = folder / "out"
    until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 3)
    ranks = sorted(psutil.Process(pid).children(), key=lambda p: p.pid)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert wait(pid) == 0
    assert time.monotonic() - begin < 30
    (restart,) = events(home, "restart")
    assert restart["rank"] == 1
    assert restart["why"].startswith("E575 rank 1")
    assert "its process is stopped or stuck" in restart["why"]
    assert sorted(records(home)) == list(range(1, 41))


@pytest.mark.slow
def test_without_elastic_a_lost_rank_ends_the_run(folder: Path) -> None:
    write_inputs(folder)
    assert wait(start(folder, "out", f"dp=2,{FP64}", Kill("forward", 1, False, 3))) == 1
    assert not events(folder / "out", "restart")


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_does_not_start_again(folder: Path) -> None:
    """SIGTERM to an elastic run: it saves and ends with 0, and nothing is started after it."""
    write_inputs(folder)
    pid = start(folder, "out", f"dp=2,{FP64}", None, "run.elastic=true", "run.steps=100000")
    home = folder / "out"
    until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 3)
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 0
    assert (home / "stopped.json").exists()
    assert not events(home, "restart")
