"""``plan --try`` and ``probe --from-run`` without processes: what is refused, learnt, ranked and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import machine_runs
from tests.machine_runs import MODEL, cluster, plan, probe, truth
from typer.testing import CliRunner

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.records import MemoryBytes
from meshwright.cli.main import app, run
from meshwright.cost.ledger import ledger_path, read_ledger
from meshwright.cost.machine_fit import predict_plan
from meshwright.orchestrate import feedback, trying
from meshwright.orchestrate.preparing import device_type
from meshwright.orchestrate.told_apart import measured, stolen_share
from meshwright.parallel.products import product_library
from meshwright.probe.processor import (
    core_share,
    processor_cluster,
    processor_seconds,
    processor_view,
    quiet_share,
)
from meshwright.probe.steps import RankSteps
from meshwright.program.plan import Plan, plan_spec
from meshwright.program.plan_file import load_plan, plan_to_dict
from meshwright.search.tree import measured_class

SIZES = ["--seq-len", "128", "--global-batch", "16", "--fix", "precision=fp32"]


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = run([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this machine the one of the made-up probe; return the probe's file."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    for module in (trying, feedback):
        monkeypatch.setattr(module, "machine_fingerprint", lambda: "feedc0de")
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(probe()))
    return str(file)


def ranks_of(made: Plan, seconds: float) -> list[RankSteps]:
    """Return what ranks measure of a plan whose step takes ``seconds``."""
    stages = made.layout.pp
    names = [f"{s}{kind}{k}" for s in range(stages) for kind in "FB" for k in range(made.batch.accumulation)]
    return [
        RankSteps(
            rank=rank,
            stage=rank % stages,
            memory=MemoryBytes(
                parameters=4000, gradients=4000, optimizer=8000, activations=2000 + rank, working=500
            ),
            wall_s=tuple(seconds * f for f in (0.98, 1.0, 1.0, 1.01, 1.02)),
            processor_s=(0.9 * seconds,) * 5,
            phases_s={
                "count": 0.0,
                "forward_backward": 0.9 * seconds,
                "reduce": 0.0,
                "optimizer": 0.05 * seconds,
            },
            busy_s=0.6 * seconds,
            actions_s={
                n: 0.6 * seconds / len(names) * stages for n in names if n.startswith(str(rank % stages))
            },
        )
        for rank in range(made.world_size)
    ]


def really(made: Plan, steps: int, show: Any = None) -> list[RankSteps]:
    return ranks_of(made, predict_plan(made, truth()).step_time_s)


def test_only_a_probe_of_this_machine_is_tried(
    capsys: pytest.CaptureFixture[str], here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trying, "run_steps", lambda *_: pytest.fail("a process would have started"))
    code, found = answer(capsys, "plan", "llama-2-7b", "--cluster", "a100-40gb-x8", *SIZES[:4], "--try", "2")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E473")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(probe(machine="another")))
    code, found = answer(capsys, "plan", MODEL, "--cluster", str(other), *SIZES, "--try", "2")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E473")
    assert "another" in found["problems"][0]["found"]
    assert "feedc0de" in found["problems"][0]["found"]
    big = tmp_path / "big.json"
    big.write_text(json.dumps(probe(world=4096)))
    code, found = answer(capsys, "plan", MODEL, "--cluster", str(big), *SIZES, "--try", "2")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E474")
    assert "4096" in found["problems"][0]["found"]
    with monkeypatch.context() as torchrun:
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
            torchrun.setenv(name, str(value))
        torchrun.setenv("MASTER_ADDR", "127.0.0.1")
        code, found = answer(capsys, "plan", MODEL, "--cluster", here, *SIZES, "--try", "2")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E474")
    code, found = answer(capsys, "plan", MODEL, "--cluster", here, *SIZES, "--try", "2", "--unbuilt")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E479")


def test_tries_are_compared_learnt_and_ranked_anew(
    capsys: pytest.CaptureFixture[str], here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def steps(made: Plan, count: int, show: Any = None) -> list[RankSteps]:
        ran.append(made.layout.text())
        if len(ran) == 2:  # the second plan fails; the others go on
            raise MeshwrightError(
                problem("E512", where="rank 1", found="out of memory"), ExitCode.ENVIRONMENT
            )
        if len(ran) == 1:  # the first is three times slower than it should be
            return ranks_of(made, 3.0 * predict_plan(made, truth()).step_time_s)
        return really(made, count)

    monkeypatch.setattr(trying, "run_steps", steps)
    out = tmp_path / "plan.json"
    args = ("plan", MODEL, "--cluster", here, *SIZES)
    code, found = answer(capsys, *args, "--try", "4", "--top", "2", "--out", str(out))
    assert code == ExitCode.GOOD
    done = found["try"]
    assert [t["number"] for t in done["tries"]] == [1, 2, 3, 4]
    assert [p["code"] for p in done["tries"][1]["problems"]] == ["E512"]
    assert done["tries"][1]["measured"] is None
    first = done["tries"][0]
    assert first["measured"]["step_time_s"] > 2 * first["predicted"]["step_time_s"]
    terms = first["terms"]
    parts = ("compute_s", "communication_s", "bubble_s", "optimizer_s", "other_s")
    for side in ("predicted", "measured"):
        assert sum(terms[p][side] for p in parts) == pytest.approx(terms["step_s"][side])
    assert terms["peak_bytes"]["measured"] == 18501
    assert terms["activations_and_working_bytes"]["measured"] == 2501
    assert done["profile"]["runs"] == 3
    assert done["profile"]["after_pct"] < done["profile"]["before_pct"]
    # what was first is not first any more, what failed is not ranked, and the file holds the new best
    assert done["before"][0]["layout_text"] == found["plans"][0]["layout_text"]
    after = [a["layout_text"] for a in done["after"]]
    assert after[0] != done["before"][0]["layout_text"]
    assert done["before"][1]["layout_text"] not in after
    times = [a["measured_step_time_s"] or a["predicted_step_time_s"] for a in done["after"]]
    assert times == sorted(times)
    assert load_plan(out).layout.text() == after[0]
    # the ledger has the three, and a later plan says so
    assert len(read_ledger(ledger_path(tmp_path / "cache", "feedc0de"))) == 3
    _, later = answer(capsys, *args)
    said = later["plans"][0]["predicted"]["sources"]
    assert any("fitted on 3 runs of this machine" in s for s in said)
    _, one = answer(
        capsys, "estimate", MODEL, "--cluster", here, "--layout", "dp=2,precision=fp32", *SIZES[:4]
    )
    assert any("fitted on 3 runs" in s for s in one["predicted"]["sources"])
    assert done["memory_class"]["measured"]["class"] in ("state", "activations", "gradients", "none")
    assert capsys.readouterr() is not None
    text = CliRunner().invoke(app, [*args, "--try", "1"]).output
    for word in (
        "compute (time)",
        "activations and working (memory)",
        "learnt from",
        "error of step times",
        "ranking with what",
    ):
        assert word in text


def test_when_every_try_fails_nothing_is_learnt(
    capsys: pytest.CaptureFixture[str], here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(*_: Any) -> Any:
        raise MeshwrightError(problem("E511", where="rank 0", found="killed"), ExitCode.ENVIRONMENT)

    monkeypatch.setattr(trying, "run_steps", steps)
    code, found = answer(capsys, "plan", MODEL, "--cluster", here, *SIZES, "--try", "2")
    assert (code, found["problems"][0]["code"]) == (ExitCode.ENVIRONMENT, "E478")
    assert not ledger_path(tmp_path / "cache", "feedc0de").exists()


def test_ranks_that_waited_for_a_core_are_not_believed() -> None:
    made = plan("dp=2")
    ranks = [replace(r, queued_s=q) for r, q in zip(ranks_of(made, 1.0), (0.05, 0.2), strict=True)]
    assert stolen_share(ranks, cluster()) == pytest.approx(0.2)
    shared = replace(cluster(), measured={**cluster().measured, "cores": 1.0})
    assert stolen_share(ranks, shared) is None, "ranks that share a core wait for each other"
    assert stolen_share(ranks_of(made, 1.0), cluster()) is None
    assert machine_runs.row("dp=2", stolen_share=0.2).disturbed
    assert not machine_runs.row("dp=2", stolen_share=0.05).disturbed


def test_a_pipelines_step_is_told_apart() -> None:
    made = replace(plan("pp=2"), prediction=predict_plan(plan("pp=2"), cluster()))
    now = measured(made, ranks_of(made, 1.0), cluster())
    assert now.time.total == pytest.approx(now.step_time_s)
    # 16 micro-batches of two equal stages: the bubble is 1/17 of the schedule
    assert now.time.bubble == pytest.approx(0.6 / 16, rel=0.05)
    assert now.time.compute == pytest.approx(0.6, rel=0.01)
    assert now.time.data == pytest.approx(0.9 - 0.6 - 0.6 / 16, rel=0.05)
    assert measured(plan("dp=2"), ranks_of(plan("dp=2"), 1.0), cluster()).time.bubble == 0.0


def run_folder(tmp_path: Path, **change: Any) -> Path:
    """Return a run's folder with what feeding back reads."""
    made = plan("tp=2")
    seconds = predict_plan(made, truth()).step_time_s
    before = predict_plan(made, cluster())
    measurement = measured(made, ranks_of(made, seconds), cluster()).as_dict()
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    record = {"plan": plan_to_dict(made), "prediction": before.as_dict(), "measurement": measurement}
    record |= {"matmul": product_library("machine", device_type())} | change
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "probe.json").write_text(json.dumps(probe()))
    return folder


