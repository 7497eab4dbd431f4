"""What a run writes down: one JSON line a step, no NaN in JSON, a readable line, TensorBoard where installed."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest

from meshwright.train.metrics import RunLog
from meshwright.train.optim import Rate


def record(step: int, loss: float = 1.5):
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_s": 1234.5,
        "memory_bytes": {"parameters": 2**20, "gradients": 2**20, "optimizer": 2**21, "peak": 2**23},
    }


def test_files_are_append_only_json_lines(tmp_path, capsys):
    for _ in range(2):
        log = RunLog(tmp_path, writes=True, total_steps=2)
        log.step(record(1))
        log.step(record(2, math.nan))
        log.event("end", step=2)
        log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["loss"] for x in lines] == [1.5, None, 1.5, None]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2
    shown = capsys.readouterr().out
    assert "step 1/2  loss 1.5000" in shown
    assert "8.00 MiB/rank" in shown


def test_other_ranks_write_and_show_nothing(tmp_path, capsys):
    log = RunLog(tmp_path, writes=False, total_steps=2)
    log.step(record(1))
    log.event("x")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_the_scalars_where_it_is_installed(tmp_path, monkeypatch):
    got = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            got.append(folder)

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            got.append((tag, value, step))

        def close(self) -> None:
            got.append("closed")

    module = types.ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    package = types.ModuleType("torch.utils.tensorboard")
    package.writer = module
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "meshwright.train.metrics.importlib.util.find_spec",
        lambda name, *rest: object() if name == "tensorboard" else real(name, *rest),
    )
    log = RunLog(tmp_path, writes=True, total_steps=1)
    log.step(record(1))
    log.close()
    assert got[0] == str(tmp_path / "tensorboard")
    assert ("loss", 1.5, 1) in got
    assert got[-1] == "closed"


@pytest.mark.parametrize(
    ("name", "step", "want"),
    [
        ("cosine", 5, 0.5),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.55),
        ("cosine", 110, 0.1),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("constant", 110, 1.0),
        ("cosine", 500, 0.1),
    ],
)
def test_rate_of_a_step(name, step, want):
    rate = Rate(name=name, peak=1.0, warmup_steps=10, total_steps=110, min_ratio=0.1)
    assert rate.rate(step) == pytest.approx(want)
