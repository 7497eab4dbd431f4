"""Whole training runs on local ranks, through the product's own door, on a small model and a small text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate.training import train_command

pytestmark = pytest.mark.gloo

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
CLUSTER = {
    "name": "two cores",
    "gpus_per_node": 8,
    "num_nodes": 1,
    "source": "made up for tests",
    "device": {
        "name": "core",
        "memory": "4GiB",
        "peak_flops": {"fp32": 1e11, "fp64": 5e10, "bf16": 1e11, "fp16": 1e11},
        "matmul_flops": {"fp32": 5e10, "fp64": 2e10, "bf16": 5e10, "fp16": 5e10},
        "memory_rate_bytes_per_s": 5e9,
        "launch_s": 1e-5,
        "is_cpu": True,
    },
    "intra": {"name": "loop-back", "rate_bytes_per_s": 1e9, "latency_s": 1e-4},
}
TEXT = "".join(
    f"Line {i}: the quick brown fox number {i * i % 97} jumps over {i * 7 % 31} lazy dogs.\n"
    for i in range(1500)
)


class Job:
    """A run file in a temporary folder, and a way to run it with changes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        (folder / "cluster.json").write_text(json.dumps(CLUSTER))
        (folder / "text.txt").write_text(TEXT)
        (folder / "run.yaml").write_text(
            "model: {config: model}\n"
            "data: {path: text.txt, seq_len: 32, eval_fraction: 0.05}\n"
            "batch: {sequences: 8}\n"
            "optimizer: {lr: 3e-3}\n"
            "schedule: {warmup_steps: 2}\n"
            "cluster: cluster.json\n"
            "run: {steps: 6, eval_every: 3, eval_batches: 2}\n"
        )
        monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        self.lines: list[str] = []

    def run(self, layout: str, name: str = "out", **options):
        sets = [f"run.dir={self.folder / name}", *options.pop("sets", [])]
        run = resolve(load_run(str(self.folder / "run.yaml"), sets), layout=layout)
        return train_command(run, layout=layout, show=self.lines.append, **options)

    def metrics(self, name: str = "out"):
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def codes(error) -> set[str]:
    return {p.code for p in error.value.problems}


def test_a_run_leaves_everything_in_its_folder(job):
    result = job.run("dp=2,zero=3,precision=fp32")
    folder = job.folder / "out"
    steps = job.metrics()
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert {
        "step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "step_time_s", "tokens_per_s",
        "memory_bytes", "phases_s",
    } <= steps[0].keys()  # fmt: skip
    assert {"parameters", "gradients", "optimizer", "activations", "other", "peak"} <= steps[-1][
        "memory_bytes"
    ].keys()
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["lr"] == pytest.approx(1.5e-3)  # H142: warm-up counts steps, not ranks
    assert result["steps"] == 6
    assert result["final_loss"] == steps[-1]["loss"]
    record = json.loads((folder / "run.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    manifest = json.loads((folder / "checkpoints" / "step-6" / "manifest.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert record["plan_hash"] == plan["hash"] == events[0]["plan_hash"] == manifest["extra"]["plan_hash"]
    assert record["placement"]["complete"]
    assert record["measurement"]["memory_bytes"]["parameters"] > 0
    assert set(result) >= {
        "run_dir", "steps", "final_loss", "prediction", "measurement", "errors_pct",
    }  # fmt: skip
    assert next(e["event"] for e in events) == "start"
    assert [e["event"] for e in events][-1] == "end"


def test_losses_do_not_depend_on_the_layout(job):
    """H41, H142, H144: same initial weights, same order of samples, same rates, whatever the layout."""
    job.run("dp=1,precision=fp64", "one")
    for name, layout in (
        ("a", "dp=4,zero=2,shard=2"),
        ("b", "dp=2,zero=3,pp=2"),
        ("c", "pp=4,schedule=gpipe"),
        ("d", "dp=2,zero=1,pp=2,schedule=zbv"),
    ):
        job.run(f"{layout},precision=fp64", name)
        for want, got in zip(job.metrics("one"), job.metrics(name), strict=True):
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-11), (layout, want["step"])
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-10)
            assert got["lr"] == want["lr"]
            if "eval_loss" in want:  # H153
                assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-11)


def test_resume_in_another_layout_goes_on_as_if_unbroken(job):
    """H135, H140, H149: parameters, moments, rate and data position all continue."""
    job.run("dp=2,zero=3,precision=fp64", "whole")
    job.run("dp=2,zero=3,precision=fp64", "broken", stop_at_step=3)
    assert len(job.metrics("broken")) == 3
    job.run("pp=2,precision=fp64", "broken", resume=True)
    for want, got in zip(job.metrics("whole"), job.metrics("broken"), strict=True):
        assert got["step"] == want["step"]
        assert got["lr"] == want["lr"]
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-10)


