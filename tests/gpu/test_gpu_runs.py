"""One GPU does what one CPU rank does: proofs, a run with its measurements, and a probe that predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli.main import run
from meshwright.layout.parse import parse_layout
from meshwright.mesh.env import RankFacts
from meshwright.model.read_hf import read_model
from meshwright.orchestrate.proving import ProofOptimizer, proof_plan, run_proof

MODELS = Path(__file__).parents[2] / "recipes" / "models"


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def _here(worker: Callable[[RankFacts, Any], Any], nproc: int, work: Any) -> list[Any]:
    """Run the one rank of a proof in this process: importing torch and meeting a driver takes most of a proof's time."""
    assert nproc == 1
    on = work.recipe.device if work.recipe is not None else "cuda:0"
    return [worker(RankFacts(rank=0, world_size=1, local_rank=0, local_world_size=1, device=on), work)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-llama", "dp=1"),
        ("tiny-llama", "dp=1,recompute=full,loss=chunked"),
        ("tiny-llama", "dp=1,recompute=selective"),
        ("tiny-llama", "dp=1,offload=optimizer"),
        ("tiny-llama", "dp=1,offload=parameters"),
        ("tiny-llama", "dp=1,offload=parameters-nvme"),
        ("tiny-qwen3", "dp=1,compile=blocks"),
        ("tiny-gpt2", "dp=1"),
        ("tiny-mixtral", "dp=1"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_proof_on_a_gpu(model: str, layout: str, precision: str) -> None:
    spec = read_model(str(MODELS / model))
    wanted = parse_layout(f"{layout},precision={precision}")
    plan = proof_plan(spec, wanted, model_path="", seq_len=32, global_batch=None, freeze=())
    steps = (
        1 if model == "tiny-mixtral" and precision == "bf16" else 3
    )  # a near-tie may choose another expert
    result = run_proof(
        plan,
        spec,
        steps=steps,
        seed=0,
        valid="unequal",
        optimizer=ProofOptimizer(),
        max_norm=1.0,
        show=print,
        execute=_here,
        device="cuda",
    )
    assert result["passed"], result
    assert result["device"] == "cuda"
    if precision == "fp64":
        assert result["gradients"]["max_rel_diff"] < 1e-10


def test_a_proof_starts_its_rank_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(["prove", "--model", str(MODELS / "tiny-llama"), "--layout", "dp=1"], capsys)
    assert result["passed"]
    assert result["device"] == "cuda"


def test_a_run_measures_what_the_allocator_gave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "recipes/demo.yaml", "--layout", "dp=1,precision=bf16", "--steps", "8"]
    arguments += ["--set", f"run.dir={tmp_path / 'run'}"]
    result = _json(arguments, capsys)
    measured = result["measurement"]
    assert measured["mfu_pct"] is None or 0 < measured["mfu_pct"] < 100
    rank = measured["ranks"][0]["memory_bytes"]
    inside = sum(v for k, v in rank.items() if k != "outside_allocator")
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    peaks = [r["memory_bytes"]["peak"] for r in records if "memory_bytes" in r]
    assert inside <= max(peaks)  # the traced step is not above the whole run
    assert inside > 0.5 * max(peaks)
    assert rank["outside_allocator"] > 100 * 2**20  # the context alone


def test_a_probe_gives_a_device_with_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cluster.load import read_cluster

    out = tmp_path / "probe.json"
    assert run(["probe", "--nproc", "1", "--quick", "--out", str(out)]) == 0
    capsys.readouterr()
    cluster = read_cluster(str(out), 1)
    assert not cluster.device.is_cpu
    assert cluster.device.name == torch.cuda.get_device_name(0)
    for precision, rate in cluster.device.matmul_flops.items():
        peak = cluster.device.peak_flops.get(precision)
        assert peak is None or 0.2 * peak.value < rate.value < 1.1 * peak.value
