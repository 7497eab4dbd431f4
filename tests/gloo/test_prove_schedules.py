"""Pipelines with several stages per rank and backwards in halves, against one device in float64."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

pytestmark = pytest.mark.gloo

TIED = SMALL | {"tie_word_embeddings": True}
EIGHT = SMALL | {"num_hidden_layers": 9, "hidden_size": 16, "intermediate_size": 24}

ALONE = [
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zb-h1",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
]
SHARDED = [
    "dp=2,zero=1,pp=2,schedule=interleaved",  # cut 1/1/2/1: a stage of two blocks and nothing else
    "dp=2,zero=3,pp=2,schedule=interleaved,cut=1/2/1/1",
    "dp=2,zero=1,pp=2,schedule=zb-h1",
    "dp=2,zero=2,pp=2,schedule=zb-h1,cut=1/4",
    "dp=2,zero=1,pp=2,schedule=zbv",
    "dp=2,zero=2,pp=2,schedule=dualpipev",
    "dp=2,pp=2,schedule=zbv,cut=1/2/1/1",
]
BY_HAND = """0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W2,0W1
1F1,1I1,1F0,1I0,1F2,1B2,1W1,1W0"""
"""Two ranks, three micro-batches: halves and a whole backward, and micro-batches out of their order."""


def right(result, tolerance=1e-10):
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= tolerance
    assert result["gradients"]["missing"] == []
    assert result["ledger"]["matches"], result["ledger"]
    assert result["placement"]["complete"]
    assert result["checks"]["order"]
    return result


@pytest.mark.parametrize("layout", ALONE)
def test_each_schedule_alone(pool, layout):
    right(prove(pool, layout, config=SMALL, steps=3))


@pytest.mark.parametrize("layout", ["pp=4,schedule=zbv", "pp=4,schedule=interleaved", "pp=4,schedule=zb-h1"])
def test_four_ranks(pool, layout):
    right(prove(pool, layout, config=EIGHT, steps=1))


@pytest.mark.parametrize("layout", SHARDED)
def test_with_data_parallelism(pool, layout):
    """H59: gradients are reduced once their stage's last backward, whole or in halves, is done."""
    right(prove(pool, layout, config=SMALL))


@pytest.mark.parametrize(
    "layout", ["pp=2,schedule=zbv", "dp=2,zero=1,pp=2,schedule=dualpipev", "pp=2,schedule=interleaved"]
)
def test_tied_embeddings(pool, layout):
    """H47: embedding and head on one rank (a V) or on two, in two stages."""
    result = right(prove(pool, layout, config=TIED, steps=3))
    assert result["checks"]["tied_copies_equal"]
    axes = {line["axis"] for line in result["ledger"]["recorded"]}
    assert ("tied" in axes) == ("interleaved" in layout)


@pytest.mark.parametrize("layout", ["pp=2,schedule=zbv", "dp=2,zero=1,pp=2,schedule=zb-h1"])
def test_frozen_embedding(pool, layout):
    right(prove(pool, layout, config=SMALL, freeze=("model.embed_tokens.*",)))


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_families(pool, family):
    layout = "dp=2,zero=1,pp=2,schedule=zbv"
    right(prove(pool, layout, config=f"recipes/models/{family}", steps=1, seq_len=16))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["pp=2,schedule=zbv", "dp=2,zero=1,pp=2,schedule=zb-h1"])
def test_low_precision_stays_within_its_own_error(pool, layout, precision):
    result = prove(pool, layout, config=TIED, precision=precision)
    assert result["passed"], result


def test_a_schedule_file_by_hand(pool, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(BY_HAND)
    result = prove(pool, f"dp=2,zero=2,pp=2,schedule=@{path}", config=SMALL, global_batch=6)
    right(result)


def test_a_schedule_file_of_a_v(pool, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("0F0,0F1,3F0,3I0,3F1,3B1,0I0,3W0,0B1,0W0\n1F0,2F0,1F1,2F1,2B0,1I0,2B1,1W0,1B1")
    right(prove(pool, f"pp=2,schedule=@{path},chunks=2", config=SMALL, global_batch=2))


def test_h55_the_default_batch_fills_every_stage(pool):
    """H55: two stages on each of two ranks get four micro-batches when no batch is written."""
    result = right(prove(pool, "pp=2,schedule=interleaved", config=SMALL, steps=1))
    sends = sum(
        line["count"]
        for line in result["ledger"]["recorded"]
        if line["kind"] == "send" and line["axis"] == "pp"
    )
    # rank 0: stages 0 and 2 send forward, stage 2 sends its gradient back: three messages a micro-batch
    assert sends == 3 * 4


def test_a_v_sends_nothing_between_its_own_stages(pool):
    result = right(prove(pool, "pp=2,schedule=zbv", config=SMALL, steps=1))
    sends = sum(line["count"] for line in result["ledger"]["recorded"] if line["kind"] == "send")
    # rank 0 owns both ends: stage 0 sends forward, stage 3 its gradient back
    assert sends == 2 * 4
