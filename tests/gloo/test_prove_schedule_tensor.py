"""Schedules with several stages or split backwards, on top of the tensor axis, recompute and the chunked loss."""

from __future__ import annotations

import pytest
from test_prove_tensor import LLAMA, QWEN3, proven

pytestmark = pytest.mark.gloo

FOUR = {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": True}
SCHEDULES = [
    "schedule=interleaved,chunks=2",
    "schedule=zb-h1",
    "schedule=zbv,chunks=2",
    "schedule=dualpipev,chunks=2",
]


@pytest.mark.parametrize("extra", ["recompute=full", "recompute=selective,loss=chunked"])
def test_interleaved_with_recompute(pool, extra):
    proven(pool, f"pp=2,schedule=interleaved,chunks=2,{extra}", config=FOUR, global_batch=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("extra", ["tp=2", "tp=2,sp=off", "loss=chunked", "tp=2,loss=chunked"])
def test_with_each(pool, schedule, extra):
    proven(pool, f"pp=2,{schedule},{extra}", config=FOUR, global_batch=4)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=1,tp=2,pp=2,schedule=zbv,chunks=2",
        "dp=2,zero=2,tp=2,pp=2,schedule=zb-h1,loss=chunked",
        "dp=2,zero=3,tp=2,pp=2,schedule=interleaved,chunks=2,recompute=full,loss=chunked",
    ],
)
def test_eight_ranks(pool, layout):
    proven(pool, layout, config=LLAMA | {"num_hidden_layers": 4} if "zb-h1" in layout else FOUR)
