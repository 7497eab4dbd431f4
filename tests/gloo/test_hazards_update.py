"""Hazards of one update, by row: what is counted, what is clipped, what is skipped, and that all ranks agree."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hazard_runs import MINI, SGD, TIED, Rig, largest_difference, set_norm, tokens
from meshwright.parallel.tied import local
from meshwright.train.scale import LossScale

pytestmark = pytest.mark.gloo

ZEROS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"]
ADAMW = SimpleNamespace(name="adamw", lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


def empty_rank(rank, world, layout):
    """Rank 1 has no label at all; then nobody has one."""
    rig = Rig(rank, layout, global_batch=4)
    rows = tokens(4, valid=[8, 0, 3, 0])  # rows 1 and 3 are rank 1's
    before = rig.local_params()
    seen = {}
    result = rig.step(1, batch=rows, on_gradients=lambda m: seen.update(rig.gradients()))
    one = Rig(0, "dp=1", global_batch=2)
    want = {}
    one.step(
        1,
        batch=(rows[0][::2], rows[1][::2]),
        on_gradients=lambda m: want.update(one.gradients()),
    )
    moved = largest_difference(rig.local_params(), before)
    before = rig.local_params()
    nothing = rig.step(2, batch=tokens(4, valid=[0, 0, 0, 0]))
    return SimpleNamespace(
        loss=result.loss,
        valid=result.valid_tokens,
        off=largest_difference(seen, want),
        moved=moved,
        skipped=nothing.skipped,
        empty_valid=nothing.valid_tokens,
        kept=largest_difference(rig.local_params(), before),
        after=rig.step(3).loss,
    )


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_h8_a_rank_without_labels_is_no_nan(pool, layout):
    """H8: the gradient is that of the other rank's tokens; with no label anywhere the step is skipped and said."""
    for got in pool.run(empty_rank, 2, layout):
        assert math.isfinite(got.loss)
        assert got.valid == 11
        assert got.off < 1e-14
        assert got.moved > 0
        assert (got.skipped, got.empty_valid, got.kept) == ("no valid token", 0, 0.0)
        assert math.isfinite(got.after)


def last_window(rank, world, layout):
    """Update 3 after two others, from the first weights again, and update 3 of a model that ran no other."""
    rig = Rig(rank, layout, global_batch=2)
    rig.step(1)
    rig.step(2)
    seen, fresh = {}, {}
    with torch.no_grad():
        for name, value in Rig(rank, layout, global_batch=2).local_params().items():
            local(rig.model.params[name]).copy_(value)
    rig.step(3, on_gradients=lambda m: seen.update(rig.gradients()))
    other = Rig(rank, layout, global_batch=2)
    other.step(3, on_gradients=lambda m: fresh.update(other.gradients()))
    return largest_difference(seen, fresh)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2,zero=1"])
def test_h9_no_gradient_leaks_into_the_next_window(pool, layout):
    """H9: a window's gradient is that of its own micro-batches, whatever came before (its samples: see the unit test)."""
    assert pool.run(last_window, 2 if "2" in layout else 1, layout) == [0.0] * (2 if "2" in layout else 1)


def logged(rank, world, layout, valid):
    rig = Rig(rank, layout, global_batch=len(valid))
    rows = tokens(len(valid), valid=valid)
    one = Rig(0, "dp=1,precision=fp64", global_batch=len(valid))
    whole = one.model.module.eval()
    with torch.no_grad():
        sums = [whole(x[None], labels=y[None]).item() for x, y in zip(*rows, strict=True)]
    return rig.step(1, batch=rows).loss, sums


def test_h14_the_logged_loss_is_a_mean_over_tokens(pool):
    """H14: rank 0 has 1 label, rank 1 has 8: the sum over 9 tokens, neither the mean of ratios nor rank 0's own."""
    results = pool.run(logged, 2, "dp=2", [1, 8])
    (loss, (a, b)), (other, _) = results
    assert loss == other == pytest.approx((a + b) / 9, abs=1e-13)
    assert abs(loss - (a + b / 8) / 2) > 1e-4
    assert abs(loss - a) > 1e-4


def test_h15_every_stage_logs_the_loss(pool):
    """H15: under pp only the last stage computes the loss; the printing rank, the first, has it too."""
    results = pool.run(logged, 2, "pp=2", [5, 3])
    (loss, sums), (other, _) = results
    assert loss == other == pytest.approx(sum(sums) / 8, abs=1e-13)


def clipped(rank, world, layout, norms, config):
    """Plant a gradient of norm ``norms[rank]`` on each rank; return the step's norm and this rank's update norm."""
    rig = Rig(rank, layout, config=config)
    before = rig.local_params()
    result = rig.step(1, max_norm=1.0, on_gradients=lambda m: set_norm(m, norms[rank]))
    after = rig.local_params()
    update = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in after))
    return result.grad_norm, update


