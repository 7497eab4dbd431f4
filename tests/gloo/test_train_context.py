"""Training runs over the context axis: losses, evaluation, and checkpoints that other degrees go on from."""

from __future__ import annotations

import json

import pytest
from test_train_runs import CONFIG, Job
from test_train_tensor import GPT2

pytestmark = pytest.mark.gloo


def _equal(job: Job, name: str) -> None:
    for want, got in zip(job.metrics("whole"), job.metrics(name), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-10), want["step"]
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-9)
        assert got["valid_tokens"] == want["valid_tokens"]
        if "eval_loss" in want and "eval_loss" in got:
            assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-10)


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(GPT2, marks=pytest.mark.slow)], ids=lambda c: c["model_type"]
)
def test_resume_over_context_degrees_goes_on_as_if_unbroken(tmp_path, monkeypatch, config):
    """One device -> ring of two -> four under ZeRO-3 -> Ulysses in a pipeline -> one device."""
    job = Job(tmp_path, monkeypatch)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    job.run("dp=1,precision=fp64", "whole")
    job.run("cp=2,precision=fp64", "ring")
    _equal(job, "ring")
    job.run("dp=1,precision=fp64", "broken", stop_at_step=1)
    job.run("cp=2,precision=fp64", "broken", resume=True, stop_at_step=2)
    job.run("cp=4,zero=3,precision=fp64", "broken", resume=True, stop_at_step=3)
    job.run("cp=2,cp_style=ulysses,pp=2,zero=1,precision=fp64", "broken", resume=True, stop_at_step=4)
    job.run("dp=1,precision=fp64", "broken", resume=True)
    _equal(job, "broken")
