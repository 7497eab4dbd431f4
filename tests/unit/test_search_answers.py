"""What the planner answers beside its list: named layouts, what cannot be told apart, sensitivity, the tree."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.base.records import Prediction, TimeSeconds
from meshwright.cluster.load import read_cluster
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import strided_shape
from meshwright.cost.predict import predict
from meshwright.cost.state import FP32, NO_MASTER
from meshwright.cost.textbook import (
    FINE_TUNING,
    bubble_of_ideal,
    bubble_of_total,
    data_volume,
    fine_tuning_bytes,
    ring_all_reduce_s,
)
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import generate
from meshwright.search.asked import ask
from meshwright.search.compare import apart_sentence, because, can_be_told_apart, differences, like_the_best
from meshwright.search.search import search
from meshwright.search.tree import bus_bandwidth, decide
from meshwright.search.whatif import better_clusters, sensitivity

LLAMA = read_model("llama-2-7b")
A100 = read_cluster("a100-40gb-x8")


def made(**seconds: float) -> Prediction:
    base = predict(
        LLAMA, Layout(dp=8, zero=3, shard=8), derive_batch(Layout(dp=8), 8, 128), generate("1f1b", 1, 1), A100
    )
    time = TimeSeconds(**seconds)
    return replace(
        base,
        time=time,
        step_time_s=time.total,
        step_time_low_s=time.total * math.exp(-1.2816 * 0.25),
        step_time_high_s=time.total * math.exp(1.2816 * 0.25),
    )


def test_what_two_layouts_share_cancels():
    one = made(compute=10.0, data=1.0)
    assert not can_be_told_apart(one, made(compute=10.0, data=1.1))  # less than a repeat differs
    assert can_be_told_apart(one, made(compute=10.0, data=2.0))  # one more second of one cause
    assert not can_be_told_apart(one, made(compute=7.0, tensor=3.0, data=1.3))  # causes traded for others
    assert like_the_best([one, made(compute=10.05, data=1.0), made(compute=12.0, data=1.0)]) == 2
    assert apart_sentence([one, made(compute=12.0, data=1.0)]) == ""
    assert "first 2 plans cannot be told apart" in apart_sentence([one, made(compute=10.05, data=1.0)])


def test_a_difference_names_its_terms_largest_first():
    slow, best = made(compute=10.0, bubble=2.0, data=0.5), made(compute=10.5, data=0.25)
    assert list(differences(slow, best).items()) == [("bubble", 2.0), ("compute", -0.5), ("data", 0.25)]
    assert because(slow, best) == "bubble +2.00 s, compute -500.0 ms, data +250.0 ms"
    assert because(best, best) == "no term differs"


def asked(text: str, cluster: ClusterSpec = A100):
    best = search(LLAMA, cluster, 2048, 64, top=1).plans[0]
    return ask(LLAMA, cluster, parse_layout(text), 2048, 64, best.prediction, best.layout.text())


def test_a_named_layout_is_illegal_by_a_rule_with_numbers():
    found = asked("dp=8,tp=3")
    assert not found.legal
    assert found.prediction is None
    assert any(
        s.startswith("Illegal by E203") and "11008" in s and "tp = 2 | 4" in s for s in found.sentences
    )
    assert asked("dp=16").sentences[0].startswith("Illegal by E215")
    assert asked("dp=8,micro_batch=3").sentences[0].startswith("Illegal by E220")
    assert "estimate" in asked("dp=8,schedule=@rows.txt").sentences[0]


def test_a_named_layout_is_slower_by_its_terms():
    found = asked("dp=2,pp=4,zero=1,recompute=full")
    assert found.legal
    assert found.slower_pct is not None
    assert found.slower_pct > 0
    assert found.prediction is not None
    best = search(LLAMA, A100, 2048, 64, top=1).plans[0].prediction
    assert best is not None
    assert sum(found.terms.values()) == pytest.approx(found.prediction.step_time_s - best.step_time_s)
    assert "recompute +" in found.sentences[-1]
    assert "bubble +" in found.sentences[-1]
    assert json.loads(json.dumps(found.as_dict()))["fits"] is True


def test_a_named_layout_is_over_and_what_cures_it():
    found = asked("dp=8")
    assert found.over_bytes > 0
    assert f"{found.over_bytes / 2**30:.2f} GiB over" in found.sentences[0]
    assert "would make it fit" in found.sentences[1]


def test_what_is_not_built_is_priced_and_says_so():
    found = asked("dp=4,cp=2,zero=3,compile=blocks,recompute=selective")
    assert not found.legal
    assert found.prediction is not None
    assert any(s.startswith("E279: compile=blocks with recompute=selective") for s in found.sentences)


def test_sensitivity_searches_again_on_a_better_cluster():
    big, cluster = read_model("llama-2-13b"), read_cluster("a100-40gb-x8", 16)
    best = search(big, cluster, 2048, 64, top=1).plans[0]
    found = {w.change: w for w in sensitivity(big, cluster, 2048, 64, best)}
    assert set(found) == {
        "4 more GiB per device",
        "twice the bandwidth between nodes",
        "twice the bandwidth inside a node",
        "twice the matrix rate",
    }
    assert all(w.gain_pct is not None and w.gain_pct > -0.01 for w in found.values())
    rate = found["twice the matrix rate"].gain_pct
    assert rate is not None
    assert 20 < rate < 100
    # each of them is what the search finds on that cluster
    wider = dict(better_clusters(cluster))["twice the bandwidth between nodes"]
    again = search(big, wider, 2048, 64, top=1).plans[0].prediction
    assert again is not None
    assert found["twice the bandwidth between nodes"].step_time_s == again.step_time_s


def test_more_memory_can_make_a_miss_fit():
    cluster = read_cluster("a100-40gb-x8")
    fix = "dp=8,zero=3,micro_batch=1,recompute=none,loss=eager,offload=none"
    found = search(LLAMA, cluster, 3840, 64, fix=fix)
    assert not found.plans
    more = sensitivity(LLAMA, cluster, 3840, 64, None, fix=fix)[0]
    assert more.step_time_s is not None
    assert "would fit" in more.sentence


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "row", "degrees"),
    [
        ("gpt2", "a100-80gb-x8", 8, "up to 3 B", (1, 1, 1, 0)),
        ("llama-2-7b", "a100-40gb-x8", 8, "up to 13 B", (1, 1, 1, 2)),
        ("llama-2-70b", "h100-x8", 64, "13 to 70 B", (4, 2, 1, 1)),
        ("llama-3.1-405b", "h100-x8", 512, "70 B and more", (8, 4, 2, 3)),
    ],
)
def test_the_tree_takes_its_row_of_the_table(
    model: str, cluster: str, gpus: int, row: str, degrees: tuple[int, ...]
):
    answer = decide(read_model(model), read_cluster(cluster, gpus), 1024, "bf16")
    made_ = answer.layout
    assert answer.row.startswith(row)
    assert (made_.tp, made_.pp, made_.cp, made_.zero) == degrees
    assert made_.world_size == gpus
    assert len(answer.steps) == 6
    assert all(any(c.isdigit() for c in s.rule + s.found) for s in answer.steps)


def test_the_tree_looks_at_memory_bandwidth_and_structure():
    slow = read_cluster("a100-80gb-x8")
    slow = replace(slow, intra=replace(slow.intra, rate=replace(slow.intra.rate, value=5e9)))
    answer = decide(read_model("llama-2-70b"), slow, 4096, "bf16")
    assert "at most 4" in answer.steps[1].then
    slower = replace(slow, intra=replace(slow.intra, rate=replace(slow.intra.rate, value=1e9)))
    assert decide(read_model("llama-2-70b"), slower, 4096, "bf16").layout.tp == 1
    assert "optimizer" in answer.steps[0].then
    assert answer.steps[3].then == "a pipeline"  # 80 layers
    assert answer.steps[4].then == "no need"
    long = decide(read_model("llama-2-7b"), A100, 16384, "bf16")
    assert long.steps[4].then == "context parallelism"
    tiny = decide(read_model("gpt2"), read_cluster("a100-80gb-x8"), 1024, "bf16")
    assert "no bottleneck" in tiny.steps[0].then
    assert "expert" in decide(read_model("mixtral-8x7b"), A100, 2048, "bf16").steps[2].then


def test_the_tree_s_layout_has_degrees_that_the_model_has():
    # 10 key/value heads: neither 4 divides them nor they 4
    phi = read_model("phi-3-medium")
    answer = decide(phi, read_cluster("l20-x8", 40), 4096, "bf16")
    batch = derive_batch(answer.layout, 40, 4096)
    assert answer.layout.tp == 2
    assert not [p.code for p in check(phi, answer.layout, batch) if p.severity == "error"]
    # where the tree says expert parallelism its layout has it
    assert decide(read_model("deepseek-v3"), read_cluster("h200-x8", 256), 4096, "bf16").layout.ep == 8
    assert decide(read_model("mixtral-8x7b"), read_cluster("h100-x8", 64), 4096, "bf16").layout.ep == 2


def test_activations_that_dominate_ask_for_recompute():
    small = read_model("gpt2")
    answer = decide(small, read_cluster("a100-80gb-x8"), 16384, "bf16")
    assert "activations" in answer.steps[0].then
    assert answer.layout.recompute == "full"


def test_bus_bandwidth_is_that_of_the_usual_test():
    shape = strided_shape(8, 1, 8)
    got = bus_bandwidth(A100, shape)
    assert 0.7 * A100.intra.rate.value < got <= A100.intra.rate.value


def test_volumes_are_2_2_2_3():
    assert [data_volume(stage, 8, textbook=True) for stage in range(4)] == [2, 2, 2, 3]
    assert [data_volume(stage, 8) for stage in range(4)] == [1.75, 1.75, 1.75, 2.625]
    assert [data_volume(stage, 8, 4, textbook=True) for stage in range(4)] == [2, 2, 5, 12]


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (8, 8, 1), (4, 8, 2), (8, 32, 3)])
def test_bubbles_are_those_of_the_clock(p: int, m: int, v: int):
    name = "1f1b" if v == 1 else "interleaved"
    clock = run_clock(generate(name, p, m, v), 1.0, 2.0)
    assert clock.bubble_share_of_total == pytest.approx(bubble_of_total(p, m, v))
    ideal = 3.0 * m * v
    assert (clock.makespan_s - ideal) / ideal == pytest.approx(bubble_of_ideal(p, m, v))
    # eight stages and eight micro-batches: 47 % of the total
    assert round(100 * bubble_of_total(8, 8)) == 47


def test_all_reduce_of_14_gb():
    rates = {"NVLink 3": 300e9, "PCIe 4 x16": 32e9, "200 Gb/s InfiniBand": 25e9, "10 GbE": 1.25e9}
    seconds = {name: ring_all_reduce_s(14e9, 8, rate) for name, rate in rates.items()}
    assert {n: float(f"{s:.3g}") for n, s in seconds.items()} == {
        "NVLink 3": 0.0817,
        "PCIe 4 x16": 0.766,
        "200 Gb/s InfiniBand": 0.98,
        "10 GbE": 19.6,
    }


def test_the_fine_tuning_table():
    gb = {row.name: fine_tuning_bytes(row, NO_MASTER, FP32) / 1e9 for row in FINE_TUNING}
    assert {n: round(x, 1) for n, x in gb.items()} == {
        "7B LoRA": 14.0,  # one 24 GB card holds it, not a 16 GB one with activations
        "7B QLoRA": 4.4,  # one 12 GB card, with recompute
        "7B full": 47.2,  # four 80 GB cards, not four of 40
        "70B LoRA": 35.2,  # four 80 GB cards
        "70B QLoRA": 19.6,  # not two 24 GB cards: float32 embedding, head and factors come on top
        "70B full": 69.0,  # sixteen 80 GB cards hold the state and little else
    }


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "fits"),
    [
        ("llama-2-7b", "a100-80gb-x8", 4, True),
        ("llama-2-7b", "a100-80gb-x8", 1, False),
        ("llama-2-7b", "a100-40gb-x8", 2, False),
        ("llama-2-70b", "a100-80gb-x8", 16, True),
        ("llama-2-70b", "a100-80gb-x8", 8, False),
    ],
)
def test_the_planner_judges_the_fine_tuning_table(model: str, cluster: str, gpus: int, fits: bool):
    spec = read_model(model)
    found = search(spec, read_cluster(cluster, gpus), 2048, 32, fix="offload=none", top=1)
    assert bool(found.plans) is fits


def test_the_command_answers_in_json():
    command = [
        *(
            sys.executable,
            "-m",
            "meshwright",
            "plan",
            "llama-2-7b",
            "--cluster",
            "a100-40gb-x8",
            "--seq-len",
            "2048",
        ),
        *(
            "--global-batch",
            "64",
            "--json",
            "--why",
            "dp=8",
            "--pareto",
            "--unbuilt",
            "--explain",
            "--top",
            "2",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["searched"] + got["bounded"] == got["legal"]
    assert got["asked"]["over_bytes"] > 0
    assert got["pareto"][0]["predicted"]["step_time_s"] == pytest.approx(
        got["plans"][0]["predicted"]["step_time_s"]
    )
    assert {"steps", "row", "layout_text", "agrees", "why"} <= set(got["tree"])
    assert next(w["change"] for w in got["sensitivity"]) == "4 more GiB per device"
    assert all("not_built" in p for p in got["plans"])
    assert got["like_the_best"] >= 1


HAND = {
    "name": "mine", "gpus_per_node": 8, "num_nodes": 2, "source": "by hand",
    "device": {
        "name": "X", "memory": "80GB", "peak_flops": {"bf16": 312e12}, "matmul_flops": {"bf16": 250e12},
        "memory_rate_bytes_per_s": 2e12, "launch_s": 7e-6,
    },
    "intra": {"name": "NVLink", "rate_bytes_per_s": 3e11, "latency_s": 1e-6},
    "inter": {"name": "IB", "rate_bytes_per_s": 25e9, "latency_s": 1e-5},
}  # fmt: skip


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1, 0, 1e308, 1e-308, 5e-324, "", None, [], True, 10**400]
)
def test_a_figure_that_no_machine_has_is_a_problem(value: object, tmp_path: Path):
    for part, key in (
        ("device", "memory"),
        ("device", "memory_rate_bytes_per_s"),
        ("intra", "rate_bytes_per_s"),
        ("inter", "rate_bytes_per_s"),
        ("", "num_nodes"),
    ):
        made_ = json.loads(json.dumps(HAND))
        (made_[part] if part else made_)[key] = value
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps(made_), encoding="utf-8")
        with pytest.raises(MeshwrightError) as error:
            read_cluster(str(file))
        assert error.value.problems[0].code in ("E402", "E403", "E404"), (part, key, value)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"seq_len": 0}, "E410"),
        ({"seq_len": 2**28}, "E410"),
        ({"global_batch": 0}, "E410"),
        ({"global_batch": 2**21}, "E410"),
        ({"top": 0}, "E410"),
        ({"top": 10**6}, "E410"),
        ({"fix": "dp=8", "global_batch": 4}, "E409"),
        ({"fix": "tp=1000000"}, "E409"),
        ({"fix": "micro_batch=1000000"}, "E409"),
        ({"fix": "ep=2"}, "E409"),
        ({"fix": "cut=99/1"}, "E409"),
        ({"fix": "schedule=@rows.txt"}, "E301"),
        ({"fix": "offload=optimizer-nvme,dp=3"}, "E409"),
        ({"fix": "compile=blocks,recompute=selective"}, "E409"),
        ({"fix": "zero=9"}, "E112"),
    ],
)
def test_requests_that_cannot_be_are_problems(request_: dict[str, object], code: str):
    with pytest.raises(MeshwrightError) as error:
        search(LLAMA, A100, **({"seq_len": 2048, "global_batch": 64} | request_))  # type: ignore[arg-type]
    assert code in [p.code for p in error.value.problems]
    assert all(p.do for p in error.value.problems if p.code in ("E409", "E410"))