def test_h20_stages_clip_by_one_norm(pool):
    """H20: stage norms 3 and 4 make 5; both updates shrink by 1/5, not by 1/3 and 1/4."""
    results = pool.run(clipped, 2, "pp=2", [3.0, 4.0], MINI)
    assert [r[0] for r in results] == [pytest.approx(5.0, abs=1e-12)] * 2
    assert [r[1] for r in results] == [pytest.approx(0.6, abs=1e-12), pytest.approx(0.8, abs=1e-12)]


def test_h22_the_norm_is_over_all_shards(pool):
    """H22: four shards of norm 1 have norm 2, logged by every rank."""
    results = pool.run(clipped, 4, "dp=4,zero=3", [1.0] * 4, MINI)
    assert [r[0] for r in results] == [pytest.approx(2.0, abs=1e-12)] * 4
    assert [r[1] for r in results] == [pytest.approx(0.5, abs=1e-12)] * 4


def test_h26_replicas_are_not_counted_in_the_norm(pool):
    """H26: two shards of norm 1, each on two replicas, have norm sqrt(2), not 2."""
    results = pool.run(clipped, 4, "dp=4,zero=3,shard=2", [1.0] * 4, MINI)
    assert [r[0] for r in results] == [pytest.approx(math.sqrt(2), abs=1e-12)] * 4
    assert pool.run(clipped, 2, "dp=2", [3.0] * 2, MINI)[0][0] == pytest.approx(3.0, abs=1e-12)


def copy_counted(rank, world):
    rig = Rig(rank, "pp=2", config=TIED)
    result = rig.step(1, on_gradients=lambda m: [local(g).fill_(1.0) for g in m.gradients().values()])
    return result.grad_norm, rig.spec.num_parameters


def test_h26_h57_a_tied_copy_is_not_counted_in_the_norm(pool):
    """H26, H57: with every gradient element 1 the squared norm is the number of logical parameters."""
    for norm, parameters in pool.run(copy_counted, 2):
        assert norm**2 == pytest.approx(parameters, abs=1e-8)


def tiny_clip(rank, world, layout):
    rig = Rig(rank, layout)
    before = rig.local_params()
    result = rig.step(1, max_norm=1e-9)
    after = rig.local_params()
    return result.grad_norm, largest_difference(after, before)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "pp=2"])
def test_h27_the_clip_that_was_asked_is_applied(pool, layout):
    """H27: SGD with rate 1 and a largest norm of 1e-9 moves nothing by more than 1e-9."""
    for norm, moved in pool.run(tiny_clip, 2, layout):
        assert norm > 0.1
        assert 0 < moved <= 1e-9


def scaled(rank, world, layout):
    rig = Rig(rank, layout)
    rig.scale = LossScale(value=1024.0, dynamic=True)
    before = rig.local_params()
    result = rig.step(1, max_norm=1.0, on_gradients=lambda m: set_norm(m, 2048.0 / world**0.5))
    after = rig.local_params()
    return result.grad_norm, sum(float((after[n] - before[n]).square().sum()) for n in after)


def test_h28_the_loss_scale_is_taken_out_before_clipping(pool):
    """H28: scale 1024, true norm 2, largest norm 1: the update has norm 1, not 1/1024."""
    results = pool.run(scaled, 2, "dp=2,zero=3")
    assert [r[0] for r in results] == [pytest.approx(2.0, abs=1e-12)] * 2
    assert sum(r[1] for r in results) == pytest.approx(1.0, abs=1e-12)


def opposed(rank, world):
    """The same micro-batch twice, its gradients times +10 and -9: far above the limit alone, below it together."""
    rig = Rig(rank, "dp=1", global_batch=2)
    row = tokens(1)
    rows = (row[0].repeat(2, 1), row[1].repeat(2, 1))
    one = Rig(rank, "dp=1", global_batch=1)
    plain = one.step(1, batch=row)
    start, end = rig.params(), one.params()
    want = {n: start[n] - end[n] for n in start}
    factors: dict[str, list[float]] = {}
    for name, p in rig.model.params.items():
        factors[name] = [20.0, -18.0]  # a row's share of the loss is one half here
        p.register_hook(lambda g, name=name: g * factors[name].pop(0))
    result = rig.step(1, batch=rows, max_norm=5 * plain.grad_norm)
    got = {n: start[n] - after for n, after in rig.params().items()}
    return result.grad_norm / plain.grad_norm, largest_difference(got, want)


def test_h29_the_clip_waits_for_the_last_micro_batch(pool):
    """H29: +10 g and -9 g under a limit of 5 |g| leave g; a clip after each backward would leave -4 g."""
    ((ratio, off),) = pool.run(opposed, 1)
    assert ratio == pytest.approx(1.0, abs=1e-12)
    assert off < 1e-12


def trains(rank, world, layout, config):
    rig = Rig(rank, layout, config=config, optimizer=SGD)
    held = {id(p) for g in rig.optimizer.param_groups for p in g["params"]}
    assert held == {id(p) for p in rig.model.trainable().values()}
    before = rig.params()
    rig.step(1)
    after = rig.params()
    return [n for n in after if torch.equal(before[n], after[n])]


