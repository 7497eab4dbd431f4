"""What the tensor axis cuts, which gradients it leaves as partial sums, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout.check import check_built
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.sharding import gradient_sum, tp_copies, tp_ranges, tp_shape
from meshwright.model.spec import ModelSpec

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
}


@pytest.fixture(name="spec")
def _spec() -> ModelSpec:
    return spec_from_config(CONFIG, "small")


def test_every_element_is_held_by_as_many_ranks_as_there_are_copies(spec: ModelSpec) -> None:
    for tp in (1, 2, 4):
        for tensor in spec.tensors():
            held = 0
            for index in range(tp):
                product = 1
                for size in tp_shape(tensor, tp, index, spec.attention):
                    product *= size
                held += product
            assert held == tensor.numel * tp_copies(tensor, tp, spec.attention), (tensor.name, tp)


def test_heads_and_vocabulary_rows_are_cut_as_said(spec: ModelSpec) -> None:
    tensors = {t.name: t for t in spec.tensors()}
    key = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert [tp_ranges(key, 4, i, spec.attention) for i in range(4)] == [((0, 8),)] * 2 + [((8, 8),)] * 2
    head = tensors["lm_head.weight"]
    assert [tp_ranges(head, 4, i, spec.attention)[0] for i in range(4)] == [
        (0, 17),
        (17, 17),
        (34, 17),
        (51, 16),
    ]


def test_partial_gradients(spec: ModelSpec) -> None:
    tensors = {t.name.removeprefix("model.layers.0."): t for t in spec.tensors()}

    def sums(tp: int, sp: bool) -> dict[str, str]:
        return {n: s for n, t in tensors.items() if (s := gradient_sum(t, tp, sp, spec.attention))}

    heads = {"self_attn.q_norm.weight": "all", "self_attn.k_norm.weight": "all"}
    assert sums(1, False) == {}
    assert sums(2, False) == heads
    copies = {"self_attn.k_proj.weight": "heads", "self_attn.v_proj.weight": "heads"}
    assert sums(4, False) == heads | copies
    assert {"input_layernorm.weight", "post_attention_layernorm.weight"} <= sums(2, True).keys()


def test_what_the_axis_cannot_cut_is_refused(spec: ModelSpec) -> None:
    layout = parse_layout("tp=4,kv_heads=replicate")
    assert check_built(layout, spec) == []
    for wrong in (
        replace(spec, family="another"),
        replace(spec, vocab_size=9),
    ):
        assert [p.code for p in check_built(layout, wrong)] == ["E253"]
    assert check_built(parse_layout("tp=1"), replace(spec, family="another", dropout=0.1)) == []
