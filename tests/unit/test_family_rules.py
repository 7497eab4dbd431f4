"""What is particular to single families in the rules: what is refused of them, and how they are cut."""

from __future__ import annotations

from typing import Any

import pytest

from family_configs import NEWER
from meshwright.base.errors import MeshwrightError
from meshwright.layout.check import check_built
from meshwright.layout.parse import parse_layout
from meshwright.model.activations import always_unfused
from meshwright.model.adapters import adapted, parse_adapter
from meshwright.model.read_hf import spec_from_config
from meshwright.model.sharding import gradient_sum, rule, tp_copies, tp_local_shape, tp_ranges, tp_shape
from meshwright.model.spec import AdapterSpec, ModelSpec, TensorSpec
from meshwright.orchestrate.data_rules import packing_problems


def model(name: str, **changed: Any) -> ModelSpec:
    return spec_from_config(NEWER[name] | changed, name)


def tensor(spec: ModelSpec, end: str) -> TensorSpec:
    return next(t for t in spec.blocks[0].tensors if t.name.endswith(end))


@pytest.mark.parametrize(
    ("name", "layout", "code", "says"),
    [
        ("stablelm-parallel", "tp=2", "E253", "qk_layernorm"),
        ("falcon-alibi", "tp=2", "E253", "alibi"),
        ("falcon-multi-query", "tp=2,kv_heads=replicate", "E253", "1 key/value heads"),
        ("falcon", "tp=4,kv_heads=replicate", "E253", "2 key/value heads"),
        ("falcon", "cp=2", "E260", "falcon"),
        ("falcon-serial", "cp=2", "E260", "falcon"),
    ],
)
def test_an_axis_that_is_not_built_is_refused_and_its_neighbour_is_not(
    name: str, layout: str, code: str, says: str
) -> None:
    (found,) = check_built(parse_layout(layout), model(name))
    assert (found.code, found.kind.value) == (code, "code")
    assert says in found.found
    assert found.do
    for beside in ("dp=2,zero=3", "pp=2,schedule=zbv,chunks=2"):
        assert check_built(parse_layout(beside), model(name)) == []


def test_beside_what_is_refused() -> None:
    for name, layout in (
        ("stablelm", "tp=2,cp=2"),
        ("falcon", "tp=2"),
        ("falcon-serial", "tp=4"),
        ("gpt_oss", "dp=2,ep=2,tp=4,kv_heads=replicate,cp=2"),
        ("cohere-norms", "tp=4,kv_heads=replicate"),
    ):
        assert check_built(parse_layout(layout), model(name)) == [], name


def test_documents_of_gpt_oss_are_not_packed() -> None:
    (found,) = packing_problems(model("gpt_oss"), "data.rows")
    assert found.code == "E654"
    for name in ("qwen2_moe", "glm4", "glm4_moe", "cohere2", "stablelm", "phi", "falcon", "seed_oss"):
        assert packing_problems(model(name), "data.rows") == []


@pytest.mark.parametrize("target", ["experts", "down_proj", "experts.gate_up_proj"])
def test_adapters_beside_experts_stored_the_other_way_round(target: str) -> None:
    lora = AdapterSpec(kind="lora", rank=2, alpha=4.0, targets=("q_proj", target))
    with pytest.raises(MeshwrightError) as error:
        adapted(model("gpt_oss"), lora)
    assert [p.code for p in error.value.problems] == ["E292"]
    assert "q_proj" in error.value.problems[0].do
    attention = adapted(model("gpt_oss"), parse_adapter("lora:2"))
    names = {t.name.split(".")[-3] for t in attention.tensors() if t.role == "adapter"}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_gate_and_up_that_alternate_are_cut_in_pairs() -> None:
    spec = model("gpt_oss", intermediate_size=5)
    matrix, bias = tensor(spec, "experts.gate_up_proj"), tensor(spec, "gate_up_proj_bias")
    assert (rule(matrix).tp_dim, rule(bias).tp_dim, rule(matrix).ep_dim) == (2, 1, 0)
    assert [tp_ranges(matrix, 2, i, spec.attention) for i in (0, 1)] == [((0, 6),), ((6, 4),)]
    assert tp_ranges(bias, 2, 1, spec.attention) == ((6, 4),)
    assert tp_local_shape(matrix, 2, spec.attention) == (4, 32, 6)
    down = tensor(spec, "experts.down_proj")
    assert (rule(down).cut, tp_shape(down, 2, 0, spec.attention)) == ("row", (4, 3, 32))


def test_whose_gradients_are_sums_over_the_tensor_axis() -> None:
    def sums(name: str, sp: bool = False) -> set[str]:
        spec = model(name)
        return {
            t.name.removeprefix("model.layers.0.")
            for t in spec.blocks[0].tensors
            if gradient_sum(t, 2, sp, spec.attention)
        }

    assert sums("gpt_oss") == {"mlp.router.weight", "mlp.router.bias", "mlp.experts.down_proj_bias"}
    assert sums("qwen2_moe") == {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    assert sums("glm4_moe") == {
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }  # its first layer is dense
    assert sums("cohere-norms") == set()  # a head's norm is with the head
    assert sums("cohere-norms", sp=True) == {"self_attn.o_proj.bias", "input_layernorm.weight"}


def test_norms_and_sinks_of_single_heads_go_with_them() -> None:
    spec = model("cohere-norms")
    norm = tensor(spec, "k_norm.weight")
    assert tp_copies(norm, 4, spec.attention) == 2
    assert [tp_ranges(norm, 4, i, spec.attention) for i in range(4)] == [((0, 1),)] * 2 + [((1, 1),)] * 2
    assert tp_local_shape(norm, 4, spec.attention, "replicate") == (1, 8)
    oss = model("gpt_oss")
    assert tp_shape(tensor(oss, "sinks"), 4, 3, oss.attention) == (1,)


def test_one_norm_before_both() -> None:
    for name, shared in (("cohere", True), ("phi", True), ("falcon-one-norm", True), ("falcon", False)):
        block = model(name).blocks[0]
        assert block.parallel
        assert not block.ends_in_norm
        ahead = [block.norm_tensors(part) for part in ("attention", "mlp")]
        assert (ahead[0] == ahead[1]) is shared, name
    assert model("glm4").blocks[0].ends_in_norm


def test_whose_attention_no_fused_kernel_runs() -> None:
    found = [name for name in NEWER if always_unfused(model(name))]
    assert found == ["gemma2", "bloom", "gpt_oss", "falcon-multi-query"]


@pytest.mark.parametrize(
    ("name", "changed", "code"),
    [
        ("falcon", {"attention_dropout": 0.1}, "E125"),
        ("falcon", {"parallel_attn": False}, "E125"),
        ("falcon-multi-query", {"num_ln_in_parallel_attn": 2}, "E125"),
        ("falcon-serial", {"num_kv_heads": 2}, "E123"),
        ("falcon", {"num_kv_heads": 3}, "E123"),
        ("cohere", {"logit_scale": 0}, "E123"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["sliding_attention"] * 5}, "E123"),
        ("glm4_moe", {"n_shared_experts": 0}, "E125"),
    ],
)
def test_configs_that_cannot_be(name: str, changed: dict[str, Any], code: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        model(name, **changed)
    assert [p.code for p in error.value.problems] == [code]
