"""Runs on a base in 4 bits: what lives beside what was predicted, resume on another layout, the saved adapter."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from test_train_runs import Job

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.export import export_command
from meshwright.model.quantised import held_bytes

pytest.importorskip("bitsandbytes", reason="bitsandbytes (extra: quantised) is not installed")
pytestmark = pytest.mark.gloo

QLORA = ["adapter.kind=qlora", "adapter.rank=4", "optimizer.lr=2e-2"]
MATRICES = 4 * [32 * 32, 16 * 32, 16 * 32, 32 * 32, 48 * 32, 48 * 32, 32 * 48]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def test_the_base_lives_in_four_bits_as_predicted(job):
    plain = job.run("dp=1,precision=fp32", "lora", sets=["adapter.kind=lora", "adapter.rank=4"])
    four = job.run("dp=1,precision=fp32", "qlora", sets=QLORA)
    before, now = (r["measurement"]["memory_bytes"]["parameters"] for r in (plain, four))
    packed = sum(held_bytes(n, double=True) for n in MATRICES)
    assert before - now == 4 * sum(MATRICES) - packed
    print(
        before,
        now,
        packed,
        [r["prediction"]["memory_bytes"] for r in (plain, four)],
        [r["measurement"] for r in (plain, four)],
    )
    for kind in ("parameters", "gradients", "optimizer"):
        want = four["measurement"]["memory_bytes"][kind]
        assert four["prediction"]["memory_bytes"][kind] == pytest.approx(want, rel=0.01), kind
    assert four["prediction"]["peak_memory_bytes"] == pytest.approx(
        four["measurement"]["peak_memory_bytes"], rel=0.15
    )


def test_a_run_resumes_on_another_layout_and_saves_an_adapter(job, tmp_path):
    job.run("dp=1,precision=fp64", "one", sets=QLORA)
    job.run("dp=2,zero=2,precision=fp64", "cut", sets=QLORA, stop_at_step=3)
    job.run("dp=1,pp=2,precision=fp64", "cut", sets=QLORA, resume=True)
    want = [m["loss"] for m in job.metrics("one")]
    assert [m["loss"] for m in job.metrics("cut")] == pytest.approx(want, abs=1e-11)
    assert want[-1] < want[0]
    checkpoint = str(job.folder / "cut" / "checkpoints" / "step-6")
    done = export_command(checkpoint, str(tmp_path / "adapter"))
    assert done["tensors"] == 2 * len(MATRICES)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(t.norm() > 0 for t in saved.values())
    for merge, logits in ((True, False), (False, True)):
        with pytest.raises(MeshwrightError) as error:
            export_command(checkpoint, str(tmp_path / "whole"), check_logits=logits, merge=merge)
        assert [p.code for p in error.value.problems] == ["E287"]
    manifest = json.loads((job.folder / "cut" / "checkpoints" / "step-6" / "manifest.json").read_text())
    assert manifest["plan"]["adapter"]["levels"] == "nf4"
    before = json.loads((job.folder / "cut" / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert manifest["extra"]["base"] == before["extra"]["base"]


def test_factors_do_not_go_on_beside_another_base(job):
    job.run("dp=1,precision=fp32", "out", sets=QLORA, stop_at_step=3)
    path = job.folder / "out" / "checkpoints" / "step-3" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["extra"]["base"] = "0" * 16
    path.write_text(json.dumps(manifest))
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=1,precision=fp32", "out", sets=QLORA, resume=True)
    assert "E288" in {p.code for p in error.value.problems}
