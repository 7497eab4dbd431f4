"""What a probe measured in its place: each figure moves just the term that it is of, by just what it says."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from tests.machine_runs import MODEL
from tests.unit.test_cluster_load import IN_PLACE, PLACED, PROBE, SMALL

from meshwright.cluster.load import cluster_from_probe
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import GroupShape, ascending
from meshwright.cost.fast import columns
from meshwright.cost.in_place import MEASURED, MOST, REFERENCES, in_place_figures, pieces_seconds
from meshwright.cost.machine_profile import NAMES, scaled_by
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.work import work_key
from meshwright.layout.batch import derive_batch
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.probe.processor import processor_view

SPEC = read_model(MODEL)
BLOCKS, SEQ, SEQUENCES = SPEC.num_layers, 128, 16


def cluster(placed: dict[str, Any] | None = None, **small: float) -> ClusterSpec:
    """Return the probe's cluster with only these figures in their place."""
    overhead = PROBE["overhead"] | small
    return cluster_from_probe(PROBE | {"overhead": overhead} | ({"in_place": placed} if placed else {}))


def pricer(placed: dict[str, Any] | None = None, **small: float) -> Pricer:
    return make_pricer(SPEC, cluster(placed, **small), SEQ, "fp32")


def key(text: str = "dp=1") -> Any:
    return work_key(parse_layout(f"{text},precision=fp32"))


def column(made: Pricer, text: str, name: str) -> list[float]:
    """Return a column of the layout, by stage."""
    layout = parse_layout(f"{text},precision=fp32")
    found = columns(made, [layout], [derive_batch(layout, SEQUENCES, SEQ)])
    return [float(x) for x in getattr(found, name)[0]]


def test_factors_are_on_blocks_and_on_the_head() -> None:
    plain, placed = (
        pricer(),
        pricer({"forward": 1.5, "backward": 2.0, "head_forward": 3.0, "head_backward": 0.5}),
    )
    for way, factor in (("forward", 1.5), ("backward", 2.0), ("weight", 2.0), ("kept", 1.0)):
        one, other = (getattr(p.block(0, key()), way) for p in (plain, placed))
        assert other == pytest.approx(factor * one), way
    for way, factor in (("forward", 3.0), ("backward", 0.5), ("weight", 0.5)):
        one, other = (getattr(p.head(key()), way) for p in (plain, placed))
        assert other == pytest.approx(factor * one), way
    assert placed.embedding(key()) == plain.embedding(key())
    full = placed.block(0, key("recompute=full"))
    assert full.recompute == pytest.approx(1.5 * plain.block(0, key("recompute=full")).recompute)
    half = [p.block(0, key("recompute=selective")).recompute for p in (plain, placed)]
    assert half[1] == pytest.approx(1.5 * half[0])


def test_a_pass_is_paid_on_every_stage_of_every_micro_batch() -> None:
    figures = {"pass_forward_s": 1e-3, "pass_backward_s": 2e-3}
    for name, more in (("forward", 1e-3), ("backward", 2e-3), ("compute", 16 * 3e-3)):
        before, after = column(pricer(), "pp=2", name), column(pricer(figures), "pp=2", name)
        assert after == pytest.approx([x + more for x in before]), name


def test_small_costs_are_on_their_terms() -> None:
    plain = pricer()
    again = [p.block(0, key("recompute=full")).recompute for p in (plain, pricer(checkpoint_s=1e-3))]
    assert again[1] - again[0] == pytest.approx(1e-3)
    assert pricer(checkpoint_s=1e-3).block(0, key()).recompute == 0.0
    sums = pricer(accumulate_s=1e-3)
    elements = sum(t.numel for t in SPEC.blocks[0].tensors)
    moved = 12.0 * elements / PROBE["memory"]["elementwise_bytes_per_s"]
    more = sums.block(0, key()).backward - plain.block(0, key()).backward
    assert more == pytest.approx(1e-3 * len(SPEC.blocks[0].tensors) + moved)
    # two column-row pairs in a block have two regions each, forward and backward in one figure
    for text in ("tp=2", "tp=2,sp=off"):
        one, other = (p.block(0, key(text)).tensor for p in (plain, pricer(region_s=1e-3)))
        message = SEQ * SPEC.hidden_size * 4.0
        copied = 4.0 * 2.0 * message / PROBE["memory"]["elementwise_bytes_per_s"] if "off" in text else 0.0
        assert other - one == pytest.approx(4e-3 + copied), text


