"""Reading clusters: sizes that fill nodes, files by hand, probes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.cluster.load import cluster_from_dict, cluster_from_probe, read_cluster

HAND: dict[str, Any] = {
    "name": "mine",
    "gpus_per_node": 4,
    "num_nodes": 2,
    "device": {
        "name": "X",
        "memory": "80GiB",
        "peak_flops": {"bf16": 300e12},
        "memory_rate_bytes_per_s": 2e12,
    },
    "intra": {"name": "NVLink", "rate_bytes_per_s": 3e11},
    "inter": {"name": "IB", "rate_bytes_per_s": 25e9, "latency_s": 5e-6},
}

PROBE: dict[str, Any] = {
    "device": "cpu",
    "world_size": 4,
    "backend": "gloo",
    "cores": 2,
    "links": [
        {
            "ranks": [0, 1, 2, 3],
            "collective": "all_reduce",
            "points": [
                {"bytes": 1024, "time_s": 1e-4, "algbw_bytes_per_s": 1e7, "busbw_bytes_per_s": 1.5e7},
                {"bytes": 1048576, "time_s": 2e-3, "algbw_bytes_per_s": 5e8, "busbw_bytes_per_s": 7.5e8},
            ],
            "latency_s": 9e-5,
            "peak_busbw_bytes_per_s": 8e8,
        }
    ],
    "matmul": [{"precision": "fp32", "m": 256, "k": 128, "n": 384, "time_s": 1e-3, "flops_per_s": 2.5e10}],
    "memory": {
        "total_bytes": 24e9,
        "available_bytes": 16e9,
        "copy_bytes_per_s": 5e9,
        "elementwise_bytes_per_s": 4e9,
    },
    "overhead": {
        "op_s": 5e-6,
        "backward_op_s": 8e-6,
        "optimizer_bytes_per_s": 4e9,
        "optimizer_tensor_s": 1e-5,
    },
}

IN_PLACE: dict[str, Any] = {
    "forward": 1.1,
    "backward": 1.2,
    "head_forward": 1.3,
    "head_backward": 1.4,
    "pass_forward_s": 7e-4,
    "pass_backward_s": 2e-4,
    "sharding": [
        {
            "ranks": ranks,
            "points": [
                {"bytes": 8192, "apart_s": 2e-4, "unit_s": 4e-4, "gather_s": 6e-4, "scatter_s": 8e-4},
                {"bytes": 1048576, "apart_s": 8e-4, "unit_s": 5e-4, "gather_s": 2e-3, "scatter_s": 3e-3},
            ],
        }
        for ranks in ([0, 1], [0, 1, 2, 3])
    ],
    "tensor": [
        {
            "ranks": [0, 1],
            "points": [
                {"bytes": 32768, "apart_s": 2e-4, "pair_s": 8e-4, "reduce_s": 5e-4},
                {"bytes": 524288, "apart_s": 2e-4, "pair_s": 2e-3, "reduce_s": 1e-3},
            ],
        }
    ],
    "meetings": [
        {
            "ranks": ranks,
            "bytes": 65536,
            "link_apart_s": 4e-4,
            "points": [
                {"apart_s": work, "meet_s": seconds, "meet_processor_s": 5e-4, "calls": 100}
                for work, seconds in ((2e-4, 1e-3), (1.6e-3, 1.3e-3), (1.28e-2, 1.6e-3))
            ],
        }
        for ranks in ([0, 1], [0, 1, 2, 3], [2, 3])
    ],
}
"""What a probe has beside: parts in their place and, since format 3, meetings after three lengths of work."""
SMALL: dict[str, float] = {"accumulate_s": 2e-6, "checkpoint_s": 3e-4, "region_s": 4e-5}
PLACED: dict[str, Any] = PROBE | {
    "format": 3,
    "in_place": IN_PLACE,
    "overhead": PROBE["overhead"] | SMALL,
}


def codes(call: Any) -> list[str]:
    with pytest.raises(MeshwrightError) as error:
        call()
    return [p.code for p in error.value.problems]


def problem_of(call: Any) -> Any:
    with pytest.raises(MeshwrightError) as error:
        call()
    return error.value.problems[0]


def test_gpus_fill_nodes_or_a_part_of_one():
    assert read_cluster("h100-x8", 32).num_nodes == 4
    for gpus in (2, 3, 7):
        part = read_cluster("h100-x8", gpus)
        assert (part.gpus_per_node, part.num_nodes) == (gpus, 1)


@pytest.mark.parametrize(
    ("gpus", "near"), [(0, "1"), (-8, "1"), (10**9, "1,000,000"), (12, "8 and 16"), (9, "8 and 16")]
)
def test_impossible_sizes_name_the_nearest(gpus: int, near: str):
    found = problem_of(lambda: read_cluster("h100-x8", gpus))
    assert found.code == "E402"
    assert near in found.do


def test_an_unknown_name_gets_the_nearest():
    found = problem_of(lambda: read_cluster("a100-40g-x8"))
    assert found.code == "E401"
    assert "a100-40gb-x8" in found.do


def test_no_network_between_nodes_is_refused():
    assert codes(lambda: read_cluster("rtx-3090-x8", 16)) == ["E406"]


def test_files_that_are_missing_or_not_json(tmp_path: Path):
    assert codes(lambda: read_cluster(str(tmp_path / "no.json"))) == ["E401"]
    bad = tmp_path / "bad.json"
    bad.write_text("{not json")
    assert codes(lambda: read_cluster(str(bad))) == ["E403"]
    bad.write_text("[1, 2]")
    assert codes(lambda: read_cluster(str(bad))) == ["E403"]
    bad.write_bytes(b"\xff\xfe\x00")
    assert codes(lambda: read_cluster(str(bad))) == ["E403"]


def test_a_file_by_hand(tmp_path: Path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(HAND))
    spec = read_cluster(str(path))
    assert spec.num_gpus == 8
    assert spec.device.memory.value == 80 * 2**30
    assert spec.device.matmul_flops["bf16"].kind == "assumed"
    assert spec.intra.latency.kind == "assumed"
    assert spec.inter is not None
    assert spec.inter.latency.value == 5e-6
    assert read_cluster(str(path), 16).num_nodes == 4


def test_80gb_and_80gib_differ():
    smaller = cluster_from_dict(HAND | {"device": HAND["device"] | {"memory": "80GB"}})
    assert smaller.device.memory.value == 80e9


def test_a_file_by_hand_may_name_a_device():
    assert cluster_from_dict(HAND | {"device": "A100-80GB-SXM4"}).device.peak_flops["bf16"].value == 312e12


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_per_node": 8},
        {"gpus_per_node": "eight"},
        {"gpus_per_node": 0},
        {"gpus_per_node": True},
        {"num_nodes": -1},
        {"device": 5},
        {"device": "A100-80GB"},
        {"device": {"name": "X"}},
        {"device": HAND["device"] | {"memory": "80"}},
        {"device": HAND["device"] | {"peak_flops": {"bf32": 1e12}}},
        {"device": HAND["device"] | {"peak_flops": 3}},
        {"device": HAND["device"] | {"peak_flops": {"bf16": -1}}},
        {"device": HAND["device"] | {"is_cpu": "no"}},
        {"intra": None},
        {"intra": {"rate_bytes_per_s": "fast"}},
        {"inter": None},
        {"inter": {"rate": 5}},
        {"price_per_device_hour": "cheap"},
        {"name": 7},
    ],
)
def test_wrong_keys_and_kinds_are_refused(change: dict[str, Any]):
    assert set(codes(lambda: cluster_from_dict(HAND | change))) == {"E404"}


def test_all_mistakes_are_shown_at_once():
    wrong = HAND | {"gpu_per_node": 8, "num_nodes": 0, "notes": 3}
    found = problem_of(lambda: cluster_from_dict(wrong))
    assert found.code == "E404"
    assert len(codes(lambda: cluster_from_dict(wrong))) == 3


def test_a_probe_becomes_a_cluster():
    spec = cluster_from_probe(PROBE)
    assert (spec.num_gpus, spec.device.is_cpu) == (4, True)
    assert spec.device.memory.value == 4e9
    assert spec.device.peak_flops == {}
    assert spec.measured["matmul_flops_per_s/fp32/256x128x384"] == 2.5e10
    assert spec.measured["collective_s/all_reduce/4/1048576"] == 2e-3
    assert spec.measured["op_s"] == 5e-6
    assert spec.intra.fits["all_reduce/4"].busbw_bytes_per_s == 8e8


def test_a_probe_file_is_recognised(tmp_path: Path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE))
    assert read_cluster(str(path)).name == "probe"
    assert codes(lambda: read_cluster(str(path), 8)) == ["E406"]


@pytest.mark.parametrize(
    "change", [{"matmul": []}, {"links": []}, {"memory": {}}, {"world_size": "4x"}, {"links": [{"ranks": 4}]}]
)
def test_a_broken_probe_is_refused(change: dict[str, Any]):
    assert codes(lambda: cluster_from_probe(PROBE | change)) == ["E404"]


def test_a_probe_of_parts_in_their_place_is_read_and_a_newer_one_refused():
    before, now = cluster_from_probe(PROBE).measured, cluster_from_probe(PLACED).measured
    assert not any("in_place" in key or key.startswith("shard_s") for key in before)
    assert now["forward_in_place"] == 1.1
    assert now["head_backward_in_place"] == 1.4
    assert now["pass_forward_s"] == 7e-4
    assert now["region_s"] == 4e-5
    assert now["shard_s/scatter/4/1048576"] == 3e-3
    assert now["tensor_s/pair/2/524288"] == 2e-3
    assert now["meet_s/4/1600"] == 1.3e-3
    assert now["apart_s/gather/2"] == pytest.approx(4e-4), "the mean of 2e-4 and 8e-4 as logarithms"
    assert now["apart_s/reduce/2"] == pytest.approx(2e-4)
    problem = problem_of(lambda: cluster_from_probe(PLACED | {"format": 4}))
    assert problem.code == "E404"
    assert "format 4 is newer than 3" in problem.found
    second = {k: v for k, v in IN_PLACE.items() if k != "meetings"}
    before = cluster_from_probe(PLACED | {"format": 2, "in_place": second}).measured
    assert not any(key.startswith(("meet_s", "apart_s")) for key in before), (
        "a probe of before has its meaning of before"
    )


def hand_made(**changed: Any) -> dict[str, Any]:
    return {"name": "home", "device": "L40S-48GB", "gpus_per_node": 4, "num_nodes": 7, "source": "a shelf"} | {
        "intra": "PCIe 4",
        "inter": "2 x 100GbE",
    } | changed  # fmt: skip


def test_a_link_may_be_named_and_adapters_are_shared_by_a_node():
    cluster = cluster_from_dict(hand_made())
    assert cluster.inter is not None
    assert (cluster.intra.rate.value, cluster.inter.rate.value) == (32e9, 2 * 12.5e9 / 4)
    assert (cluster.inter.name, cluster.inter.latency.kind) == ("2 x 100 GbE", "assumed")
    assert "7" not in cluster.inter.rate.source
    for text, rate in (("nvlink-4", 450e9), ("PCIe5", 64e9)):
        assert cluster_from_dict(hand_made(intra=text)).intra.rate.value == rate


@pytest.mark.parametrize(
    ("key", "text", "near"),
    [("inter", "100 GBit", "100 GbE"), ("intra", "NVLink 6", "NVLink 5"), ("inter", "0 x EFA", "EFA")],
)
def test_an_unknown_link_gets_the_nearest(key: str, text: str, near: str):
    found = problem_of(lambda: cluster_from_dict(hand_made(**{key: text})))
    assert found.code == "E404"
    assert near in found.do


@pytest.mark.parametrize(
    ("part", "key", "value", "do"),
    [
        ("device", "memory", 48, '"48GB"'),
        ("device", "memory_rate_bytes_per_s", 864, "864e9"),
        ("intra", "rate_bytes_per_s", 32.0, "32.0e9"),
        ("inter", "latency_s", 30, "30e-6"),
    ],
)
def test_figures_in_another_unit_are_said(part: str, key: str, value: float, do: str):
    made: dict[str, Any] = hand_made(
        device={
            "name": "X",
            "memory": "48GB",
            "peak_flops": {"bf16": 3e14},
            "memory_rate_bytes_per_s": 864e9,
        },
        intra={"rate_bytes_per_s": 32e9},
        inter={"rate_bytes_per_s": 12.5e9},
    )
    assert cluster_from_dict(made).num_gpus == 28
    made[part][key] = value
    found = problem_of(lambda: cluster_from_dict(made))
    assert found.code == "E404"
    assert do in found.do
    made[part][key] = {"memory": "48GB"}.get(key, 864e9 if key != "latency_s" else 3e-5)
    made["device"]["peak_flops"] = {"bf16": 362}
    assert "362e12" in problem_of(lambda: cluster_from_dict(made)).do
