"""The arithmetic of the probe: bus bandwidth, fits, ring order, the small-tensor rule, topology tables, advice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.probe.fit import (
    Line,
    advice,
    busbw_factor,
    crossover_bytes,
    fit_line,
    link,
    ring_order,
)
from meshwright.probe.topology import (
    Topology,
    closeness,
    describe_nodes,
    effective_cores,
    memory_bytes,
    parse_topology,
    topology_pair_rates,
)


@pytest.mark.parametrize(
    ("collective", "two", "four", "eight"),
    [  # nccl-tests, doc/PERFORMANCE.md
        ("all_reduce", 1.0, 1.5, 1.75),
        ("all_gather", 0.5, 0.75, 0.875),
        ("reduce_scatter", 0.5, 0.75, 0.875),
        ("all_to_all", 0.5, 0.75, 0.875),
        ("broadcast", 1.0, 1.0, 1.0),
        ("send_recv", 1.0, 1.0, 1.0),
    ],
)
def test_busbw_factors(collective: str, two: float, four: float, eight: float) -> None:
    assert [busbw_factor(collective, n) for n in (2, 4, 8)] == [two, four, eight]


def test_an_unknown_collective_has_no_factor() -> None:
    with pytest.raises(ValueError, match="gossip"):
        busbw_factor("gossip", 2)


def test_a_link_has_both_bandwidths_and_the_fit() -> None:
    points = [(size, 1e-4 + size / 1e9) for size in (1000, 100_000, 10_000_000)]
    found = link([0, 1, 2, 3], "all_reduce", points)
    assert found["latency_s"] == pytest.approx(1e-4)
    assert found["peak_busbw_bytes_per_s"] == pytest.approx(1.5e9)
    last = found["points"][-1]
    assert last["bytes"] == 10_000_000
    assert last["algbw_bytes_per_s"] == pytest.approx(1e7 / (1e-4 + 1e-2))
    assert last["busbw_bytes_per_s"] == pytest.approx(1.5 * last["algbw_bytes_per_s"])


@given(latency=st.floats(0, 1e-2), rate=st.floats(1e7, 1e12))
@settings(max_examples=100, deadline=None)
def test_points_on_a_line_give_that_line(latency: float, rate: float) -> None:
    points = [(s, latency + s / rate) for s in (1024.0, 16384.0, 131072.0, 1048576.0, 4194304.0)]
    line = fit_line(points)
    for size, time_s in points:
        assert line.latency_s + size / line.rate_bytes_per_s == pytest.approx(time_s, rel=1e-6)


@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_one_disturbed_point_does_not_move_the_fit(bad: int, factor: float) -> None:
    points = [(2.0 ** (10 + 3 * i), 1e-4 + 2.0 ** (10 + 3 * i) / 1e9) for i in range(6)]
    points[bad] = (points[bad][0], points[bad][1] * factor)
    line = fit_line(points)
    assert line.latency_s == pytest.approx(1e-4, rel=0.01)
    assert line.rate_bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_small_messages_that_were_slow_do_not_make_a_link_fast() -> None:
    """Times of a crowded machine: the raw slope from 128 KiB to 1 MiB would say 28 GB/s."""
    sizes = (1024, 16384, 131072, 1048576, 4194304)
    times = (1800e-6, 1863e-6, 1421e-6, 1453e-6, 6455e-6)
    line = fit_line(list(zip(sizes, times, strict=True)))
    assert line.rate_bytes_per_s < 1.5e9


def test_latency_is_never_negative() -> None:
    line = fit_line([(1000.0, 1e-6), (2000.0, 4e-6)])
    assert line.latency_s == 0.0
    assert line.rate_bytes_per_s in (pytest.approx(1e9), pytest.approx(5e8))
    assert fit_line([(1000.0, 1e-6)]) == Line(0.0, pytest.approx(1e9))


def test_a_fit_needs_a_point() -> None:
    with pytest.raises(ValueError, match="one point"):
        fit_line([])


def test_ring_order_avoids_the_slow_link() -> None:
    # a square 0-2-1-3-0 of fast links; the diagonals 0-1 and 2-3 are slow
    rates = {(0, 2): 10.0, (1, 2): 10.0, (1, 3): 10.0, (0, 3): 10.0, (0, 1): 1.0, (2, 3): 1.0}
    assert ring_order(rates, 4) in ([0, 2, 1, 3], [0, 3, 1, 2])


def test_ring_order_of_equal_links_is_plain() -> None:
    rates = {(a, b): 5.0 for a in range(6) for b in range(a + 1, 6)}
    assert ring_order(rates, 6) == list(range(6))
    assert ring_order({}, 1) == [0]
    assert ring_order({(0, 1): 1.0}, 2) == [0, 1]


@given(st.integers(3, 6), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_ring_order_is_a_ring_and_no_worse_than_the_plain_one(n: int, random: Any) -> None:
    rates = {(a, b): random.uniform(1, 9) for a in range(n) for b in range(a + 1, n)}
    ring = ring_order(rates, n)
    assert sorted(ring) == list(range(n))
    assert ring[0] == 0

    def bottleneck(order: list[int]) -> float:
        return min(rates[min(a, b), max(a, b)] for a, b in zip(order, [*order[1:], order[0]], strict=True))

    assert bottleneck(ring) >= bottleneck(list(range(n)))


def test_crossover_between_two_sizes() -> None:
    sizes = [1e3, 1e4, 1e5]
    broadcast = list(zip(sizes, [1.0, 1.0, 4.0], strict=True))
    all_reduce = list(zip(sizes, [2.0, 2.0, 2.0], strict=True))
    found = crossover_bytes(broadcast, all_reduce)
    assert found is not None
    assert math.log10(found) == pytest.approx(4.5)  # ratio 1/2 at 10^4 and 2 at 10^5: equal halfway
    assert crossover_bytes(all_reduce, broadcast) == 0.0
    assert crossover_bytes(broadcast[:2], all_reduce[:2]) is None


NVSWITCH = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and the links between NUMA nodes\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_4\n"
)
PCIE = """\
        GPU0    GPU1    GPU2    GPU3    mlx4_0  CPU Affinity
