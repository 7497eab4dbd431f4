"""Hazards of what ranks hold, by row: first weights, buffers, frozen and unused parameters, saved optimizers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hazard_runs import MINI, TIED, Rig, largest_difference
from meshwright.base.errors import MeshwrightError
from meshwright.parallel.build import build_model
from meshwright.train.loop import _check_coverage, check_replicas

pytestmark = pytest.mark.gloo

ADAMW = SimpleNamespace(name="adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def first_weights(rank, world, layout):
    rig = Rig(rank, f"{layout},precision=fp32", seed=3)
    check_replicas(rig.model)
    return rig.params(), rig.local_params(), rig.view.coords


def built(config=MINI, seed=3):
    return dict(build_model(config, seed=seed).named_parameters())


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3", "dp=2,zero=1", "pp=2", "dp=2,zero=2,pp=2"])
def test_h41_first_weights_do_not_depend_on_the_layout(pool, layout):
    """H41: gathered over the ranks, every weight has the bits of the whole model built in one process."""
    want = built()
    world = {"dp=1": 1, "dp=2,zero=2,pp=2": 4}.get(layout, 2)
    seen = set()
    for whole, _, _ in pool.run(first_weights, world, layout):
        for name, value in whole.items():
            assert torch.equal(value, want[name]), name
        seen |= whole.keys()
    assert seen == want.keys()


def test_h42_replicas_start_equal_and_shards_do_not(pool):
    """H42: HSDP 2 x 2: the replicas of a shard are equal, the two shards of a matrix are not."""
    ranks = pool.run(first_weights, 4, "dp=4,zero=3,shard=2")
    by_place = {(c["dp_replicate"], c["dp_shard"]): held for _, held, c in ranks}
    assert len(by_place) == 4
    for name, value in by_place[0, 0].items():
        assert torch.equal(value, by_place[1, 0][name])
        assert torch.equal(by_place[0, 1][name], by_place[1, 1][name])
        other = by_place[0, 1][name]
        if value.ndim == 2 and value.shape == other.shape:
            assert not torch.equal(value, other), name


def apart(rank, world):
    rig = Rig(rank, "dp=2,precision=fp32")
    if rank == 1:
        with torch.no_grad():
            rig.model.params["model.norm.weight"][3] += 1e-3
    try:
        check_replicas(rig.model)
    except MeshwrightError as error:
        return [(p.code, p.found) for p in error.problems]
    return []


def test_h42_replicas_that_start_apart_are_refused(pool):
    """H42: one element off by 1e-3 on one replica is found before the first step, and the tensor named."""
    for found in pool.run(apart, 2):
        assert found == [("E550", "1 tensors differ over dp_replicate: model.norm.weight")]


def buffers(rank, world, layout):
    """Fresh memory is NaN while the model is built, wrapped and run."""
    want = {n: b.clone() for n, b in build_model(MINI, seed=0).named_buffers()}
    one = Rig(0, "dp=1,precision=fp32").step(1).loss
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(8).isnan().all())
    rig = Rig(rank, f"{layout},precision=fp32")
    loss = rig.step(1).loss
    got = {n.removeprefix("causal_lm."): b for n, b in rig.model.module.named_buffers()}
    return [n for n in want if not torch.equal(got[n], want[n])], len(want), loss - one


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "pp=2"])
def test_h103_buffers_that_are_not_saved_are_right(pool, layout):
    """H103: every buffer, saved or not, is that of an eager build, with NaN in all fresh memory; so is the loss."""
    for wrong, count, off in pool.run(buffers, 2, layout):
        assert wrong == []
        assert count >= 1
        assert abs(off) < 1e-6


def without_one_layer(rank, world, layout, freeze):
    rig = Rig(rank, layout, freeze=freeze)
    one = Rig(0, "dp=1", freeze=freeze)
    for model in (rig.model, one.model):
        for name, block in model.module.named_modules():
            if name.endswith("layers.1"):
                block.forward = lambda hidden, *args, **kwargs: hidden * 1.0
    seen, want = {}, {}
    rig.step(1, on_gradients=lambda m: seen.update(rig.gradients()))
    one.step(1, on_gradients=lambda m: want.update(one.gradients()))
    seen = {n: g for n, g in seen.items() if "layers.1." not in n}
    try:
        _check_coverage(rig.model)
    except MeshwrightError as error:
        return [(p.code, p.found) for p in error.problems], largest_difference(seen, want)
    return [], largest_difference(seen, want)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"])
def test_h111_parameters_that_the_forward_does_not_use_are_named(pool, layout):
    """H111: a dead layer is refused with the number and names of its parameters, on the ranks that hold it."""
    ranks = pool.run(without_one_layer, 1 if layout == "dp=1" else 2, layout, ())
    found = [problems for problems, _ in ranks if problems]
    assert len(found) == (2 if "dp=2" in layout else 1)
    for ((code, text),) in found:
        assert code == "E548"
        assert text.startswith("9 trainable tensors without gradient: model.layers.1.")


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_h111_frozen_ones_may_rest(pool, layout):
    """H111: frozen by name, the dead layer is no fault, and the other gradients are REF's."""
    for problems, off in pool.run(without_one_layer, 2, layout, ("model.layers.1.*",)):
        assert problems == []
        assert off < 1e-14


