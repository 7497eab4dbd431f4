"""Live bytes of the ZeRO stages, exact, on a model whose parameters dominate (H112)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hazard_runs import MINI, Rig
from meshwright.train.memory import resting_bytes, watch_step

pytestmark = pytest.mark.gloo

WIDE = MINI | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 64,
}
"""Every first dimension is divided by 4, so that no shard is padded."""

ADAMW = SimpleNamespace(name="adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)
FLOAT = 4


def measured(rank, world, layout):
    """Live bytes by category between the two micro-batches of the second step, at its peak, and at rest after it."""
    rig = Rig(rank, layout, config=WIDE, global_batch=2 * world, optimizer=ADAMW)
    buffers = sum(b.untyped_storage().nbytes() for b in rig.model.module.buffers())
    start = resting_bytes(rig.model, rig.optimizer)
    rig.step(1)
    between = {}
    with watch_step(rig.model, rig.optimizer, ()) as counter:
        before = rig.model.on_action

        def on_action(action):
            before(action)
            if action == "0F1":
                between.update(counter.current)

        rig.model.on_action = on_action
        rig.step(2)
    return SimpleNamespace(
        numel=rig.spec.num_parameters,
        tensors=len(rig.model.params),
        buffers=buffers,
        start=start,
        between=between,
        peak=counter.memory(),
        rest=resting_bytes(rig.model, rig.optimizer),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "world", "shards", "whole_gradients"),
    [
        ("dp=2", 2, 1, True),
        ("dp=2,zero=1", 2, 2, True),
        ("dp=2,zero=2", 2, 2, False),
        ("dp=2,zero=3", 2, 2, False),
        ("dp=4,zero=1", 4, 4, True),
        ("dp=4,zero=2", 4, 4, False),
        ("dp=4,zero=3", 4, 4, False),
        ("dp=4,zero=2,shard=2", 4, 2, False),
    ],
)
def test_h112_what_each_stage_holds(pool, layout, world, shards, whole_gradients, precision):
    """H112: parameters and optimizer 1/N; gradients between micro-batches 1/N, but whole under ZeRO-1; at rest 1/N."""
    for got in pool.run(measured, world, f"{layout},precision={precision}"):
        whole = FLOAT * got.numel
        assert got.start["parameters"] == whole // shards + got.buffers
        assert got.start["optimizer"] == 0
        assert got.start["gradients"] == (whole if shards == 1 else 0)
        state = 2 * whole // shards + FLOAT * got.tensors  # two moments, and a counter per tensor
        assert got.between["optimizer"] == state
        assert got.between["parameters"] == whole // shards + got.buffers
        assert got.between["gradients"] == (whole if whole_gradients else whole // shards)
        assert got.peak.optimizer == state
        assert got.rest == {
            "parameters": whole // shards + got.buffers,
            "gradients": whole // shards,
            "optimizer": state,
            "offloaded": 0,
        }


def saved(rank, world, layout, folder):
    """Bytes that come on top of what rests while a checkpoint is written, and the sizes of shards and tensors."""
    rig = Rig(rank, f"{layout},precision=fp32", config=WIDE, optimizer=ADAMW)
    rig.step(1)
    with watch_step(rig.model, rig.optimizer, ()) as counter:
        rest = sum(counter.current.values())
        rig.save(folder, 1)
    largest = max(FLOAT * t.numel for t in rig.spec.tensors())
    return counter.peak_total - rest, largest, FLOAT * rig.spec.num_parameters


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_h127_a_save_gathers_nothing(pool, tmp_path, layout):
    """H127: while every rank writes its shards, no rank holds more than two of the largest tensors extra."""
    for extra, largest, whole in pool.run(saved, 2, layout, tmp_path):
        assert extra < 2 * largest < whole / 2