def test_a_run_is_fed_back_once(capsys: pytest.CaptureFixture[str], here: str, tmp_path: Path) -> None:
    folder = str(run_folder(tmp_path))
    code, found = answer(capsys, "probe", "--from-run", folder)
    assert (code, found["added"], found["profile"]["runs"]) == (ExitCode.GOOD, True, 1)
    errors = found["errors_pct"]
    assert errors["probe"] == errors["before"] < -20.0
    assert abs(errors["after"]) < 3.0
    code, again = answer(capsys, "probe", "--from-run", folder)
    assert (code, again["added"]) == (ExitCode.GOOD, False)
    assert again["errors_pct"]["before"] == pytest.approx(errors["after"])
    assert len(read_ledger(ledger_path(tmp_path / "cache", "feedc0de"))) == 1
    assert "already in" in CliRunner().invoke(app, ["probe", "--from-run", folder]).output


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("no folder", "E475", "run.json"),
        ("no probe", "E475", "probe.json"),
        ("no measurement", "E475", "no measurement"),
        ("cut off", "E475", "run.json"),
        ("other products", "E475", "run.matmul"),
        ("other machine", "E473", "another"),
        ("disturbed", "E476", "80 %"),
        ("and a probe", "E479", "--quick"),
    ],
)
def test_a_run_that_says_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], here: str, tmp_path: Path, fault: str, code: str, said: str
) -> None:
    folder = run_folder(tmp_path, **({"measurement": None} if fault == "no measurement" else {}))
    record = folder / "run.json"
    if fault == "no folder":
        folder = tmp_path / "nowhere"
    elif fault == "no probe":
        (folder / "probe.json").unlink()
    elif fault == "cut off":
        record.write_text(record.read_text()[:100])
    elif fault == "other machine":
        (folder / "probe.json").write_text(json.dumps(probe(machine="another")))
    elif fault == "other products":
        now = product_library("machine", device_type())
        record = run_folder(tmp_path, matmul="torch" if now == "onednn" else "onednn") / "run.json"
    elif fault == "disturbed":
        held = json.loads(record.read_text())
        held["measurement"]["step_time_spread_s"] = held["measurement"]["step_time_s"]
        record.write_text(json.dumps(held))
    more = ["--quick"] if fault == "and a probe" else []
    exit_code, found = answer(capsys, "probe", "--from-run", str(folder), *more)
    assert (exit_code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, code)
    assert said in found["problems"][0]["found"]
    assert not ledger_path(tmp_path / "cache", "feedc0de").exists()