GPU0     X      PIX     PHB     SYS     PHB     0-9,20-29
GPU1    PIX      X      PHB     SYS     PHB     0-9,20-29
GPU2    PHB     PHB      X      SYS     PHB     0-9,20-29
GPU3    SYS     SYS     SYS      X      SYS     10-19,30-39
mlx4_0  PHB     PHB     PHB     SYS      X
"""
MIXED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV2     SYS     NV1     0-19    0
GPU1    NV2      X      NV1     SYS     0-19    0
GPU2    SYS     NV1      X      NV2     20-39   1
GPU3    NV1     SYS     NV2      X      20-39   1
"""


def test_topology_of_a_switched_node() -> None:
    found = parse_topology(NVSWITCH)
    assert found.gpus == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert found.devices[-2:] == ("NIC0", "NIC1")
    assert found.kind == "NVSwitch"
    assert found.links["GPU0", "GPU3"] == "NV18"
    assert found.numa == {"GPU0": "0", "GPU1": "0", "GPU2": "1", "GPU3": "1"}
    assert [found.nearest_nic(g) for g in found.gpus] == ["mlx5_0", "mlx5_0", "mlx5_4", "mlx5_4"]
    assert found.as_dict()["kind"] == "NVSwitch"


def test_topology_of_an_old_pcie_table() -> None:
    found = parse_topology(PCIE)
    assert found.kind == "PCIe"
    assert found.numa == {}
    assert found.nearest_nic("GPU3") == "mlx4_0"
    assert topology_pair_rates(found) == {(0, 1): 5, (0, 2): 3, (0, 3): 1, (1, 2): 3, (1, 3): 1, (2, 3): 1}


def test_ring_order_from_a_table_keeps_to_nvlinks() -> None:
    found = parse_topology(MIXED)
    assert found.kind == "NVLink"
    ring = ring_order(topology_pair_rates(found), 4)
    for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
        assert found.links[f"GPU{a}", f"GPU{b}"].startswith("NV")


