"""Families beside the Llama-shaped ones on every axis, against one device in float64."""

from __future__ import annotations

from typing import Any

import pytest
from proofs import prove

from family_configs import NEWER, PHI3
from meshwright.model.adapters import parse_adapter

pytestmark = pytest.mark.gloo


def shorter(config: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    """Return ``config`` with few layers and 67 tokens of vocabulary, which no degree divides."""
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    return config | {depth: layers, "vocab_size": 67}


CONFIGS = {name: shorter(config) for name, config in {"phi3": PHI3, **NEWER}.items()}
WHOLE_HEADS = ("stablelm-parallel", "falcon-multi-query", "falcon-alibi")  # refused with tp: E253
TENSOR = [name for name in CONFIGS if name not in WHOLE_HEADS]
CONTEXT = [n for n in CONFIGS if n not in ("bloom", "gpt_neox-serial") and not n.startswith("falcon")]
PECULIAR = ["phi3", "gemma2", "gemma3", "granite", "gpt_neox", "olmo2", "opt", "bloom", "deepseek_v3"]
PECULIAR += ["gpt_oss", "qwen2_moe", "glm4", "glm4_moe", "cohere-norms", "cohere2", "phi", "falcon"]


def proven(pool: Any, layout: str, name: str, layers: int = 2, **options: Any) -> None:
    if name == "gemma" and "tp=2" in layout:  # one key/value head
        layout += ",kv_heads=replicate"
    options = {"seq_len": 32, "steps": 1} | options
    result = prove(pool, layout, config=shorter(CONFIGS[name], layers), **options)
    assert result["passed"], (result["checks"], result["gradients"], result["weights"], result["ledger"])
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]
    assert result["placement"]["complete"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [  # ``make test`` runs the first of every five
        ("phi3", "tp=2"),
        ("granite", "pp=2"),
        ("gemma3", "cp=2"),
        ("smollm3", "cp=2"),
        ("starcoder2", "tp=2"),
        ("gemma2", "cp=2,tp=2,sp=off"),
        ("gemma2", "tp=2,loss=chunked"),
        ("gpt_neox", "tp=2"),
        ("olmo2", "cp=2"),
        ("opt", "tp=2"),
        ("deepseek_v3", "tp=2,pp=2"),
        ("olmo2", "tp=2"),
        ("deepseek_v2", "cp=2"),
        ("bloom", "pp=2"),
        ("opt", "cp=2"),
        ("gemma", "tp=2"),
        ("bloom", "tp=2"),
        ("stablelm", "tp=2"),
        ("seed_oss", "tp=2"),
        ("falcon", "tp=2"),
        ("gpt_oss", "cp=2,tp=2"),
        ("glm", "cp=2"),
        ("glm4_moe", "tp=2"),
        ("cohere2", "cp=2"),
        ("phi", "tp=2"),
        ("qwen2_moe", "dp=2,ep=2,tp=2"),
    ],
)
def test_core(pool: Any, name: str, layout: str) -> None:
    proven(pool, layout, name)


@pytest.mark.slow
def test_a_gradient_that_is_rounding_alone(pool: Any) -> None:
    """Softmax does not see a key's bias where positions are learned: its gradient is compared, its Adam step is not."""
    result = prove(pool, "tp=2", config=CONFIGS["opt"], seq_len=32, steps=1)
    assert result["passed"], result["checks"]
    biases = [f"model.decoder.layers.{i}.self_attn.k_proj.bias" for i in range(2)]
    assert sorted(result["weights"]["not_compared"]) == biases
    assert prove(pool, "tp=2", config=CONFIGS["phi3"], seq_len=32, steps=1)["weights"]["not_compared"] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2,sp=on", "tp=2,sp=off", "tp=2,loss=chunked"])
