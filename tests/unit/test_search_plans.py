"""The search: all legal layouts, the best explained, the nearest misses with a change that fits."""

import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.cluster.load import read_cluster, with_gpus
from meshwright.cluster.spec import Figure
from meshwright.cost.estimate import item
from meshwright.cost.predict import fits
from meshwright.layout import built
from meshwright.layout.check import check
from meshwright.model.read_hf import read_model
from meshwright.search.price import price_sentence, sizes
from meshwright.search.search import SearchResult, search

LLAMA = read_model("llama-2-7b")
A100 = read_cluster("a100-40gb-x8")


def test_plans_are_legal_fit_and_are_in_order():
    found = search(LLAMA, A100, 2048, 64)
    assert found.plans
    assert found.searched + found.bounded == found.legal
    times = []
    for plan in found.plans:
        assert plan.prediction is not None
        assert fits(plan.prediction)
        assert not [p for p in check(LLAMA, plan.layout, plan.batch, A100) if p.severity == "error"]
        assert plan.world_size == 8
        assert plan.layout.cut_layers
        assert len(plan.schedule_text.splitlines()) == plan.layout.pp
        assert plan.binds in ("memory", "compute", "bubble", A100.intra.name)
        assert any(char.isdigit() for char in plan.why[0])
        times.append(plan.prediction.step_time_s)
    assert times == sorted(times)
    assert found.seconds < 5


def test_the_item_has_the_contract_s_keys():
    got = item(search(LLAMA, A100, 2048, 64, top=1).plans[0])
    assert set(got) >= {"layout", "world_size", "predicted", "hidden_s", "why", "binds"}
    assert set(got["predicted"]) >= {
        "step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu_pct",
        "flops_convention", "bubble_share_of_total", "peak_memory_bytes", "oom_probability", "memory_bytes", "time_s",
    }  # fmt: skip


def test_memory_objective_finds_the_lowest_peak():
    fast, small = search(LLAMA, A100, 2048, 64), search(LLAMA, A100, 2048, 64, objective="memory")
    assert fast.plans[0].prediction is not None
    assert small.plans[0].prediction is not None
    lowest = small.plans[0].prediction.peak_memory_bytes
    assert lowest <= fast.plans[0].prediction.peak_memory_bytes
    assert all(p.prediction is not None and p.prediction.peak_memory_bytes >= lowest for p in small.plans)


def test_fix_pins_keys():
    found = search(LLAMA, A100, 2048, 64, fix="pp=2,micro_batch=1,schedule=gpipe", top=20)
    every = [*found.plans, *found.misses]
    assert every
    assert {(p.layout.pp, p.layout.micro_batch, p.layout.schedule) for p in every} == {(2, 1, "gpipe")}


def test_what_cannot_run_is_priced_only_when_asked(monkeypatch):
    monkeypatch.setattr(built, "AXES", frozenset({"dp", "pp", "tp"}))
    plain = search(LLAMA, A100, 2048, 64, top=50)
    more = search(LLAMA, A100, 2048, 64, top=50, include_unbuilt=True)
    assert {p.layout.cp for p in plain.plans} == {1}
    assert more.legal > plain.legal
    assert more.plans[0].prediction is not None
    assert plain.plans[0].prediction is not None
    assert more.plans[0].prediction.step_time_s <= plain.plans[0].prediction.step_time_s * 1.0001


def test_a_context_axis_is_tried_where_sequences_are_long():
    short = search(LLAMA, A100, 1024, 64, top=50)
    assert {p.layout.cp for p in short.plans} == {1}
    long = search(LLAMA, A100, 16384, 8, top=50)
    assert {p.layout.cp for p in long.plans} - {1}


def change(found: SearchResult) -> str:
    assert not found.plans
    assert found.fits == 0
    assert all(p.binds == "memory" for p in found.misses)
    return found.misses[0].why[0]


def test_nothing_fits_names_the_change():
    big = read_model("llama-2-70b")
    many = read_cluster("a100-80gb-x8", 64)
    kept = search(big, many, 4096, 1024, fix="recompute=none,loss=eager,tp=1,cp=1")
    assert "recompute=full" in change(kept)
    found = search(big, many, 4096, 1024, fix="tp=1,cp=1")
    assert {p.layout.recompute for p in found.plans} & {"full", "selective"}
    small = read_model("llama-2-13b"), read_cluster("v100-32gb-x8"), 2048, 64
    assert "offload=optimizer would make it fit" in change(search(*small, fix="tp=1,cp=1,offload=none"))
    fix = "tp=1,cp=1,pp=1,zero=1,offload=parameters"
    assert "GPUs" in change(search(big, read_cluster("a100-40gb-x8"), 2048, 64, fix=fix))
    for pinned, cure in (("zero=2,micro_batch=1", "zero=3"), ("zero=3,micro_batch=2", "micro_batch=1")):
        fix = f"dp=8,{pinned},recompute=none,loss=eager,tp=1,offload=none"
        assert cure in change(search(LLAMA, A100, 2048, 64, fix=fix))


def test_a_v100_is_planned_in_fp16():
    found = search(read_model("gpt2"), read_cluster("v100-32gb-x8"), 1024, 64)
    assert {p.layout.precision for p in found.plans} == {"fp16"}


def codes(**request: object) -> list[str]:
    with pytest.raises(MeshwrightError) as error:
        search(LLAMA, A100, **({"seq_len": 2048, "global_batch": 64} | request))  # type: ignore[arg-type]
    return [p.code for p in error.value.problems]


def test_requests_that_cannot_be(monkeypatch):
    assert codes(seq_len=0) == ["E410"]
    assert codes(global_batch=-1, top=0) == ["E410", "E410"]
    assert codes(objective="speed") == ["E410"]
    assert codes(objective="cost") == ["E410"]
    assert codes(fix="tpp=2") == ["E111"]
    assert "E409" in codes(fix="dp=3")
    monkeypatch.setattr(built, "AXES", frozenset({"dp", "pp"}))
    assert {"E409", "E250"} <= set(codes(fix="cp=2"))


def test_cost_with_a_price():
    priced = replace(A100, price_per_device_hour=Figure(value=2.0, unit="per device hour", source="test"))
    assert search(LLAMA, priced, 2048, 64, objective="cost").plans
    four = with_gpus(
        replace(read_cluster("a100-80gb-x8"), price_per_device_hour=priced.price_per_device_hour), 32
    )
    found = sizes(LLAMA, four, 2048, 64, objective="cost")
    assert {s.num_gpus for s in found} == {32, 16, 8}
    prices = [s.price for s in found if s.price is not None and s.step_time_s is not None]
    assert prices == sorted(prices)
    assert found[0].step_time_s is not None
    assert prices[0] == pytest.approx(2.0 * found[0].num_gpus * found[0].step_time_s / 3600)
    assert found[0].num_gpus < 32  # communication is not free: fewer devices are slower and cheaper
    assert "32 GPUs" in price_sentence(found)


def test_planning_needs_no_torch():
    code = (
        "import sys; from meshwright.search.search import search; from meshwright.model.read_hf import read_model; "
        "from meshwright.cluster.load import read_cluster, with_gpus; "
        "search(read_model('llama-2-7b'), read_cluster('a100-40gb-x8'), 2048, 64); "
        "bad = {'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
