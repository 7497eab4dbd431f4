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
CONTEXT = [
    "cp=2",
    "cp=4,cp_style=ulysses",
    "cp=4",
    "cp=2,tp=2",
    "cp=2,tp=2,cp_style=ulysses,sp=off",
    "cp=2,cp_style=ulysses",
    "cp=2,dp=2,zero=3",
    "cp=2,pp=2,schedule=zbv,chunks=2",
    "cp=2,dp=2,zero=1,pp=2,micro_batch=2",
    "cp=2,cp_style=ulysses,recompute=selective",
    "cp=2,recompute=full",
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


@pytest.mark.parametrize("layout", CONTEXT)
def test_h39_masks_over_a_context_axis_are_one_devices(pool, layout):
    """H39: a pair of positions has its mask, whichever rank has the query and whichever sends the key; also padded."""
    result = proven(pool, layout, config=DROPS, global_batch=8, seq_len=27)
    assert result["gradients"]["max_rel_diff"] <= 1e-10


@pytest.mark.parametrize("layout", ["cp=4,cp_style=ulysses", "cp=4", "cp=2,tp=2"])
def test_attention_dropout_with_fewer_key_value_heads_than_ranks(pool, layout):
    """Two key/value heads for four ranks: the masks are those of the query heads that a rank has."""
    proven(pool, layout, config=LLAMA | {"attention_dropout": 0.3}, seq_len=32, steps=1)


def test_dropout_changes_the_loss(pool):
    """The masks do something: the same weights without dropout give another loss."""
    on = prove(pool, "dp=2", config=DROPS, steps=1)
    off = prove(pool, "dp=2", config=GPT2 | {"n_layer": 4}, steps=1)
    assert abs(on["loss"]["reference"][0] - off["loss"]["reference"][0]) > 1e-3


def forgets(model, step):
    """Draw the next step's masks on one rank, as a rank with its own random numbers would."""
    if step == 0 and model.view.rank == 1:
        model.dropout.seed += 1


def counts_from_0(model, step):
    """Draw hidden masks by a token's place on its rank, as if it had the first positions."""
    if step == 0 and model.view.rank == 1:
        model.dropout.positions.clear()


def takes_other_heads(model, step):
    if step == 0 and model.view.rank == 1:
        model.dropout.head += 1


@pytest.mark.parametrize("fault", [counts_from_0, takes_other_heads])
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_a_rank_with_the_masks_of_other_tokens_is_found(pool, style, fault):
    result = prove(pool, f"cp=2,cp_style={style}", config=DROPS, steps=2, fault=fault)
    assert not result["passed"]
    assert result["gradients"]["worst"]["step"] == 2


def test_a_rank_with_its_own_masks_is_found(pool):
    result = prove(pool, "dp=2", config=DROPS, steps=2, fault=forgets)
    assert not result["passed"]
    assert result["gradients"]["worst"]["step"] == 2
