"""What the torch-free commands answer: keys of the contract, figures that agree, tables and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import run
from meshwright.cli.plan_table import memory_bar
from meshwright.cli.simulate import memory_curve

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "recipes" / "models" / "tiny-llama")
SIZE = ["--seq-len", "2048", "--global-batch", "64"]
LLAMA_7B = ["llama-2-7b", "--cluster", "a100-40gb-x8", *SIZE]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert run(args) == code
    return capsys.readouterr().out


def answer_json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    return json.loads(answer(capsys, *args, "--json", code=code))


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_json(capsys, "inspect", LLAMA, "--seq-len", "128")
    keys = (
        "name family num_parameters num_active_parameters num_layers hidden_size num_attention_heads "
        "num_key_value_heads vocab_size tied_embeddings is_moe max_position_embeddings flops_per_token flags"
    )
    assert set(keys.split()) <= found.keys()
    assert found["num_parameters"] == 1_705_600
    assert "1,705,600" in answer(capsys, "inspect", LLAMA)


def test_catalogues_name_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    models = answer_json(capsys, "models")["models"]
    assert len(models) >= 40
    assert all(m["source"] and m["num_parameters"] >= m["num_active_parameters"] for m in models)
    clusters = answer_json(capsys, "clusters")["clusters"]
    assert all(f["source"] and f["unit"] for c in clusters for f in c["figures"].values())
    assert "a100-40gb-x8" in answer(capsys, "clusters")
    assert "llama-2-7b" in answer(capsys, "models")


def test_plan_and_what_reads_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = answer_json(capsys, "plan", *LLAMA_7B, "--top", "2", "--out", "plan.json")
    assert {"plans", "searched", "legal", "fits", "seconds"} <= found.keys()
    assert len(found["plans"]) == 2
    for item in found["plans"]:
        predicted = item["predicted"]
        assert sum(predicted["memory_bytes"].values()) == predicted["peak_memory_bytes"]
        assert sum(predicted["time_s"].values()) == pytest.approx(predicted["step_time_s"])
        assert item["world_size"] == 8
    text = answer(capsys, "explain", "plan.json", "--rank", "3")
    assert "You are rank 3 of 8" in text
    assert answer_json(capsys, "explain", "plan.json", "--rank", "3")["text"] + "\n" == text
    played = answer_json(capsys, "simulate", "plan.json")
    assert played["cluster"] == "a100-40gb-x8"
    assert played["makespan_s"] <= found["plans"][0]["predicted"]["step_time_s"]
    assert {"problems"} == answer_json(capsys, "explain", "plan.json", "--rank", "8", code=2).keys()
    table = answer(capsys, "plan", *LLAMA_7B, "--explain")
    assert "layouts priced" in table
    assert found["plans"][0]["layout_text"] in table


def test_plan_that_fits_nowhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = [
        "plan",
        "llama-2-70b",
        "--cluster",
        "a100-40gb-x8",
        *SIZE,
        "--fix",
        "offload=none",
        "--out",
        "plan.json",
    ]
    found = answer_json(capsys, *args, code=1)
    assert found["fits"] == 0
    assert found["plans"]
    assert all(item["change"] and item["fits"] is False for item in found["plans"])
    assert not (tmp_path / "plan.json").exists()
    assert "nothing fits" in answer(capsys, *args, code=1)


def test_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_json(capsys, "estimate", *LLAMA_7B, "--layout", "dp=8,zero=3")
    assert found["legal"] is found["fits"] is True
    assert max(r["peak_memory_bytes"] for r in found["ranks"]) == found["predicted"]["peak_memory_bytes"]
    assert "fits" in answer(capsys, "estimate", *LLAMA_7B, "--layout", "dp=8,zero=3")
    illegal = answer_json(capsys, "estimate", *LLAMA_7B, "--layout", "dp=8,micro_batch=3", code=1)
    assert illegal["legal"] is False
    assert illegal["problems"][0]["code"] == "E220"
    large = answer_json(capsys, "estimate", *LLAMA_7B, "--layout", "dp=8", code=1)
    assert (large["legal"], large["fits"]) == (True, False)
    unread = answer_json(capsys, "estimate", *LLAMA_7B, "--layout", "dp=4,pp=2,schedule=@none.txt", code=2)
    assert unread["problems"][0]["code"] == "E114"


def test_simulate_without_a_cluster_has_the_closed_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # 1F1B with p = 4 stages and m = 8 micro-batches: idle (p-1)/(m+p-1) of the total, (p-1)/m of the ideal.
    args = ["simulate", LLAMA, "--layout", "pp=4,cut=1/2/2/1", "--global-batch", "8", "--trace", "t.json"]
    found = answer_json(capsys, *args)
    assert found["bubble_share_of_total"] == pytest.approx(3 / 11)
    assert found["bubble_share_of_ideal"] == pytest.approx(3 / 8)
    assert found["makespan_forwards"] == pytest.approx(33)
    assert "makespan_s" not in found
    assert [r["peak_in_flight"] for r in found["ranks"]] == [4, 3, 2, 1]
    assert len(found["drawing"]) == 5
    spans = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 4 * 8 * 2
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(33_000)
    assert "rank 0 |" in answer(capsys, *args)


def test_simulate_with_a_cluster_has_seconds_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "llama-2-7b", "--layout", "pp=4,dp=2,zero=1", *SIZE, "--cluster", "a100-40gb-x8"]
    found = answer_json(capsys, *args)
    for row in found["ranks"]:
        assert max(size for _, size in row["memory_curve_bytes"]) <= row["peak_memory_bytes"]
        assert row["busy_s"] <= found["makespan_s"]
    assert "peak memory" in answer(capsys, *args)


def test_memory_curve_by_hand() -> None:
    memory = {
        "parameters": 10,
        "gradients": 20,
        "optimizer": 30,
        "activations": 40,
        "logits": 5,
        "working": 6,
        "outside_allocator": 1,
    }
    assert memory_curve(memory, ((0.0, 1), (1.0, 2), (2.0, 0)), 2) == [[0.0, 81.0], [1.0, 101.0], [2.0, 61.0]]


def test_memory_bar() -> None:
    assert memory_bar({"parameters": 50, "gradients": 25}, 100, 8) == "[PPPPGG..]"
    assert memory_bar({"parameters": 1, "gradients": 1}, 1000, 8) == "[PG......]"
    assert memory_bar({"parameters": 150}, 100, 8) == "[PPPPPPPP!PPPP"


def test_config_commands(capsys: pytest.CaptureFixture[str]) -> None:
    demo = str(ROOT / "recipes" / "demo.yaml")
    found = answer_json(capsys, "config", "show", demo, "--origin", "--set", "optimizer.lr=1e-4")
    assert found["resolved"]["optimizer"]["lr"] == 1e-4
    assert found["origins"]["optimizer.lr"] == "--set"
    shown = answer(capsys, "config", "show", demo, "--origin")
    assert "clip.max_norm" in shown
    assert "file:27" in shown
    assert answer_json(capsys, "config", "schema")["additionalProperties"] is False
    assert "optimizer.lr" in answer(capsys, "config", "schema")


def test_explain_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert "E108" in answer(capsys, "explain", "e108")
    assert answer_json(capsys, "explain", "E108")["kind"] == "input"


def test_init_writes_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "meshwright train run.yaml" in answer(capsys, "init", LLAMA)
    assert (tmp_path / "run.yaml").read_text() == answer(capsys, "init", LLAMA, "--out", "-")
    assert "tiny-llama" in answer(capsys, "config", "show", "run.yaml")
    assert "meshwright train 'my ☃ run.yaml' --dry-run" in answer(
        capsys, "init", LLAMA, "--out", "my ☃ run.yaml"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version").startswith("meshwright ")
