"""Compiled blocks against one device that compiles nothing, in float64, traced ahead and run by torch's own kernels."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

from meshwright.model.spec import AdapterSpec

pytestmark = pytest.mark.gloo


def holds(result):
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]


@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "dp=2,recompute=full", "dp=2,zero=3,recompute=full"],
)
def test_equals_one_device(pool, layout):
    holds(prove(pool, f"{layout},compile=blocks", config=SMALL))


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_families(pool, family):
    holds(prove(pool, "dp=2,zero=3,compile=blocks", config=f"recipes/models/{family}", steps=1, seq_len=16))


def test_interleaved(pool):
    holds(prove(pool, "pp=2,schedule=interleaved,chunks=2,dp=2,zero=1,compile=blocks", config=SMALL))


def test_adapters(pool):
    lora = AdapterSpec(kind="lora", rank=3, alpha=5.0)
    holds(prove(pool, "dp=2,zero=2,compile=blocks", config=SMALL, adapter=lora))
