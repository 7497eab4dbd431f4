"""The probe on this machine: its JSON is complete and positive, and the plan's side can read it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.cluster.load import cluster_from_probe
from meshwright.cost.in_place import MEASURED, REFERENCES
from meshwright.probe.fit import busbw_factor
from meshwright.probe.run import assemble, run_probe

pytestmark = pytest.mark.gloo

KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}


@pytest.fixture(scope="module")
def probed() -> tuple[dict[str, Any], list[str], float]:
    lines: list[str] = []
    start = time.perf_counter()
    found = run_probe(4, True, lines.append)
    return found, lines, time.perf_counter() - start


def test_every_key_is_there_and_every_figure_positive(
    probed: tuple[dict[str, Any], list[str], float], record_property: Any
) -> None:
    found, lines, seconds = probed
    record_property("wall_s", round(seconds, 2))
    print(f"quick probe of 4 ranks: {seconds:.1f} s")
    assert (found["device"], found["world_size"], found["backend"]) == ("cpu", 4, "gloo")
    groups = {(tuple(x["ranks"]), x["collective"]) for x in found["links"]}
    for ranks in ((0, 1), (2, 3), (0, 1, 2, 3)):
        assert {k for r, k in groups if r == ranks} == (KINDS | {"send_recv"} if len(ranks) == 2 else KINDS)
    for one in found["links"]:
        assert len(one["points"]) == 5
        assert [p["bytes"] for p in one["points"]] == [2**10, 2**14, 2**17, 2**20, 2**22]
        assert one["peak_busbw_bytes_per_s"] > 0
        assert one["latency_s"] >= 0
        for point in one["points"]:
            assert point["time_s"] > 0
            factor = busbw_factor(one["collective"], len(one["ranks"]))
            assert point["busbw_bytes_per_s"] == pytest.approx(factor * point["bytes"] / point["time_s"])
    assert {row["precision"] for row in found["matmul"]} == {"fp32", "bf16"}
    for row in found["matmul"]:
        flops = 2 * row["m"] * row["k"] * row["n"]
        assert row["flops_per_s"] == pytest.approx(flops / row["time_s"])
    for row in found["attention"]:
        assert row["forward_s"] > 0
        assert row["backward_s"] > 0
    once = {"op_s", "backward_op_s", "optimizer_bytes_per_s", "optimizer_tensor_s"}
    assert set(found["overhead"]) == once | {"accumulate_s", "checkpoint_s", "region_s"}
    assert all(v > 0 for v in (found["overhead"] | found["memory"]).values())
    assert found["topology"]["nodes"] == 1
    assert len(found["topology"]["pairs"]) == 6
    assert sorted(found["ring_order"]) == [0, 1, 2, 3]
    assert found["small_tensor_rule"]["measured_up_to_bytes"] == 2**22
    assert any("all_reduce in groups of 4" in line for line in lines)
    assert "done" in lines[-1]


def test_parts_are_measured_in_their_place(probed: tuple[dict[str, Any], list[str], float]) -> None:
    found = probed[0]
    placed = found["in_place"]
    assert found["format"] == 3
    for part in ("forward", "backward", "head_forward", "head_backward"):
        assert 0.5 < placed[part] < 2.0, part
    assert len(placed["references"]) == len(REFERENCES)
    for row in placed["references"]:
        for name in MEASURED:
            assert 0 < row[f"{name}_processor_s"] < 1.0
            # four ranks have half a core each
            assert row[f"{name}_s"] == pytest.approx(
                row[f"{name}_processor_s"] / min(1.0, found["cores"] / 4)
            )
    assert [one["ranks"] for one in placed["sharding"]] == [[0, 1], [0, 1, 2, 3], [2, 3]]
    for one in placed["sharding"]:
        small, large = one["points"]
        assert 0 < small["bytes"] < 2e4
        assert large["bytes"] > 2**20
        for part in ("unit", "gather", "scatter"):
            assert all(0 < point[f"{part}_processor_s"] < 0.2 for point in (small, large)), part
    assert [one["ranks"] for one in placed["tensor"]] == [[0, 1], [0, 1, 2, 3], [2, 3]]
    for one in placed["tensor"]:
        assert [point["bytes"] for point in one["points"]] == [2**15, 2**19]
        for part in ("pair", "reduce"):
            assert all(1e-6 < point[f"{part}_processor_s"] < 0.2 for point in one["points"]), part
        assert all(0 < point["apart_s"] < 0.1 for point in one["points"])
    assert [one["ranks"] for one in placed["meetings"]] == [[0, 1], [0, 1, 2, 3], [2, 3]]
    for one in placed["meetings"]:
        works = [point["apart_s"] for point in one["points"]]
        assert works == sorted(works)
        assert works[-1] > 5 * works[0]
        assert all(0 < point["meet_processor_s"] < 0.1 for point in one["points"])
        assert all(0 < point["meet_s"] < 1.0 and point["calls"] >= 12 for point in one["points"])
    region = found["processor"]["overhead"]["region_s"]
    assert 1e-6 < region < 1e-3


def test_the_planner_reads_it(probed: tuple[dict[str, Any], list[str], float]) -> None:
    cluster = cluster_from_probe(probed[0])
    assert cluster.num_gpus == 4
    assert cluster.device.is_cpu
    assert set(cluster.device.matmul_flops) == {"fp32", "bf16"}
    assert "all_reduce/4" in cluster.intra.fits
    assert "send_recv/2" in cluster.intra.fits
    assert cluster.measured["forward_in_place"] == probed[0]["in_place"]["forward"]
    assert {key.rpartition("/")[0] for key in cluster.measured if key.startswith("shard_s/")} == {
        f"shard_s/{part}/{ranks}" for part in ("unit", "gather", "scatter") for ranks in (2, 4)
    }


@pytest.mark.slow
def test_one_rank_has_no_links() -> None:
    found = run_probe(1, True, lambda _: None)
    assert found["links"] == []
    assert found["ring_order"] == [0]
    assert found["small_tensor_rule"] is None
    assert found["in_place"]["sharding"] == []
    assert cluster_from_probe(found).num_gpus == 1


def test_e520_no_ranks() -> None:
    with pytest.raises(MeshwrightError) as caught:
        run_probe(0, True, lambda _: None)
    assert caught.value.problems[0].code == "E520"


def test_e520_another_number_than_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(MeshwrightError) as caught:
        run_probe(4, True, lambda _: None)
    assert "torchrun started 2" in caught.value.problems[0].found


def test_e521_ranks_on_different_devices() -> None:
    shapes: dict[str, Any] = {"matmul_shapes": (), "attention_shapes": (), "cores": 1.0}
    ranks = [{"device": "A"}, {"device": "B"}]
    with pytest.raises(MeshwrightError) as caught:
        assemble(ranks, backend="nccl", torch_version="2.13", quick=True, **shapes)
    assert caught.value.problems[0].code == "E521"
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
