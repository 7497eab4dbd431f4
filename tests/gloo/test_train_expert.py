"""Training runs over the expert axis: losses, checkpoints that other ep go on from, export to Hugging Face."""

from __future__ import annotations

import json

import pytest
from test_train_runs import Job

from meshwright.checkpoint.export import export_command

pytestmark = pytest.mark.gloo

MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}


@pytest.fixture
def job(tmp_path, monkeypatch):
    made = Job(tmp_path, monkeypatch)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXTRAL))
    return made


def same(want, got, bound):
    assert [x["step"] for x in want] == [x["step"] for x in got]
    for one, other in zip(want, got, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=bound), one["step"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=10 * bound)
        if "eval_loss" in one and "eval_loss" in other:
            assert other["eval_loss"] == pytest.approx(one["eval_loss"], abs=bound)


def test_losses_do_not_depend_on_ep(job):
    """Six steps with accumulation, clipping, evaluation and the routers' loss, ep = 1 and 2, fp32 and fp64."""
    for precision, bound in (("fp64", 1e-10), ("fp32", 2e-5)):
        job.run(f"dp=2,precision={precision}", f"{precision}-1")
        job.run(f"dp=2,ep=2,precision={precision}", f"{precision}-2")
        same(job.metrics(f"{precision}-1"), job.metrics(f"{precision}-2"), bound)


@pytest.mark.slow
def test_resume_over_expert_layouts_goes_on_as_if_unbroken(job):
    """One device -> ep 2, ZeRO-3 -> ep 4 -> ep 2 under HSDP -> ep 2 x tp 2, ZeRO-1 -> cp 2 x pp 2: the same losses."""
    job.run("dp=1,precision=fp64", "whole")
    job.run("dp=1,precision=fp64", "broken", stop_at_step=1)
    job.run("dp=4,ep=2,zero=3,precision=fp64", "broken", resume=True, stop_at_step=2)
    job.run("dp=4,ep=4,precision=fp64", "broken", resume=True, stop_at_step=3)
    job.run("dp=4,ep=2,zero=1,shard=2,precision=fp64", "broken", resume=True, stop_at_step=4)
    job.run("dp=2,ep=2,tp=2,zero=1,precision=fp64", "broken", resume=True, stop_at_step=5)
    job.run("cp=2,pp=2,precision=fp64", "broken", resume=True)
    same(job.metrics("whole"), job.metrics("broken"), 1e-10)


def test_a_checkpoint_of_spread_experts_exports(job):
    """The exported folder is transformers' own: every expert by itself, logits those of the checkpoint."""
    job.run("dp=2,ep=2,zero=1,precision=fp32", "out")
    step = job.folder / "out" / "checkpoints" / "step-6"
    done = export_command(str(step), str(job.folder / "hub"), check_logits=True)
    assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
