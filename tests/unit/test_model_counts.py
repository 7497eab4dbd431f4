"""Counts against hand-worked cases; the row of the hazard list is named where a case comes from it."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.model import catalogue
from meshwright.model.counts import (
    active_parameters,
    attended_keys,
    block_forward_flops,
    block_matmul_parameters,
    flops_per_token,
    head_forward_flops,
    matmul_parameters,
    routed_tokens_per_rank,
    saved_activation_bytes,
    saved_activations,
    saved_final_bytes,
)
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import ModelSpec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}


def tiny(**changes: Any) -> ModelSpec:
    return spec_from_config(TINY | changes, "tiny")


def test_h190_gated_matrix_gqa_and_untied_head_are_counted() -> None:
    spec = tiny()
    assert spec.num_parameters == 1112
    assert spec.num_parameters == sum(t.numel for t in spec.tensors())
    assert spec.blocks[0].num_parameters == 592
    assert tiny(tie_word_embeddings=True).num_parameters == 856
    assert tiny(num_key_value_heads=4).num_parameters == 1176


def test_h57_tied_copies_are_counted_once() -> None:
    spec = tiny(tie_word_embeddings=True)
    assert spec.num_parameters == 856
    head = spec.head[0]
    assert head.tied_to == "model.embed_tokens.weight"
    assert head.numel == 256  # what a second copy on the last stage would add
    assert sum(t.numel for t in spec.tensors()) == spec.num_parameters + 256


def test_h200_matmul_weights_with_three_matrices() -> None:
    spec = tiny()
    assert matmul_parameters(spec) == 832
    assert 6 * matmul_parameters(spec) == 4992
    assert block_matmul_parameters(spec.blocks[0]) == 192 + 384


def test_h201_causal_and_full_conventions() -> None:
    flops = flops_per_token(tiny(), 10)
    assert flops.full == 5952
    assert flops.causal == 5472


def test_h203_only_active_experts_count() -> None:
    spec = tiny(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert matmul_parameters(spec) == 192 + 768 + 32 + 256
    assert 6 * matmul_parameters(spec) == 7488
    assert flops_per_token(spec, 10).full == 7488 + 960
    assert active_parameters(spec) == spec.num_parameters - 2 * 384


def test_h89_routed_copies_are_not_divided_by_ep() -> None:
    spec = tiny(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert routed_tokens_per_rank(spec, 8) == 16
    assert routed_tokens_per_rank(tiny(), 8) == 0


def test_tied_head_is_a_matmul_and_the_embedding_gather_is_not() -> None:
    assert flops_per_token(tiny(tie_word_embeddings=True), 10) == flops_per_token(tiny(), 10)
    assert head_forward_flops(tiny()) == 2 * 32 * 8


def test_published_active_parameters() -> None:
    """Mixtral 12.9B, DeepSeek-V2 21B, Qwen3-235B-A22B 22B, V3 37B (which leaves the embedding out)."""
    assert active_parameters(read_model("mixtral-8x7b")) == pytest.approx(12.9e9, abs=0.05e9)
    assert active_parameters(read_model("deepseek-v2")) == pytest.approx(21e9, abs=0.5e9)
    assert active_parameters(read_model("qwen3-235b-a22b")) == pytest.approx(22e9, abs=0.5e9)
    v3 = read_model("deepseek-v3")
    assert active_parameters(v3) - v3.embedding[0].numel == pytest.approx(37e9, abs=0.5e9)


def test_classic_gpt_formula() -> None:
    """72 * tokens * L * h^2 * (1 + s/(6h) + V/(12 h L)), Narayanan et al. 2021, without the recompute factor."""
    spec = read_model("megatron-145b")
    s, h, layers, vocab = 2048, 12288, 80, 51200
    formula = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert flops_per_token(spec, s).full == pytest.approx(formula, rel=1e-12)


def test_full_convention_is_an_eighth_larger_for_llama_3_8b_at_8192() -> None:
    """cost-model notes, section 2.2."""
    flops = flops_per_token(read_model("llama-3-8b"), 8192)
    assert flops.full / flops.causal == pytest.approx(1.125, abs=0.001)


def test_latent_attention_counts_its_own_head_sizes() -> None:
    spec = read_model("deepseek-v3")
    block = spec.blocks[0]
    scores = block_forward_flops(spec, block, 1000, "full") - 2 * block_matmul_parameters(block)
    assert scores == 2 * 128 * (192 + 128) * 1000


def test_sliding_windows_bound_the_keys() -> None:
    spec = read_model("gemma-2-2b")
    inside, whole = spec.blocks[0], spec.blocks[1]
    assert inside.sliding_window == 4096
    assert attended_keys(whole, 8192, "full") == 8192
    assert attended_keys(inside, 8192, "full") == 4096
    assert attended_keys(inside, 8192, "causal") == 4096 - 4096 * 4096 / (2 * 8192)
    assert attended_keys(inside, 4096, "causal") == attended_keys(whole, 4096, "causal") == 2048
    exact = sum(min(i + 1, 4096) for i in range(8192)) / 8192
    assert attended_keys(inside, 8192, "causal") == pytest.approx(exact, rel=1e-3)


def test_saved_bytes_scale_with_tokens() -> None:
    spec = read_model("llama-3-8b")
    one = saved_activation_bytes(spec, spec.blocks[0], 1024, 1, 2)
    assert saved_activation_bytes(spec, spec.blocks[0], 2048, 1, 2) == 2 * one
    assert saved_activation_bytes(spec, spec.blocks[0], 1024, 3, 2) == 3 * one
    listed = saved_activations(spec, spec.blocks[0], 1024, 1, 2)
    assert sum(row.num_bytes for row in listed) == one


def test_final_norm_and_head_input() -> None:
    """Per token, fp32: the norm's 8h + 4 and the head's input 4h; bf16: 4h + 4 + 2h and 2h."""
    assert saved_final_bytes(tiny(), 5, 2, 4) == 10 * (8 * 8 + 4 + 4 * 8)
    assert saved_final_bytes(tiny(), 5, 2, 2) == 10 * (4 * 8 + 4 + 2 * 8 + 2 * 8)


def test_saved_bytes_of_a_hand_worked_block() -> None:
    """Per token, fp32: two norms 8h+4 each, two inputs 4h, q and out 4*h_q, k and v 4*h_kv, lse 4a, 4 * 4f."""
    h, q, kv, a, f = 8, 8, 4, 4, 16
    by_hand = 2 * (8 * h + 4) + 2 * 4 * h + 2 * 4 * q + 2 * 4 * kv + 4 * a + 4 * 4 * f
    spec = tiny()
    assert saved_activation_bytes(spec, spec.blocks[0], 6, 1, 4) == 6 * by_hand
    rows = saved_activations(spec, spec.blocks[0], 6, 1, 4)
    assert {r.along for r in rows} == {"tp", "sequence", "column_input"}


def test_unfused_attention_keeps_the_scores() -> None:
    spec = tiny()
    flash = saved_activation_bytes(spec, spec.blocks[0], 64, 1, 4, "flash")
    math = saved_activation_bytes(spec, spec.blocks[0], 64, 1, 4, "math")
    assert math > flash + 64 * 64 * 4 * 4 - 64 * 16


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda e: e.name)
def test_catalogue_counts_agree_with_the_published_ones(entry: catalogue.ModelEntry) -> None:
    spec = read_model(entry.name)
    assert abs(spec.num_parameters - entry.published_parameters) <= entry.published_within
    assert entry.published_within <= 0.035 * entry.published_parameters
    assert len(entry.source) > 20
    assert len({t.name for t in spec.tensors()}) == len(list(spec.tensors()))


def test_catalogue_has_the_promised_models() -> None:
    names = [e.name for e in catalogue.entries()]
    assert len(names) == len(set(names)) >= 45
    wanted = """llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b
        llama-3.1-405b llama-3.2-1b llama-3.2-3b mistral-7b mixtral-8x7b mixtral-8x22b qwen2.5-0.5b qwen2.5-72b
        qwen3-0.6b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b
        gemma-3-4b gemma-3-12b gemma-3-27b phi-3-mini phi-3-medium gpt2 gpt2-medium gpt2-large gpt2-xl
        gpt-3-175b opt-6.7b opt-13b opt-66b bloom-7b1 bloom-176b megatron-22b megatron-175b megatron-530b
        megatron-1t deepseek-v2 deepseek-v2-lite deepseek-v3 smollm2-135m smollm2-360m smollm2-1.7b
        tinyllama-1.1b"""
    assert set(wanted.split()) <= set(names)