def test_the_ends_of_the_tensor_axis_send_what_the_engine_sends() -> None:
    made = pricer(region_s=1e-3)
    shape, message = GroupShape(2, 1, 2), SEQ * SPEC.hidden_size * 4.0
    rates = PROBE["memory"]["elementwise_bytes_per_s"]
    reduce = float(made.times.seconds("all_reduce", message, shape)) + 2.0 * message / rates
    pair = sum(float(made.times.seconds(kind, message, shape)) for kind in ("all_gather", "reduce_scatter"))
    small = sum(float(made.times.seconds("all_reduce", n * SEQ, shape)) for n in (4.0, 8.0))
    assert made.embedding(key("tp=2")).tensor == pytest.approx(reduce + 1e-3)
    assert made.head(key("tp=2")).tensor == pytest.approx(reduce + small + 1e-3)
    # with sp every stage joins its tokens, and the gradient before its blocks
    for text, stages in (("tp=2", 1), ("tp=2,pp=2", 2)):
        blocks = BLOCKS * made.block(0, key(text)).tensor
        each = stages * (pair + 2e-3)
        ends = 2 * (reduce + 1e-3) + small
        assert sum(column(made, text, "tensor")) == pytest.approx(16 * (blocks + each + ends)), text
    assert made.embedding(key("tp=2,sp=off")).each == 0.0
    assert made.head(key("tp=2,sp=off")).tensor == pytest.approx(reduce + small + 1e-3)
    plain = pricer()
    assert plain.head(key("tp=2")).tensor == plain.embedding(key("tp=2")).tensor, "without a probe of regions"


def test_sharded_units_cost_what_was_measured() -> None:
    points = [
        {"bytes": 1, "unit_s": 1e-3, "gather_s": 2e-3, "scatter_s": 5e-3},
        {"bytes": 2**30, "unit_s": 1e-3, "gather_s": 2e-3, "scatter_s": 5e-3},
    ]
    made = pricer({"sharding": [{"ranks": [0, 1], "points": points}]})
    units, m = BLOCKS + 1, 8
    # each micro-batch: hooks in every stage, a scatter from 2 on, two gathers in 3; once a step the others
    said = {
        1: m * 1e-3 + 2e-3 + 5e-3,
        2: m * (1e-3 + 5e-3) + 2e-3,
        3: m * (1e-3 + 5e-3 + 2 * 2e-3),
    }
    for zero, seconds in said.items():
        assert column(made, f"dp=2,zero={zero}", "data") == pytest.approx([units * seconds]), zero
    assert column(made, "dp=2", "data") == pytest.approx(column(pricer(), "dp=2", "data"))
    # another group has what was measured in the nearest, and what its collective takes more
    wide = column(made, "dp=4,zero=3", "data")[0]
    assert wide >= units * 4 * (1e-3 + 5e-3 + 2 * 2e-3)


def test_a_unit_beyond_the_measured_sizes_grows_as_its_collective() -> None:
    made = make_pricer(SPEC, cluster_from_probe(PLACED), SEQ, "fp32")
    small, large = IN_PLACE["sharding"][0]["points"]
    shape = GroupShape(2, 1, 2)

    def gather(num_bytes: float) -> float:
        return float(made.placed.seconds("gather", num_bytes, shape))

    half = 0.5 * (small["bytes"] + large["bytes"])
    assert gather(half) == pytest.approx(0.5 * (small["gather_s"] + large["gather_s"]))
    more = 4.0 * large["bytes"]
    grown = [float(made.times.seconds("all_gather", n, shape)) for n in (more, large["bytes"])]
    assert gather(more) == pytest.approx(large["gather_s"] + grown[0] - grown[1])


def test_the_tensor_axis_is_priced_in_its_place() -> None:
    points = [{"bytes": size, "pair_s": 5e-3, "reduce_s": 7e-3} for size in (1, 2**30)]
    made = pricer({"tensor": [{"ranks": [0, 1], "points": points}]})
    assert made.block(0, key("tp=2")).tensor == pytest.approx(2 * 2 * 5e-3)
    assert made.block(0, key("tp=2,sp=off")).tensor == pytest.approx(2 * 2 * 7e-3)
    assert made.block(0, key("dp=2")).tensor == 0.0


