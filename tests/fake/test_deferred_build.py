"""Models built without memory for their large parameters: the same bits, the same stream of random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import adapted, parse_adapter
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import holds_a_part
from meshwright.parallel.build import build_model
from meshwright.parallel.deferred import LARGE, deferring

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "models").glob("*/config.json"))
MORE = {
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 96,
        "word_embed_proj_dim": 64,
        "pad_token_id": 7,
    },
    "phi3": {
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "pad_token_id": 0,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
    },
}
CONFIGS = {p.parent.name: json.loads(p.read_text()) for p in RECIPES} | MORE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_h41_a_model_made_unit_by_unit_has_the_bits_of_a_whole_build(name, dtype):
    """H41, H103: parameters and buffers, in any order of making them; random numbers go on from the same place."""
    want = build_model(CONFIGS[name], seed=3, dtype=dtype)
    state = torch.get_rng_state()
    with deferring(True) as pending:
        got = build_model(CONFIGS[name], seed=3, dtype=dtype, pending=pending)
    assert torch.equal(torch.get_rng_state(), state)
    without = [n for n, p in got.named_parameters() if p.is_meta]
    assert set(without) == {n for n, p in want.named_parameters() if p.numel() >= LARGE and p.ndim > 1}
    blocks = [m for n, m in got.named_modules() if n.rpartition(".")[2].isdigit()]
    for module in [*reversed(blocks), got]:
        pending.fill(module, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    for (n, a), (m, b) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert (n, a.dtype) == (m, b.dtype)
        assert torch.equal(a, b), n
    for (n, a), (m, b) in zip(want.named_buffers(), got.named_buffers(), strict=True):
        assert n == m
        assert torch.equal(a, b), n


def test_the_padding_row_of_an_embedding_is_zero_in_both():
    with deferring(True) as pending:
        got = build_model(MORE["opt"], seed=3, pending=pending)
    pending.fill(got, torch.device("cpu"))
    assert bool((got.get_input_embeddings().weight[7] == 0).all())


def test_another_seed_gives_other_numbers():
    with deferring(True) as pending:
        one = build_model(MORE["qwen2"], seed=3, pending=pending)
        two = build_model(MORE["qwen2"], seed=4, pending=pending)
    pending.fill(one, torch.device("cpu"))
    pending.fill(two, torch.device("cpu"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one.get_parameter(name), two.get_parameter(name))


def test_adapters_and_spread_experts_are_put_into_a_whole_model():
    spec = spec_from_config(MORE["qwen2"], "qwen2")
    assert holds_a_part(parse_layout("pp=2"), spec)
    assert holds_a_part(parse_layout("dp=2,zero=1"), spec)
    assert not holds_a_part(parse_layout("dp=2"), spec)
    assert not holds_a_part(parse_layout("dp=2,zero=3,ep=2"), spec)
    assert not holds_a_part(parse_layout("pp=2"), adapted(spec, parse_adapter("lora:4")))
