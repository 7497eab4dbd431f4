"""The closed form of memory against played ranks: every term that differs was once a fault of the formula."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cluster.load import read_cluster
from meshwright.cost.estimate import estimate
from meshwright.exact.estimate import exact_answer
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.make import make_plan

MIXTURE: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3584,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def of_depth(name: str, blocks: int) -> ModelSpec:
    """A model of the catalogue at its width, with fewer blocks."""
    if name == "mixture":
        return spec_from_config(MIXTURE | {"num_hidden_layers": blocks}, name)
    config = dict(read_model(name).config)
    config |= {key: blocks for key in ("num_hidden_layers", "n_layer") if key in config}
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:blocks]
    return spec_from_config(config, name)


def differences(
    name: str, blocks: int, text: str, micro_batches: int, tokens: int = 2048
) -> list[tuple[str, float]]:
    """Return (position, exact - closed form in percent of the exact peak) of each class of stages; prints categories."""
    spec, layout = of_depth(name, blocks), parse_layout(text)
    seq_len = min(tokens, spec.max_position_embeddings)
    batch = micro_batches * layout.dp * layout.micro_batch
    cluster = read_cluster("h100-x8", layout.world_size)
    item = estimate(spec, layout, cluster, seq_len, batch)
    found = exact_answer(make_plan(spec, layout, batch, seq_len, name), spec, cluster, item["ranks"])
    out: list[tuple[str, float]] = []
    for row in found["difference"]["ranks"]:
        parts = ", ".join(f"{key} {pct:+.1f}" for key, pct in row["memory_pct_of_peak"].items())
        print(f"{name} {text} {row['position']}: peak {row['peak_pct']:+.2f} % ({parts})")
        out.append((row["position"], row["peak_pct"]))
    return out


def test_a_sharded_and_recomputed_layout():
    """Was 15 % too high: a copy that only gloo makes, an embedding's gradient that comes later."""
    assert all(abs(off) < 1.0 for _, off in differences("llama-2-7b", 4, "dp=8,zero=3,recompute=full", 2))


def test_a_tied_head_waits_for_the_embedding():
    """Was 22 % too low with few tokens: the gradients of both uses of the table, and their sum, are there at once."""
    assert all(abs(off) < 0.2 for _, off in differences("smollm2-135m", 2, "dp=1", 1, 128))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks", "text", "micro_batches", "most"),
    [
        # a scaled tanh keeps its output; a chunk's weight gradient is made before it is added
        ("gemma-2-2b", 4, "dp=1", 2, 0.2),
        ("gemma-2-2b", 4, "tp=2", 2, 0.2),
        ("gemma-2-2b", 4, "dp=2,zero=3", 2, 0.2),
        ("gemma-2-2b", 4, "dp=1,loss=chunked", 2, 0.2),
        ("llama-2-7b", 4, "tp=2,loss=chunked", 2, 0.3),
        ("llama-2-7b", 8, "dp=8", 2, 0.5),
        ("llama-2-7b", 8, "dp=8,zero=1", 2, 0.5),
        ("llama-2-7b", 8, "dp=8,zero=2", 2, 0.5),
        ("llama-2-7b", 8, "dp=8,zero=3", 2, 0.5),
        ("llama-2-7b", 6, "dp=8,zero=3,recompute=full", 1, 1.5),
        ("llama-2-7b", 8, "dp=8,zero=3,recompute=selective", 2, 0.5),
        ("llama-2-7b", 32, "tp=8", 2, 1.0),
        ("llama-2-7b", 8, "tp=4,dp=2,zero=3,recompute=full", 2, 0.5),
        ("llama-2-7b", 8, "cp=4,dp=2,zero=3", 2, 1.0),
        ("llama-2-7b", 8, "pp=4", 8, 0.5),
        ("llama-2-7b", 8, "pp=4,schedule=interleaved", 8, 1.0),
        ("llama-2-7b", 8, "pp=4,schedule=zb-h1", 8, 2.5),
        ("llama-2-7b", 8, "pp=4,recompute=selective,schedule=zb-h1", 8, 3.0),
        ("llama-2-7b", 8, "pp=4,schedule=zbv", 8, 2.0),
        ("llama-2-7b", 8, "dp=2,pp=4,zero=1,schedule=zbv", 8, 3.0),
        ("llama-2-7b", 8, "pp=4,schedule=dualpipev", 8, 2.5),
        ("llama-2-7b", 8, "dp=4,pp=2,zero=2", 4, 0.5),
        ("llama-2-7b", 8, "dp=2,pp=2,zero=1,schedule=gpipe", 4, 2.0),
        ("qwen3-0.6b", 8, "dp=1", 2, 0.5),
        ("qwen3-0.6b", 8, "tp=4,dp=2,zero=3,recompute=full", 2, 0.5),
        ("gpt2", 6, "pp=2", 4, 1.5),
        ("gpt2", 6, "dp=2,zero=3", 2, 1.5),
        ("mixture", 8, "dp=8,zero=3", 2, 0.5),
        ("mixture", 8, "dp=4,ep=4,zero=2", 2, 0.5),
        ("mixture", 8, "tp=4", 2, 3.0),
        ("mixture", 8, "pp=4", 8, 2.5),
    ],
)
def test_the_closed_form_is_that_of_the_runtime(
    name: str, blocks: int, text: str, micro_batches: int, most: float
):
    found = differences(name, blocks, text, micro_batches)
    assert all(abs(off) < most for _, off in found), found
