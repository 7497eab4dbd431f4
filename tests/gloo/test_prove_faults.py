"""The tester is tested: planted mistakes must be found, and named."""

from __future__ import annotations

import pytest
import torch
from proofs import SMALL, prove

from meshwright.parallel.tied import local

pytestmark = pytest.mark.gloo


def divided_by_dp(model, step):
    model.scale_gradients(0.5)


def summed_twice(model, step):
    model.scale_gradients(2.0)


def quarter(model, step):
    model.scale_gradients(0.25)


def drop_one(model, step):
    name = "model.layers.1.mlp.up_proj.weight"
    if name in model.params:
        local(model.params[name].grad).zero_()


def swap_block(model, step):
    name = "model.layers.3.self_attn.q_proj.weight"
    if name in model.params:
        grad = local(model.params[name].grad)
        grad.copy_(grad.flip(0))


def only_norms_doubled(model, step):
    for name, p in model.params.items():
        if name.endswith("model.norm.weight") and p.grad is not None:
            local(p.grad).mul_(2.0)


def nan_on_rank_one(model, step):
    if model.view.rank == 1 and step == 1:
        next(iter(model.params.values())).grad.view(-1)[0] = float("nan")


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_a_mean_over_dp_is_recognised(pool, layout):
    """H5, H19: gradients divided once too often."""
    result = prove(pool, layout, config=SMALL, steps=1, fault=divided_by_dp, global_batch=4)
    assert not result["passed"]
    assert result["sentinel"]["factor"] == pytest.approx(0.5)
    assert "divided by dp" in result["sentinel"]["cause"]


def test_a_mean_over_micro_batches_is_recognised(pool):
    """H5: accumulation 4, one division too many."""
    result = prove(pool, "dp=1", config=SMALL, steps=1, fault=quarter, global_batch=4)
    assert result["sentinel"]["factor"] == pytest.approx(0.25)
    assert "micro-batches" in result["sentinel"]["cause"]


def test_a_factor_on_a_pipeline_is_recognised(pool):
    result = prove(pool, "pp=2", config=SMALL, steps=1, fault=summed_twice, global_batch=3)
    assert result["sentinel"]["factor"] == pytest.approx(2.0)
    assert "pp" in result["sentinel"]["cause"]


def test_a_lost_gradient_is_named(pool):
    result = prove(pool, "dp=2,pp=2", config=SMALL, steps=1, fault=drop_one)
    assert not result["passed"]
    assert result["gradients"]["worst"]["tensor"] == "model.layers.1.mlp.up_proj.weight"
    assert result["gradients"]["max_rel_diff"] == pytest.approx(1.0)
    assert result["sentinel"] is None


def test_rows_in_the_wrong_place_are_named(pool):
    result = prove(pool, "dp=2,zero=3", config=SMALL, steps=1, fault=swap_block)
    assert not result["passed"]
    assert result["gradients"]["worst"]["tensor"] == "model.layers.3.self_attn.q_proj.weight"


def test_a_factor_on_one_tensor_is_found_there(pool):
    """H34: a norm summed twice while all else is right."""
    result = prove(pool, "dp=2,zero=1", config=SMALL, steps=1, fault=only_norms_doubled)
    assert result["sentinel"]["factor"] == pytest.approx(2.0)
    assert result["sentinel"]["tensors"] == "model.norm.weight"


def test_nan_on_one_rank_is_skipped_by_all(pool):
    """H33: all ranks skip the step alike, and the proof says the gradients are not finite."""
    result = prove(pool, "dp=2", config=SMALL, steps=2, fault=nan_on_rank_one)
    assert not result["passed"]
    assert result["gradients"]["max_rel_diff"] == float("inf")
    assert result["gradients"]["worst"]["step"] == 2


def test_faults_leave_other_proofs_alone(pool):
    result = prove(pool, "dp=2", config=SMALL, steps=1)
    assert result["passed"]
    assert torch.isfinite(torch.tensor(result["gradients"]["max_rel_diff"]))


def unreached(model, step):
    if model.view.rank == 0:
        model.engines[0].reached.discard(id(model.params["model.norm.weight"]))


def test_h111_a_parameter_that_no_backward_reached_fails_the_proof(pool):
    """H111: with replicated parameters too, where its gradient exists and is zero."""
    result = prove(pool, "dp=2", config=SMALL, steps=1, fault=unreached)
    assert not result["passed"]
    assert result["gradients"]["missing"] == ["model.norm.weight"]
