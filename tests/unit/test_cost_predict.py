"""One prediction: its parts sum up, it refuses what it does not know, it orders layouts as they are."""

import json
from dataclasses import replace

import pytest
from tests.unit.test_cluster_load import PROBE

from meshwright.base.errors import MeshwrightError
from meshwright.base.records import MemoryBytes, Prediction
from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cost.estimate import estimate
from meshwright.cost.pieces import make_pricer
from meshwright.cost.predict import predict
from meshwright.cost.work import work_key
from meshwright.layout.batch import derive_batch
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.schedule.generate import generate

LLAMA = read_model("llama-2-7b")


def price(text: str, cluster: str = "a100-80gb-x8", gpus: int | None = None, batch: int = 64) -> Prediction:
    layout = parse_layout(text)
    derived = derive_batch(layout, batch, 2048)
    schedule = generate(layout.schedule, layout.pp, derived.accumulation)
    return predict(LLAMA, layout, derived, schedule, read_cluster(cluster, gpus))


def state(memory: MemoryBytes) -> int:
    return memory.parameters + memory.gradients + memory.optimizer


def test_a_higher_zero_stage_holds_less():
    held = [state(price(f"dp=8,zero={z}").memory) for z in range(4)]
    assert held == sorted(held, reverse=True)
    assert held[0] == 16 * LLAMA.num_parameters


def test_stage_three_at_the_loss_of_its_only_micro_batch_has_no_gradient_yet():
    found = price("dp=8,zero=3,micro_batch=4,precision=fp32", "a100-80gb-x8", batch=32)
    assert found.memory.optimizer == pytest.approx(8 * LLAMA.num_parameters / 8, rel=1e-3)
    assert found.memory.parameters == pytest.approx(4 * LLAMA.num_parameters / 8, rel=1e-3)


def test_hsdp_shards_over_its_group_only():
    whole, part = price("dp=8,zero=3"), price("dp=8,zero=3,shard=2")
    assert part.memory.optimizer == pytest.approx(4 * whole.memory.optimizer, rel=1e-3)


def test_bubble_and_order_of_pipelines():
    short, long = price("pp=8,micro_batch=1", batch=8), price("pp=8,micro_batch=1", batch=64)
    assert short.bubble_share_of_total is not None
    assert long.bubble_share_of_total is not None
    assert short.bubble_share_of_total > 0.4 > long.bubble_share_of_total > 0.05
    flood, steady = price("pp=8,schedule=gpipe"), price("pp=8,schedule=1f1b")
    assert flood.peak_memory_bytes > 2 * steady.peak_memory_bytes


def test_a_slow_network_is_exposed():
    fast = price("dp=16,zero=3", "a100-40gb-x8", 16)
    slow = price("dp=16,zero=3", "aws-p4d", 16)
    assert slow.time.data > fast.time.data
    assert slow.step_time_s > fast.step_time_s


def test_a_prediction_survives_json():
    found = price("dp=4,zero=1,pp=2")
    assert Prediction.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert any("assumed" in s for s in found.sources)


def test_a_cpu_has_no_memory_outside_and_no_peak():
    cluster = cluster_from_probe(PROBE)
    spec = read_model("smollm2-135m")
    layout = parse_layout("dp=4,zero=3,precision=fp32")
    found = predict(spec, layout, derive_batch(layout, 8, 128), generate("1f1b", 1, 2), cluster)
    assert found.memory.outside_allocator == 0
    assert found.mfu_pct is None
    assert found.hidden_s == {"data": 0.0}
    assert found.time.data > 0


def codes(call: object) -> list[str]:
    assert callable(call)
    with pytest.raises(MeshwrightError) as error:
        call()
    return [p.code for p in error.value.problems]


def test_unknown_figures_are_refused():
    assert codes(lambda: price("dp=8,zero=3", "ascend-910b-x8")) == ["E405"]
    assert codes(lambda: price("dp=8,zero=3", "v100-32gb-x8")) == ["E405"]
    assert price("dp=8,zero=3,precision=fp16", "v100-32gb-x8").step_time_s > 0


def test_another_number_of_ranks_is_refused():
    assert codes(lambda: price("dp=4,zero=3")) == ["E407"]