def test_resume_from_several_stages_per_rank_on_replicas(job):
    job.run("pp=2,schedule=interleaved,precision=fp64", "whole")
    job.run("pp=2,schedule=interleaved,precision=fp64", "broken", stop_at_step=3)
    job.run("dp=2,precision=fp64", "broken", resume=True)
    assert len(job.metrics("broken")) == 6
    for want, got in zip(job.metrics("whole"), job.metrics("broken"), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-10)
        if "eval_loss" in want:
            assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-10)


def test_what_a_run_refuses_before_it_writes(job):
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,precision=fp32", "x", nproc=3)
    assert codes(error) == {"E501"}
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,precision=fp32", "x", resume=True)
    assert codes(error) == {"E542"}
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,precision=fp32", "x", sets=['freeze=["model.embd*"]'])
    assert codes(error) == {"E812"}
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=3,precision=fp32", "x")
    assert {"9", "6"} <= set("".join(c if c.isdigit() else " " for c in str(error.value)).split())
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,compile=blocks,recompute=selective,precision=fp32", "x")
    assert all(p.kind == "code" for p in error.value.problems if p.severity == "error")
    assert not (job.folder / "x").exists()


def test_a_dry_run_writes_nothing(job):
    result = job.run("dp=2,zero=1,precision=fp32", "dry", dry_run=True)
    assert result["plan"]["layout"]["zero"] == 1
    assert not (job.folder / "dry").exists()


def test_a_folder_with_another_run_is_left_alone(job):
    job.run("dp=1,precision=fp32", stop_at_step=1)
    before = {p: p.read_bytes() for p in (job.folder / "out").rglob("*") if p.is_file()}
    for layout, words in (("dp=2,precision=fp32", "another plan"), ("dp=1,precision=fp32", "this very plan")):
        with pytest.raises(MeshwrightError, match=words) as error:
            job.run(layout)
        assert codes(error) == {"E541"}
    assert before == {p: p.read_bytes() for p in (job.folder / "out").rglob("*") if p.is_file()}


def test_resume_with_other_data_is_refused(job):
    job.run("dp=1,precision=fp32", stop_at_step=1)
    (job.folder / "text.txt").write_text(TEXT.replace("fox", "cat"))
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=1,precision=fp32", resume=True)
    assert "E551" in str(error.value)


def test_a_stage_without_anything_to_train_is_refused(job):
    with pytest.raises(MeshwrightError, match="E546"):
        job.run("pp=2,cut=2/2,precision=fp32", sets=['freeze=["model.embed*", "model.layers.[01].*"]'])


def test_nan_stops_the_run_and_all_ranks_alike(job):
    """H33: five steps in a row are skipped by every rank, then the run says so; no weight was touched."""
    begin = time.monotonic()
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,precision=fp32", sets=["optimizer.lr=1e30", "clip.max_norm=null", "run.steps=20"])
    assert "E545" in str(error.value)
    assert error.value.exit_code == 1
    assert time.monotonic() - begin < 60
    skipped = [s for s in job.metrics() if s["skipped"]]
    assert 4 <= len(skipped) <= 5
    assert all(s["loss"] is None or s["loss"] == s["loss"] for s in job.metrics())


def test_auto_lets_the_planner_choose_for_the_ranks_at_hand(job):
    run = resolve(load_run(str(job.folder / "run.yaml"), [f"run.dir={job.folder / 'auto'}", "run.steps=2"]))
    result = train_command(run, nproc=2, show=job.lines.append)
    assert result["layout"].startswith(("dp=2", "dp=1"))
    assert any("planned" in line for line in job.lines)
    assert result["prediction"]["step_time_s"] > 0


def test_a_plan_file_is_run_as_it_is_and_another_model_is_refused(job):
    job.run("dp=2,zero=1,precision=fp32", "first", stop_at_step=1)
    run = resolve(load_run(str(job.folder / "run.yaml"), [f"run.dir={job.folder / 'second'}"]))
    plan = str(job.folder / "first" / "plan.json")
    result = train_command(run, plan_path=plan, stop_at_step=1, show=job.lines.append)
    assert result["layout"] == "dp=2,zero=1,cut=4,precision=fp32" or "zero=1" in result["layout"]
    (job.folder / "model" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    run = resolve(load_run(str(job.folder / "run.yaml"), [f"run.dir={job.folder / 'third'}"]))
    with pytest.raises(MeshwrightError) as error:
        train_command(run, plan_path=plan, stop_at_step=1, show=job.lines.append)
    assert codes(error) == {"E552"}