def test_the_memory_class_of_measured_bytes() -> None:
    def kind(capacity: float, **held: int) -> str:
        return measured_class(MemoryBytes(**held), capacity, 3)[1]

    assert kind(100.0, parameters=30, gradients=30, optimizer=30, activations=5) == "state"
    assert kind(1000.0, parameters=10, gradients=10, optimizer=20, activations=80) == "activations"
    assert kind(1000.0, parameters=10, gradients=90, activations=20) == "gradients"
    assert kind(1000.0, parameters=10, gradients=10, optimizer=20, activations=30) == "none"
    step, _ = measured_class(MemoryBytes(parameters=2**30), 2.0**31, 3)
    assert "3 measured steps" in step.found


def test_a_probe_in_processor_seconds() -> None:
    assert core_share(4, 2.0) == 0.5
    assert core_share(2, 8.0) == 1.0
    assert quiet_share([{"matmul": [(2.0, 1.0)]}, {"matmul": [(1.0, 1.0)]}], 1.0) == 0.75
    assert quiet_share([], None) == 1.0
    view = processor_view(probe())
    assert view["matmul"][0]["flops_per_s"] == pytest.approx(2 * probe()["matmul"][0]["flops_per_s"])
    assert view["links"][0]["points"][0]["time_s"] == pytest.approx(5e-5)
    assert probe()["links"][0]["points"][0]["time_s"] == 2e-4, "the probe itself is not changed"
    used = processor_cluster(probe())
    two, one = plan("dp=2"), plan("pp=2")
    seconds = {p.layout.text(): processor_seconds_of(p, used) for p in (two, one)}
    # the probe's processor seconds are half of its wall seconds (a quarter for collectives): two ranks use what one
    # needs in wall time, and a bubble uses nothing
    wall = predict_plan(two, cluster())
    assert seconds[two.layout.text()] == pytest.approx(wall.step_time_s, rel=0.1)
    bubble = predict_plan(one, cluster())
    assert seconds[one.layout.text()] < bubble.step_time_s
    assert machine_runs.LAYOUTS


def processor_seconds_of(made: Plan, used: Any) -> float:
    return processor_seconds(plan_spec(made), made.layout, made.batch, used)
