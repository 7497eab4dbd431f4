"""What plans say of other layouts is what an estimate of those layouts says."""

import re

import pytest

from meshwright.base.units import format_bytes, format_seconds
from meshwright.cluster.load import read_cluster
from meshwright.cost.estimate import estimate
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.search.asked import ask
from meshwright.search.search import search

QWEN = read_model("qwen3-32b")
MI300X = read_cluster("mi300x-x8", 56)
BESIDE = re.compile(r"With (\w+)=(\w+) a step takes ([^,]+), ([\d.]+) % (slower|faster), peak ([^;]+);")


def test_neighbours_of_a_pipeline_have_the_figures_of_their_estimate():
    found = search(QWEN, MI300X, 4096, 224, fix="pp=7,chunks=2,schedule=interleaved,micro_batch=1", top=1)
    plan = found.plans[0]
    assert plan.prediction is not None
    told = 0
    for match in filter(None, (BESIDE.match(sentence) for sentence in plan.why)):
        key, value, seconds, percent, word, peak = match.groups()
        keys = dict(pair.split("=") for pair in plan.layout.text().split(","))
        changed = {k: v for k, v in keys.items() if k not in ("cut", "shard")} | {key: value}
        layout = parse_layout(",".join(f"{k}={v}" for k, v in changed.items()))
        asked = estimate(QWEN, layout, MI300X, 4096, 224)["predicted"]
        slower = 100.0 * (asked["step_time_s"] / plan.prediction.step_time_s - 1.0)
        assert format_seconds(asked["step_time_s"]) == seconds
        assert f"{abs(slower):.1f} {'slower' if slower >= 0 else 'faster'}" == f"{percent} {word}"
        assert format_bytes(asked["peak_memory_bytes"]) == peak
        told += 1
    assert told >= 2


def test_without_replicas_an_order_that_moves_them_is_no_other_plan():
    found = search(QWEN, MI300X, 4096, 224, fix="dp=1,pp=7,micro_batch=1,schedule=1f1b", top=20)
    steps = [(p.prediction.step_time_s, p.layout.order) for p in found.plans if p.prediction is not None]
    assert len(steps) > 5
    assert {order for _, order in steps} == {("tp", "cp", "dp", "pp")}


def test_no_plan_of_the_pareto_set_is_undercut_by_another():
    # an interleaved step's prediction is longer than what the search played of it
    pins = "micro_batch=1,recompute=none,loss=eager"
    front = search(QWEN, MI300X, 4096, 224, fix=pins, top=1, pareto=True).front
    told = [
        (p.prediction.step_time_s, p.prediction.peak_memory_bytes) for p in front if p.prediction is not None
    ]
    assert len(told) > 5
    assert told == sorted(told)
    assert [peak for _, peak in told] == sorted((peak for _, peak in told), reverse=True)


def test_the_terms_of_a_difference_sum_to_it():
    best = search(QWEN, MI300X, 4096, 224, top=1).plans[0].prediction
    assert best is not None
    layout = parse_layout("dp=7,tp=4,pp=2,zero=1,precision=bf16")
    asked = ask(QWEN, MI300X, layout, 4096, 224, best)
    assert asked.prediction is not None
    said = asked.sentences[-1].split(": ", 1)[1].rstrip(".")
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    parts = [re.search(r"([+-])([\d.]+) (\w+)$", part) for part in said.split(", ")]
    total = sum(float(p[1] + p[2]) * units[p[3]] for p in parts if p)
    assert len(parts) == 4
    assert total == pytest.approx(asked.prediction.step_time_s - best.step_time_s, abs=0.02)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (90.0, "90.00 s"),
        (150.0, "2.50 min"),
        (7300.0, "2.03 h"),
        (200_000.0, "2.3 days"),
        (9.2e12, "291,730 years"),
    ],
)
def test_long_times_are_in_units_that_are_read(seconds: float, text: str):
    assert format_seconds(seconds) == text
