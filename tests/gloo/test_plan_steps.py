"""A few real steps of plans: what they measure adds up, and a plan that fails leaves the others to run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.machine_runs import MODEL, cluster, plan, probe

from meshwright.cli.main import run
from meshwright.cost.ledger import ledger_path, read_ledger
from meshwright.cost.machine_fit import predict_plan
from meshwright.orchestrate.machine import machine_fingerprint
from meshwright.orchestrate.told_apart import measured, stolen_share
from meshwright.orchestrate.trying import class_by_steps, run_steps, try_plans
from meshwright.program.plan import plan_spec


def test_real_steps_are_told_apart_and_a_failure_is_a_row() -> None:
    lines: list[str] = []
    good = replace(plan("pp=2,micro_batch=8"), prediction=None)
    broken = replace(good, model_config={**good.model_config, "hidden_act": "no such function"})
    found = try_plans([broken, good], cluster(), lines.append)
    assert [t.measurement is None for t in found] == [True, False]
    assert found[0].problems
    assert any("failed" in line for line in lines)
    now = found[1].measurement
    assert now is not None
    assert now.time.total == pytest.approx(now.step_time_s, rel=0.25)
    assert now.time.compute > 0
    assert now.time.bubble > 0
    said = predict_plan(good, cluster())
    assert now.peak_memory_bytes == pytest.approx(said.peak_memory_bytes, rel=0.05)
    assert found[1].processor_s is not None
    assert 0 < found[1].processor_s < 2 * 1.3 * now.step_time_s


def test_the_traced_peak_of_three_steps_gives_the_memory_class() -> None:
    spec = plan_spec(plan("dp=2"))
    found = class_by_steps(spec, cluster(), 128, "fp32")
    assert found[1] == "none"
    small = replace(cluster().device.memory, value=20e6)
    tight = replace(cluster(), device=replace(cluster().device, memory=small))
    assert class_by_steps(spec, tight, 128, "fp32")[1] == "state"


@pytest.mark.slow
def test_plan_try_from_end_to_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    here = machine_fingerprint()
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(probe(machine=here)))
    args = ["plan", MODEL, "--cluster", str(file), "--seq-len", "128", "--global-batch", "16"]
    assert run([*args, "--fix", "precision=fp32", "--try", "2", "--json"]) == 0
    done: dict[str, Any] = json.loads(capsys.readouterr().out)["try"]
    assert len(read_ledger(ledger_path(tmp_path, here))) == 2
    assert [t["problems"] for t in done["tries"]] == [[], []]
    assert done["memory_class"]["agree"] is True


@pytest.mark.slow
def test_a_rank_with_a_core_of_its_own_tells_how_long_it_waited() -> None:
    made = plan("dp=2,micro_batch=8")
    ranks = run_steps(made, 3)
    share = stolen_share(ranks, cluster())
    assert share is None or 0.0 <= share < 1.0
    assert measured(made, ranks, cluster()).steps == 3
    assert all(median(r.wall_s) > 0 for r in ranks)


@pytest.mark.slow
def test_a_real_run_is_fed_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"Line {i}: {i * i % 97} foxes jump over {i * 7 % 31} dogs.\n" for i in range(1500))
    )
    (tmp_path / "run.yaml").write_text(
        f"model: {{config: {MODEL}}}\n"
        f"data: {{path: {text}, seq_len: 32}}\n"
        "batch: {sequences: 8}\n"
        f"run: {{steps: 12, dir: {tmp_path / 'run'}}}\n"
    )
    layout = "dp=2,micro_batch=4,precision=fp32"
    assert run(["train", str(tmp_path / "run.yaml"), "--layout", layout, "--json"]) == 0
    capsys.readouterr()
    code = run(["probe", "--from-run", str(tmp_path / "run"), "--json"])
    found = json.loads(capsys.readouterr().out)
    if code == 2:  # other programs had the cores: said, with the spread, and not believed
        assert [p["code"] for p in found["problems"]] == ["E476"]
        return
    assert (code, found["added"], found["profile"]["runs"]) == (0, True, 1)
    assert abs(found["errors_pct"]["after"]) <= abs(found["errors_pct"]["probe"])
