"""How tensors are cut by the tensor and expert axes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.model import catalogue
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.sharding import (
    Boundary,
    block_boundaries,
    local_parameters,
    rule,
    segment_sizes,
    sharding_table,
    tp_local_shape,
)
from meshwright.model.spec import TensorSpec

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
}


def named(model: str, ending: str) -> TensorSpec:
    return next(t for t in read_model(model).tensors() if t.name.endswith(ending))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_h186_norms_are_whole_on_every_rank(tp: int) -> None:
    spec = spec_from_config(TINY, "tiny")
    norms = [t for t in spec.tensors() if t.role == "norm"]
    assert sum(prod(tp_local_shape(t, tp, spec.attention)) for t in norms) == 2 * 2 * 8 + 8 == 40
    assert set(sharding_table(spec).replicated()) == {t.name for t in norms}


@pytest.mark.parametrize(
    ("model", "ending", "cut", "dim", "local"),
    [
        ("llama-3-8b", "q_proj.weight", "column", 0, (1024, 4096)),
        ("llama-3-8b", "k_proj.weight", "column", 0, (256, 4096)),
        ("llama-3-8b", "o_proj.weight", "row", 1, (4096, 1024)),
        ("llama-3-8b", "up_proj.weight", "column", 0, (3584, 4096)),
        ("llama-3-8b", "down_proj.weight", "row", 1, (4096, 3584)),
        ("llama-3-8b", "embed_tokens.weight", "vocab", 0, (32064, 4096)),
        ("llama-3-8b", "lm_head.weight", "vocab", 0, (32064, 4096)),
        ("gpt2", "c_attn.weight", "column", 1, (768, 576)),
        ("gpt2", "c_attn.bias", "column", 0, (576,)),
        ("gpt2", "attn.c_proj.weight", "row", 0, (192, 768)),
        ("gpt2", "attn.c_proj.bias", "replicated", None, (768,)),
        ("gpt2", "mlp.c_fc.bias", "column", 0, (768,)),
        ("gpt2", "wpe.weight", "replicated", None, (1024, 768)),
        ("qwen3-8b", "q_norm.weight", "replicated", None, (128,)),
        ("bloom-7b1", "query_key_value.weight", "column", 0, (3072, 4096)),
        ("mixtral-8x7b", "mlp.gate.weight", "replicated", None, (8, 4096)),
        ("mixtral-8x7b", "experts.gate_up_proj", "column", 1, (8, 7168, 4096)),
        ("mixtral-8x7b", "experts.down_proj", "row", 2, (8, 4096, 3584)),
        ("deepseek-v3", "q_a_proj.weight", "replicated", None, (1536, 7168)),
        ("deepseek-v3", "q_b_proj.weight", "column", 0, (6144, 1536)),
        ("deepseek-v3", "kv_a_proj_with_mqa.weight", "replicated", None, (576, 7168)),
        ("deepseek-v3", "kv_b_proj.weight", "column", 0, (8192, 512)),
        ("deepseek-v3", "o_proj.weight", "row", 1, (7168, 4096)),
        ("deepseek-v3", "shared_experts.down_proj.weight", "row", 1, (7168, 512)),
    ],
)
def test_cuts_at_tp_4(model: str, ending: str, cut: str, dim: int | None, local: tuple[int, ...]) -> None:
    tensor = named(model, ending)
    found = rule(tensor)
    assert (found.cut, found.tp_dim) == (cut, dim)
    assert tp_local_shape(tensor, 4, read_model(model).attention) == local


def test_fused_tensors_are_cut_part_by_part() -> None:
    spec = read_model("phi-3-medium")
    qkv = named("phi-3-medium", "qkv_proj.weight")
    assert segment_sizes(qkv, spec.attention) == (5120, 1280, 1280)
    assert tp_local_shape(qkv, 20, spec.attention, "replicate")[0] == 256 + 128 + 128
    gate_up = named("phi-3-medium", "gate_up_proj.weight")
    assert segment_sizes(gate_up, spec.attention) == (17920, 17920)
    c_attn = named("gpt2", "c_attn.weight")
    assert segment_sizes(c_attn, read_model("gpt2").attention) == (768, 768, 768)
    assert segment_sizes(named("gpt2", "ln_1.weight"), read_model("gpt2").attention) == ()


def test_key_value_heads_are_replicated_only_on_request() -> None:
    attention = read_model("llama-3-8b").attention
    k = named("llama-3-8b", "k_proj.weight")
    assert tp_local_shape(k, 16, attention, "replicate") == (128, 4096)
    assert tp_local_shape(k, 16, attention, "split") == (64, 4096)
    assert tp_local_shape(k, 8, attention, "replicate") == (128, 4096)


def test_experts_are_cut_by_the_expert_axis_only() -> None:
    spec = read_model("mixtral-8x7b")
    stack = named("mixtral-8x7b", "experts.gate_up_proj")
    assert rule(stack).ep_dim == 0
    assert tp_local_shape(stack, 1, spec.attention, ep=4) == (2, 28672, 4096)
    cut = {t.role for t in spec.tensors() if rule(t).ep_dim is not None}
    assert cut == {"expert_in", "expert_out"}


def test_boundaries_name_their_collectives() -> None:
    assert [b.collective for b in block_boundaries(sp=False)] == ["", "", "all_reduce", "", "all_reduce", ""]
    with_sp = [b.collective for b in block_boundaries(sp=True)]
    assert with_sp == ["", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter", ""]
    assert Boundary(place="", before="replicate", after="shard(sequence)").collective == ""


@given(
    st.sampled_from(["llama-2-7b", "gpt2-medium", "phi-3-mini", "deepseek-v2", "opt-13b", "bloom-7b1"]),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=40, deadline=None)
def test_shards_and_replicas_cover_every_tensor_exactly(model: str, tp: int) -> None:
    spec = read_model(model)
    for tensor in (*spec.embedding, *spec.blocks[-1].tensors, *spec.final, *spec.head):
        cut = rule(tensor).tp_dim is not None
        local = prod(tp_local_shape(tensor, tp, spec.attention))
        if cut and all(size % tp == 0 for size in segment_sizes(tensor, spec.attention)):
            assert local * tp == tensor.numel
        elif not cut:
            assert local == tensor.numel
        else:
            assert local * tp >= tensor.numel


def test_whole_model_on_one_rank_is_the_whole_model() -> None:
    for entry in catalogue.entries():
        spec = read_model(entry.name)
        assert local_parameters(spec, 1) == spec.num_parameters
