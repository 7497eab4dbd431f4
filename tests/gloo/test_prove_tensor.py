"""The tensor axis, with and without sequence parallelism, against one device in float64."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

from meshwright.base.errors import MeshwrightError

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


@pytest.mark.parametrize(
    "layout", ["tp=2", "tp=4,sp=off,kv_heads=replicate", "tp=2,pp=2", "dp=2,zero=3,tp=2"]
)
def test_tied_embeddings(pool, layout):
    """H47: one tensor cut by vocabulary rows is looked up in and multiplied with; both ends of a pipeline too."""
    result = proven(pool, layout, config=LLAMA | {"tie_word_embeddings": True}, steps=3)
    assert result["checks"]["tied_copies_equal"]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize(
    ("layout", "blocks"),
    [("tp=2,sp=off", ("*.0.*",)), ("tp=2,sp=on", ("*.0.*",)), ("tp=2", ()), ("dp=2,zero=3,tp=2", ())],
)
def test_frozen(pool, config, layout, blocks):
    """The backward sends nothing where no gradient flows, and the derived ledger knows it."""
    embedding = "transformer.w*" if config is GPT2 else "*embed_tokens*"
    proven(pool, layout, config=config, freeze=(embedding, *blocks))


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=off", "dp=2,tp=2", "dp=2,zero=3,tp=2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precision(pool, layout, precision):
    proven(pool, layout, config=LLAMA, precision=precision)


@pytest.mark.parametrize("layout", ["tp=2,sp=on", "tp=2,sp=off"])
def test_h34_norm_gradients_are_sums_over_the_axis(pool, layout):
    """H34: the gradients of norms are one device's, not halves, for norms per token and per head."""
    result = proven(pool, layout, config=QWEN3, steps=1)
    assert result["sentinel"] is None


def test_h37_row_bias_is_added_once(pool):
    """H37: biases after row-cut matrices, in both families that have them, do not grow with tp."""
    proven(pool, "tp=4,sp=off,kv_heads=replicate", config=BIASED, steps=3)


def test_h43_vocabulary_that_does_not_divide(pool):
    """H43: 67 rows on 4 ranks: 17, 17, 17 and 16, no padding in the softmax."""
    proven(pool, "tp=4,sp=off,kv_heads=replicate", config=LLAMA, steps=1)


def _loss_parts(rank, world):
    import torch
    import torch.distributed as dist

    from meshwright.parallel.stage import token_loss_sum
    from meshwright.parallel.tensor import vocab_loss_sum

    logits = torch.randn(1, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 30
    labels = torch.tensor([[3, -100, 7, 8]])
    out = []
    for y in (labels, torch.full_like(labels, -100)):
        whole = logits.clone().requires_grad_()
        token_loss_sum(whole, y).backward()
        part = logits[..., rank * 5 : rank * 5 + 5].clone().requires_grad_()
        loss = vocab_loss_sum(part, y, group=dist.group.WORLD, start=rank * 5)
        (2 * loss).backward()
        assert torch.allclose(loss, token_loss_sum(logits, y), rtol=1e-14, atol=0)
        assert torch.allclose(part.grad, 2 * whole.grad[..., rank * 5 : rank * 5 + 5], rtol=1e-13, atol=1e-15)
        out.append(part.grad.abs().max().item())
    return out


def test_h44_vocabulary_parallel_loss_ignores(pool):
    """H44: -100 is no class of any rank, and a row without a label has no gradient."""
    for some, none in pool.run(_loss_parts, 2, timeout_s=60.0):
        assert some > 0
        assert none == 0


def test_h72_sequence_that_does_not_split_is_refused(pool):
    """H72: 10 positions on 4 ranks under sp are refused with numbers; without sp they run."""
    with pytest.raises(MeshwrightError) as error:
        prove(pool, "tp=4,sp=on,kv_heads=replicate", config=LLAMA, seq_len=10)
    assert {p.code for p in error.value.problems if p.severity == "error"} == {"E205"}
    proven(pool, "tp=4,sp=off,kv_heads=replicate", config=LLAMA, seq_len=10, steps=1)
