"""Hazards of a run, by row: rates, resuming, data per rank, evaluation, and decisions that all ranks share."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hazard_runs import MINI, SEQ_LEN, Rig
from meshwright.checkpoint.metadata import read_index
from meshwright.layout.parse import parse_layout
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_report import RankFailure
from meshwright.model.read_hf import spec_from_config
from meshwright.program.make import make_plan
from meshwright.train.data import TokenData, TokenStream, rank_batch
from meshwright.train.loop import RESUMED, TrainTask, check_resumed, evaluate, train_rank
from meshwright.train.stop import Watch

pytestmark = pytest.mark.gloo

ADAMW = SimpleNamespace(name="adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


def stream(folder: Path, name: str, tokens: int, *, keep_partial: bool) -> TokenStream:
    file = folder / f"{name}.npy"
    np.save(file, np.random.default_rng(1).integers(0, 37, tokens, dtype=np.uint16))
    return TokenStream(file=file, num_tokens=tokens, seq_len=SEQ_LEN, pad_id=0, keep_partial=keep_partial)


def task(folder: Path, layout: str, name: str, *, steps: int = 8, **changes: Any) -> TrainTask:
    """A run of 5-sample evaluations over 43 training samples: epochs end inside batches."""
    spec = spec_from_config(MINI, "mini")
    batch = changes.pop("global_batch", 4)
    precision = changes.pop("precision", "fp64")
    plan = make_plan(spec, parse_layout(f"{layout},precision={precision}"), batch, SEQ_LEN, "mini")
    (folder / name).mkdir(exist_ok=True)
    data = TokenData(
        folder=folder,
        train=stream(folder, "train", 43 * SEQ_LEN + 1, keep_partial=False),
        eval=stream(folder, "eval", 5 * SEQ_LEN - 2, keep_partial=True),
        tokenizer_file=folder / "tokenizer.json",
        tokenizer_size=37,
        eos_id=0,
        seq_len=SEQ_LEN,
        hash="corpus-1",
        report={},
    )
    run = SimpleNamespace(
        run=SimpleNamespace(
            seed=0,
            steps=steps,
            eval_every=0,
            eval_batches=4,
            checkpoint_every=0,
            checkpoint_async=True,
            keep_last=None,
            keep_every=0,
            keep_best=False,
            max_minutes=None,
            deterministic=False,
            matmul="machine",
        ),
        guards=SimpleNamespace(
            nonfinite="skip",
            spike=None,
            on_spike="report",
            replicas_every=0,
            straggler=None,
            slow_link=None,
            silence_s=0.0,
            heartbeat_s=0.0,
        ),
        optimizer=ADAMW,
        schedule=SimpleNamespace(name="linear", warmup_steps=3, min_lr_ratio=0.0),
        clip=SimpleNamespace(max_norm=1.0),
    )
    made = TrainTask(run=run, plan=plan, spec=spec, data=data, run_dir=folder / name, stop_at=steps)
    return replace(made, **changes)


def train(rank: int, world: int, work: TrainTask) -> Any:
    facts = RankFacts(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    summary = train_rank(facts, work)[rank]
    return summary.eval_loss, summary.final_loss


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def steps_at_load(rank, world, path):
    rig = Rig(rank, "dp=2,zero=3", optimizer=ADAMW, seed=7)
    rig.load(path)
    return {int(s["step"]) for s in rig.optimizer.state.values()}


@pytest.fixture(scope="module")
def broken(pool, tmp_path_factory):
    """Eight steps at once, and eight steps with a break after the fifth."""
    folder = tmp_path_factory.mktemp("resume")
    pool.run(train, 2, task(folder, "dp=2,zero=3", "whole"))
    pool.run(train, 2, task(folder, "dp=2,zero=3", "broken", stop_at=5))
    checkpoint = folder / "broken" / "checkpoints" / "step-5"
    pool.run(train, 2, task(folder, "dp=2,zero=3", "broken", resume_from=checkpoint))
    return folder, checkpoint


def test_h140_h149_a_resumed_run_is_the_unbroken_one(broken):
    """H140, H149: the first resumed step is 6, on batch 6 and at rate 6; every figure has the same bits."""
    folder, _ = broken
    whole, parts = metrics(folder, "whole"), metrics(folder, "broken")
    assert [m["step"] for m in parts] == list(range(1, 9))
    assert len({m["lr"] for m in whole[2:]}) == 6  # after three steps of warm-up each step has its own rate
    for want, got in zip(whole, parts, strict=True):
        assert (got["lr"], got["loss"], got["grad_norm"]) == (want["lr"], want["loss"], want["grad_norm"])


def test_h149_the_optimizer_has_counted_five_steps(pool, broken):
    """H149: saved at the end of step 5, the optimizer's own counter is 5 when it is loaded."""
    assert pool.run(steps_at_load, 2, broken[1]) == [{5}, {5}]