def test_figures_of_references_are_measured_over_priced() -> None:
    here = cluster()
    rows = [{f"{part}_s": 1.25 * s for part, s in pieces_seconds(here, one).items()} for one in REFERENCES]
    found = in_place_figures(here, rows)
    for part in ("forward", "backward", "head_forward", "head_backward"):
        assert found[part] == pytest.approx(1.25), part
    rest = [0.25 * pieces_seconds(here, one)["rest_forward"] for one in REFERENCES]
    assert found["pass_forward_s"] == pytest.approx(sum(rest) / len(rest))
    rows = [{name: 100 * seconds for name, seconds in row.items()} for row in rows]
    assert in_place_figures(here, rows)["forward"] == MOST, "a disturbed measurement is not believed whole"


def test_in_processor_seconds_they_are_processor_seconds() -> None:
    probe = copy.deepcopy(PLACED)
    for row in probe["matmul"]:
        row["processor_s"] = row["time_s"]
    for point in probe["links"][0]["points"]:
        point["processor_s"] = point["time_s"]
    probe |= {"attention": [], "processor": {"memory": {}, "overhead": {}}}
    for one in probe["in_place"]["sharding"]:
        for point in one["points"]:
            point |= {f"{n}_processor_s": 0.25 * point[f"{n}_s"] for n in ("unit", "gather", "scatter")}
    for point in probe["in_place"]["tensor"][0]["points"]:
        point |= {f"{n}_processor_s": 0.5 * point[f"{n}_s"] for n in ("pair", "reduce")}
    bare = cluster_from_probe(processor_view({k: v for k, v in probe.items() if k != "in_place"}))
    rows = [pieces_seconds(bare, one) for one in REFERENCES]
    probe["in_place"]["references"] = [
        {f"{n}_s": 9.0 for n in MEASURED} | {f"{n}_processor_s": 1.5 * row[n] for n in MEASURED}
        for row in rows
    ]
    seen = processor_view(probe)["in_place"]
    assert seen["forward"] == pytest.approx(1.5)
    assert seen["sharding"][0]["points"][0]["gather_s"] == pytest.approx(1.5e-4)
    assert seen["tensor"][0]["points"][1]["reduce_s"] == pytest.approx(5e-4)
    assert probe["in_place"]["forward"] == 1.1, "the probe itself is not changed"


def test_noise_between_groups_and_sizes_is_evened_out() -> None:
    assert ascending(np.array([1.0, 4.0, 2.0, 3.0, 9.0])).tolist() == [1.0, 3.0, 3.0, 3.0, 9.0]
    assert ascending(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]
    probe = copy.deepcopy(PROBE) | {"attention": [], "processor": {"memory": {}, "overhead": {}}}
    probe["matmul"][0]["processor_s"] = 1e-3
    point = {"bytes": 1024, "time_s": 9.0}
    probe["links"] = [
        {"ranks": ranks, "collective": "all_reduce", "points": [point | {"processor_s": seconds}]}
        for ranks, seconds in (([0, 1], 1e-4), ([2, 3], 3e-4), ([0, 1, 2, 3], 8e-4))
    ]
    seen = [one["points"][0]["time_s"] for one in processor_view(probe)["links"]]
    assert seen == pytest.approx([2e-4, 2e-4, 8e-4]), "each group pays its own, not the slowest one's"


def test_a_machines_factors_are_on_them_too() -> None:
    scaled = scaled_by(cluster_from_probe(PLACED), np.log([1.0, 1.0, 2.0, 3.0, 1.0])).measured
    assert len(NAMES) == 5
    for name, value in SMALL.items():
        assert scaled[name] == pytest.approx(2.0 * value)
    assert scaled["pass_forward_s"] == pytest.approx(2.0 * IN_PLACE["pass_forward_s"])
    assert scaled["shard_s/gather/2/8192"] == pytest.approx(3.0 * 6e-4)
    assert scaled["forward_in_place"] == 1.1
