"""Jobs that are killed with SIGKILL, again and again: nothing is lost, and the losses are the undisturbed ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kill_runs import DROPOUT, STEPS, Survivor, records, start, wait, write_inputs

pytestmark = pytest.mark.gloo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def survive(folder: Path, layout: str, kills: int, seed: int) -> Survivor:
    harness = Survivor(folder, seed)
    want = harness.undisturbed(layout)
    assert sorted(want) == list(range(1, STEPS + 1))

    def equal(got: dict) -> None:
        for step, record in want.items():
            for key in ("loss", "grad_norm", "lr", "valid_tokens"):
                assert got[step][key] == record[key], (step, key)

    harness.survive([layout], kills, equal)
    assert harness.kills >= kills
    print(f"{harness.kills} kills over {harness.jobs} jobs: {dict(harness.moments)}")
    return harness


def test_ten_kills_lose_nothing(folder: Path) -> None:
    """H121: no damaged checkpoint is chosen, no saved step is lost, every figure has the bits of the undisturbed run."""
    write_inputs(folder, DROPOUT)
    survive(folder, "dp=2,zero=3,precision=fp32", 10, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kills", "seed"),
    [
        ("dp=2,zero=1,precision=fp32", 30, 2),
        ("pp=2,precision=fp32", 30, 3),
        ("dp=2,precision=fp32", 20, 4),
    ],
)
def test_many_kills_lose_nothing(folder: Path, layout: str, kills: int, seed: int) -> None:
    write_inputs(folder, DROPOUT)
    survive(folder, layout, kills, seed)


@pytest.mark.slow
def test_kills_with_another_layout_after_each(folder: Path) -> None:
    """Each session may run in another layout: float64 losses of the undisturbed run to 1e-9."""
    write_inputs(folder)
    harness = Survivor(folder, 5)
    want = harness.undisturbed("dp=2,precision=fp64")

    def near(got: dict) -> None:
        for step, record in want.items():
            assert got[step]["loss"] == pytest.approx(record["loss"], abs=1e-9), step

    tensor = "tp=2,kv_heads=replicate"  # the model has one key/value head
    layouts = [
        f"{text},precision=fp64" for text in ("dp=2,zero=3", "pp=2", "dp=2", tensor, "dp=2,pp=2,zero=1")
    ]
    harness.survive(layouts, 30, near)
    print(f"{harness.kills} kills over {harness.jobs} jobs: {dict(harness.moments)}")


def test_sigterm_saves_and_ends_well_and_sigusr1_saves(folder: Path) -> None:
    """SIGUSR1 saves at once and the run goes on; SIGTERM saves, leaves a marker and ends with 0; resumed, it is whole."""
    write_inputs(folder, DROPOUT)
    layout, sets = "dp=2,zero=1,precision=fp32", ("run.steps=100000", "run.checkpoint_every=0")
    pid = start(folder, "out", layout, None, *sets)
    home = folder / "out"
    _until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 3)
    os.kill(pid, signal.SIGUSR1)
    _until(lambda: any((home / "checkpoints").glob("step-*")) if (home / "checkpoints").exists() else False)
    saved = min(int(p.name.split("-")[1]) for p in (home / "checkpoints").glob("step-*"))
    _until(lambda: max(records(home)) > saved)
    begin = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 0
    assert time.monotonic() - begin < 25.0
    marker = json.loads((home / "stopped.json").read_text())
    assert marker["why"] == "SIGTERM"
    last = max(records(home))
    assert marker["step"] == last
    assert (home / "checkpoints" / f"step-{last}" / "manifest.json").exists()
    assert sorted(records(home)) == list(range(1, last + 1))
    until = f"run.steps={last + 2}"
    assert wait(start(folder, "out", layout, None, until, "run.checkpoint_every=0")) == 0
    assert max(records(home)) == last + 2
    assert not (home / "stopped.json").exists()


def test_a_closed_terminal_saves_and_ends_well(folder: Path) -> None:
    """SIGHUP goes to all of the terminal's processes, ranks too: the run stops in good order as for SIGTERM."""
    write_inputs(folder)
    pid = start(folder, "out", "dp=2,precision=fp32", None, "run.steps=100000", "run.checkpoint_every=0")
    home = folder / "out"
    _until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 2)
    os.killpg(pid, signal.SIGHUP)
    assert wait(pid) == 0
    last = max(records(home))
    assert json.loads((home / "stopped.json").read_text())["step"] == last
    assert (home / "checkpoints" / f"step-{last}" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_lines_that_nobody_reads_end_no_run(folder: Path, ignored: bool) -> None:
    """The program on a terminal that goes away: writing fails, the run does not; nohup's runs go on to their end."""
    write_inputs(folder)
    steps = 60 if ignored else 100000
    ours, theirs = os.openpty()
    layout, sets = "dp=2,precision=fp32", [f"run.dir={folder / 'out'}", f"run.steps={steps}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", str(folder / "run.yaml"), "--layout", layout]
        + [word for text in sets for word in ("--set", text)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignored else None,
    )
    os.close(theirs)
    home = folder / "out"
    _until(lambda: (home / "metrics.jsonl").exists() and len(records(home)) >= 2)
    os.close(ours)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(60) == 0
    last = max(records(home))
    assert (last == steps) == ignored
    assert (home / "stopped.json").exists() != ignored
    assert (home / "checkpoints" / f"step-{last}" / "manifest.json").exists()


def _until(condition, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_deterministic_runs_have_the_same_bits(folder: Path) -> None:
    write_inputs(folder, DROPOUT)
    seen = []
    for name in ("a", "b"):
        assert wait(start(folder, name, "dp=2,zero=3,precision=fp32", None, "run.deterministic=true")) == 0
        seen.append([(r["loss"], r["grad_norm"], r["lr"]) for r in records(folder / name).values()])
        settings = json.loads((folder / name / "run.json").read_text())["deterministic"]
        assert settings["torch.use_deterministic_algorithms"] is True
        assert "CUBLAS_WORKSPACE_CONFIG" in settings
    assert seen[0] == seen[1]
    assert len(seen[0]) == STEPS