def test_h146_a_checkpoint_has_every_part(broken):
    """H146: model, optimizer, loss scale, data position, seed and step; the rate is a function of the step."""
    _, checkpoint = broken
    extra = json.loads((checkpoint / "manifest.json").read_text())["extra"]
    assert set(RESUMED) <= extra.keys()
    assert (extra["step"], extra["data_position"]) == (5, 20)
    assert extra["loss_scale"] == {"value": 1.0, "good_steps": 0, "skipped_in_row": 0}
    keys = read_index(checkpoint).state_dict_metadata.keys()
    names = {t.name for t in spec_from_config(MINI, "mini").tensors()}
    assert {f"model/{n}" for n in names} <= keys
    assert {f"optimizer/{n}/{e}" for n in names for e in ("exp_avg", "exp_avg_sq", "step")} <= keys


@pytest.mark.parametrize("part", RESUMED)
def test_h146_a_missing_part_is_named(broken, part):
    """H146: a checkpoint without one part is refused by the name of the part."""
    folder, checkpoint = broken
    work = task(folder, "dp=2,zero=3", "broken", resume_from=checkpoint)
    extra = json.loads((checkpoint / "manifest.json").read_text())["extra"]
    assert check_resumed(extra, work) == []
    (found,) = check_resumed({k: v for k, v in extra.items() if k != part}, work)
    assert found.code == "E556"
    assert found.found == f"1 of {len(RESUMED)} parts are not in it: {part}"
    assert found.where == str(checkpoint)


def test_h146_a_run_does_not_start_from_it(pool, broken):
    """H146: the refusal is the run's own, on every rank, before any step."""
    folder, checkpoint = broken
    cut = folder / "cut" / "checkpoints" / "step-5"
    shutil.copytree(checkpoint, cut)
    manifest = json.loads((cut / "manifest.json").read_text())
    del manifest["extra"]["loss_scale"]
    (cut / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RankFailure, match="E556"):
        pool.run(train, 2, task(folder, "dp=2,zero=3", "cut", resume_from=cut))
    assert not (folder / "cut" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ("seed", "run.seed", "the checkpoint has the order of seed 0, this run 1"),
        ("batch", "batch.sequences", "the checkpoint has after step 5, position 20, this run 30"),
        ("seq_len", "data.seq_len", "the checkpoint has sequences of 8, this run 4"),
        ("data", "data.path", "the checkpoint has data corpus-1, this run corpus-2"),
    ],
)
def test_h144_h149_another_order_of_samples_is_refused(broken, change, where, found):
    """H144, H149: with another seed, batch, length or corpus a resumed run would repeat or skip samples."""
    folder, checkpoint = broken
    extra = json.loads((checkpoint / "manifest.json").read_text())["extra"]
    work = task(folder, "dp=2,zero=3", "broken", resume_from=checkpoint)
    if change == "seed":
        work.run.run.seed = 1
    elif change == "batch":
        work = task(folder, "dp=2,zero=3", "broken", global_batch=6)
    elif change == "seq_len":
        plan = work.plan
        work = replace(work, plan=replace(plan, batch=replace(plan.batch, seq_len=4)))
    else:
        work = replace(work, data=replace(work.data, hash="corpus-2"))
    (problem,) = check_resumed(extra, work)
    assert (problem.code, problem.where, problem.found) == ("E551", where, found)


def test_h142_warm_up_counts_steps(pool, tmp_path):
    """H142, H15: at step 10 of a warm-up of 100 the rate is a tenth of its peak for dp 1, 2 and 4, with accumulation
    4, 2 and 1; rank 0 logs the loss of one device under every layout, pp too."""
    got = {}
    for layout, world in (("dp=1", 1), ("dp=2,zero=1", 2), ("dp=4", 4), ("pp=2", 2)):
        work = task(tmp_path, layout, layout, steps=200, stop_at=10)
        work.run.schedule.warmup_steps = 100
        pool.run(train, world, work)
        got[layout] = metrics(tmp_path, layout)
    for layout, steps in got.items():
        assert len(steps) == 10
        assert steps[9]["lr"] == pytest.approx(0.1 * 0.01, rel=1e-12), layout
        for want, have in zip(got["dp=1"][:3], steps[:3], strict=True):
            assert have["loss"] == pytest.approx(want["loss"], abs=1e-12), layout
            assert have["lr"] == want["lr"]


