"""``estimate --exact``: what it answers, composes, compares and refuses. Ranks are played in children of this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.cli.main import run
from meshwright.cluster.load import read_cluster
from meshwright.cost.estimate import estimate
from meshwright.exact import children
from meshwright.exact.children import play_ranks
from meshwright.exact.estimate import exact_answer
from meshwright.exact.model import reduced, uniform, unknown_spec
from meshwright.exact.rank import RankTask
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.program.make import make_plan

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
UNKNOWN = LLAMA | {
    "model_type": "helium",
    "architectures": ["HeliumForCausalLM"],
    "head_dim": 16,
    "num_hidden_layers": 2,
}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    found = run([*args, "--json"])
    out = json.loads(capsys.readouterr().out)
    assert found == code, out
    return out


def options(layout: str, gpus: int, batch: int = 64) -> list[str]:
    cluster = ["--cluster", "a100-40gb-x8", "--gpus", str(gpus)]
    return [*cluster, "--layout", layout, "--seq-len", "32", "--global-batch", str(batch), "--exact"]


def answered(
    config: dict[str, Any], layout: str, batch: int, cluster: str = "a100-40gb-x8", seq_len: int = 32
) -> dict[str, Any]:
    spec, parsed = spec_from_config(config, "t"), parse_layout(layout)
    machine = read_cluster(cluster, parsed.world_size)
    item = estimate(spec, parsed, machine, seq_len, batch)
    plan = make_plan(spec, parsed, batch, seq_len, "t")
    return exact_answer(plan, spec, machine, item["ranks"])


def test_keys_sums_and_the_difference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Three classes of a pipeline; exact - closed form = difference, in bytes and by category."""
    model = folder(tmp_path, LLAMA | {"num_hidden_layers": 4})
    args = options("dp=1,pp=4,cut=1/1/1/1", 4, 8)
    found = answer(capsys, "estimate", model, *args)
    exact, closed, difference = found["exact"], found["closed_form"], found["difference"]
    assert [r["position"] for r in exact["ranks"]] == ["first", "middle", "last"]
    assert [r["stages"] for r in exact["ranks"]] == [[0], [1], [3]]
    worst = max(exact["ranks"], key=lambda r: r["peak_memory_bytes"])
    assert exact["peak_memory_bytes"] == worst["peak_memory_bytes"] == sum(worst["memory_bytes"].values())
    assert worst["moment"].startswith("backward of micro-batch")
    assert {m["phase"] for m in worst["moments"]} == {
        "begin",
        "forward",
        "backward",
        "reduce",
        "norm",
        "update",
    }
    assert max(m["live_bytes"] for m in worst["moments"]) == worst["peak_memory_bytes"]
    for name in ("parameters", "gradients", "optimizer", "working"):
        assert difference["memory_bytes"][name] == exact["memory_bytes"][name] - closed["memory_bytes"][name]
    logits = closed["memory_bytes"]["logits"]
    activations = closed["memory_bytes"]["activations"] + logits
    assert difference["memory_bytes"]["activations"] == exact["memory_bytes"]["activations"] - activations
    outside = closed["memory_bytes"]["outside_allocator"]
    assert (
        difference["peak_memory_bytes"] == exact["peak_memory_bytes"] - closed["peak_memory_bytes"] + outside
    )
    assert sum(difference["memory_bytes"].values()) == difference["peak_memory_bytes"]
    assert (exact["collectives"], exact["fits"], found["fits"]) == ("nccl", True, True)
    assert run(["estimate", model, *args]) == 0
    text = capsys.readouterr().out
    assert "closed form" in text
    assert "middle rank 1" in text


