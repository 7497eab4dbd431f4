"""Every built layout against one device, in float64: loss, each gradient, norm, weights, ledger, placement."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

pytestmark = pytest.mark.gloo

LAYOUTS = [
    "dp=1",
    "dp=2",
    "dp=3",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=3,zero=3",
    "dp=4,zero=3,shard=2",
    "dp=4,zero=1,shard=2",
    "dp=4,zero=2,shard=2",
    "pp=2",
    "pp=2,schedule=gpipe",
    "pp=4",
    "pp=3,cut=1/3/1,schedule=gpipe",
    "dp=2,pp=2",
    "dp=2,zero=1,pp=2",
    "dp=2,zero=2,pp=2,schedule=gpipe",
    "dp=2,zero=3,pp=2,schedule=1f1b",
    "dp=4,zero=3,shard=2,pp=2",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_device(pool, layout):
    result = prove(pool, layout, config=SMALL)
    assert result["passed"], result
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]


@pytest.mark.parametrize(
    "layout", ["dp=2,zero=3", "pp=2", "pp=4,schedule=gpipe", "dp=2,zero=3,pp=2", "dp=2,pp=2"]
)
def test_tied_embeddings_equal_one_device(pool, layout):
    """H47, H101, H102: both copies of a tied embedding get the whole gradient and stay equal."""
    result = prove(pool, layout, config={**SMALL, "tie_word_embeddings": True}, steps=3)
    assert result["passed"], result
    assert result["checks"]["tied_copies_equal"]


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,pp=2"])
def test_accumulation_of_four(pool, layout):
    """H1, H2, H5, H7, H10, H11: unequal valid tokens, an empty micro-batch, accumulation 4."""
    result = prove(pool, layout, config=SMALL, global_batch=8)
    assert result["passed"], result


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "dp=2,zero=2,pp=2", "pp=2"])
def test_frozen_embedding(pool, layout):
    result = prove(pool, layout, config=SMALL, freeze=("model.embed_tokens.*",))
    assert result["passed"], result


def test_fewer_micro_batches_than_stages(pool):
    """H50: pp 4 with 2 micro-batches runs, and right."""
    result = prove(pool, "pp=4", config=SMALL, global_batch=2)
    assert result["passed"], result


@pytest.mark.parametrize("layout", ["dp=2,micro_batch=2", "dp=2,zero=3,pp=2,micro_batch=2"])
def test_larger_micro_batches(pool, layout):
    """H6: gradients do not depend on the micro-batch size."""
    result = prove(pool, layout, config=SMALL)
    assert result["passed"], result


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral", "tiny-llama"])
@pytest.mark.parametrize("layout", ["dp=2,zero=3,pp=2", "dp=2"])
def test_families(pool, family, layout):
    result = prove(pool, layout, config=f"recipes/models/{family}", steps=1, seq_len=16)
    assert result["passed"], result


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "dp=2,zero=1,pp=2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precision_is_as_close_as_one_device(pool, layout, precision):
    result = prove(pool, layout, config=SMALL, precision=precision)
    assert result["passed"], result
    assert result["tolerance"]["gradients"] < {"fp32": 1e-4, "bf16": 0.5, "fp16": 0.2}[precision]


def test_sgd_without_clipping(pool):
    """Raw gradients and SGD hide no factor."""
    from meshwright.orchestrate.proving import ProofOptimizer

    result = prove(
        pool, "dp=2,zero=3,pp=2", config=SMALL, optimizer=ProofOptimizer(name="sgd", lr=0.1), max_norm=None
    )
    assert result["passed"], result
