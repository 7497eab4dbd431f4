"""Adapters as a description: tensors, what is frozen, counts, plans; no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.errors import MeshwrightError, problem
from meshwright.cluster.load import read_cluster
from meshwright.cost.pieces import make_pricer
from meshwright.cost.work import work_key
from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import adapted, base_names, leaf, parse_adapter, target_names, without_adapter
from meshwright.model.counts import flops_per_token, matmul_parameters
from meshwright.model.read_hf import read_model
from meshwright.model.spec import AdapterSpec
from meshwright.program.derive import derive, expected_ledger
from meshwright.program.make import make_plan, plan_schedule
from meshwright.program.plan import plan_spec
from meshwright.program.plan_file import plan_from_dict, plan_to_dict
from meshwright.program.step import Compute
from meshwright.program.units import frozen_names, leading_frozen, stage_units

TINY = "recipes/models/tiny-llama"
LORA = AdapterSpec(kind="lora", rank=4, alpha=8.0)


def code(error) -> str:
    return error.value.problems[0].code


def test_every_matrix_of_attention_and_feed_forward_gets_two_factors() -> None:
    spec = read_model(TINY)
    lora = adapted(spec, LORA)
    assert target_names(spec, LORA) == (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    shapes = {t.name: t.shape for t in lora.tensors()}
    for tensor in spec.tensors():
        assert shapes[tensor.name] == tensor.shape
    down = "model.layers.0.mlp.down_proj"
    out, inner = shapes[f"{down}.weight"]
    assert shapes[f"{down}.lora_A.weight"] == (4, inner)
    assert shapes[f"{down}.lora_B.weight"] == (out, 4)
    assert without_adapter(lora) == spec
    assert adapted(spec, None) is spec


def test_gpt2_stores_its_matrices_the_other_way_round() -> None:
    spec = adapted(read_model("recipes/models/tiny-gpt2"), LORA)
    shapes = {t.name: t.shape for t in spec.tensors()}
    inner, out = shapes["transformer.h.0.attn.c_attn.weight"]
    assert shapes["transformer.h.0.attn.c_attn.lora_A.weight"] == (4, inner)
    assert shapes["transformer.h.0.attn.c_attn.lora_B.weight"] == (out, 4)


def test_experts_norms_and_routers_take_none() -> None:
    spec = read_model("recipes/models/tiny-mixtral")
    assert target_names(spec, LORA) == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(MeshwrightError) as error:
        adapted(spec, replace(LORA, targets=("input_layernorm",)))
    assert code(error) == "E271"


def test_a_wrong_target_says_the_nearest() -> None:
    with pytest.raises(MeshwrightError) as error:
        adapted(read_model(TINY), replace(LORA, targets=("q_prj", "v_proj")))
    assert code(error) == "E271"
    assert "q_proj" in error.value.problems[0].do


@pytest.mark.parametrize(
    "text", ["", "lora", "lora:0", "lora:x", "dora:4", "lora:4:0", "lora:4:nan", "lora:99999999"]
)
def test_texts_that_are_no_adapter(text: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        parse_adapter(text)
    assert code(error) == "E274"


@pytest.mark.parametrize(("text", "bound"), [("lora:65537", "65,536"), ("lora:4:1e9", "1,000,000,000")])
def test_a_rank_or_alpha_that_is_too_large_says_the_bound(text: str, bound: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        parse_adapter(text)
    assert bound in error.value.problems[0].needs


def test_adapter_texts() -> None:
    assert parse_adapter("lora:4") == LORA
    assert parse_adapter("lora:4:1.5") == replace(LORA, alpha=1.5)
    assert parse_adapter("qlora:4") == replace(LORA, kind="qlora", levels="nf4", double=True)


def test_all_but_the_factors_is_frozen() -> None:
    spec = adapted(read_model(TINY), LORA)
    frozen = frozen_names(spec, ())
    assert frozen == base_names(spec)
    assert {t.name for t in spec.tensors()} - frozen == {t.name for t in spec.tensors() if "lora_" in t.name}
    units = stage_units(spec, parse_layout("dp=2,cut=4"), 0)
    assert units[0].trainable_numel == 0
    assert all(u.trainable_numel == sum(t.numel for t in u.tensors if "lora_" in t.name) for u in units)


def test_flops_leave_out_the_weight_gradients_of_the_base() -> None:
    """4 FLOPs per frozen matrix element and token in place of 6; 6 for the factors."""
    spec = read_model(TINY)
    lora = adapted(spec, LORA)
    factors = sum(t.numel for t in lora.tensors() if t.role == "adapter")
    base = matmul_parameters(spec)
    expected = flops_per_token(spec, 32).causal - 2.0 * base + 6.0 * factors
    assert flops_per_token(lora, 32).causal == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2", "pp=2,schedule=zb-h1", "tp=2"])
def test_a_step_counts_the_same_flops(layout: str) -> None:
    spec = adapted(read_model(TINY), LORA)
    plan = make_plan(spec, parse_layout(layout), 8, 32, TINY)
    total = 0.0
    for rank in range(plan.world_size):
        program = derive(spec, plan.layout, plan.batch, plan_schedule(plan.layout, plan.batch), rank)
        total += sum(op.flops for op in program.ops if isinstance(op, Compute))
    assert total == pytest.approx(flops_per_token(spec, 32).causal * 8 * 32, rel=1e-12)


def test_gradients_of_the_factors_alone_are_sent() -> None:
    spec = adapted(read_model(TINY), LORA)
    plan = make_plan(spec, parse_layout("dp=2,zero=2,precision=fp32"), 4, 32, TINY)
    program = derive(spec, plan.layout, plan.batch, plan_schedule(plan.layout, plan.batch), 0)
    lines = {line.kind: line for line in expected_ledger(program)}
    factors = sum(t.numel for t in spec.tensors() if t.role == "adapter")
    assert lines["reduce_scatter"].num_bytes == 2 * 4 * factors  # two micro-batches
    assert lines["all_gather"].num_bytes == 4 * spec.num_parameters


def test_plans_keep_the_adapter() -> None:
    spec = read_model(TINY)
    bare = make_plan(spec, parse_layout("dp=2"), 4, 32, TINY)
    plan = make_plan(adapted(spec, LORA), parse_layout("dp=2"), 4, 32, TINY)
    assert "adapter" not in plan_to_dict(bare)
    assert plan.hash != bare.hash
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan_spec(plan) == replace(adapted(spec, LORA), name=plan.model_name, source=TINY)
    other = make_plan(adapted(spec, replace(LORA, alpha=9.0)), parse_layout("dp=2"), 4, 32, TINY)
    assert other.hash != plan.hash


INT4 = {"kind": "qlora", "rank": 4, "alpha": 8.0, "targets": [], "levels": "int4", "double": True}


@pytest.mark.parametrize(
    "held", [3, {}, {"kind": "lora", "rank": "4", "alpha": 8.0, "targets": []}, {"kind": "qlora"}, INT4]
)
def test_a_plan_file_with_a_broken_adapter_is_refused(held) -> None:
    data = plan_to_dict(make_plan(adapted(read_model(TINY), LORA), parse_layout("dp=2"), 4, 32, TINY))
    with pytest.raises(MeshwrightError) as error:
        plan_from_dict({**data, "adapter": held})
    assert code(error) == "E451"


@pytest.mark.parametrize("axis", ["cp=2", "dp=2,ep=2", "cp=2,ep=2,tp=2,pp=2"])
def test_adapters_run_on_every_axis(axis: str) -> None:
    spec = adapted(read_model("recipes/models/tiny-mixtral"), LORA)
    assert make_plan(spec, parse_layout(axis), 4, 32, TINY).adapter == LORA


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("experts", ("gate_up_proj", "down_proj")),
        ("gate_up_proj", ("gate_up_proj",)),
        ("mlp.experts.down_proj", ("down_proj",)),
    ],
)
def test_experts_have_factors_of_their_own(target: str, meant: tuple[str, ...]) -> None:
    spec = read_model("recipes/models/tiny-mixtral")
    lora = adapted(spec, replace(LORA, targets=("q_proj", target)))
    assert target_names(lora, lora.adapter) == ("q_proj",)
    made = {
        t.name.rpartition(".")[2]: t for t in lora.blocks[0].tensors if t.role == "adapter" and t.of_experts
    }
    assert set(made) == {f"{name}_lora_{which}" for name in meant for which in "AB"}
    stacked = {t.name.rpartition(".")[2]: t for t in spec.blocks[0].tensors if t.of_experts}
    for name in meant:
        experts, out, inner = stacked[name].shape
        assert made[f"{name}_lora_A"].shape == (experts, 4, inner)
        assert made[f"{name}_lora_B"].shape == (experts, out, 4)
    assert without_adapter(lora) == spec


@pytest.mark.parametrize("target", ["w1", "up_proj"])
def test_half_of_a_stacked_matrix_is_refused(target: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        adapted(read_model("recipes/models/tiny-mixtral"), replace(LORA, targets=("q_proj", target)))
    assert code(error) == "E285"
    assert "experts.gate_up_proj" in error.value.problems[0].do
    with pytest.raises(MeshwrightError) as error:
        adapted(read_model(TINY), replace(LORA, targets=("experts",)))
    assert code(error) == "E271"


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,ep=2", "tp=2", "dp=2,ep=2,pp=2"])
def test_a_step_counts_the_flops_of_the_chosen_experts(layout: str) -> None:
    """2 of 4 experts a token: 6 FLOPs for each element of their factors and token, 4 for each of the frozen stack."""
    bare = read_model("recipes/models/tiny-mixtral")
    spec = adapted(bare, replace(LORA, targets=("experts",)))
    factors = sum(t.numel for t in spec.tensors() if t.role == "adapter")
    expected = flops_per_token(bare, 32).causal - 2.0 * matmul_parameters(bare) + 6.0 * factors / 2
    assert flops_per_token(spec, 32).causal == pytest.approx(expected, rel=1e-12)
    plan = make_plan(spec, parse_layout(layout), 8, 32, TINY)
    total = 0.0
    for rank in range(plan.world_size):
        program = derive(spec, plan.layout, plan.batch, plan_schedule(plan.layout, plan.batch), rank)
        total += sum(op.flops for op in program.ops if isinstance(op, Compute))
    assert total == pytest.approx(expected * 8 * 32, rel=1e-12)


def test_the_ring_sends_back_where_an_adapter_before_attention_trains() -> None:
    """With the embedding frozen, the first layer's attention has a gradient only if q, k or v has an adapter."""

    def sends(*targets: str) -> int:
        spec = adapted(read_model(TINY), replace(LORA, targets=targets))
        plan = make_plan(spec, parse_layout("cp=2"), 2, 32, TINY)
        program = derive(spec, plan.layout, plan.batch, plan_schedule(plan.layout, plan.batch), 0)
        return sum(c.kind == "send" for c in program.collectives)

    layers, steps = read_model(TINY).num_layers, 2
    assert sends("q_proj") == steps * 3 * layers
    assert sends("o_proj", "down_proj") == steps * (3 * layers - 2)


