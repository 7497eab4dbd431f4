"""Units of a stage: every tensor once, tied heads, frozen names, padding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.units import (
    frozen_names,
    padded_numel,
    shard_numel,
    stage_units,
    tied_tensor,
)


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
    return spec_from_config(config | changes, "small")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cut", ["6", "3/3", "1/2/2/1"])
def test_every_tensor_is_in_one_unit(tied: bool, cut: str) -> None:
    spec = llama(tie_word_embeddings=tied)
    stages = cut.count("/") + 1
    layout = parse_layout(f"pp={stages},cut={cut}")
    names = [t.name for s in range(stages) for u in stage_units(spec, layout, s) for t in u.tensors]
    assert len(set(names)) == len(names)
    real = {t.name for t in spec.tensors() if t.tied_to is None}
    copies = {"lm_head.weight"} if tied and stages > 1 else set()
    assert set(names) == real | copies
    assert all(stage_units(spec, layout, s)[0].name == "root" for s in range(stages))


def test_unit_names_are_global_layers() -> None:
    layout = parse_layout("pp=2,cut=4/2")
    assert [u.name for u in stage_units(llama(), layout, 1)] == ["root", "block 4", "block 5"]


def test_a_middle_stage_has_an_empty_root() -> None:
    root = stage_units(llama(), parse_layout("pp=3,cut=2/2/2"), 1)[0]
    assert (root.tensors, root.numel) == ((), 0)


@pytest.mark.parametrize("pattern", ["model.embed_tokens.weight", "lm_head.*", "*embed*"])
def test_tied_tensors_freeze_together(pattern: str) -> None:
    spec = llama(tie_word_embeddings=True)
    assert frozen_names(spec, (pattern,)) == {"model.embed_tokens.weight", "lm_head.weight"}
    layout = parse_layout("pp=2,cut=3/3")
    first, last = (stage_units(spec, layout, s, (pattern,))[0] for s in (0, 1))
    assert first.trainable == (False,)
    assert first.trainable_numel == 0
    assert {t.name: ok for t, ok in zip(last.tensors, last.trainable, strict=True)} == {
        "model.norm.weight": True,
        "lm_head.weight": False,
    }


def test_tied_tensor() -> None:
    found = tied_tensor(llama(tie_word_embeddings=True))
    assert found is not None
    assert found.name == "model.embed_tokens.weight"
    assert tied_tensor(llama()) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 12))
def test_shards_sum_to_the_tensor_and_fit_the_padding(shape: list[int], n: int) -> None:
    shards = [shard_numel(shape, n, i) for i in range(n)]
    whole = padded_numel(shape, 1)
    assert sum(shards) == whole
    assert padded_numel(shape, n) == n * shards[0] >= whole
    assert shards == sorted(shards, reverse=True)
