"""The expert axis without torch: groups, what a rank holds, what it exchanges, what it costs, what it is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.units import unit_size
from meshwright.layout.batch import derive_batch
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import (
    EP,
    EXPERT_AXES,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    expert_degrees,
    group,
    groups,
)
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.derive import derive
from meshwright.program.expert import data_degrees, split_units
from meshwright.program.explain import explain_rank
from meshwright.program.make import make_plan
from meshwright.program.step import Collective, ledger
from meshwright.program.units import stage_units
from meshwright.schedule.generate import generate

TINY = "recipes/models/tiny-mixtral"
"""4 layers of 4 experts, top 2; hidden 128, experts 192 wide."""


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config({**read_model(TINY).config, **changes}, "tiny")


def collectives(text: str, rank: int = 0, seq: int = 16, **changes: Any) -> tuple[Collective, ...]:
    layout = parse_layout(text + ",precision=fp64")
    model = spec(**changes)
    if not layout.cut_layers:
        each = model.num_layers // layout.num_stages
        layout = layout.with_cut((each,) * layout.num_stages)
    batch = derive_batch(layout, layout.dp * layout.micro_batch * 2, seq)
    schedule = generate(layout.schedule, layout.pp, batch.accumulation, layout.chunks)
    return derive(model, layout, batch, schedule, rank).collectives


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,cp=2,ep=2,zero=1,shard=4,order=tp/dp/cp/pp",
        "dp=4,cp=2,ep=4,zero=3,shard=4,order=tp/dp/cp/pp,tp=2",
        "dp=4,ep=4,zero=1,shard=2",
        "dp=4,cp=2,ep=4,zero=2,shard=2,order=tp/dp/cp/pp",
        "dp=4,cp=2,ep=8,zero=2,shard=4,order=dp/tp/cp/pp",
    ],
)
def test_experts_are_spread_inside_shard_groups_in_any_order(text: str) -> None:
    """Ranks with the same experts that share their state are in one shard group; every rank is in one group of each."""
    layout = parse_layout(text)
    for rank in range(layout.world_size):
        shards, experts = group(layout, rank, "shard"), group(layout, rank, EP)
        assert set(group(layout, rank, EXPERT_SHARD)) <= set(shards)
        assert len(experts) == layout.ep
        assert set(experts) <= set(shards) or set(shards) <= set(experts)
        for axis in EXPERT_AXES:  # torch numbers the ranks of a group in their own order
            assert list(group(layout, rank, axis)) == sorted(group(layout, rank, axis))
    for axis in EXPERT_AXES:
        assert sorted(r for members in groups(layout, axis) for r in members) == list(
            range(layout.world_size)
        )


def test_experts_borrow_neighbours_of_dp() -> None:
    layout = parse_layout("dp=8,ep=2,zero=2,shard=4,pp=2")
    assert group(layout, 5, EP) == (4, 5)
    assert group(layout, 5, EXPERT_SHARD) == (5, 7)
    assert group(layout, 5, EXPERT_REPLICATE) == (1, 5)
    assert expert_degrees(layout) == (2, 2)
    plain = parse_layout("dp=8,ep=2")
    assert group(plain, 5, EXPERT_REPLICATE) == (1, 3, 5, 7)
    assert expert_degrees(plain) == (4, 1)
    whole = parse_layout("dp=4,ep=4,zero=3")
    assert expert_degrees(whole) == (1, 1)
    assert group(whole, 2, EXPERT_SHARD) == group(whole, 2, EXPERT_REPLICATE) == (2,)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4, 8]),
)
def test_expert_groups_cut_the_world_and_meet_in_one_rank(
    dp: int, ep: int, pp: int, tp: int, cp: int, zero: int, shard: int
) -> None:
    room = dp * cp
    if room % ep or (zero and (room % shard or shard % cp or shard % ep or shard == 1)):
        return
    layout = Layout(dp=dp, ep=ep, pp=pp, tp=tp, cp=cp, zero=zero, shard=shard if zero else 1)
    replicas, shards = expert_degrees(layout)
    assert replicas * shards * ep == room
    for axis, size in ((EP, ep), (EXPERT_SHARD, shards), (EXPERT_REPLICATE, replicas)):
        cut = groups(layout, axis)
        assert sorted(r for g in cut for r in g) == list(range(layout.world_size))
        assert {len(g) for g in cut} == {size}
    for rank in range(layout.world_size):
        mine = [set(group(layout, rank, axis)) for axis in EXPERT_AXES]
        assert set.intersection(*mine) == {rank}
        plane = {r for other in group(layout, rank, "dp") for r in group(layout, other, "cp")}
        assert set.union(*mine) <= plane
        if zero:
            assert set(group(layout, rank, EXPERT_SHARD)) <= set(group(layout, rank, "shard"))


def test_exchanges_by_hand() -> None:
    """H89: a rank's own tokens are tokens x top-k rows in each exchange, whatever ep is."""
    for text in ("dp=2,ep=2", "dp=4,ep=4,zero=1"):
        found = [c for c in collectives(text) if c.axis == EP]
        # 2 micro-batches x 4 layers x (counts, out, back, and the gradients of both)
        assert [c.kind for c in found] == ["all_to_all"] * (2 * 4 * 5)
        rows = [c for c in found if not c.what.startswith("rows")]
        assert {c.num_bytes for c in rows} == {16 * 2 * 128 * 8}
        assert {c.num_bytes for c in found if c.what.startswith("rows")} == {4 * 8}
        assert not {c.micro_batch for c in found} - {0, 1}


