"""Stages of an unchanged model, run one after another in one process, equal the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from family_configs import LATER, NEWER
from meshwright.layout.built import PIPELINE_FAMILIES
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.build import build_model
from meshwright.parallel.stage import cut_stage, logical_name, token_loss_sum

RECIPES = Path(__file__).parents[2] / "recipes" / "models"
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": {"model_type": "llama", **SMALL},
    "llama-tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 8, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", **SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 5,
        "n_head": 4,
        "vocab_size": 64,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
} | NEWER


def _whole(config):
    torch.manual_seed(0)
    model = build_model(config, seed=3, dtype=torch.float64)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(
            name,
            layers,
            marks=pytest.mark.slow if name in LATER and ("-" in name or len(layers) == 2) else (),
        )
        for name in CONFIGS
        for layers in ((2, 3), (1, 3, 1))
    ],
)
def test_stages_in_sequence_equal_the_whole_model(name, layers):
    config = CONFIGS[name]
    spec = spec_from_config(config, name)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    whole = _whole(config)
    loss = token_loss_sum(whole(input_ids=ids, use_cache=False).logits, labels)
    loss.backward()
    want = {n: p.grad for n, p in whole.named_parameters()}

    stages = [cut_stage(_whole(config), spec, layers, s, torch.float64) for s in range(len(layers))]
    x = ids
    for stage in stages[:-1]:
        x = stage(x)
    got_loss = stages[-1](x, labels)
    got_loss.backward()
    torch.testing.assert_close(got_loss, loss, rtol=1e-13, atol=1e-12)

    got: dict[str, torch.Tensor] = {}
    tied = {t.name: t.tied_to for t in spec.tensors() if t.tied_to is not None}
    seen = []
    for stage in stages:
        for n, p in stage.named_parameters():
            name_ = tied.get(logical_name(n), logical_name(n))
            seen.append(logical_name(n))
            got[name_] = got.get(name_, 0) + p.grad
    assert len(seen) == len(set(seen))
    assert got.keys() == want.keys()
    for n, g in want.items():
        torch.testing.assert_close(got[n], g, rtol=1e-11, atol=1e-12, msg=n)


def test_every_family_with_a_built_pipeline_is_tried_here():
    assert {spec_from_config(c, n).family for n, c in CONFIGS.items()} >= set(PIPELINE_FAMILIES)


def test_loss_of_a_micro_batch_without_labels_is_zero_with_zero_gradient():
    logits = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().max().item() == 0.0


def test_shipped_tiny_llama_can_be_cut_into_four_stages():
    config = json.loads((RECIPES / "tiny-llama" / "config.json").read_text())
    spec = spec_from_config(config, "tiny-llama")
    model = cut_stage(build_model(config, seed=0), spec, (2, 2, 1, 1), 1, torch.float32)
    names = [logical_name(n) for n, _ in model.named_parameters()]
    assert names[0].startswith("model.layers.2.")
    assert names[-1].startswith("model.layers.3.")
