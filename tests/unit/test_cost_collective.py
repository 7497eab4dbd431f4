"""Collectives: ring volumes, placement, a probe's own points."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_cluster_load import PROBE

from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cost.collective import (
    GroupShape,
    collective_times,
    link_share,
    neighbours_shape,
    plane_shape,
    shape_of,
    strided_shape,
)
from meshwright.program.step import Collective

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_large_messages_cost_their_ring_volume(kind: str, size: int):
    times = collective_times(read_cluster("h100-x8"))
    num_bytes = 8 * 10**9
    step = Collective(kind=kind, axis="dp", group_size=size, num_bytes=num_bytes, what="")  # type: ignore[arg-type]
    shape = GroupShape(size, 1, size)
    seconds = float(
        times.seconds(kind, 2.0 * num_bytes, shape) - times.seconds(kind, float(num_bytes), shape)
    )
    assert seconds == pytest.approx(step.volume_bytes / (450e9 * link_share(1)), rel=1e-3)


@pytest.mark.parametrize("kind", [*KINDS, "send"])
def test_one_rank_sends_nothing_and_more_bytes_take_longer(kind: str):
    for cluster in (read_cluster("h100-x8"), cluster_from_probe(PROBE)):
        times = collective_times(cluster)
        assert float(times.seconds(kind, 1e6, GroupShape(1, 1, 1))) == 0
        seconds = times.seconds(kind, np.array([1e3, 1e5, 1e7, 1e9]), GroupShape(4, 1, 4))
        assert (np.diff(seconds) > 0).all()


def test_groups_over_nodes_pay_the_network():
    times = collective_times(read_cluster("a100-80gb-x8", 32))
    inside = float(times.seconds("all_reduce", 1e9, GroupShape(8, 1, 8)))
    across = float(times.seconds("all_reduce", 1e9, GroupShape(8, 4, 2)))
    apart = float(times.seconds("all_reduce", 1e9, GroupShape(8, 8, 1)))
    assert inside < across < apart
    assert times.link_name(GroupShape(8, 4, 2)) == "8 x HDR 200 Gb/s"


def test_an_all_to_all_over_nodes_sends_what_each_rank_has_for_other_nodes():
    cluster = read_cluster("h100-x8", 64)
    assert cluster.inter is not None
    times = collective_times(cluster)
    one_node = float(times.seconds("all_to_all", 1e9, GroupShape(8, 1, 8)))
    for nodes in (2, 8):
        found = float(times.seconds("all_to_all", 1e9, GroupShape(8 * nodes, nodes, 8)))
        far = 1e9 * (nodes - 1) / nodes / (cluster.inter.rate.value * link_share(2))
        assert far < found < far + one_node
    # an all-reduce's payload is shared out over the node's adapters
    assert float(times.seconds("all_reduce", 1e9, GroupShape(64, 8, 8))) < 2 * 1e9 / cluster.inter.rate.value


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    st.sampled_from([1, 4, 6, 8]),
)
def test_a_groups_shape_is_that_of_the_worst_one_on_whole_nodes(size: int, stride: int, node: int):
    # ranks 6 to 11 of tp = 6 are on two nodes of 8, although ranks 0 to 5 are on one
    tile = size * stride
    every = [
        shape_of([at + start + i * stride for i in range(size)], node)
        for at in range(0, math.lcm(tile, node), tile)
        for start in range(stride)
    ]
    worst = max(every, key=lambda shape: (shape.nodes, -shape.per_node))
    assert strided_shape(size, stride, node) == worst
    assert neighbours_shape(size, stride, node).nodes == min(2, worst.nodes)
    outer = plane_shape(((3, 2 * tile), (size, stride)), node)
    assert outer.nodes >= worst.nodes


def test_a_probe_is_read_at_its_points_and_between():
    times = collective_times(cluster_from_probe(PROBE))
    shape = GroupShape(4, 1, 4)
    assert float(times.seconds("all_reduce", 1024, shape)) == pytest.approx(1e-4)
    assert float(times.seconds("all_reduce", 2**20, shape)) == pytest.approx(2e-3)
    assert 1e-4 < float(times.seconds("all_reduce", 2**15, shape)) < 2e-3
    assert float(times.seconds("all_reduce", 2**24, shape)) == pytest.approx(16 * 2e-3)
    assert float(times.seconds("all_reduce", 8, shape)) == pytest.approx(1e-4)
