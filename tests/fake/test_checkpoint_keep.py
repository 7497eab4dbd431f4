"""Checkpoints beside the training, and which of them stay: one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_runs import LLAMA, Run
from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.agree import Ranks
from meshwright.checkpoint.background import BackgroundWriter
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.manifest import MODEL
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.checkpoint.retain import Retention, kept_steps, retain
from meshwright.checkpoint.save import capture


def start(writer: BackgroundWriter, run: Run, folder: Path, step: int, **facts: Any) -> None:
    writer.start(
        folder=folder,
        step=step,
        captured=capture(run.model.params, run.optimizer, run.tied),
        extra={"step": step} | facts,
        manifest={},
        after=lambda path: None,
    )


def test_h124_a_background_save_writes_the_values_of_its_step(tmp_path: Path) -> None:
    """H124: the weights are zeroed right after the call returns; the file holds the old values and step, twice."""
    run = Run(0, LLAMA, "precision=fp32", seed=1)
    run.train(1, 1)
    writer = BackgroundWriter(Ranks(0, 1))
    for step in (1, 2):  # the second one reuses the memory of the first
        want = {n: p.detach().clone() for n, p in run.model.params.items()}
        start(writer, run, tmp_path, step)
        with torch.no_grad():
            for p in run.model.params.values():
                p.zero_()
        writer.wait()
        path, _ = latest_checkpoint(tmp_path)
        assert path == tmp_path / f"step-{step}"
        assert json.loads((path / "manifest.json").read_text())["step"] == step
        index = read_index(path)
        for name, tensor in want.items():
            assert torch.equal(read_tensor(path, index, f"{MODEL}{name}"), tensor), name
        with torch.no_grad():
            for name, p in run.model.params.items():
                p.copy_(want[name] + 1.0)


def test_an_error_beside_the_training_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    run = Run(0, LLAMA, "precision=fp32", seed=1)
    (tmp_path / "file").write_text("no folder")
    writer = BackgroundWriter(Ranks(0, 1))
    start(writer, run, tmp_path / "file", 1)
    with pytest.raises(MeshwrightError, match="E703"):
        writer.wait()
    start(writer, run, tmp_path / "folder", 1)
    writer.wait()
    assert latest_checkpoint(tmp_path / "folder")[0] is not None


def test_h125_the_newest_two_and_the_best_stay(tmp_path: Path) -> None:
    """H125: keep 2 of 5 plus the best (step 1): 1, 4 and 5 are left, whole; an unfinished folder is not touched."""
    run = Run(0, LLAMA, "precision=fp32", seed=1)
    writer = BackgroundWriter(Ranks(0, 1))
    for step, loss in enumerate((0.5, 0.9, 0.8, None, 0.7), 1):
        start(writer, run, tmp_path, step, eval_loss=loss)
    writer.wait()
    (tmp_path / "step-3" / "manifest.json").rename(tmp_path / "kept.json")
    assert retain(tmp_path, Retention(last=2, best=True)) == [2]
    (tmp_path / "kept.json").rename(tmp_path / "step-3" / "manifest.json")
    assert retain(tmp_path, Retention(last=2, best=True)) == [3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-4", "step-5"]
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-5", [])
    assert retain(tmp_path, Retention()) == []


@given(
    losses=st.dictionaries(st.integers(1, 40), st.none() | st.floats(0, 9), min_size=1),
    last=st.integers(1, 5),
    every=st.integers(0, 5),
    best=st.booleans(),
)
def test_what_is_kept(losses: dict[int, float | None], last: int, every: int, best: bool) -> None:
    kept = kept_steps(losses, Retention(last=last, every=every, best=best))
    assert kept <= set(losses)
    assert max(losses) in kept
    assert set(sorted(losses)[-last:]) <= kept
    assert {s for s in losses if every and s % every == 0} <= kept
    known = {s: v for s, v in losses.items() if v is not None}
    if best and known:
        assert min(known.values()) in {known.get(s) for s in kept}
