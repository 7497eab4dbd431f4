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
TENSOR = list(CONFIGS)
CONTEXT = [name for name in CONFIGS if name not in ("bloom", "gpt_neox-serial")]
PECULIAR = ["phi3", "gemma2", "gemma3", "granite", "gpt_neox", "olmo2", "opt", "bloom", "deepseek_v3"]


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
@pytest.mark.parametrize("name", [n for n in [*PECULIAR, "smollm3"] if n not in ("opt", "bloom")])
def test_packed_rows(pool: Any, name: str, layout: str) -> None:
    """Windows and caps inside documents, positions that begin again."""
    proven(pool, layout, name, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=off,recompute=full", "cp=2"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox", "gpt_neox-serial", "deepseek_v3", "olmo2"])
@pytest.mark.parametrize("blocks", [(), ("*.0.*",)], ids=["table", "layer"])
def test_frozen(pool: Any, name: str, layout: str, blocks: tuple[str, ...]) -> None:
    """The backward sends nothing where no gradient flows: norms on either side, feed-forward beside attention."""
    if name == "gpt_neox-serial" and layout == "cp=2":
        layout = "dp=2,zero=2"
    embedding = "gpt_neox.embed_in*" if name.startswith("gpt_neox") else "*embed_tokens*"
    proven(pool, layout, name, freeze=(embedding, *blocks))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3,loss=chunked", "cp=2", "pp=2"])
@pytest.mark.parametrize("name", ["gemma2", "granite", "phi3"])
def test_lower_precision(pool: Any, name: str, layout: str, precision: str) -> None:
    result = prove(pool, layout, config=CONFIGS[name], seq_len=32, precision=precision)
    assert result["passed"], (result["checks"], result["gradients"], result["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "dp=2,zero=1"])
@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("gemma2", {"attention_dropout": 0.2}),
        ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.2}),
        ("phi3", {"resid_pdrop": 0.2}),
    ],
)
def test_dropout(pool: Any, name: str, dropped: dict[str, float], layout: str) -> None:
    """Masks by element; scores are capped before they are dropped."""
    result = prove(pool, layout, config=CONFIGS[name] | dropped, seq_len=32, steps=1)
    assert result["passed"], (result["checks"], result["gradients"], result["ledger"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,pp=2", "dp=2,zero=3,tp=2"])
@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "gemma2", "opt", "bloom"])
def test_adapters(pool: Any, name: str, layout: str) -> None:
    """Factors beside fused matrices are cut by the same parts."""
    proven(pool, layout, name, adapter=parse_adapter("lora:3"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,ep=2,tp=2", "dp=2,ep=2,zero=1,pp=2", "cp=2,dp=2,ep=2,zero=3"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_experts_with_other_axes(pool: Any, name: str, layout: str) -> None:
    """Shared experts are cut over tp and whole on every rank of ep."""
    proven(pool, layout, name)
