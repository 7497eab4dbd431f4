"""Recompute and chunked loss against one device that does neither, in float64."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

pytestmark = pytest.mark.gloo

SPREADS = ["dp=2", "dp=2,zero=3", "pp=2", "dp=2,zero=3,pp=2"]
OPTIONS = ["recompute=full", "recompute=selective", "loss=chunked", "recompute=selective,loss=chunked"]
TIED = {**SMALL, "tie_word_embeddings": True}


def holds(result):
    assert result["passed"], result
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spread", SPREADS)
def test_equals_one_device(pool, spread, options):
    holds(prove(pool, f"{spread},{options}", config=SMALL))


@pytest.mark.parametrize(
    "layout", ["dp=2,zero=1", "dp=3,zero=2", "dp=4,zero=3,shard=2", "pp=2,schedule=gpipe,micro_batch=2"]
)
def test_both_in_other_layouts(pool, layout):
    holds(prove(pool, f"{layout},recompute=full,loss=chunked", config=SMALL))


@pytest.mark.parametrize("options", ["recompute=full,loss=chunked", "recompute=selective,loss=chunked"])
@pytest.mark.parametrize("spread", SPREADS)
def test_tied_embeddings(pool, spread, options):
    result = prove(pool, f"{spread},{options}", config=TIED)
    holds(result)
    assert result["checks"]["tied_copies_equal"]


@pytest.mark.parametrize("options", ["recompute=full,loss=chunked", "recompute=selective,loss=chunked"])
@pytest.mark.parametrize("spread", ["dp=2", "dp=2,zero=3,pp=2"])
@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_families(pool, family, spread, options):
    """H85 beside: experts are routed alike in the recomputed forward."""
    holds(prove(pool, f"{spread},{options}", config=f"recipes/models/{family}", steps=1, seq_len=16))


@pytest.mark.parametrize("options", ["recompute=full", "recompute=selective", "loss=chunked"])
@pytest.mark.parametrize("freeze", [("model.layers.2.*", "model.layers.3.mlp.*"), ("lm_head.*",)])
def test_h119_frozen_parameters(pool, freeze, options):
    """H119: a frozen part, recomputed under ZeRO-3: runs, and the other gradients are the reference's."""
    holds(prove(pool, f"dp=2,zero=3,{options}", config=SMALL, freeze=freeze))
