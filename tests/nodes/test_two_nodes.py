"""Two nodes on one machine (``two_nodes.py``): a cut or slow cable, a node that is gone. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import two_nodes
from two_nodes import ADDRESSES, LAYOUT, SCENARIOS, STEPS, alone, cannot, losses, write_inputs

pytestmark = pytest.mark.gloo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    why = cannot()
    if why:
        pytest.skip(why)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    return tmp_path


def play(name: str, folder: Path) -> dict:
    with two_nodes.two_nodes() as nodes:
        seen = SCENARIOS[name](nodes, folder)
    print(json.dumps(seen)[:2000])
    return seen


def said(folder: Path, node: int) -> str:
    return (folder / f"node-{node}.log").read_text()


def _rank(nodes: two_nodes.Nodes, rank: int, folder: Path, status: Path) -> None:
    """Be a rank on its own node, in a process forked from this one: what torchrun would set, without its start."""
    log = os.open(folder / f"node-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    try:
        nodes.enter(rank)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank)
        )
        os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29401", TORCHELASTIC_RESTART_COUNT="0")
        os.environ.update(TORCHELASTIC_RUN_ID="short")
        from meshwright.config.load import load_run
        from meshwright.config.resolve import resolve
        from meshwright.orchestrate.training import train_command

        layout = "dp=2,zero=3,precision=fp64"
        sets = [f"run.dir={folder / 'out'}", "run.steps=2"]
        train_command(resolve(load_run(str(folder / "run.yaml"), sets), layout=layout), layout=layout)
        status.write_text("0")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def test_two_ranks_on_two_nodes_take_two_steps(folder: Path) -> None:
    """Both nodes have the same host name, which leads each to itself: the interface is chosen, and said."""
    with two_nodes.two_nodes() as nodes:
        pids = []
        for rank in (0, 1):
            pid = os.fork()
            if not pid:
                _rank(nodes, rank, folder, folder / f"status-{rank}")
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
    assert (folder / "status-0").exists(), said(folder, 0)
    assert (folder / "status-1").exists(), said(folder, 1)
    got = losses(folder / "out")
    assert sorted(got) == [1, 2]
    assert got == alone(folder, "dp=2,zero=3,precision=fp64", "run.steps=2")
    for rank in (0, 1):
        if "W575" in said(folder, rank):  # a host whose name leads elsewhere needs no choice
            assert f"({ADDRESSES[rank]}) is on the way to {ADDRESSES[0]}" in said(folder, rank)


@pytest.mark.slow
def test_a_run_over_two_nodes_has_the_losses_of_one_node(folder: Path) -> None:
    seen = play("train", folder)
    assert seen["status"] == [0, 0]
    assert seen["losses"] == alone(folder, LAYOUT)
    assert len(seen["losses"]) == STEPS


@pytest.mark.slow
def test_a_cut_link_ends_the_job_in_seconds_and_is_named(folder: Path) -> None:
    seen = play("cut", folder)
    assert seen["seconds"] < 30
    assert all(seen["status"])
    text = said(folder, 0)
    assert "E575  rank 0 (node 0" in text
    assert f"no sign from ranks 2, 3 (node 1, {os.uname().nodename} {ADDRESSES[1]})" in text
    assert f"that node, or the link {ADDRESSES[0]} - {ADDRESSES[1]}" in text
    assert "these answer: 1" in text
    assert "E575  rank 2 (node 1" in said(folder, 1)
    assert {e["code"] for e in seen["said"]} == {"E575"}


@pytest.mark.slow
def test_a_slow_link_is_named_and_sigterm_ends_both_nodes_well(folder: Path) -> None:
    seen = play("slow", folder)
    assert {tuple(e["ranks"]) for e in seen["slow"]} == {(1, 2)}  # the other way is as fast as before
    assert seen["slow"][0]["addresses"] == list(ADDRESSES)
    assert seen["slow"][0]["bytes_per_s"] < 10e6 / 8 * 1.5
    assert f"W576  link rank 1 ({ADDRESSES[0]}) -> rank 2 ({ADDRESSES[1]})" in said(folder, 0)
    assert seen["stopped"]["why"] == "SIGTERM"
    assert seen["stopped"]["step"] == seen["done"]
    step = folder / "out" / "checkpoints" / f"step-{seen['done']}"
    assert (step / "manifest.json").exists()


@pytest.mark.slow
def test_the_probe_names_the_slow_link(folder: Path) -> None:
    seen = play("probe", folder)
    assert seen["status"] == [0, 0]
    rates = {tuple(p["ranks"]): p["bytes_per_s"] for p in seen["pairs"]}
    across = [rate for (a, b), rate in rates.items() if a < 2 <= b]
    within = [rate for (a, b), rate in rates.items() if (a < 2) == (b < 2)]
    assert max(across) < 200e6 / 8 * 1.3 < min(within)
    slowest = min(rates, key=lambda p: rates[p])
    assert any(f"the slowest pair of ranks {slowest}" in line for line in seen["advice"])


@pytest.mark.slow
def test_a_node_without_its_agent_ends_and_the_other_says_why(folder: Path) -> None:
    seen = play("gone", folder)
    assert seen["seconds"] < 30
    assert seen["status"][0] not in (0, None)
    assert "E574  rank 0" in said(folder, 0) or "E574  rank 1" in said(folder, 0)
    assert "torchrun's agent, which started this rank, is gone" in said(folder, 1)


@pytest.mark.slow
def test_when_a_node_vanishes_an_elastic_run_goes_on_alone(folder: Path) -> None:
    seen = play("elastic", folder)
    assert seen["status"] == 0, said(folder, 0)
    want = alone(folder, "dp=2,zero=1,precision=fp64", "run.steps=400")
    assert sorted(seen["losses"]) == sorted(want)
    assert seen["losses"] == pytest.approx(want, abs=1e-9)
    (restart,) = seen["restarts"]
    assert restart["step"] > 0
    assert restart["step"] >= seen["done"] - 4
    assert "2 ranks were planned, 1 are left" in restart["changed"]
    assert "W577" in said(folder, 0)
