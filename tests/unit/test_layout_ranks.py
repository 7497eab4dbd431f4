"""Ranks, coordinates and groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.axes import LAYOUT_AXES, MESH_AXES
from meshwright.layout.layout import Layout
from meshwright.layout.parse import complete, parse_layout
from meshwright.layout.ranks import (
    coordinates,
    group,
    groups,
    mesh_shape,
    nodes_of,
    nodes_spanned,
    rank_of,
    strides,
)


def test_tp8_pp2_dp4_over_64_ranks() -> None:
    layout = parse_layout("tp=8,pp=2,dp=4")
    assert list(mesh_shape(layout)) == list(MESH_AXES)
    assert group(layout, 0, "tp") == tuple(range(8))
    assert group(layout, 63, "tp") == tuple(range(56, 64))
    assert group(layout, 0, "dp_replicate") == (0, 8, 16, 24)
    assert group(layout, 5, "pp") == (5, 37)
    assert coordinates(layout, 37) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 5}
    # tensor groups stay inside a node of 8, the two stages are on different nodes
    assert nodes_spanned(layout, "tp", 8) == 1
    assert nodes_of(group(layout, 5, "pp"), 8) == (0, 4)


def test_h178_tensor_groups_are_neighbours_and_list_their_nodes() -> None:
    layout = parse_layout("tp=8,dp=2")
    assert groups(layout, "tp") == (tuple(range(8)), tuple(range(8, 16)))
    assert [nodes_of(g, 8) for g in groups(layout, "tp")] == [(0,), (1,)]
    outer = parse_layout("tp=8,dp=2,order=dp/cp/tp/pp")
    assert groups(outer, "tp")[0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert nodes_of(groups(outer, "tp")[0], 8) == (0, 1)


def test_h182_a_group_of_eight_may_cross_nodes() -> None:
    layout = parse_layout("tp=4,dp=8")
    members = group(layout, 0, "dp")
    assert len(members) == 8
    assert nodes_of(members, 8) == (0, 1, 2, 3)


def test_shard_is_the_inner_half_of_dp() -> None:
    layout = parse_layout("dp=8,zero=3,shard=2")
    assert group(layout, 0, "dp_shard") == (0, 1)
    assert group(layout, 0, "dp_replicate") == (0, 2, 4, 6)
    assert group(layout, 3, "shard") == (2, 3)


def test_the_shard_group_covers_cp() -> None:
    layout = parse_layout("dp=4,cp=2,zero=3,shard=4")
    assert group(layout, 0, "shard") == (0, 1, 2, 3)
    assert group(layout, 0, "cp") == (0, 1)
    assert group(layout, 0, "dp_shard") == (0, 2)
    assert group(layout, 0, "dp_replicate") == (0, 4)


def test_ep_borrows_the_innermost_ranks_of_dp_and_cp() -> None:
    layout = parse_layout("dp=4,cp=2,tp=2,ep=4")
    assert group(layout, 0, "ep") == (0, 2, 4, 6)
    assert group(layout, 1, "ep") == (1, 3, 5, 7)
    assert group(layout, 8, "ep") == (8, 10, 12, 14)
    turned = parse_layout("dp=4,cp=2,ep=4,order=tp/dp/cp/pp")
    assert group(turned, 0, "ep") == (0, 1, 2, 3)


def test_the_tied_pair_is_first_and_last_stage() -> None:
    layout = parse_layout("pp=3,dp=2")
    assert group(layout, 1, "tied") == (1, 5) == group(layout, 5, "tied")
    assert group(layout, 2, "tied") == ()
    assert groups(layout, "tied") == ((0, 4), (1, 5))
    assert group(layout, 3, "world") == tuple(range(6))


@st.composite
def meshes(draw: st.DrawFn) -> Layout:
    dp, tp, pp, cp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    zero = draw(st.integers(0, 3))
    values: dict[str, object] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero}
    if zero:
        values["shard"] = cp * draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0]))
    values["ep"] = draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0]))
    values["order"] = tuple(draw(st.permutations(LAYOUT_AXES)))
    return complete(values)


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_coordinates_and_groups_take_the_world_apart(layout: Layout) -> None:
    world = range(layout.world_size)
    seen = {tuple(sorted(coordinates(layout, r).items())) for r in world}
    assert len(seen) == layout.world_size
    assert all(rank_of(layout, coordinates(layout, r)) == r for r in world)
    sizes = {
        **mesh_shape(layout),
        "dp": layout.dp,
        "data": layout.dp * layout.cp,
        "ep": layout.ep,
        "world": layout.world_size,
    }
    if layout.zero:
        sizes["shard"] = layout.shard
    for axis, size in sizes.items():
        found = groups(layout, axis)
        assert sorted(r for members in found for r in members) == list(world)
        assert {len(members) for members in found} == {size}
        assert all(group(layout, r, axis) == members for members in found for r in members)
    for axis, step in strides(layout).items():
        members = group(layout, 0, axis)
        assert members == tuple(i * step for i in range(mesh_shape(layout)[axis]))


@pytest.mark.parametrize("rank", [0, 2047, 4095])
def test_thousands_of_ranks_are_arithmetic(rank: int) -> None:
    layout = parse_layout("dp=64,zero=3,shard=16,tp=8,pp=8")
    assert rank in group(layout, rank, "dp")
    assert len(group(layout, rank, "dp")) == 64
