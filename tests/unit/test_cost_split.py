"""Moments of schedules with split backwards: read off the rows, and by closed form for the search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.unit.test_cluster_load import PROBE

from meshwright.cluster.load import cluster_from_probe, read_cluster
from meshwright.cost.bounds import split_moments
from meshwright.cost.fast import columns
from meshwright.cost.loads import owned, turns
from meshwright.cost.pieces import make_pricer
from meshwright.cost.replay import Moment, makespans, moments
from meshwright.cost.rows import rows_of
from meshwright.cost.slots import make_slot
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.model.read_hf import read_model
from meshwright.schedule.clock import run_clock
from meshwright.schedule.generate import generate


def of_rank(found: tuple[Moment, ...], rank: int) -> set[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(half, held of each chunk, waiting of each chunk) of one rank, as whole numbers."""
    return {
        (int(x.half[rank]), tuple(map(int, x.held[rank])), tuple(map(int, x.waiting[rank]))) for x in found
    }


def test_zb_h1_holds_p_and_rank_r_keeps_r_plus_one_between_the_halves():
    found = moments(generate("zb-h1", 4, 8))
    assert of_rank(found, 0) == {(0, (4,), (0,))}  # the first stage's input half does nothing
    assert [of_rank(found, r) for r in (1, 2, 3)] == [{(1, (4,), (r + 1,))} for r in (1, 2, 3)]


def test_a_schedule_of_whole_backwards_has_one_moment():
    (one,) = moments(generate("interleaved", 2, 4, 2))
    assert not one.half.any()
    assert not one.waiting.any()


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_closed_forms_are_states_that_the_rows_reach_or_exceed(schedule: str):
    pricer = make_pricer(read_model("llama-2-7b"), read_cluster("a100-80gb-x8"), 128, "bf16")
    chunks = 1 if schedule == "zb-h1" else 2
    for pp, m in itertools.product([2, 3, 4, 8], [1, 4, 8, 16, 33]):
        if schedule == "dualpipev" and m < 2 * pp:
            continue
        layout = Layout(pp=pp, chunks=chunks, schedule=schedule)
        rows = rows_of([layout], [Batch(global_batch=m, micro_batch=1, accumulation=m, dp=1, seq_len=128)])
        told = split_moments(rows, make_slot(pricer, layout, every=True), np.array([float(m)]))
        found = moments(generate(schedule, pp, m, chunks))
        reached = 0
        for rank, x in itertools.product(range(pp), told):
            here = of_rank(found, rank)
            mine = (int(x.half[0, rank]), *x.held[0, rank], *x.waiting[0, rank])
            if schedule == "zbv" and m < 2 * pp:  # too few micro-batches to fill both stages: an upper bound
                most = np.max([(*held, *waiting) for _, held, waiting in here], axis=0)
                assert (np.array(mine[1:]) <= np.maximum(most, pp)).all()
                continue
            assert any(
                h == mine[0] and all(a >= b for a, b in zip((*held, *waiting), mine[1:], strict=True))
                for h, held, waiting in here
            ), (pp, m, rank, mine, here)
            reached += 1
        assert reached or m < 2 * pp


def test_gradients_are_there_only_behind_the_first_weight_half():
    """ZB-V is fullest before any micro-batch is through its backward; once all have gradients less is kept."""
    for rank, near in ((0, 0), (2, 3), (3, 4)):
        states = {
            (tuple(map(int, x.held[rank])), tuple(map(int, x.waiting[rank]))): tuple(map(int, x.graded[rank]))
            for x in moments(generate("zbv", 4, 8, 2))
        }
        assert states[(4, 4), (near, 4)] == (0, 0)
        later = [sum(held) + sum(waiting) for (held, waiting), graded in states.items() if all(graded)]
        assert later
        assert max(later) < 12 + near


def test_across_the_turn_of_a_v_nothing_is_sent():
    p, m = 4, 8
    pricer = make_pricer(read_model("llama-2-7b"), read_cluster("a100-80gb-x8"), 2048, "bf16")
    layout = Layout(pp=p, chunks=2, schedule="zbv")
    schedule = generate("zbv", p, m, 2)
    batch = Batch(global_batch=m, micro_batch=1, accumulation=m, dp=1, seq_len=2048)
    load = columns(pricer, [layout], [batch], schedule).load
    stages = np.array([[r, 2 * p - 1 - r] for r in range(p)], dtype=np.intp)
    message = load.back[0, 1]
    assert message == 2048 * 4096 * 4
    ones = np.ones((1, p, 2))
    full = Moment(half=ones[:, :, 0], held=ones, waiting=ones, graded=ones)
    with_turn = owned(load, stages, turns(stages), np.ones(1)).at(full)
    without = owned(load, stages, 0.0 * turns(stages), np.ones(1)).at(full)
    assert turns(stages).tolist() == [[0], [0], [0], [1]]
    # both stages' ends there: what is received and what is sent, of every micro-batch
    assert (without.boundary - with_turn.boundary).tolist() == [[0, 0, 0, 4 * m * message]]
    # the output that is handed over is kept, and is one of two chunks' here
    assert (with_turn.activations - without.activations).tolist() == [[0, 0, 0, 0.5 * message]]


def test_two_halves_take_longer_than_the_whole_on_a_cpu_only():
    probe = cluster_from_probe(PROBE)
    for cluster, more in ((probe, True), (read_cluster("a100-80gb-x8", 4), False)):
        pricer = make_pricer(read_model("smollm2-135m"), cluster, 128, "fp32")
        layouts = [Layout(pp=4, schedule=s, micro_batch=2) for s in ("1f1b", "zb-h1")]
        batches = [Batch(global_batch=16, micro_batch=2, accumulation=8, dp=1, seq_len=128)] * 2
        cols = columns(pricer, layouts, batches)
        assert cols.backward[0, 0] == cols.backward[1, 0]  # the first stage's backward is whole
        assert (cols.backward[1, 1:] > 1.02 * cols.backward[0, 1:]).all() == more
        assert (cols.backward[1, 1:] == cols.backward[0, 1:]).all() != more


@pytest.mark.parametrize("weight", [0.6, 0.8, 1.0])
def test_the_bubble_of_zb_h1_with_halves_that_differ(weight: float):
    """(p - 1)(F + I - W), by the clock and by columns; the search's bound stays below it."""
    p, m = 4, 16
    schedule = generate("zb-h1", p, m)
    length = m * 3.0 + (p - 1) * (1.0 + (2.0 - weight) - weight)
    assert run_clock(schedule, 1.0, 2.0, 0.0, [weight] * p).makespan_s == pytest.approx(length)
    ones = np.ones((p, 1))
    got, _ = makespans("zb-h1", p, 1, m, ones, 2.0 * ones, np.zeros(1), weight * ones)
    assert got[0] == pytest.approx(length)


def test_the_weight_half_is_its_products_and_the_first_stages_whole_backward():
    pricer = make_pricer(read_model("llama-2-7b"), read_cluster("a100-80gb-x8"), 2048, "bf16")
    cols = columns(
        pricer,
        [Layout(pp=4, schedule="zb-h1", precision="bf16")],
        [Batch(global_batch=8, micro_batch=1, accumulation=8, dp=1, seq_len=2048)],
    )
    share = cols.weight[0] / cols.backward[0]
    assert share[0] == 1.0
    assert (
        (share[1:] > 0.3) & (share[1:] < 0.5)
    ).all()  # attention and elementwise operations are in the input half
