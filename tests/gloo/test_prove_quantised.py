"""QLoRA against one device whose base bitsandbytes rounded: the factors' gradients, the same base, the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest
from proofs import SMALL, TINY, prove

from meshwright.model.spec import AdapterSpec

pytest.importorskip("bitsandbytes", reason="bitsandbytes (extra: quantised) is not installed")
pytestmark = pytest.mark.gloo

NF4 = AdapterSpec(kind="qlora", rank=3, alpha=5.0)
FP4 = replace(NF4, levels="fp4", double=False)


def holds(result):
    assert result["passed"], {
        k: v
        for k, v in result.items()
        if k in ("gradients", "weights", "ledger", "checks", "loss", "placement")
    }
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]
    assert result["placement"]["complete"]


@pytest.mark.parametrize("adapter", [NF4, replace(NF4, double=False), FP4, replace(FP4, double=True)])
def test_one_device(pool, adapter):
    holds(prove(pool, "dp=1", config=SMALL, adapter=adapter, steps=3))


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=4,zero=2,shard=2",
        "dp=2,zero=3",
        "dp=4,zero=3,shard=2",
        "dp=2,zero=3,pp=2",
        "dp=3,zero=3,recompute=full",
        "pp=2",
        "dp=2,zero=1,pp=2",
        "pp=2,schedule=zbv,chunks=2",
        "cp=2",
        "dp=2,recompute=full",
        "dp=2,zero=1,recompute=selective,loss=chunked",
    ],
)
def test_equals_one_device(pool, layout):
    holds(prove(pool, layout, config=SMALL, adapter=NF4, steps=2))


@pytest.mark.parametrize(
    "layout", ["tp=2", "tp=2,sp=off", "tp=2,dp=2,zero=1", "tp=2,pp=2,schedule=zb-h1", "tp=2,dp=2,zero=3"]
)
@pytest.mark.parametrize("adapter", [NF4, FP4])
def test_tensor_axis_cuts_the_packed_matrices(pool, layout, adapter):
    holds(prove(pool, layout, config=TINY, adapter=adapter, steps=2, seq_len=16))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "pp=2"])
def test_other_precisions(pool, layout, precision):
    result = prove(pool, layout, config=SMALL, adapter=NF4, steps=2, precision=precision)
    assert result["passed"], result["gradients"] | result["checks"]


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3"])
def test_families(pool, family):
    """GPT-2 stores its matrices transposed: blocks run along what is stored."""
    holds(
        prove(pool, "dp=2,zero=2,pp=2", config=f"recipes/models/{family}", adapter=NF4, steps=2, seq_len=16)
    )