@pytest.mark.slow
def test_composed_bytes_are_those_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 blocks and 6 micro-batches from 4 and 5, 3 and 4: the same peak, categories and place as played whole."""
    config, layout = LLAMA | {"num_hidden_layers": 7}, "dp=2,zero=3"
    composed = answered(config, layout, 12)["exact"]["ranks"][0]
    assert composed["method"].startswith("composed: 7 blocks a stage from 4 and 5, 6 on the line; 6 micro")
    monkeypatch.setattr("meshwright.exact.rank.axis", lambda size, *_, **__: _one(size))
    whole = answered(config, layout, 12)["exact"]["ranks"][0]
    assert whole["method"] == "whole step"
    assert {k: composed[k] for k in composed if k != "method"} == {
        k: whole[k] for k in whole if k != "method"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2,recompute=full",
        "dp=2,zero=3,recompute=full",
        "dp=2,zero=3,tp=2,recompute=selective",
        "tp=2,loss=chunked",
        "cp=2,dp=2,zero=3",
        "pp=4",
        "pp=2,schedule=gpipe",
        "pp=2,schedule=interleaved",
        "pp=2,schedule=zbv",
        "dp=2,pp=2,zero=2",
    ],
)
def test_more_composed_bytes(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    stages = parse_layout(layout).num_stages
    config = LLAMA | {"num_hidden_layers": 7 * stages}
    layout += f",cut={'/'.join(['7'] * stages)}"
    composed = answered(config, layout, 12)["exact"]["ranks"]
    alike = [r["method"].startswith("composed") for r in composed]
    assert all(alike), [r["method"] for r in composed]
    monkeypatch.setattr("meshwright.exact.rank.axis", lambda size, *_, **__: _one(size))
    whole = answered(config, layout, 12)["exact"]["ranks"]
    for mine, theirs in zip(composed, whole, strict=True):
        assert {k: mine[k] for k in mine if k != "method"} == {k: theirs[k] for k in theirs if k != "method"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("pp=2,schedule=interleaved", "6 and 8, 10"),
        ("pp=2,schedule=zbv", "8 and 9, 10"),
        ("dp=2,pp=2,zero=2,schedule=dualpipev", "8 and 9, 10"),
    ],
)
def test_stages_that_take_turns_are_composed(
    monkeypatch: pytest.MonkeyPatch, layout: str, sizes: str
) -> None:
    """A long step of interleaved or V-shaped stages from three short ones, to the byte and with the same place."""
    config, batch = LLAMA | {"num_hidden_layers": 8}, 28 * parse_layout(layout).dp
    composed = answered(config, layout, batch)["exact"]["ranks"]
    assert {r["method"] for r in composed} == {f"composed: 28 micro-batches from {sizes} on the line"}
    monkeypatch.setattr("meshwright.exact.rank.axis", lambda size, *_, **__: _one(size))
    whole = answered(config, layout, batch)["exact"]["ranks"]
    for mine, theirs in zip(composed, whole, strict=True):
        assert {k: mine[k] for k in mine if k != "method"} == {k: theirs[k] for k in theirs if k != "method"}


def _one(size: int) -> Any:
    from meshwright.exact.compose import Axis

    return Axis((size,))


def test_blocks_that_are_not_alike_are_played_whole() -> None:
    mixed = spec_from_config(LLAMA, "t")
    assert uniform(mixed, ())
    assert not uniform(mixed, ("model.layers.0.*",))
    assert not uniform(spec_from_config(UNKNOWN | {"model_type": "deepseek_v3"} | DEEPSEEK, "t"), ())
    assert reduced(mixed, 4).num_layers == 4


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def test_a_model_that_no_family_file_knows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Memory, and no time; state bytes by hand."""
    model = folder(tmp_path, UNKNOWN)
    found = answer(capsys, "estimate", model, *options("dp=2,zero=3", 2, 4))
    assert (found["predicted"], found["closed_form"], found["difference"]) == (None, None, None)
    assert [p["code"] for p in found["problems"]] == ["W469"]
    spec = unknown_spec(UNKNOWN, "t")
    assert (spec.num_layers, spec.vocab_size, spec.hidden_size) == (2, 64, 64)
    rank = found["exact"]["ranks"][0]
    assert uniform(spec, ())
    assert reduced(spec, 5).num_layers == 5
    assert rank["rest_bytes"]["gradients"] == 4 * spec.num_parameters // 2
    tensors = sum(1 for _ in spec.tensors())
    assert rank["rest_bytes"]["optimizer"] == 2 * 4 * spec.num_parameters // 2 + 4 * tensors
    assert run(["estimate", model, *options("dp=2,zero=3", 2, 4)]) == 0
    assert "W469" in capsys.readouterr().out
    unread = answer(capsys, "estimate", model, *options("dp=2,zero=3", 2, 4)[:-1], code=2)
    assert unread["problems"][0]["code"] == "E124"  # without a trace nothing is known of it
    piped = answer(capsys, "estimate", model, *options("pp=2", 2, 12), code=2)
    assert piped["problems"][0]["code"] == "E252"
    adapted = answer(capsys, "estimate", model, *options("dp=2", 2, 12), "--adapter", "lora:4", code=2)
    assert adapted["problems"][0]["code"] == "E467"


def test_what_cannot_be_played_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    compiled = answer(capsys, "estimate", model, *options("dp=2,compile=blocks", 2), code=2)
    assert [p["code"] for p in compiled["problems"]] == ["E467"]
    illegal = answer(capsys, "estimate", model, *options("dp=2,micro_batch=3", 2), code=1)
    assert (illegal["legal"], illegal["exact"]) == (False, None)


def test_a_model_without_the_usual_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    headless = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    headless.get_input_embeddings = headless.get_output_embeddings = lambda: None
    monkeypatch.setattr("meshwright.exact.model.build_model", lambda *_, **__: headless)
    with pytest.raises(MeshwrightError) as caught:
        unknown_spec(UNKNOWN, "t")
    assert caught.value.problems[0].code == "E468"


def test_the_end_of_a_child_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, asking for values, or failing: three codes; a refusal of the runtime comes through as it is."""
    import torch

    spec, layout = spec_from_config(LLAMA, "t"), parse_layout("dp=1")
    plan = make_plan(spec, layout, 2, 32, "t")
    task = RankTask(position="only", rank=0, stages=(0,), plan=plan, spec=spec, gloo=True)

    def killed(*_: Any) -> None:
        os._exit(9)

    def asks(*_: Any) -> None:
        from torch._subclasses.fake_tensor import DataDependentOutputException

        raise DataDependentOutputException(torch.ops.aten.item.default)

    def fails(*_: Any) -> None:
        raise ValueError("no such thing")

    for work, code, status in (
        (killed, "E472", ExitCode.ENVIRONMENT),
        (asks, "E470", ExitCode.BAD_INPUT),
        (fails, "E471", ExitCode.FAULT),
    ):
        monkeypatch.setattr(children, "rank_memory", work)
        with pytest.raises(MeshwrightError) as caught:
            play_ranks([task])
        assert (caught.value.problems[0].code, caught.value.exit_code) == (code, status)


def test_the_closed_form_is_near_at_a_real_width() -> None:
    """State to the byte, but for padded rows and step counters; the rest within a few per cent of the peak."""
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
    config = LLAMA | wide | {"num_hidden_layers": 4, "max_position_embeddings": 2048}
    found = answered(config, "dp=2,zero=3", 4, seq_len=2048)
    off = found["difference"]["memory_pct_of_peak"]
    assert all(abs(off[name]) < 0.1 for name in ("parameters", "gradients", "optimizer")), off
    assert abs(found["difference"]["peak_pct"]) < 5.0, found["difference"]
