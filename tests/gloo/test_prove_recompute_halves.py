"""Recompute with backwards in halves, against one device that does neither, in float64."""

from __future__ import annotations

import pytest
from proofs import SMALL
from test_prove_adapters import LORA
from test_prove_dropout import DROPS
from test_prove_expert import MIXTRAL, QWEN3_MOE
from test_prove_schedules import BY_HAND
from test_prove_tensor import QWEN3, proven

pytestmark = pytest.mark.gloo

FOUR = {**QWEN3, "num_hidden_layers": 4, "tie_word_embeddings": True}
MODES = ["recompute=full", "recompute=selective"]


@pytest.mark.parametrize("schedule", ["zbv,chunks=2", "zb-h1", "dualpipev,chunks=2"])
@pytest.mark.parametrize("mode", MODES)
def test_each_schedule(pool, mode, schedule):
    proven(pool, f"pp=2,schedule={schedule},{mode}", config=FOUR, global_batch=4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=1,pp=2,schedule=zbv,loss=chunked",
        "dp=2,zero=2,tp=2,pp=2,schedule=zb-h1,loss=chunked",
        "dp=4,zero=1,shard=2,pp=2,schedule=dualpipev",
        "tp=2,sp=off,pp=2,schedule=zbv",
        "cp=2,pp=2,schedule=zbv",
        "cp=2,cp_style=ulysses,pp=2,schedule=zb-h1",
    ],
)
def test_with_other_axes(pool, mode, layout):
    proven(pool, f"{layout},{mode}", config=FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (MIXTRAL, "dp=2,ep=2,zero=1,pp=2,schedule=zbv"),
        (QWEN3_MOE, "dp=4,ep=2,zero=2,pp=2,schedule=zb-h1"),
        (QWEN3_MOE, "tp=2,pp=2,schedule=dualpipev"),
    ],
)
def test_mixtures(pool, config, layout, mode):
    """A recomputed mixture exchanges its tokens again once: the ledger would show it."""
    proven(pool, f"{layout},{mode}", config=config | {"num_hidden_layers": 4})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["pp=2,schedule=zbv", "dp=2,zero=1,tp=2,pp=2,schedule=zb-h1"])
def test_h117_dropout_draws_the_same_masks(pool, layout, mode):
    """H117: in the second forward, which runs between other micro-batches' forwards."""
    proven(pool, f"{layout},{mode}", config=DROPS, global_batch=8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("freeze", [("*norm*",), ("model.embed_tokens.*", "model.layers.0.*")])
def test_frozen_parameters(pool, freeze, mode):
    proven(pool, f"dp=2,zero=1,pp=2,schedule=zb-h1,{mode}", config=SMALL, freeze=freeze)


@pytest.mark.slow
def test_adapters(pool):
    proven(pool, "pp=2,schedule=zbv,recompute=full", config=SMALL, adapter=LORA, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["pp=2,schedule=zbv", "dp=2,zero=1,pp=2,schedule=zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_low_precision(pool, layout, precision, mode):
    proven(pool, f"{layout},{mode}", config=FOUR, precision=precision, steps=1)


def test_a_schedule_file_with_whole_and_half_backwards(pool, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(BY_HAND)
    proven(pool, f"dp=2,zero=2,pp=2,schedule=@{path},recompute=full", config=SMALL, global_batch=6)
