"""Plans: making one, its file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.codes import plan_file as codes
from meshwright.base.errors import MeshwrightError
from meshwright.base.records import MemoryBytes, Prediction, RankRecord, TimeSeconds
from meshwright.layout import built
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.program.plan_file import canonical_json, load_plan, plan_from_dict, plan_to_dict, save_plan


def llama(layers: int = 6) -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "id2label": {10: "b", 9: "a"},
    }
    return spec_from_config(config, "small")


def make(text: str = "dp=2,zero=1,pp=2", batch: int = 8, **more: Any) -> Plan:
    return make_plan(llama(), parse_layout(text), batch, 16, "small/config.json", **more)


def refusal(text: str, batch: int = 8) -> dict[str, str]:
    with pytest.raises(MeshwrightError) as caught:
        make(text, batch)
    return {p.code: p.text() for p in caught.value.problems}


def prediction() -> Prediction:
    memory = MemoryBytes(parameters=1, gradients=2, optimizer=3)
    return Prediction(
        step_time_s=0.1,
        tokens_per_s_per_gpu=1.5,
        model_tflops_per_gpu=2.5,
        mfu_pct=None,
        flops_convention="causal",
        bubble_share_of_total=0.25,
        memory=memory,
        time=TimeSeconds(compute=0.1),
        ranks=(RankRecord(rank=0, stage=0, memory=memory),),
        step_time_low_s=0.09,
        step_time_high_s=0.12,
        oom_probability=0.0,
        hidden_s={"data": 0.01},
        sources=("measured",),
    )


def test_a_plan_has_nothing_open() -> None:
    plan = make()
    assert plan.layout.cut == "3/3"
    assert plan.batch.accumulation == 4
    assert plan.schedule_text.splitlines() == [
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    ]
    assert make("schedule=gpipe", 2).schedule_text == "0F0,0B0,0F1,0B1"


def test_warnings_are_kept() -> None:
    (kept,) = make("pp=4", 2).warnings
    assert kept.startswith("W301 2 micro-batches over 4 stages")


def test_everything_wrong_is_told_at_once() -> None:
    found = refusal("dp=3,pp=9,zero=3,shard=2,compile=blocks,recompute=selective", 8)
    assert set(found) == {"E220", "E211", "E213", "E279"}


def test_what_is_not_built_can_still_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "AXES", frozenset({"dp", "pp"}))
    assert "E250" in refusal("cp=2")
    assert make("tp=2", for_run=False).layout.tp == 2


def test_the_hash_covers_the_work_and_not_the_prediction() -> None:
    plan = make()
    assert replace(plan, prediction=prediction(), why=("fast",), cluster="x").hash == plan.hash
    hashes = {
        plan.hash,
        make("dp=2,zero=2,pp=2").hash,
        make(batch=16).hash,
        make("dp=2,zero=1,pp=2,schedule=gpipe").hash,
        make(frozen=("*norm*",)).hash,
        make("dp=2,zero=1,pp=2,cut=2/4").hash,
    }
    assert len(hashes) == 6


@pytest.mark.parametrize("with_prediction", [False, True])
def test_the_file_reads_back(tmp_path: Path, with_prediction: bool) -> None:
    plan = replace(make(frozen=("lm_head*",)), why=("because",), binds="memory", cluster="here")
    plan = replace(plan, prediction=prediction()) if with_prediction else plan
    path = tmp_path / "plan.json"
    path.write_text("old")
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert load_plan(path).hash == plan.hash
    assert canonical_json(load_plan(path)) == path.read_text() == canonical_json(plan)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(make(), path)
    before = path.read_text()
    with pytest.raises(TypeError):
        save_plan(replace(make(), model_config={"x": object()}), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(MeshwrightError, match=r"E450.*No such file"):
        load_plan(path)
    for content in (canonical_json(make())[:-40].encode(), b"\xff\xfe", b"", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(MeshwrightError, match="E450"):
            load_plan(path)
    path.write_text("[1]")
    with pytest.raises(MeshwrightError, match="E451"):
        load_plan(path)


def test_foreign_and_damaged_keys_are_named() -> None:
    data = plan_to_dict(make())
    data.pop("why")
    data["surprise"] = 1
    data["schedule_text"] = 3
    with pytest.raises(MeshwrightError) as caught:
        plan_from_dict(data)
    (found,) = caught.value.problems
    assert found.code == "E451"
    for part in ("no 'why'", "unknown 'surprise'", "'schedule_text' is int, not str"):
        assert part in found.found


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"format": 2}, "E452"),
        ({"layout": {"dp": 2}}, "E451"),
        ({"batch": {"global_batch": True}}, "E451"),
        ({"frozen": [1]}, "E451"),
        ({"prediction": {"step_time_s": 1}}, "E451"),
        ({"prediction": "fast"}, "E451"),
        ({"schedule_text": "0F0,0B0"}, "E453"),
        ({"model_config": {}}, "E453"),
        ({"frozen": ["*"]}, "E453"),
        ({"hash": "0" * 16}, "E453"),
    ],
)
def test_a_changed_plan_is_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(MeshwrightError, match=code):
        plan_from_dict(plan_to_dict(make()) | change)


def test_a_changed_layout_is_refused() -> None:
    data = json.loads(canonical_json(make()))
    data["layout"]["zero"] = 2
    with pytest.raises(MeshwrightError, match="E453"):
        plan_from_dict(data)
    data["layout"]["zero"] = 7
    with pytest.raises(MeshwrightError, match="E112"):
        plan_from_dict(data)


def test_every_plan_code_is_triggered_somewhere() -> None:
    # E454 and E455 in test_program_explain.py
    assert {i.code for i in codes.CODES} == {f"E45{n}" for n in range(6)}


def schedule_file(folder: Path, text: str) -> str:
    path = folder / "rows.csv"
    path.write_text(text)
    return f"dp=1,pp=2,schedule=@{path}"


def test_a_schedule_file_runs(tmp_path: Path) -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    plan = make(schedule_file(tmp_path, text), 2)
    assert plan.schedule_text == text.strip()


@pytest.mark.parametrize(
    ("text", "batch", "code", "part"),
    [
        ("0F0,0B0\n1F0,1B0", 2, "E307", "global batch = 1"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0", 1, "E307", "pp = 3"),
        ("1F0,1B0\n0F0,0B0", 1, "E304", "sort the rows"),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", 1, "E307", "chunks = 2"),
        ("0F0,1F0,1B0,0B0\n,,", 1, "E307", "no action in row 1"),
        ("0B0,0F0\n1F0,1B0", 1, "E305", "0B0,0F0\n^"),
    ],
)
def test_a_schedule_file_that_does_not_fit(
    tmp_path: Path, text: str, batch: int, code: str, part: str
) -> None:
    found = refusal(schedule_file(tmp_path, text), batch)
    assert part in found[code]


def test_a_schedule_file_with_halves_and_two_stages_per_rank(tmp_path: Path) -> None:
    halves = schedule_file(tmp_path, "0F0,0I0,0W0\n1F0,1I0,1W0")
    assert make(halves, 1).schedule_text == "0F0,0I0,0W0\n1F0,1I0,1W0"
    found = refusal(halves.replace("dp=1", "dp=2,zero=3"), 2)
    assert "split backwards" in found["E216"]
    v = schedule_file(tmp_path, "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0") + ",chunks=2"
    assert make(v, 1).layout.num_stages == 4


def test_a_schedule_file_that_is_missing(tmp_path: Path) -> None:
    assert "No such file" in refusal(f"pp=2,schedule=@{tmp_path}/none.csv", 2)["E114"]
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\xfa")
    assert "not text" in refusal(f"pp=2,schedule=@{tmp_path}/bad.csv", 2)["E114"]