def test_estimate_says_legal_fits_and_ranks():
    cluster = read_cluster("a100-40gb-x8")
    good = estimate(LLAMA, parse_layout("dp=8,zero=3"), cluster, 2048, 64)
    assert good["legal"]
    assert good["fits"]
    assert len(good["ranks"]) == 8
    predicted = good["predicted"]
    assert sum(predicted["memory_bytes"].values()) == predicted["peak_memory_bytes"]
    assert sum(predicted["time_s"].values()) == pytest.approx(predicted["step_time_s"])
    big = estimate(LLAMA, parse_layout("dp=8"), cluster, 2048, 64)
    assert big["legal"]
    assert not big["fits"]
    assert big["binds"] == "memory"


def test_estimate_of_the_illegal_and_the_unbuilt():
    cluster = read_cluster("a100-80gb-x8")
    wrong = estimate(LLAMA, parse_layout("dp=8,micro_batch=3"), cluster, 2048, 64)
    assert not wrong["legal"]
    assert wrong["predicted"] is None
    assert wrong["problems"][0]["code"] == "E220"
    later = estimate(
        LLAMA, parse_layout("dp=2,zero=1,cp=4,compile=blocks,recompute=selective"), cluster, 2048, 64
    )
    assert not later["legal"]
    assert later["predicted"]["time_s"]["context"] > 0
    assert {p["kind"] for p in later["problems"]} == {"code"}


def test_almost_full_is_said():
    cluster = read_cluster("a100-40gb-x8")
    whole = estimate(LLAMA, parse_layout("dp=8,zero=3"), cluster, 2048, 64)
    peak = whole["predicted"]["peak_memory_bytes"]
    memory = replace(cluster.device.memory, value=peak * 1.03)
    tight = replace(cluster, device=replace(cluster.device, memory=memory))
    found = estimate(LLAMA, parse_layout("dp=8,zero=3"), tight, 2048, 64)
    assert found["legal"]
    assert not found["fits"]
    assert "W411" in [p["code"] for p in found["problems"]]


def test_soft_capped_scores_over_a_context_axis_cost_passes_over_them():
    """The ring takes a kernel that is not fused; a plan must not prefer cp because it looks fused."""
    layout = parse_layout("dp=4,zero=3,cp=2,recompute=full")
    derived = derive_batch(layout, 16, 8192)
    schedule = generate("1f1b", 1, derived.accumulation)
    capped = read_model("gemma-2-9b")
    plain = replace(capped, config={**capped.config, "attn_logit_softcapping": None})
    cluster = read_cluster("a100-80gb-x8", None)
    seconds = [predict(m, layout, derived, schedule, cluster).step_time_s for m in (capped, plain)]
    assert seconds[0] > 1.1 * seconds[1]


def test_attention_dropout_over_cp_is_priced_by_its_pairs():
    """Ulysses makes masks for the whole square of its heads, the ring for what is seen and its own upper halves."""
    big = read_model("llama-2-7b")
    drops = replace(big, config={**big.config, "attention_dropout": 0.1}, dropout=0.1)
    cluster = read_cluster("a100-80gb-x8", 8)
    rate = make_pricer(big, cluster, 4096, "bf16").rates.copy_rate

    def extra(text: str) -> tuple[float, float, float]:
        key = work_key(parse_layout(text))
        one, two = (make_pricer(s, cluster, 4096, "bf16").block(0, key) for s in (big, drops))
        return two.forward - one.forward, two.backward - one.backward, two.transient

    square = 32 * 4096**2
    for text, pairs in (("dp=4,cp=2", square * 5 / 16), ("dp=4,cp=2,cp_style=ulysses", square / 2)):
        forward, backward, transient = extra(text)
        assert forward == pytest.approx(pairs * 354 / rate, rel=1e-9)
        assert backward == pytest.approx(pairs * 402 / rate, rel=1e-9)
        assert transient >= 2**21 * 36
    assert extra("dp=8")[0] > 0  # not fused: scores in memory
    recomputed = make_pricer(drops, cluster, 4096, "bf16").block(
        0, work_key(parse_layout("dp=4,cp=2,recompute=full"))
    )
    assert recomputed.recompute > square * 5 / 16 * 354 / rate
