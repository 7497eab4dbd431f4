"""Weights out of torch's own distributed checkpoints: found behind a prefix, bit for bit, without running a pickle."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_runs import LLAMA, TIED, Run
from meshwright.base.errors import MeshwrightError
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.build import build_model
from meshwright.train.weights import load_pretrained


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(LLAMA, seed=4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_a_torch_checkpoint_of_an_fsdp_run_is_read(model: Any, tmp_path: Path, prefix: str) -> None:
    """As FSDP users save it: model and optimizer by name, objects beside tensors; the objects are never read."""
    state: dict[str, Any] = {prefix + n: t for n, t in model.state_dict().items()}
    state |= {f"optim.state.{n}.exp_avg": torch.zeros_like(t) for n, t in model.state_dict().items()}
    state["step"] = {"number": 7}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    weights = load_pretrained(str(tmp_path / "theirs"), spec_from_config(LLAMA, "small"), tmp_path)
    made = build_model(LLAMA, seed=9, weights=weights)
    for (name, want), got in zip(model.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(want, got), name
    assert len(weights.left_out) == len(model.state_dict()) + 1


def test_a_checkpoint_of_a_run_gives_its_weights_to_another(tmp_path: Path) -> None:
    run = Run(0, TIED, "precision=fp32", seed=1)
    run.train(1, 1)
    path = run.save(tmp_path / "checkpoints", 1)
    weights = load_pretrained(str(path), spec_from_config(TIED, "small"), tmp_path)
    made = dict(build_model(TIED, seed=9, weights=weights).named_parameters())
    assert all(torch.equal(made[n], p) for n, p in run.model.params.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "theirs", no_dist=True)
    for changes, code in (({"num_hidden_layers": 4}, "E621"), ({"intermediate_size": 30}, "E623")):
        with pytest.raises(MeshwrightError, match=code):
            load_pretrained(str(tmp_path / "theirs"), spec_from_config(LLAMA | changes, "small"), tmp_path)


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_strangers_index_and_object_run_nothing(model: Any, tmp_path: Path) -> None:
    """A crafted object in the files is never read; a crafted index is refused (E710) before anything is called."""
    marker = tmp_path / "executed"
    state = dict(model.state_dict()) | {"object": Marker(marker)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    spec = spec_from_config(LLAMA, "small")
    build_model(LLAMA, seed=9, weights=load_pretrained(str(tmp_path / "theirs"), spec, tmp_path))
    assert not marker.exists()
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps({"a": Marker(marker)}))
    with pytest.raises(MeshwrightError, match="E710"):
        load_pretrained(str(tmp_path / "theirs"), spec, tmp_path)
    assert not marker.exists()
