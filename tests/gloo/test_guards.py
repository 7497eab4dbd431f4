"""Guards of a run: values that are not finite, spikes, replicas that drift, slow ranks, stops that reach one rank."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_hazards_run import metrics, task, train

from hazard_runs import MINI, Rig, tokens
from meshwright.base.errors import MeshwrightError
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_report import RankFailure
from meshwright.train import links as links_module
from meshwright.train import loop as loop_module
from meshwright.train.guards import Heartbeat, Spikes, Stragglers, checksum, drifted, locate
from meshwright.train.links import EVERY, Links
from meshwright.train.loop import _placing, _same_start, train_rank

pytestmark = pytest.mark.gloo


def apart(rank, world, layout, guilty, name):
    rig = Rig(rank, layout, config=MINI | {"num_key_value_heads": 2})
    before = drifted(rig.model, _placing(rig.model))
    if rank in guilty:
        with torch.no_grad():
            rig.local_params()  # what is changed is the shard itself
            p = rig.model.params[name].detach()
            (p.to_local() if hasattr(p, "to_local") else p).view(-1)[1] += 1e-12
    return before, drifted(rig.model, _placing(rig.model))


@pytest.mark.parametrize(
    ("layout", "world", "guilty", "name", "named"),
    [
        ("dp=4", 4, [2], "model.layers.1.mlp.up_proj.weight", [2]),
        ("dp=2", 2, [1], "model.norm.weight", [0, 1]),
        ("dp=4,zero=3,shard=2", 4, [3], "model.embed_tokens.weight", [1, 3]),
        ("dp=2,tp=2", 4, [3], "model.layers.0.input_layernorm.weight", [3]),
        ("dp=2,tp=2", 4, [3], "model.layers.0.self_attn.q_proj.weight", [1, 3]),
        ("dp=2,zero=3", 2, [1], "model.norm.weight", None),
    ],
)
def test_h36_a_replica_that_differs_is_named(pool, layout, world, guilty, name, named):
    """H36: one element off by 1e-12 on one copy: tensor and rank are named (of two copies both); shards have none."""
    for before, after in pool.run(apart, world, layout, guilty, name):
        assert before == []
        assert after == ([] if named is None else [(name, named)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_checksum_sees_every_element_and_its_place(dtype):
    one = torch.arange(1, 12, dtype=dtype)
    seen = {checksum(one)}
    for at in range(11):
        other = one.clone()
        other[at] += 1
        seen.add(checksum(other))
    seen.add(checksum(one.flip(0)))
    assert len(seen) == 13
    assert checksum(one.view(11, 1)) == checksum(one)
    assert checksum(one[:0]) == 0


def bad_block(rank, world, layout, phase):
    """On rank 1, layer 1 makes a NaN in micro-batch 1 (or an infinite gradient)."""
    rig = Rig(rank, layout, global_batch=4)
    owner = rank == 1
    if owner:
        layer = next(m for n, m in rig.model.module.named_modules() if n.endswith("layers.1"))
        real, count = layer.forward, [0]

        def forward(*args, **kwargs):
            out = real(*args, **kwargs)
            count[0] += 1
            if count[0] % 2 == 0:  # micro-batch 1 of 2
                if phase == "forward":
                    return out * float("nan")
                out.register_hook(lambda g: g * float("inf"))
            return out

        layer.forward = forward
    inputs, labels = tokens(4, 1)
    result = rig.step(1)

    def again():
        rig.model.zero_grad()
        rig.model.forward_backward(rig.rows(inputs), rig.rows(labels), 1.0)
        rig.model.finish_gradients()

    return result.skipped, [f.text() for f in locate(rig.model, again)]


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "pp=2"])
def test_a_value_that_is_not_finite_is_traced_to_rank_layer_and_micro_batch(pool, layout):
    """The reduced gradients of all ranks are NaN; the origin is still named, on every rank alike."""
    for skipped, found in pool.run(bad_block, 2, layout, "forward"):
        assert "not finite" in skipped
        assert found[0].startswith("rank 1, output of model.layers.1, micro-batch 1")


def test_a_gradient_that_is_not_finite_is_traced(pool):
    for skipped, found in pool.run(bad_block, 2, "dp=2", "backward"):
        assert "not finite" in skipped
        assert found[0].startswith("rank 1, gradient of the output of model.layers.")
        assert "micro-batch 1" in found[0]


def poisoned(rank, world, work):
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)

    def tell(position):
        if position.get("step") == 3 and position.get("action") == "data" and rank == 1:
            session = tell.session
            with torch.no_grad():
                session.model.params["model.layers.0.mlp.up_proj.weight"].fill_(float("nan"))

    facts = replace(facts, tell=tell)
    real = loop_module._Session.run

    def run(self):
        tell.session = self
        return real(self)

    with mock.patch.object(loop_module._Session, "run", run):
        try:
            train_rank(facts, work)
        except MeshwrightError as error:
            return [(p.code, p.where, p.found) for p in error.problems]
    return []


def test_the_run_stops_at_the_step_and_names_the_origin(pool, tmp_path):
    """guards.nonfinite = stop: E570 with step, rank and tensor, the same on all ranks; steps before it are in the log."""
    work = task(tmp_path, "dp=2", "run")
    work.run.guards.nonfinite = "stop"
    one, two = pool.run(poisoned, 2, work)
    assert one == two
    ((code, where, found),) = one
    assert (code, where) == ("E570", "step 3")
    assert "rank 1, parameter model.layers.0.mlp.up_proj.weight" in found
    assert [m["step"] for m in metrics(tmp_path, "run")] == [1, 2]


def overflowing(rank, world, work):
    """Rank 1 has a matrix whose product is beyond the range of fp16, whatever the loss is scaled by."""
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    real = loop_module._Session.run

    def run(self):
        with torch.no_grad():
            if "model.layers.1.mlp.down_proj.weight" in self.model.params and rank == 1:
                self.model.params["model.layers.1.mlp.down_proj.weight"].fill_(1e9)
        return real(self)

    with (
        mock.patch.object(loop_module._Session, "run", run),
        mock.patch.object(loop_module, "MAX_SKIPS_FP16", 3),
    ):
        try:
            train_rank(facts, work)
        except MeshwrightError as error:
            return [(p.code, p.where, p.found) for p in error.problems]
    return []


def test_fp16_that_overflows_at_every_scale_stops_and_names_the_first_tensor(pool, tmp_path):
    """One stage overflows: all skip together, the scale falls, and after k skips the run says where it began."""
    work = task(tmp_path, "pp=2", "run", precision="fp16")
    one, two = pool.run(overflowing, 2, work)
    assert one == two
    ((code, where, found),) = one
    assert (code, where) == ("E544", "step 3")
    assert "3 steps in a row were not finite" in found
    assert "first: rank 1, output of model.layers.1, micro-batch 0" in found


def test_replicas_that_drift_in_a_run_stop_it(pool, tmp_path):
    work = task(tmp_path, "dp=2", "run")
    work.run.guards.replicas_every = 2

    with pytest.raises(RankFailure, match=r"E571(.|\n)*model.norm.weight"):
        pool.run(drift_in_run, 2, work)


def drift_in_run(rank, world, work):
    real = loop_module.train_step

    def step(model, optimizer, *args, **kwargs):
        result = real(model, optimizer, *args, **kwargs)
        if rank == 1 and kwargs["step"] == 3:
            with torch.no_grad():
                model.params["model.norm.weight"][0] += 1e-9
        return result

    with mock.patch.object(loop_module, "train_step", step):
        return train(rank, world, work)


def test_a_spike_is_one_that_is_above_the_median():
    spikes = Spikes(2.0)
    assert [spikes.check(1.0 + k / 100) for k in range(12)] == [None] * 12
    usual = spikes.check(2.5)
    assert usual == pytest.approx(1.055)
    assert spikes.check(2.4) == usual, "a spike does not raise the median"
    assert spikes.check(1.9) is None
    assert Spikes(None).check(1e9) is None
    early = Spikes(2.0)
    assert [early.check(v) for v in (9.0, 1.0, 8.0)] == [None] * 3, (
        "the first steps have nothing to compare with"
    )


def slow(rank, world):
    rig = Rig(rank, "dp=4")
    watch = Stragglers(1.5)
    out = []
    for _ in range(20):
        watch.note(0.3 if rank == 2 else 0.1)
        out += watch.check(rig.model)
    return out


def test_a_straggler_is_named(pool):
    for found in pool.run(slow, 4):
        ((rank, times),) = found
        assert rank == 2
        assert times == pytest.approx(3.0)


def begin(rank, world, work):
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    mine = replace(
        work, stop_at=work.stop_at + (rank == 1), resume_from=Path("step-4") if rank == 2 else None
    )
    try:
        _same_start(facts, mine)
    except MeshwrightError as error:
        return error.problems[0].code, error.problems[0].found
    return None


def test_e578_ranks_that_read_another_folder_are_named(pool, tmp_path):
    """Under torchrun each rank looks into the run folder by itself; on two nodes it may be two folders."""
    work = task(tmp_path, "dp=2", "run")
    assert pool.run(begin, 1, work) == [None]
    found = pool.run(begin, 3, work)
    assert {code for code, _ in found} == {"E578"}
    assert {text for _, text in found} == {
        f"rank 1 has ends after step {work.stop_at + 1}, rank 0 {work.stop_at}; "
        "rank 2 has begins at step-4, rank 0 step 1"
    }


def links(rank, world):
    rig = Rig(rank, "dp=4")
    watch = Links(1.5, rank // 2, f"10.0.0.{1 + rank // 2}")
    real = links_module._message
    late = lambda *a: real(*a) + (1.0 if watch._steps > 1 and a[0] == 2 else 0.0)  # noqa: E731
    with mock.patch.object(links_module, "_message", late):
        return [[link.ranks for link in watch.check(rig.model.view)] for _ in range(EVERY + 2)]


def test_a_link_that_becomes_slow_is_named_on_all_ranks(pool):
    for found in pool.run(links, 4):
        assert found[1:EVERY] == [[]] * (EVERY - 1)
        assert (1, 2) in found[EVERY]
        assert found[EVERY + 1] == []


def test_a_heartbeat_is_a_file_per_rank(tmp_path):
    heart = Heartbeat(tmp_path, 3, 60.0)
    heart.beat(7, "data")
    heart.beat(8, "data")  # within the interval
    sign = json.loads((tmp_path / "heartbeat" / "rank-3.json").read_text())
    assert (sign["step"], sign["action"]) == (7, "data")
    (tmp_path / "file").write_text("")
    Heartbeat(tmp_path / "file", 0, 1.0).beat(1, "data")  # a disk that refuses it does not end the run
    Heartbeat(tmp_path / "off", 0, 0.0).beat(1, "data")


def signalled(rank, world, work, number):
    def tell(position):
        if rank == 1 and position.get("step") == 3 and position.get("action") == "data" and not told:
            told.append(1)
            os.kill(os.getpid(), number)

    told: list[int] = []
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world, tell=tell)
    summary = train_rank(facts, work)[rank]
    return summary.steps, summary.stopped


def test_h133_a_stop_that_reaches_one_rank_stops_all_after_the_same_step(pool, tmp_path):
    """H133: SIGTERM on rank 1 only, in step 3: all save step 2 and return; resumed, every figure has the same bits."""
    pool.run(train, 2, task(tmp_path, "dp=2,zero=1", "whole"))
    work = task(tmp_path, "dp=2,zero=1", "run")
    assert pool.run(signalled, 2, work, signal.SIGTERM) == [(2, "SIGTERM")] * 2
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    assert (checkpoint / "manifest.json").exists()
    pool.run(train, 2, task(tmp_path, "dp=2,zero=1", "run", resume_from=checkpoint))
    whole, parts = metrics(tmp_path, "whole"), metrics(tmp_path, "run")
    assert [m["step"] for m in parts] == [m["step"] for m in whole]
    for want, got in zip(whole, parts, strict=True):
        assert (got["loss"], got["grad_norm"]) == (want["loss"], want["grad_norm"])


def test_sigusr1_on_one_rank_saves_once_and_goes_on(pool, tmp_path):
    work = task(tmp_path, "dp=2", "run")
    assert pool.run(signalled, 2, work, signal.SIGUSR1) == [(8, "")] * 2
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-2", "step-8"]
    assert [m["step"] for m in metrics(tmp_path, "run")] == list(range(1, 9))


def own_losses(rank, world, work):
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    losses = iter([0.9, 0.5, 0.8, 0.7] if rank == 0 else [0.2, 0.6, 0.1, 0.9])
    with mock.patch.object(loop_module, "evaluate", side_effect=losses):
        return train_rank(facts, work)[rank].steps


def test_h128_ranks_with_other_held_out_losses_take_the_same_branch(pool, tmp_path):
    """H128: saving and evaluating follow the step alone, and one rank removes: the run ends, with rank 0's best."""
    work = task(tmp_path, "dp=2", "run")
    work.run.run.checkpoint_every, work.run.run.keep_last, work.run.run.keep_best = 2, 1, True
    assert pool.run(own_losses, 2, work) == [8, 8]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-4", "step-8"]
