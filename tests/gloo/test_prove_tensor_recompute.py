"""The tensor axis with recompute and with the chunked loss, against one device that does neither, in float64."""

from __future__ import annotations

import pytest
from test_prove_tensor import BIASED, GPT2, LLAMA, QWEN3, proven

pytestmark = pytest.mark.gloo

OPTIONS = ["recompute=full", "recompute=selective", "loss=chunked", "recompute=full,loss=chunked"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spread", ["tp=2,sp=off", "tp=2", "dp=2,zero=3,tp=2", "tp=2,pp=2"])
def test_equals_one_device(pool, spread, options):
    proven(pool, f"{spread},{options}", config=LLAMA)


@pytest.mark.parametrize("config", [BIASED, QWEN3, GPT2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("sp", ["on", "off"])
def test_families(pool, config, sp):
    proven(pool, f"tp=2,sp={sp},recompute=selective,loss=chunked", config=config)


def test_tied_and_frozen(pool):
    """A frozen first block is not run again; a tied table takes the head's gradient from the chunks."""
    tied = {**QWEN3, "tie_word_embeddings": True}
    proven(pool, "tp=2,pp=2,recompute=full,loss=chunked", config=tied)
    proven(pool, "tp=2,recompute=full", config=LLAMA, freeze=("*embed_tokens*", "*.0.*"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precision(pool, precision):
    proven(pool, "dp=2,tp=2,recompute=selective,loss=chunked", config=LLAMA, precision=precision)


def test_vocabulary_that_does_not_divide(pool):
    """67 rows on 4 ranks, 32 tokens in chunks that do not divide either."""
    proven(pool, "tp=4,sp=off,kv_heads=replicate,loss=chunked", config=LLAMA, seq_len=30)
