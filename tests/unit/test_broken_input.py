"""Input that once slipped through: numbers beyond counting, edited plans, options that contradict or have no effect."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.codes import CODES
from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.cli.main import run
from meshwright.layout.batch import MOST_ACTIONS, MOST_SEQUENCES, check_actions, check_batch, derive_batch
from meshwright.layout.check import check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import MAX_DEGREE, parse_layout
from meshwright.mesh.env import check_local_ranks
from meshwright.model.read_hf import read_model
from meshwright.program.make import make_plan
from meshwright.program.plan_file import load_plan, plan_to_dict, save_plan

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "recipes" / "models" / "tiny-llama")
DEMO = str(ROOT / "recipes" / "demo.yaml")
CASE = ["--cluster", "a100-40gb-x8", "--seq-len", "128", "--global-batch", "16"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """Return the exit code and the one JSON document on standard output."""
    code = run([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    """Return the codes of a refusal for bad input, each with number, reason and choice."""
    code, found = answer(capsys, *args)
    assert code == ExitCode.BAD_INPUT
    errors = [p for p in found["problems"] if p["severity"] == "error"]
    assert all(p["found"] and p["needs"] and p["why"] and p["do"] for p in errors), errors
    return [p["code"] for p in errors]


@pytest.mark.parametrize(
    "args",
    [
        ["plan", LLAMA, "--cluster", "a100-40gb-x8", "--seq-len", "128", "--global-batch", str(10**24)],
        ["plan", LLAMA, "--cluster", "a100-40gb-x8", "--seq-len", str(10**21), "--global-batch", "8"],
        ["estimate", LLAMA, *CASE[:4], "--layout", "dp=8", "--global-batch", str(8 * 10**9)],
        ["inspect", LLAMA, "--seq-len", str(10**24)],
        ["explain", LLAMA, "--layout", "dp=2", "--rank", "0", "--seq-len", str(10**12)],
        ["simulate", LLAMA, "--layout", "dp=2", "--global-batch", str(10**12)],
    ],
)
def test_numbers_beyond_counting_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    begin = time.monotonic()
    assert refused(capsys, *args) == ["E863"]
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "override",
    [
        f"batch.sequences={10**20}",
        f"data.seq_len={10**18}",
        f"run.steps={10**26}",
        f"run.seed={10**20}",
    ],
)
def test_run_files_have_no_number_beyond_counting(capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert refused(capsys, "config", "show", DEMO, "--set", override) == ["E106"]


def test_a_step_has_a_bounded_number_of_micro_batches() -> None:
    layout = parse_layout("pp=4,micro_batch=2")
    most = MOST_ACTIONS // 4
    assert check_actions(layout, most) == []
    found = check(read_model("llama-2-7b"), layout, derive_batch(layout, 2 * most + 2, 8))
    assert [p.code for p in found] == ["E224"]
    assert f"global batch = {2 * most}" in found[0].do
    assert [p.code for p in check_batch(Layout(), MOST_SEQUENCES + 1, 8)] == ["E222"]


def test_the_planner_passes_over_layouts_with_too_many_micro_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--gpus", "512", "--seq-len", "2048", "--global-batch", str(2**18)]
    code, found = answer(capsys, "plan", "llama-2-7b", "--cluster", "a100-40gb-x8", *sizes)
    assert code == ExitCode.GOOD
    assert found["plans"]


def test_too_large_a_degree_names_the_largest() -> None:
    with pytest.raises(MeshwrightError, match=f"dp={MAX_DEGREE},"):
        parse_layout(f"dp={MAX_DEGREE + 1}")


def test_more_ranks_than_a_machine_carries() -> None:
    assert check_local_ranks(64, 2) == []
    assert [p.code for p in check_local_ranks(65, 2)] == ["E509"]
    assert check_local_ranks(256, 16) == []


@pytest.mark.parametrize("command", [["estimate", *CASE], ["explain", "--rank", "0"]])
def test_a_freeze_pattern_without_a_match_is_refused_before_a_run(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    args = [command[0], LLAMA, *command[1:], "--layout", "dp=8"]
    assert refused(capsys, *args, "--freeze", "model.embed_token") == ["E812"]
    assert answer(capsys, *args, "--freeze", "model.embed*")[0] == ExitCode.GOOD


def test_a_stage_with_nothing_to_train_is_refused_with_the_plan() -> None:
    spec = read_model(LLAMA)
    with pytest.raises(MeshwrightError, match=r"E546.*stage 0 of 1"):
        make_plan(spec, parse_layout("dp=2"), 4, 16, LLAMA, frozen=("*",))
    with pytest.raises(MeshwrightError, match=r"E546.*stage 0 of 6"):
        make_plan(spec, parse_layout("pp=6"), 6, 16, LLAMA, frozen=("model.layers.0.*", "model.embed*"))


def test_a_plan_whose_parts_contradict_each_other_is_refused(tmp_path: Path) -> None:
    plan = make_plan(read_model(LLAMA), parse_layout("dp=2,pp=2"), 8, 16, LLAMA)
    for changed in (
        replace(plan, batch=replace(plan.batch, dp=4)),
        replace(plan, batch=replace(plan.batch, accumulation=3)),
        replace(plan, layout=replace(plan.layout, pp=3)),
        replace(plan, layout=replace(plan.layout, micro_batch=2)),
    ):
        save_plan(changed, tmp_path / "plan.json")  # with the hash of what it says
        with pytest.raises(MeshwrightError, match="E451"):
            load_plan(tmp_path / "plan.json")


def test_a_report_is_not_drawn_from_an_edited_plan(capsys: pytest.CaptureFixture[str]) -> None:
    edited = plan_to_dict(make_plan(read_model(LLAMA), parse_layout("dp=2"), 8, 16, LLAMA))
    edited["layout"]["dp"] = 4
    Path("plan.json").write_text(json.dumps(edited))
    codes = refused(capsys, "report", "plan.json")
    assert codes in (["E451"], ["E453"])
    assert not Path("plan.html").exists()


def test_options_that_would_be_passed_over_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(make_plan(read_model(LLAMA), parse_layout("dp=2"), 8, 16, LLAMA), "plan.json")
    assert refused(capsys, "simulate", "plan.json", "--layout", "dp=4") == ["E864"]
    assert refused(capsys, "explain", "plan.json", "--rank", "0", "--layout", "dp=4") == ["E864"]
    assert refused(capsys, "explain", "E201", "--rank", "3") == ["E864"]
    both = ["plan", LLAMA, *CASE, "--precision", "bf16", "--fix"]
    assert refused(capsys, *both, "precision=fp32") == ["E864"]
    assert answer(capsys, *both, "precision=bf16")[0] == ExitCode.GOOD


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_an_unwritable_place_is_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["plan", LLAMA, *CASE, "--out", "/proc/plan.json"],
        ["simulate", LLAMA, "--layout", "dp=2", "--trace", "/proc/trace.json"],
        ["init", LLAMA, "--out", "/proc/run.yaml"],
    ):
        code, found = answer(capsys, *args)
        assert (code, found["problems"][0]["code"]) == (ExitCode.ENVIRONMENT, "E867")


@pytest.mark.parametrize(
    "args",
    [
        ["probe", "--nproc", "2", "--out"],
        ["prove", "--model", LLAMA, "--layout", "dp=2", "--out"],
        ["plan", LLAMA, *CASE, "--out"],
        ["simulate", LLAMA, "--layout", "dp=2", "--trace"],
    ],
)
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("work was done before the place was looked at"))
    assert refused(capsys, *args, "no/such/folder/out.json") == ["E867"]


def test_schedule_files_are_read_alike_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").write_text("\n")
    for command in (["estimate", LLAMA, *CASE], ["simulate", LLAMA]):
        assert refused(capsys, *command, "--layout", "pp=2,schedule=@none.txt") == ["E114"]
        assert refused(capsys, *command, "--layout", "pp=2,schedule=@empty.txt") == ["E306"]


def test_a_config_with_a_key_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text('{"model_type": "llama", "vocab_size": 3, "vocab_size": 4}')
    code, found = answer(capsys, "inspect", "config.json")
    assert (code, found["problems"][0]["code"]) == (ExitCode.BAD_INPUT, "E121")
    assert "vocab_size" in found["problems"][0]["found"]


def test_interrupted_is_said_in_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import meshwright.model.read_hf as read_hf

    def interrupted(target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(read_hf, "read_model", interrupted)
    code, found = answer(capsys, "inspect", LLAMA)
    assert (code, found["problems"][0]["code"]) == (130, "E515")


def test_a_cluster_file_without_its_keys_is_refused_with_a_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("cluster.json").write_text("{}")
    args = ["plan", LLAMA, "--cluster", "cluster.json", "--seq-len", "128", "--global-batch", "16"]
    assert set(refused(capsys, *args)) == {"E404"}


def test_one_code_for_a_rank_that_is_not_there() -> None:
    from meshwright.api import rank_info

    with pytest.raises(MeshwrightError, match="E454"):
        rank_info("dp=2", 2)
    assert "E554" not in CODES
    assert derive_batch(parse_layout("dp=2"), 4, 8).accumulation == 2
