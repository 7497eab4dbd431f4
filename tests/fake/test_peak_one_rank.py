"""Predicted against measured live bytes of one rank, family by family."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hazard_runs import Rig
from meshwright.cluster.load import read_cluster
from meshwright.cost.predict import predict
from meshwright.schedule.generate import generate
from meshwright.train.memory import watch_step

ADAMW = SimpleNamespace(name="adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-gpt2", pytest.param("tiny-qwen3", marks=pytest.mark.slow)]
)
def test_the_peak_of_one_rank(name, monkeypatch):
    """Within 0.5 % where every activation is kept, 5 % with recompute; in bf16 the casts of weights come and go."""
    monkeypatch.setattr("hazard_runs.SEQ_LEN", 64)
    with open(f"recipes/models/{name}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    for text, near in (
        ("micro_batch=8,loss=chunked,precision=fp32", 0.005),
        ("micro_batch=8,precision=fp32", 0.005),
        ("micro_batch=8,loss=chunked,recompute=full,precision=fp32", 0.05),
        ("micro_batch=8,loss=chunked,precision=bf16", 0.03),
        ("micro_batch=8,recompute=full,precision=bf16", 0.03),
        ("micro_batch=8,loss=chunked,recompute=full,precision=bf16", 0.05),
        ("micro_batch=8,loss=chunked,recompute=selective,precision=bf16", 0.05),
    ):
        rig = Rig(0, f"dp=1,{text}", config=config, global_batch=8, optimizer=ADAMW)
        rig.step(1)
        with watch_step(rig.model, rig.optimizer, ()) as counter:
            rig.step(2)
        batch = rig.plan.batch
        schedule = generate("1f1b", 1, batch.accumulation)
        found = predict(rig.spec, rig.plan.layout, batch, schedule, read_cluster("a100-80gb-x8", 1)).memory
        assert found.total - found.outside_allocator == pytest.approx(counter.peak_total, rel=near), text
