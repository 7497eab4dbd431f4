"""Meetings after longer work: what is measured of them, and what a step pays."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from tests.machine_runs import MODEL
from tests.unit.test_cluster_load import PLACED

from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cost.collective import GroupShape
from meshwright.cost.fast import columns
from meshwright.cost.machine_profile import NAMES, scaled_by
from meshwright.cost.meeting import meetings
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.work import work_key
from meshwright.layout.batch import derive_batch
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.probe.calm import calm_mean, calm_ones
from meshwright.probe.meeting import Meeting
from meshwright.probe.processor import processor_view
from meshwright.probe.run import meeting_points

SPEC = read_model(MODEL)
SEQ, SEQUENCES, UNITS = 128, 16, SPEC.num_layers + 1
SLOPE = 3e-4 / math.log(8.0)
"""Of ``PLACED``: three lengths of work, eight times as long each, and 0.3 ms more each."""
LEAST, MOST = 2e-4, 1.28e-2


def without() -> dict[str, Any]:
    """Return the probe without meetings: one of before."""
    placed = {k: v for k, v in PLACED["in_place"].items() if k != "meetings"}
    return PLACED | {"in_place": placed, "format": 2}


def pricer(probe: dict[str, Any]) -> Pricer:
    return make_pricer(SPEC, cluster_from_probe(probe), SEQ, "fp32")


def column(made: Pricer, text: str, name: str) -> float:
    layout = parse_layout(f"{text},precision=fp32")
    found = columns(made, [layout], [derive_batch(layout, SEQUENCES, SEQ)])
    return float(getattr(found, name)[0].sum())


def later(work_s: float, apart_s: float) -> float:
    return SLOPE * math.log(min(max(work_s, LEAST), MOST) / apart_s)


def test_a_line_over_the_logarithm_of_work() -> None:
    known = meetings(cluster_from_probe(PLACED))
    assert known.slope(2) == pytest.approx(SLOPE)
    assert known.lines[4] == pytest.approx((1e-3, SLOPE))
    assert (known.least, known.most) == pytest.approx((LEAST, MOST))
    assert float(known.log(1e-9)) == 0.0
    assert float(known.log(9.0)) == pytest.approx(math.log(64.0))
    falling = copy.deepcopy(PLACED)
    for one in falling["in_place"]["meetings"]:
        one["points"] = [p | {"meet_s": 1e-3 / p["apart_s"]} for p in one["points"]]
    assert meetings(cluster_from_probe(falling)).slope(2) == 0.0, "noise does not make longer work cheaper"
    disturbed = copy.deepcopy(PLACED)
    points = disturbed["in_place"]["meetings"][0]["points"]
    points.append({"apart_s": 2.56e-2, "meet_s": 1.7e-3, "meet_processor_s": 5e-4, "calls": 9})
    points[0]["meet_s"] = 0.9
    assert meetings(cluster_from_probe(disturbed)).slope(2) < 2.0 * SLOPE, "one disturbed point of four"
    assert not meetings(read_cluster("h100-x8", 8))
    assert not meetings(cluster_from_probe(without()))


def test_sharded_units_pay_for_the_work_before_each() -> None:
    before, after = pricer(without()), pricer(PLACED)
    m = SEQUENCES / 2
    ahead, behind = (column(before, "dp=2", name) for name in ("forward", "backward"))
    apart = 4e-4
    said = {
        1: UNITS * (later(ahead / UNITS, apart) + later(behind / UNITS, apart)),
        2: UNITS * (later(ahead / UNITS, apart) + m * later(behind / UNITS, apart)),
        3: UNITS * m * (later(ahead / UNITS, apart) + 2 * later(behind / (2 * UNITS), apart)),
    }
    for zero, seconds in said.items():
        text = f"dp=2,zero={zero}"
        assert column(after, text, "data") - column(before, text, "data") == pytest.approx(seconds), zero
        assert column(after, text, "hidden") == pytest.approx(0.0, abs=1e-12)
        assert column(after, text, "compute") == column(before, text, "compute")
    for text in ("dp=2", "pp=2"):
        assert column(after, text, "step") == column(before, text, "step"), "it has no such meetings"


def test_the_tensor_axis_pays_for_the_work_before_each() -> None:
    before, after = pricer(without()), pricer(PLACED)
    for text, calls, times in (("tp=2", 8.0, 2.0), ("tp=2,sp=off", 4.0, 1.0)):
        key = work_key(parse_layout(f"{text},precision=fp32"))
        one, other = before.block(0, key), after.block(0, key)
        each = later((one.forward + one.backward) / calls, 2e-4)
        assert other.tensor - one.tensor == pytest.approx(4.0 * times * each), text
    shape = GroupShape(2, 1, 2)
    assert after.placed.later("pair", 1.6e-3, shape) == pytest.approx(2.0 * 3e-4)
    assert after.placed.later("reduce", 1.6e-3, GroupShape(1, 1, 1)) == 0.0


def test_other_exchanges_pay_for_the_work_before_each() -> None:
    before, after = pricer(without()), pricer(PLACED)
    key = work_key(parse_layout("cp=2,cp_style=ulysses,precision=fp32"))
    one, other = before.block(0, key), after.block(0, key)
    each = later((one.forward + one.backward) / 4.0, 4e-4)
    assert other.context - one.context == pytest.approx(4.0 * each)
    ring = work_key(parse_layout("cp=2,precision=fp32"))
    assert before.block(0, ring).context == after.block(0, ring).context, "hops run beside compute"
    mixture = read_model("mixtral-8x7b")
    experts = work_key(parse_layout("dp=2,ep=2,precision=fp32"))
    twice = [
        make_pricer(mixture, cluster_from_probe(p), SEQ, "fp32").block(0, experts)
        for p in (without(), PLACED)
    ]
    each = later((twice[0].forward + twice[0].backward) / 5.0, 4e-4)
    assert twice[1].expert - twice[0].expert == pytest.approx(5.0 * each)


def test_gpus_pay_nothing_of_it() -> None:
    made = make_pricer(SPEC, read_cluster("h100-x8", 2), SEQ, "bf16")
    assert not made.placed.meetings
    layout = parse_layout("dp=2,zero=3,precision=bf16")
    found = columns(made, [layout], [derive_batch(layout, SEQUENCES, SEQ)])
    assert float(found.data.sum()) > 0


def test_waiting_costs_no_processor_seconds() -> None:
    probe = copy.deepcopy(PLACED) | {"attention": [], "processor": {"memory": {}, "overhead": {}}}
    for row in probe["matmul"]:
        row["processor_s"] = row["time_s"]
    for point in probe["links"][0]["points"]:
        point["processor_s"] = point["time_s"]
    for kind, parts in (("sharding", ("unit", "gather", "scatter")), ("tensor", ("pair", "reduce"))):
        for point in (p for one in probe["in_place"][kind] for p in one["points"]):
            point |= {f"{n}_processor_s": point[f"{n}_s"] for n in parts}
    names = ("forward", "backward", "head_forward", "head_backward", "rest_forward", "rest_backward")
    probe["in_place"]["references"] = [{f"{n}_processor_s": 1e-3 for n in names} for _ in range(2)]
    assert not meetings(cluster_from_probe(processor_view(probe)))
    assert "meetings" in probe["in_place"], "the probe itself is not changed"


def test_a_machines_factor_on_collectives_is_on_meetings() -> None:
    here = cluster_from_probe(PLACED)
    theta = np.zeros(len(NAMES))
    theta[NAMES.index("collective")] = math.log(2.0)
    there = meetings(scaled_by(here, theta))
    assert there.slope(2) == pytest.approx(2.0 * SLOPE)
    assert there.least == pytest.approx(LEAST)


def test_a_meeting_is_what_exceeds_the_work_before_it() -> None:
    pair = [
        {"in_place": {"meetings": [([0, 1], [Meeting((6e-3, 2e-3), (7e-3, 3e-3), 50, 4)])]}},
        {"in_place": {"meetings": [([0, 1], [Meeting((8e-3, 4e-3), (9e-3, 5e-3), 40, 4)])]}},
    ]
    (half,), (whole,) = (meeting_points(pair, share) for share in (0.5, 1.0))
    assert half["ranks"] == [0, 1]
    point = half["points"][0]
    assert point["apart_s"] == pytest.approx(6e-3), "three processor milliseconds on half of a core"
    assert point["meet_s"] == pytest.approx(1e-3), "wall seconds of both"
    assert point["calls"] == 40
    assert half["link_apart_s"] == pytest.approx(2 * 6e-3), "eight products for four"
    assert (whole["points"][0]["apart_s"], whole["points"][0]["meet_s"]) == pytest.approx((3e-3, 1e-3))
    assert point["meet_processor_s"] == pytest.approx(1e-3)


def test_repeats_that_others_disturbed_do_not_count() -> None:
    assert calm_ones([0.0, 0.9, 0.05, 1.2, 0.1, 0.02]) == [0, 2, 4, 5]
    assert calm_ones([2.0, 0.9, 1.0, 1.2]) == [1, 2, 3], "the calmest, where none was calm"
    assert calm_ones([0.5 + i for i in range(40)]) == list(range(10))
    assert calm_ones(None) is None
    assert calm_mean([1.0, 9.0, 3.0], [0, 2]) == 2.0
    assert calm_mean([4.0, 1.0, 3.0, 2.0, 9.0], None) == 2.0, "the lower quartile where others are not known"