def test_blocks_that_no_gradient_reaches() -> None:
    spec = read_model(TINY)
    layout = parse_layout("dp=2,zero=3,cut=4")
    first = ("model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*")
    assert leading_frozen(spec, layout, 0, first) == 2
    assert leading_frozen(spec, layout, 0, first[1:]) == 0  # the embedding trains
    assert leading_frozen(spec, layout, 0, ("model.*",)) == 4
    assert leading_frozen(spec, parse_layout("pp=2,cut=2/2"), 1, ("model.layers.2.*", *first)) == 0
    assert leading_frozen(adapted(spec, LORA), layout, 0) == 0


def test_a_frozen_matrix_costs_no_weight_gradient() -> None:
    spec = read_model("llama-2-7b")
    cluster = read_cluster("a100-40gb-x8", 8)
    key_layout = parse_layout("dp=8,zero=3")
    full = make_pricer(spec, cluster, 2048, "bf16").block(0, work_key(key_layout))
    lora = make_pricer(adapted(spec, LORA), cluster, 2048, "bf16").block(0, work_key(key_layout))
    assert lora.backward < full.backward
    assert lora.flops < 0.75 * full.flops


@pytest.mark.parametrize("name", ["E705", "E706"])
def test_a_checkpoint_with_other_tensors_asks_for_its_adapter_too(name: str) -> None:
    assert "adapter" in problem(name, where="step-3", found="336 tensors").do


def test_names_that_peft_takes_for_experts_mean_no_other_layer() -> None:
    """A dense first layer and shared experts have gate_proj, up_proj and down_proj, which peft reads as the experts'."""
    spec = read_model("deepseek-v3")
    assert "down_proj" in {leaf(t) for t in spec.tensors() if t.role == "shared_out"}
    assert not {"gate_proj", "up_proj", "down_proj"} & set(target_names(spec, LORA))
    lora = adapted(spec, replace(LORA, targets=("down_proj",)))
    assert all(t.of_experts for t in lora.tensors() if t.role == "adapter")
