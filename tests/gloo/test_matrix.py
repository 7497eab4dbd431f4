"""The parity matrix: families x every axis alone, every pair of axes, and combinations of three and four on 8 ranks.

Each cell is three steps in float64 with clipping, accumulation, unequal valid tokens and an empty micro-batch: loss,
every gradient, every weight, the ledger, the placement. A cell that cannot run is refused with a code, and the cells
that are refused are written down here, so that none goes missing unseen.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from proofs import prove

from meshwright.base.errors import MeshwrightError

pytestmark = pytest.mark.gloo

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 67,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **COMMON},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 8,
        "tie_word_embeddings": True,
        **COMMON,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **COMMON,
    },
}

AXES = {
    "dp": "dp=2",
    "zero1": "dp=2,zero=1",
    "zero2": "dp=2,zero=2",
    "zero3": "dp=2,zero=3",
    "tp": "tp=2,sp=off",
    "tp+sp": "tp=2",
    "pp": "pp=2",
    "pp-zbv": "pp=2,schedule=zbv,chunks=2",
    "pp-interleaved": "pp=2,schedule=interleaved,chunks=2",
    "cp-ring": "cp=2",
    "cp-ulysses": "cp=2,cp_style=ulysses",
    "ep": "dp=2,ep=2",
    "recompute": "recompute=full",
    "chunked": "loss=chunked",
}
"""What each axis or policy adds to a layout; "ep" for mixtures of experts only."""

SAME = [
    {"dp", "zero1", "zero2", "zero3"},
    {"tp", "tp+sp"},
    {"pp", "pp-zbv", "pp-interleaved"},
    {"cp-ring", "cp-ulysses"},
]
"""Of each set at most one is in a layout (but "ep" goes with any of the first)."""

EIGHT = [
    ("llama", "dp=2,zero=3,tp=2,pp=2"),
    ("llama", "dp=2,zero=2,tp=2,pp=2,schedule=zb-h1"),
    ("qwen3", "dp=2,zero=1,tp=2,pp=2,schedule=zbv,chunks=2"),
    ("qwen3", "dp=2,zero=1,cp=2,pp=2,schedule=zbv,chunks=2"),
    ("gpt2", "dp=2,zero=1,tp=2,sp=off,pp=2,schedule=interleaved,chunks=2"),
    ("gpt2", "dp=4,zero=3,shard=2,tp=2,recompute=full,loss=chunked"),
    ("llama", "tp=4,kv_heads=replicate,pp=2,schedule=dualpipev,chunks=2"),
    ("llama", "tp=2,cp=2,pp=2"),
    ("qwen3", "dp=2,zero=3,tp=2,cp=2"),
    ("qwen3", "dp=2,zero=2,tp=2,cp=2,cp_style=ulysses,recompute=full"),
    ("mixtral", "dp=4,ep=2,zero=1,pp=2,schedule=zbv,chunks=2"),
    ("mixtral", "dp=4,ep=2,zero=3,pp=2,recompute=full"),
    ("mixtral", "dp=8,ep=4,zero=2,shard=4"),
    ("mixtral", "dp=2,zero=3,tp=2,pp=2,loss=chunked"),
]
"""Three and four axes at once, 8 ranks each."""

CORE = {
    ("llama", "dp=2,zero=3,tp=2,pp=2"),
    ("qwen3", "dp=2,zero=1,tp=2,pp=2,schedule=zbv,chunks=2"),
    ("qwen3", "dp=2,zero=1,cp=2,pp=2,schedule=zbv,chunks=2"),
    ("mixtral", "dp=4,ep=2,zero=1,pp=2,schedule=zbv,chunks=2"),
}
"""The part of the matrix that every ``make test`` runs."""

REFUSED: dict[frozenset[str], str] = {
    frozenset({"zero3", "pp-zbv"}): "E216",
}
"""Pairs that are refused, with the code that says so."""


def join(*names: str) -> str:
    """Return one layout text of several axes."""
    parts: dict[str, str] = {}
    for name in names:
        parts |= dict(item.split("=", 1) for item in AXES[name].split(","))
    return ",".join(f"{k}={v}" for k, v in parts.items())


def allowed(names: tuple[str, ...], family: str) -> bool:
    if "ep" in names and family != "mixtral":
        return False
    return all(len(group & set(names)) <= 1 for group in SAME)


def cells() -> list[Any]:
    """Return every (family, axes) of the matrix; what is not in the core is slow."""
    out: list[Any] = []
    for family in FAMILIES:
        for size in (1, 2):
            for names in combinations(AXES, size):
                if allowed(names, family):
                    core = (size == 1 and family == "qwen3") or names == ("ep",)
                    marks = () if core else (pytest.mark.slow,)
                    out.append(pytest.param(family, names, id=f"{family}-{'x'.join(names)}", marks=marks))
    return out


def proven(pool: Any, family: str, layout: str, **options: Any) -> dict[str, Any]:
    steps = options.pop("steps", 3)
    result = prove(pool, layout, config=FAMILIES[family], steps=steps, max_norm=0.5, **options)
    assert result["passed"], {k: result[k] for k in ("checks", "gradients", "ledger", "sentinel")}
    assert result["ledger"]["matches"]
    assert result["placement"]["complete"]
    return result


@pytest.mark.parametrize(("family", "names"), cells())
def test_cell(pool, family, names):
    """One axis alone, or two together."""
    code = REFUSED.get(frozenset(names))
    if code is not None:
        with pytest.raises(MeshwrightError) as error:
            prove(pool, join(*names), config=FAMILIES[family])
        assert code in {p.code for p in error.value.problems}
        return
    result = proven(pool, family, join(*names), steps=2 if len(names) == 1 else 3)
    assert result["gradients"]["max_rel_diff"] <= 1e-10


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*cell, marks=() if cell in CORE else (pytest.mark.slow,)) for cell in EIGHT],
)
def test_eight_ranks(pool, family, layout):
    result = proven(pool, family, layout, steps=2)
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["world_size"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), EIGHT)
def test_eight_ranks_in_float32(pool, family, layout):
    """The bound is 4 x what one device in float32 differs from float64, its rows in either order."""
    proven(pool, family, layout, steps=2, precision="fp32")


def test_the_matrix_is_whole():
    """Every axis alone and in every pair, in every family that has it; a dozen or more of three and four axes."""
    found = {(c.values[0], frozenset(c.values[1])) for c in cells()}
    for family in FAMILIES:
        for name in AXES:
            if name != "ep" or family == "mixtral":
                assert (family, frozenset({name})) in found
    assert len(EIGHT) >= 12
    assert set(EIGHT) >= CORE
    assert all(code for code in REFUSED.values())