def test_recompute_exchanges_again() -> None:
    once = [c for c in collectives("dp=2,ep=2") if c.axis == EP]
    again = [c for c in collectives("dp=2,ep=2,recompute=full") if c.axis == EP]
    assert len(again) == len(once) + 2 * 4 * 3


def test_gradients_of_experts_have_groups_of_their_own() -> None:
    """H81: experts are summed over dp / ep ranks, everything else over dp."""
    lines = {
        (x.kind, x.axis): x for x in ledger((c.kind, c.axis, c.num_bytes) for c in collectives("dp=4,ep=2"))
    }
    expert = 4 * (2 * 192 * 128 + 128 * 192)
    assert lines["all_reduce", EXPERT_REPLICATE].count == 4
    assert lines["all_reduce", EXPERT_REPLICATE].num_bytes == 4 * expert // 2 * 8
    model = spec()
    assert lines["all_reduce", "dp_replicate"].num_bytes == (model.num_parameters - 4 * expert) * 8
    # nobody else holds them: nothing is sent for their gradients (H82)
    assert not any(c.axis in (EXPERT_REPLICATE, EXPERT_SHARD) for c in collectives("dp=2,ep=2,zero=3"))
    sharded = [c for c in collectives("dp=4,ep=2,zero=3") if c.axis == EXPERT_SHARD]
    assert {c.group_size for c in sharded} == {2}
    assert {c.num_bytes for c in sharded} == {expert // 2 * 8}


def test_units_hold_each_parameter_once() -> None:
    model, layout = spec(), parse_layout("dp=4,ep=4,zero=1").with_cut((4,))
    units = split_units(stage_units(model, layout, 0), layout)
    expert = sum(u.numel for u in units if u.experts)
    rest = sum(u.numel for u in units if not u.experts)
    assert rest + expert * 4 == model.num_parameters
    assert {data_degrees(u, layout) for u in units if u.experts} == {(1, 1)}
    assert {data_degrees(u, layout) for u in units if not u.experts} == {(1, 4)}


@pytest.mark.parametrize(("ep", "shards"), [(2, 4), (4, 4), (2, 8)])
def test_state_at_rest_does_not_shrink_with_ep(ep: int, shards: int) -> None:
    """H188: ZeRO over N ranks leaves 1/N of everything, experts too, whichever part of it ep takes."""
    tensors = spec(num_local_experts=8).blocks[0].tensors
    trains = [True] * len(tensors)
    one = unit_size(tensors, trains, spec().attention, 1, 1, shards)
    cut = unit_size(tensors, trains, spec().attention, 1, ep, shards)
    assert cut.resting == one.resting
    assert cut.trainable_resting == one.trainable_resting
    assert cut.full < one.full


def test_a_rank_is_told_its_experts() -> None:
    layout = parse_layout("dp=4,ep=2,zero=1")
    plan = make_plan(spec(), layout, 8, 16, TINY)
    text = " ".join(explain_rank(plan, spec(), 3).split())
    assert "expert group: ranks 2, 3. You hold experts 2 to 3 of each mixture" in text
    assert "shard group of your experts: ranks 1, 3." in text
    assert "with 1/2 of the 4 experts of each mixture" in text
    assert "gradients of 4 units of experts, one by one, over ranks 1, 3" in text
    assert "tokens to and from experts (routed evenly)" in text
    alone = make_plan(spec(), parse_layout("dp=2,ep=2"), 8, 16, TINY)
    assert "Nobody else holds your experts" in " ".join(explain_rank(alone, spec(), 0).split())