def evaluated(rank, world, work):
    rig = Rig(rank, work.plan.layout.text())
    begin = time.monotonic()
    loss = evaluate(rig.model, work)
    one = Rig(0, "dp=1").model.module.eval()
    sums, count = 0.0, 0
    for index in range(work.data.eval.num_samples):
        inputs, labels = (torch.from_numpy(x)[None] for x in work.data.eval.row(index))
        with torch.no_grad():
            sums += one(inputs, labels=labels).item()
        count += int((labels != -100).sum())
    clock = -1000.0 if rank == 1 else time.monotonic()  # only rank 1's limit is over by its own clock
    late = Watch(rank, 1.0, clock).agree(rig.view).stop
    all_late = Watch(rank, 1.0, -1000.0 if rank == 0 else time.monotonic()).agree(rig.view).stop
    return SimpleNamespace(
        loss=loss,
        want=sums / count,
        samples=work.data.eval.num_samples,
        count=count,
        seconds=time.monotonic() - begin,
        rank_one_late=bool(late),
        rank_zero_late=bool(all_late),
    )


@pytest.mark.parametrize(
    ("layout", "world"), [("dp=2", 2), ("dp=2,zero=3", 2), ("pp=2", 2), ("dp=4,zero=3,shard=2", 4)]
)
def test_h128_h153_h155_ranks_evaluate_alike(pool, tmp_path, layout, world):
    """H128, H153, H155: 5 held-out samples over 2 or 4 ranks: the mean over exactly these on every rank, no rank has
    a batch more to wait in, and what a rank's own clock says decides nothing by itself."""
    results = pool.run(evaluated, world, task(tmp_path, layout, "run"), timeout_s=30.0)
    assert {r.loss for r in results} == {results[0].loss}
    assert (results[0].samples, results[0].count) == (5, 5 * SEQ_LEN - 3)
    assert results[0].loss == pytest.approx(results[0].want, abs=1e-13)
    assert max(r.seconds for r in results) < 10.0
    assert [r.rank_one_late for r in results] == [False] * world
    assert [r.rank_zero_late for r in results] == [True] * world


def digests(rank, world, work):
    rig = Rig(rank, work.plan.layout.text(), global_batch=4)
    batch = work.plan.batch
    rows = rank_batch(
        work.data.train,
        step=0,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        dp=batch.dp,
        dp_rank=rig.view.dp_rank,
        seed=0,
    )
    return rig.view.coords["dp_shard"] or rig.view.coords["dp_replicate"], rows.digest()


@pytest.mark.parametrize("layout", ["dp=2,pp=2", "dp=2,zero=3,pp=2"])
def test_h152_stages_of_a_replica_have_its_batch(pool, tmp_path, layout):
    """H152: the batch is the same on the stages of one replica and another on the next replica."""
    found: dict[int, set[str]] = {}
    for replica, digest in pool.run(digests, 4, task(tmp_path, layout, "run")):
        found.setdefault(replica, set()).add(digest)
    assert [len(v) for v in found.values()] == [1, 1]
    assert found[0] != found[1]


def test_h9_no_window_is_short_and_no_sample_is_lost(tmp_path):
    """H9: 5 samples in batches of 2: an epoch's last sample shares its update with the next epoch's first."""
    train_stream = stream(tmp_path, "five", 5 * SEQ_LEN + 1, keep_partial=False)
    drawn = []
    for step in range(5):
        rows = rank_batch(
            train_stream, step=step, global_batch=2, micro_batch=1, accumulation=2, dp=1, dp_rank=0, seed=0
        )
        assert rows.valid_tokens == 2 * SEQ_LEN
        drawn += rows.samples.reshape(-1).tolist()
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [0, 1, 2, 3, 4]


def train_without_labels(rank: int, world: int, work: TrainTask) -> Any:
    import meshwright.train.loop as loop

    real = loop.rank_batch

    def masked(*args: Any, **kwargs: Any) -> Any:
        rows = real(*args, **kwargs)
        return replace(rows, labels=np.full_like(rows.labels, -100))

    loop.rank_batch = masked
    try:
        return train(rank, world, work)
    finally:
        loop.rank_batch = real


def test_steps_without_any_label_are_skipped_and_then_end_the_run(pool, tmp_path):
    """H8: all ranks empty: nothing is updated and it is said (W541); five in a row end the run (E543)."""
    with pytest.raises(RankFailure) as error:
        pool.run(train_without_labels, 2, task(tmp_path, "dp=2", "empty"))
    assert "E543" in str(error.value)
    assert [m["valid_tokens"] for m in metrics(tmp_path, "empty")] == [0] * 4
    events = [json.loads(x) for x in (tmp_path / "empty" / "events.jsonl").read_text().splitlines()]
    assert {e["code"] for e in events if e["event"] == "skip"} == {"W541"}
