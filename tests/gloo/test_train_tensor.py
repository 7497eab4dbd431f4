"""Training runs over the tensor axis: losses, and checkpoints that other layouts go on from."""

from __future__ import annotations

import json

import pytest
from test_train_runs import CONFIG, Job

from family_configs import PHI3

pytestmark = pytest.mark.gloo

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 301,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"vocab_size": 301},
        pytest.param(GPT2, marks=pytest.mark.slow),
        pytest.param(PHI3 | {"vocab_size": 301}, marks=pytest.mark.slow),
    ],
    ids=lambda c: c["model_type"],
)
def test_resume_over_tensor_layouts_goes_on_as_if_unbroken(tmp_path, monkeypatch, config):
    """H41, H43, H135: one device -> ZeRO-3 x tp -> tp -> one device, odd vocabulary, fused q|k|v and gate|up, tied."""
    job = Job(tmp_path, monkeypatch)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    job.run("dp=1,precision=fp64", "whole")
    job.run("dp=1,precision=fp64", "broken", stop_at_step=1)
    job.run("dp=2,zero=3,tp=2,precision=fp64", "broken", resume=True, stop_at_step=2)
    job.run("tp=2,sp=off,precision=fp64", "broken", resume=True, stop_at_step=4)
    job.run("dp=1,precision=fp64", "broken", resume=True)
    for want, got in zip(job.metrics("whole"), job.metrics("broken"), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-10), want["step"]
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-9)
        if "eval_loss" in want and "eval_loss" in got:
            assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-10)
