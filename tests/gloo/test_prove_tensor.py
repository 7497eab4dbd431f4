"""The tensor axis, with and without sequence parallelism, against one device in float64."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

pytestmark = pytest.mark.gloo

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 67,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SMALL, "num_hidden_layers": 2}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
MISTRAL = {
    **LLAMA,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 12,
}

ONE_AXIS = [
    "tp=2,sp=off",
    "tp=2,sp=on",
    "tp=4,sp=off,kv_heads=replicate",
    "tp=4,sp=on,kv_heads=replicate",
]


def proven(pool, layout, **options):
    result = prove(pool, layout, seq_len=options.pop("seq_len", 32), **options)
    assert result["passed"], result
    if options.get("precision", "fp64") == "fp64":
        assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]
    assert result["placement"]["complete"]
    return result


@pytest.mark.parametrize("layout", ONE_AXIS)
def test_tensor_axis_equals_one_device(pool, layout):
    proven(pool, layout, config=LLAMA)


@pytest.mark.parametrize("config", [BIASED, QWEN2, QWEN3, MISTRAL, GPT2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("layout", ["tp=2,sp=off", "tp=2,sp=on", "tp=4,sp=on,kv_heads=replicate"])
def test_families(pool, config, layout):
    """Fused q|k|v in segments (gpt2), norms per head (qwen3), biases, windows shorter than the sequence."""
    proven(pool, layout, config=config)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,tp=2,sp=off",
        "dp=2,tp=2",
        "dp=2,zero=1,tp=2",
        "dp=2,zero=2,tp=2,sp=off",
        "dp=2,zero=3,tp=2",
        "tp=2,pp=2",
        "tp=2,pp=2,sp=off,schedule=gpipe",
        "tp=2,dp=2,order=dp/tp/cp/pp",
    ],
)
def test_two_axes(pool, layout):
    """Accumulation of four, unequal valid tokens and an empty micro-batch on top of the tensor axis."""
    proven(pool, layout, config=LLAMA, global_batch=8)


@pytest.mark.parametrize("layout", ["dp=2,zero=3,tp=2,pp=2", "dp=2,tp=4,kv_heads=replicate,zero=2"])
def test_three_axes(pool, layout):
    proven(pool, layout, config=QWEN3 | {"tie_word_embeddings": True})


@pytest.mark.parametrize("layout", ["tp=2", "tp=4,sp=off,kv_heads=replicate", "tp=2,pp=2", "dp=2,zero=3,tp=2"])
def test_tied_embeddings(pool, layout):
    """H47: one tensor cut by vocabulary rows is looked up in and multiplied with; both ends of a pipeline too."""
    result = proven(pool, layout, config=LLAMA | {"tie_word_embeddings": True}, steps=3)
    assert result["checks"]["tied_copies_equal"]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("layout", ["tp=2,sp=off", "tp=2,sp=on", "dp=2,zero=3,tp=2"])
@pytest.mark.parametrize("freeze", [("*embed_tokens*", "transformer.w*"), ("*0.*", "*embed_tokens*", "transformer.w*")])
def test_frozen(pool, config, layout, freeze):
    """The backward sends nothing where no gradient flows, and the derived ledger knows it."""
    freeze = tuple(f for f in freeze if ("embed" not in f or config is LLAMA) and ("transf" not in f or config is GPT2))
    proven(pool, layout, config=config, freeze=freeze)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=off", "dp=2,tp=2", "dp=2,zero=3,tp=2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precision(pool, layout, precision):
    proven(pool, layout, config=LLAMA, precision=precision)