def saved_frozen(rank, world, folder):
    rig = Rig(rank, "dp=2,zero=3", freeze=("model.layers.0.*",), optimizer=ADAMW)
    with torch.no_grad():
        for name, p in rig.model.params.items():
            if "layers.0." in name:
                p.fill_(7.0)
    rig.step(1)
    return str(rig.save(folder, 1)), rig.params()


def loaded_frozen(rank, world, path):
    rig = Rig(rank, "dp=2,zero=3", freeze=("model.layers.0.*",), optimizer=ADAMW, seed=9)
    rig.load(path)
    return rig.params()


def test_h106_frozen_weights_are_in_the_checkpoint(pool, tmp_path):
    """H106: layer 0 frozen at 7 under ZeRO-3 is 7 after a load into another model, and so is all the rest."""
    (path, want), _ = pool.run(saved_frozen, 2, tmp_path)
    for got in pool.run(loaded_frozen, 2, Path(path)):
        frozen = [n for n in got if "layers.0." in n]
        assert len(frozen) == 9
        assert all(bool((got[n] == 7.0).all()) for n in frozen)
        assert all(torch.equal(got[n], want[n]) for n in want)


def wrong_order(rank, world, folder):
    rig = Rig(rank, "dp=2,zero=2", optimizer=ADAMW)
    rig.step(1)
    path = rig.save(folder, 1)
    rig.step(2)
    want = rig.params()
    # An optimizer over the parameters of before the wrap.
    early = torch.optim.AdamW(build_model(MINI, seed=0, dtype=torch.float64).parameters(), lr=0.01)
    again = Rig(rank, "dp=2,zero=2", optimizer=ADAMW, seed=5)
    before = again.params()
    try:
        again.load(path, early)
        problems = []
    except MeshwrightError as error:
        problems = [(p.code, p.found) for p in error.problems]
    touched = largest_difference(again.params(), before)
    again.load(path)
    again.step(2)
    return problems, touched, largest_difference(again.params(), want)


def test_h139_an_optimizer_from_before_the_wrap_is_refused(pool, tmp_path):
    """H139: the wrong order is refused with numbers and changes nothing; the right one equals the unbroken run."""
    for problems, touched, off in pool.run(wrong_order, 2, tmp_path):
        assert {code for code, _ in problems} == {"E716"}
        assert "[37, 16] is not among the 21 named ones" in problems[0][1]
        assert touched == 0.0
        assert off == 0.0


def tied_once(rank, world, layout):
    rig = Rig(rank, layout, config=TIED)
    one = Rig(0, "dp=1", config=TIED)
    weights = [p for n, p in rig.model.module.named_parameters(remove_duplicate=False) if p.shape == (37, 16)]
    seen, want = {}, {}
    rig.step(1, on_gradients=lambda m: seen.update(rig.gradients()))
    one.step(1, on_gradients=lambda m: want.update(one.gradients()))
    count = sum(p.numel() for p in rig.model.params.values())
    return len(weights), len({id(p) for p in weights}), largest_difference(seen, want), count


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_h101_h102_a_tied_embedding_stays_one_tensor(pool, layout):
    """H101, H102: two names, one parameter after the wrap, with the gradient of both uses; the count is the model's."""
    want = sum(p.numel() for p in built(TIED).values())
    for names, tensors, off, count in pool.run(tied_once, 2, layout):
        assert (names, tensors) == (2, 1)
        assert off < 1e-14
        assert count == want