@pytest.mark.parametrize("name", TENSOR)
def test_tensor_axis(pool: Any, name: str, layout: str) -> None:
    """Fused matrices by parts, scaled embeddings, changed logits, biases by position, latent attention."""
    proven(pool, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2", "cp=2,cp_style=ulysses"])
@pytest.mark.parametrize("name", CONTEXT)
def test_context_axis(pool: Any, name: str, layout: str) -> None:
    """Soft-capped scores, windows of some layers only, layers without positions, keys wider than values."""
    proven(pool, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2", "dp=2,zero=3,pp=2,loss=chunked", "dp=2,zero=2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_and_shards(pool: Any, name: str, layout: str) -> None:
    proven(pool, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["tp=2,recompute=full", "tp=2,pp=2,recompute=selective", "tp=2,pp=2,schedule=zbv,chunks=2"]
)
@pytest.mark.parametrize("name", [n for n in PECULIAR if n in TENSOR])
def test_recomputed_and_split(pool: Any, name: str, layout: str) -> None:
    """A norm behind the last sum of a block needs it again in a recomputed forward."""
    proven(pool, layout, name, layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2,tp=2", "cp=2,cp_style=ulysses,recompute=full", "cp=2,pp=2"])
@pytest.mark.parametrize("name", [n for n in PECULIAR if n in CONTEXT])
def test_context_with_others(pool: Any, name: str, layout: str) -> None:
    proven(pool, layout, name, seq_len=30)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize(
    "name", [n for n in [*PECULIAR, "smollm3", "falcon-alibi"] if n not in ("opt", "bloom", "gpt_oss")]
)
def test_packed_rows(pool: Any, name: str, layout: str) -> None:
    """Windows and caps inside documents, positions that begin again."""
    if (name not in CONTEXT and layout == "cp=2") or (name in WHOLE_HEADS and layout == "tp=2"):
        layout = "dp=2,zero=3"
    proven(pool, layout, name, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=off,recompute=full", "cp=2"])
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gpt_neox", "gpt_neox-serial", "deepseek_v3", "olmo2", "gpt_oss", "qwen2_moe", "glm4"),
        *("cohere-norms", "phi", "falcon", "falcon-one-norm", "falcon-serial"),
    ],
)
@pytest.mark.parametrize("blocks", [(), ("*.0.*",)], ids=["table", "layer"])
def test_frozen(pool: Any, name: str, layout: str, blocks: tuple[str, ...]) -> None:
    """The backward sends nothing where no gradient flows: norms on either side, feed-forward beside attention."""
    if name not in CONTEXT and layout == "cp=2":
        layout = "dp=2,zero=2"
    embedding = "*embed_in.*" if name.startswith("gpt_neox") else "*embed_tokens*"
    embedding = "*word_embeddings*" if name.startswith("falcon") else embedding
    proven(pool, layout, name, freeze=(embedding, *blocks))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3,loss=chunked", "cp=2", "pp=2"])
@pytest.mark.parametrize("name", ["gemma2", "granite", "phi3", "gpt_oss", "cohere", "glm4"])
def test_lower_precision(pool: Any, name: str, layout: str, precision: str) -> None:
    # a number at gpt-oss' clamp has a gradient or none: a limit that few reach
    config = CONFIGS[name] | ({"swiglu_limit": 7.0} if name == "gpt_oss" else {})
    result = prove(pool, layout, config=config, seq_len=32, precision=precision)
    assert result["passed"], (result["checks"], result["gradients"], result["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "dp=2,zero=1"])
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("gemma2", {"attention_dropout": 0.2}),
        ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.2}),
        ("phi3", {"resid_pdrop": 0.2}),
        ("gpt_oss", {"attention_dropout": 0.2}),
        ("phi", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}),
        ("stablelm", {"hidden_dropout": 0.2}),
    ],
)
def test_dropout(pool: Any, name: str, dropped: dict[str, float], layout: str) -> None:
    """Masks by element; scores are capped before they are dropped; a sink's share is never one of those dropped."""
    result = prove(pool, layout, config=CONFIGS[name] | dropped, seq_len=32, steps=1)
    assert result["passed"], (result["checks"], result["gradients"], result["ledger"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,pp=2", "dp=2,zero=3,tp=2"])
@pytest.mark.parametrize(
    "name", ["phi3", "gpt_neox", "gemma2", "opt", "bloom", "gpt_oss", "falcon", "cohere"]
)
def test_adapters(pool: Any, name: str, layout: str) -> None:
    """Factors beside fused matrices are cut by the same parts."""
    proven(pool, layout, name, adapter=parse_adapter("lora:3"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,ep=2,tp=2", "dp=2,ep=2,zero=1,pp=2", "cp=2,dp=2,ep=2,zero=3"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2_moe", "glm4_moe"])
def test_experts_with_other_axes(pool: Any, name: str, layout: str) -> None:
    """Shared experts are cut over tp and whole on every rank of ep; biases of experts are added on one rank of tp."""
    proven(pool, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2", "dp=2,ep=2", "dp=2,zero=2"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
def test_router_term(pool: Any, name: str, layout: str) -> None:
    """gpt-oss' routers have a bias beside their weight: their logits are noted once."""
    term = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    result = prove(pool, layout, config=CONFIGS[name] | term, seq_len=32, steps=1)
    assert result["passed"], (result["checks"], result["gradients"])
    assert result["gradients"]["max_rel_diff"] <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cohere-norms", "gpt_oss", "glm4", "phi"])
def test_copies_of_key_heads(pool: Any, name: str) -> None:
    """Two key/value heads on four ranks: norms of every head and sinks go with their heads."""
    proven(pool, "tp=4,kv_heads=replicate", name)


@pytest.mark.slow
def test_dropout_that_rests_leaves_no_mask_to_wait_for(pool: Any) -> None:
    """Seed-OSS drops by function, so a proof lets it rest: the recomputed forward stops before the last sum."""
    result = prove(
        pool, "tp=2,recompute=full", config=CONFIGS["seed_oss"] | {"residual_dropout": 0.1}, steps=1
    )
    assert result["passed"], (result["checks"], result["ledger"])
