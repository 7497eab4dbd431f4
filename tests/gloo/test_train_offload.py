"""Optimizer state in host memory or in files: the same bits, fewer bytes on the device, as predicted."""

from __future__ import annotations

import json

import pytest
from proofs import SMALL, prove
from test_train_runs import Job

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.metadata import read_index, read_tensor

pytestmark = pytest.mark.gloo

HOMES = ["optimizer", "optimizer-nvme"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def state(job, name, step=6):
    folder = job.folder / name / "checkpoints" / f"step-{step}"
    index = read_index(folder)
    return {key: read_tensor(folder, index, key) for key in index.state_dict_metadata}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=3,zero=3", "dp=2,zero=1,pp=2", "tp=2", "pp=2,schedule=zbv,chunks=2"]
)
def test_equals_one_device(pool, layout, home):
    """H208: the norm of clipping is the reference's under offload too."""
    result = prove(pool, f"{layout},offload={home}", config=SMALL, steps=3)
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["weights"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp=2,zero=2,precision=fp32", marks=pytest.mark.slow),
        "dp=2,precision=bf16",
        pytest.param("dp=2,zero=3,precision=bf16", marks=pytest.mark.slow),
    ],
)
def test_h209_every_bit_is_that_of_a_run_without_offload(job, layout):
    """H209: parameters and both moments after six steps, two groups with their own decay; in memory and in files."""
    job.run(layout, "plain")
    want = state(job, "plain")
    for home in HOMES:
        job.run(f"{layout},offload={home}", home)
        got = state(job, home)
        assert got.keys() == want.keys()
        different = [key for key in want if not bool((got[key] == want[key]).all())]
        assert not different, different


@pytest.mark.parametrize("home", HOMES)
def test_bytes_on_the_device_fall_as_predicted(job, home):
    sets = ["data.seq_len=8", "run.eval_every=0"]
    plain = job.run("dp=2,zero=1,precision=fp32", "plain", sets=sets)
    away = job.run(f"dp=2,zero=1,precision=fp32,offload={home}", "away", sets=sets)
    for result in (plain, away):
        predicted, measured = result["prediction"], result["measurement"]
        assert predicted["peak_memory_bytes"] == pytest.approx(measured["peak_memory_bytes"], rel=0.1)
    rest = job.metrics("plain")[-1]["memory_bytes"]["optimizer"]
    left = job.metrics("away")[-1]["memory_bytes"]
    assert left["offloaded"] == pytest.approx(rest, rel=0.01)
    assert left["optimizer"] < 0.01 * rest  # the step counters
    fallen = plain["measurement"]["peak_memory_bytes"] - away["measurement"]["peak_memory_bytes"]
    foreseen = plain["prediction"]["peak_memory_bytes"] - away["prediction"]["peak_memory_bytes"]
    assert fallen == pytest.approx(foreseen, rel=0.1)
    assert fallen == pytest.approx(rest, rel=0.1)
    assert away["prediction"]["time_s"]["offload"] > 0


@pytest.mark.slow
def test_h210_files_are_named_alike_and_gone_after_a_clean_end(job):
    """H210: names do not depend on the process, a resumed run equals the unbroken one, nothing is left."""
    layout = "dp=2,zero=2,precision=fp64,offload=optimizer-nvme"
    job.run("dp=2,zero=2,precision=fp64", "one")
    job.run(layout, "cut", stop_at_step=3)
    assert not (job.folder / "cut" / "offload").exists()
    job.run(layout, "cut", resume=True)
    assert [m["loss"] for m in job.metrics("cut")] == [m["loss"] for m in job.metrics("one")]
    assert not (job.folder / "cut" / "offload").exists()


def test_a_run_resumes_with_and_without_offload(job):
    job.run("dp=2,precision=fp64", "one")
    job.run("dp=2,zero=3,precision=fp64,offload=optimizer-nvme", "cut", stop_at_step=2)
    job.run("dp=2,pp=2,precision=fp64,offload=optimizer", "cut", resume=True, stop_at_step=4)
    job.run("dp=1,precision=fp64", "cut", resume=True)
    want = [m["loss"] for m in job.metrics("one")]
    assert [m["loss"] for m in job.metrics("cut")] == pytest.approx(want, abs=1e-11)


@pytest.mark.slow
def test_adapters_beside_offload(job):
    """Few elements train, so there is little to move; the bits are the same."""
    lora = ["adapter.kind=lora", "adapter.rank=2"]
    job.run("dp=2,zero=3,precision=fp32", "plain", sets=lora)
    job.run("dp=2,zero=3,precision=fp32,offload=optimizer-nvme", "away", sets=lora)
    want, got = state(job, "plain"), state(job, "away")
    assert all(bool((got[key] == want[key]).all()) for key in want)


def test_a_folder_without_permission_or_room_is_refused_with_its_code(job):
    (job.folder / "taken").write_text("")
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2,zero=1,offload=optimizer-nvme", sets=[f"run.offload_dir={job.folder / 'taken'}"])
    assert {p.code for p in error.value.problems} == {"E278"}
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("layout", "sets", "code"),
    [
        ("dp=2,zero=3,offload=parameters", ["optimizer.name=sgd"], "E276"),
        ("dp=2,offload=optimizer", ["optimizer.name=sgd"], "E276"),
    ],
)
def test_what_is_not_built_is_refused_before_a_rank_starts(job, layout, sets, code):
    with pytest.raises(MeshwrightError) as error:
        job.run(layout, sets=sets)
    assert {p.code for p in error.value.problems} == {code}
    assert not (job.folder / "out").exists()


def test_the_run_record_says_where_state_rests(job):
    job.run("dp=2,zero=1,precision=fp32,offload=optimizer-nvme")
    record = json.loads((job.folder / "out" / "run.json").read_text())
    assert record["plan"]["layout"]["offload"] == "optimizer-nvme"
    assert record["resolved"]["run"]["offload_dir"] is None


def test_a_folder_that_cannot_be_is_said_before_the_run_folder_is_claimed(job):
    (job.folder / "file").write_text("")
    sets = [f"run.offload_dir={job.folder / 'file'}"]
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=1,offload=optimizer-nvme,precision=fp32", sets=sets, dry_run=True)
    assert {p.code for p in error.value.problems if p.severity == "error"} == {"E278"}
    assert not (job.folder / "out").exists()
    job.run("dp=1,precision=fp32", sets=sets, dry_run=True)
    assert any("W101" in line and "run.offload_dir" in line for line in job.lines)


def test_there_is_no_adapter_to_merge_in_a_whole_model(job):
    from meshwright.checkpoint.export import export_command

    job.run("dp=1,precision=fp32", "whole", sets=["run.steps=1"])
    with pytest.raises(MeshwrightError, match="E281"):
        export_command(str(job.folder / "whole"), str(job.folder / "export"), merge=True)
    assert not (job.folder / "export").exists()