@pytest.mark.parametrize("layout", [*ZEROS, "pp=2"])
def test_h31_one_step_changes_every_parameter(pool, layout):
    """H31: the optimizer holds the parameters that are trained, not those from before sharding."""
    assert pool.run(trains, 2, layout, TIED) == [[], []]


def decayed(rank, world, layout):
    rig = Rig(rank, layout, optimizer=ADAMW)
    before = rig.params()
    rig.step(1, on_gradients=lambda m: [local(g).zero_() for g in m.gradients().values()])
    after = rig.params()
    return {n: (before[n].ndim, before[n], after[n]) for n in after}


@pytest.mark.parametrize("layout", ["dp=1", *ZEROS, "pp=2"])
def test_h32_decay_falls_on_matrices_only(pool, layout):
    """H32: rate 0.1, decay 0.1, zero gradients: norms stay 1, matrices times 0.99, under every wrap."""
    ranks = pool.run(decayed, 1 if layout == "dp=1" else 2, layout)
    names = {n for r in ranks for n in r}
    assert len([n for n in names if "norm" in n]) == 5
    for held in ranks:
        for name, (ndim, before, after) in held.items():
            assert ndim == (1 if "norm" in name else 2)
            if ndim == 1:
                assert bool((after == 1.0).all()), name
            else:
                torch.testing.assert_close(after, before * 0.99, rtol=1e-12, atol=0.0, msg=name)


def bad_backward(rank, world, layout, value, where):
    """At step 2 something is not finite on rank 1 only: in its backward, or in what it holds afterwards."""
    rig = Rig(rank, layout, optimizer=ADAMW)
    rig.scale = LossScale(value=1024.0, dynamic=True)
    rig.step(1)
    before = rig.local_params()

    def spoil(model):
        if rank == 1 and where == "held":
            grad = local(next(iter(model.gradients().values())))
            grad.view(-1)[0] = value

    handle = None
    if rank == 1 and where == "backward":
        module = next(m for m in rig.model.module.modules() if type(m).__name__ == "LlamaMLP")
        handle = module.register_full_backward_pre_hook(lambda m, g: tuple(x * value for x in g))
    bad = rig.step(2, on_gradients=spoil)
    if handle is not None:
        handle.remove()
    kept = largest_difference(rig.local_params(), before)
    scale = rig.scale.value
    good = rig.step(3)
    steps = {int(s["step"]) for s in rig.optimizer.state.values()}
    sums = {n: float(p.double().sum()) for n, p in rig.params().items()}
    return SimpleNamespace(
        skipped=bool(bad.skipped), kept=kept, scale=scale, loss=good.loss, steps=steps, sums=sums
    )


def agreed(results):
    assert all(r.skipped for r in results)
    assert [r.kept for r in results] == [0.0] * len(results)
    assert [r.scale for r in results] == [512.0] * len(results)
    assert all(r.steps == {2} for r in results)
    assert all(math.isfinite(r.loss) and r.loss == results[0].loss for r in results)
    for name in results[0].sums.keys() & results[1].sums.keys():
        assert results[0].sums[name] == results[1].sums[name]
        assert math.isfinite(results[0].sums[name])


@pytest.mark.parametrize("where", ["backward", "held"])
@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "pp=2"])
def test_h33_nan_on_one_rank_is_skipped_by_all(pool, layout, where):
    """H33: all ranks skip step 2, count alike, and hold the same weights after step 3."""
    agreed(pool.run(bad_backward, 2, layout, float("nan"), where))


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2"])
def test_h90_inf_in_one_shard_halves_every_scale(pool, layout):
    """H90: all ranks skip, all scales go from 1024 to 512, step counters stay equal."""
    agreed(pool.run(bad_backward, 2, layout, float("inf"), "held"))


def same_step_twice(rank, world, layout, scale):
    rig = Rig(rank, layout, optimizer=SimpleNamespace(**{**vars(SGD), "lr": 1e-300}))
    rig.scale = LossScale(value=scale, dynamic=False)
    first, second = {}, {}
    rig.step(1, on_gradients=lambda m: first.update(rig.gradients()))
    rig.step(1, on_gradients=lambda m: second.update(rig.gradients()))
    one = Rig(0, "dp=1")
    want = {}
    one.step(1, on_gradients=lambda m: want.update(one.gradients()))
    unscaled = {n: g / scale for n, g in first.items()}
    return largest_difference(first, second), largest_difference(unscaled, want)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_h48_h58_a_schedule_scales_once(pool, scale):
    """H48, H58: two runs of a schedule with 4 micro-batches give one gradient, REF's after unscaling."""
    for again, off in pool.run(same_step_twice, 2, "pp=2", scale):
        assert again == 0.0
        assert off < 1e-14


def test_h59_zero_two_under_a_pipeline(pool):
    """H59: gradients are reduced while micro-batches still add to them, and are REF's."""
    for again, off in pool.run(same_step_twice, 4, "dp=2,zero=2,pp=2", 1.0):
        assert again == 0.0
        assert off < 1e-14
