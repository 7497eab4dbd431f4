"""Dropout on, in every layout: the same masks as one device draws, so losses and gradients are equal in float64."""

from __future__ import annotations

import pytest
from proofs import prove
from test_prove_tensor import GPT2, LLAMA, proven

pytestmark = pytest.mark.gloo

DROPS = {**GPT2, "n_layer": 4, "resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.4}
LAYOUTS = [
    "dp=1",
    "dp=2,micro_batch=2",
    "dp=2,zero=3",
    "dp=4,zero=2,shard=2",
    "tp=2,sp=off",
    "tp=2",
    "pp=2",
    "pp=2,schedule=zbv,chunks=2",
    "pp=2,schedule=interleaved,chunks=2,recompute=full",
    "dp=2,zero=1,tp=2,pp=2,schedule=zb-h1",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_h39_h147_masks_are_the_same_in_every_layout(pool, layout):
    """H39, H147: a mask follows from seed, step, row, place and position, so ranks, shards and restarts agree."""
    result = proven(pool, layout, config=DROPS, global_batch=8)
    assert result["notes"] == ["dropout 0.4 is on: the same masks in every layout"]


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("spread", ["dp=2,zero=3", "tp=2", "pp=2"])
def test_recomputed_forwards_draw_the_same_masks(pool, spread, recompute):
    proven(pool, f"{spread},recompute={recompute}", config=DROPS, global_batch=8)


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=4,kv_heads=replicate", "pp=2"])
def test_attention_dropout_of_a_llama(pool, layout):
    proven(pool, layout, config=LLAMA | {"attention_dropout": 0.3})


def test_dropout_changes_the_loss(pool):
    """The masks do something: the same weights without dropout give another loss."""
    on = prove(pool, "dp=2", config=DROPS, steps=1)
    off = prove(pool, "dp=2", config=GPT2 | {"n_layer": 4}, steps=1)
    assert abs(on["loss"]["reference"][0] - off["loss"]["reference"][0]) > 1e-3


def forgets(model, step):
    """Draw the next step's masks on one rank, as a rank with its own random numbers would."""
    if step == 0 and model.view.rank == 1:
        model.dropout.seed += 1


def test_a_rank_with_its_own_masks_is_found(pool):
    result = prove(pool, "dp=2", config=DROPS, steps=2, fault=forgets)
    assert not result["passed"]
    assert result["gradients"]["worst"]["step"] == 2