def test_one_gpu_and_no_table() -> None:
    assert parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n").kind == "one GPU"
    with pytest.raises(ValueError, match="no table"):
        parse_topology("NVIDIA-SMI has failed because it could not communicate with the driver")


def test_more_links_are_closer_than_fewer_and_any_is_closer_than_pcie() -> None:
    names = ["NV18", "NV4", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    assert sorted(names, key=closeness, reverse=True) == names
    assert Topology((), {}, {}, {}).kind == "one GPU"


def test_this_machine_is_described() -> None:
    total, available = memory_bytes()
    assert 0 < available <= total
    assert effective_cores() > 0
    assert describe_nodes(["a", "a", "b", "a"]) == {"nodes": 2, "ranks_of_node": [[0, 1, 3], [2]]}


def _advice(**change: Any) -> list[str]:
    facts: dict[str, Any] = {
        "world_size": 4,
        "cores": 8.0,
        "is_cpu": True,
        "links": [link([0, 1, 2, 3], "all_reduce", [(1000, 1e-4), (10_000_000, 1e-2)])],
        "matmul": [],
        "rank_slowness": [1.0, 1.0, 1.0, 1.0],
        "pair_rates": {},
        "order": [0, 1, 2, 3],
        "broadcast_below_bytes": 0.0,
    }
    return advice(**(facts | change))


def test_advice_says_only_what_applies() -> None:
    assert not any("share" in line for line in _advice())
    assert any("4 ranks share 2 cores" in line for line in _advice(cores=2.0))
    assert any("rank 2 computes 50 % slower" in line for line in _advice(rank_slowness=[1, 1, 1.5, 1]))
    assert any("is below 2 GB/s" in line for line in _advice())
    fast = [link([0, 1, 2, 3], "all_reduce", [(1000, 1e-5), (10_000_000, 1e-4)])]
    assert any("above 15 GB/s" in line for line in _advice(links=fast))
    middle = [link([0, 1, 2, 3], "all_reduce", [(1000, 1e-5), (10_000_000, 2e-3)])]
    assert any("between 2 and 15 GB/s" in line for line in _advice(links=middle))
    assert any("up to 64.00 KiB" in line for line in _advice(broadcast_below_bytes=65536.0))
    assert any("every size" in line for line in _advice(broadcast_below_bytes=None))


def test_a_disturbed_probe_says_so() -> None:
    assert any("other programs had 40 % of the cores" in line for line in _advice(quiet_share=0.6))
    assert not any("other programs" in line for line in _advice(quiet_share=0.95))


def test_a_link_keeps_processor_seconds_where_they_were_measured() -> None:
    points = [(1024, 1e-3, 2e-4), (65536, 2e-3, 4e-4)]
    assert [p["processor_s"] for p in link([0, 1], "all_reduce", points)["points"]] == [2e-4, 4e-4]
    plain = link([0, 1], "all_reduce", [(1024, 1e-3), (65536, 2e-3)])
    assert plain["latency_s"] == link([0, 1], "all_reduce", points)["latency_s"]
    assert "processor_s" not in plain["points"][0]


def test_advice_on_pairs_and_precision() -> None:
    pairs = {(0, 1): 1e9, (0, 2): 4e9, (1, 2): 4e9}
    lines = _advice(pair_rates=pairs, order=[0, 2, 1], is_cpu=False)
    assert any("pair of ranks (0, 1) has 1.00 GB/s, the fastest 4.00 GB/s" in line for line in lines)
    assert any("CUDA_VISIBLE_DEVICES=0,2,1" in line for line in lines)
    assert not any("CUDA" in line for line in _advice(pair_rates=pairs, order=[0, 2, 1]))

    def rows(bf16: float) -> list[dict[str, Any]]:
        return [{"precision": "fp32", "flops_per_s": 100.0}, {"precision": "bf16", "flops_per_s": bf16}]

    assert any("0.50 of fp32's speed" in line for line in _advice(matmul=rows(50.0)))
    assert any("4.0 times as fast" in line for line in _advice(matmul=rows(400.0)))
