"""A checkpoint is loaded under another layout: every bit of parameters and moments arrives, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_runs import ADAMW, LLAMA, SGD, TIED, Run, differing
from meshwright.checkpoint.load import load_checkpoint


def save_one(
    rank: int, world: int, folder: Path, config: dict[str, Any], layout: str, optimizer: Any, more: int
) -> dict[str, Any]:
    run = Run(rank, config, layout, seed=1, optimizer=optimizer)
    run.train(1, 2)
    path = run.save(folder, 2)
    saved = run.state()
    loss = run.train(3, 2 + more)
    return {"path": path, "saved": saved, "later": run.state(), "loss": loss}


def load_one(
    rank: int, world: int, path: Path, config: dict[str, Any], layout: str, optimizer: Any, more: int
) -> dict[str, Any]:
    run = Run(rank, config, layout, seed=2, optimizer=optimizer)
    before = {n: p.grad for n, p in run.model.params.items()}
    extra = run.load(path)
    kept = all(p.grad is before[n] for n, p in run.model.params.items())
    loaded = run.state()
    loss = run.train(3, 2 + more)
    return {"extra": extra, "loaded": loaded, "later": run.state(), "loss": loss, "gradients_kept": kept}


def whole(results: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """Return the union of what the ranks (stages) hold."""
    return {n: t for r in results for n, t in r[key].items()}


TARGETS = [
    (2, "dp=2,zero=1,precision=fp64"),
    (4, "dp=2,pp=2,zero=2,precision=fp64"),
    (4, "dp=4,zero=3,shard=2,precision=fp64"),
    (2, "pp=2,precision=fp64"),
    (1, "precision=fp64"),
]


@pytest.mark.parametrize(
    "config", [pytest.param(LLAMA, marks=pytest.mark.slow), TIED], ids=["untied", "tied"]
)
def test_h135_saved_on_four_shards_loads_under_any_layout(pool, tmp_path, config):
    """H135 (dp part), H136: bits equal after loading; the next update equals that of the unbroken run."""
    first = pool.run(save_one, 4, tmp_path, config, "dp=4,zero=3,precision=fp64", ADAMW, 1)
    path, want, later = first[0]["path"], whole(first, "saved"), whole(first, "later")
    assert path == tmp_path / "step-2"
    moments = [n for n in want if n.endswith("/exp_avg")]
    assert moments
    assert all(want[n].norm() > 0 for n in moments)
    for nproc, layout in TARGETS:
        results = pool.run(load_one, nproc, path, config, layout, ADAMW, 1)
        for result in results:
            assert result["extra"]["step"] == 2
            assert result["gradients_kept"]
            assert differing(result["loaded"], want) == [], layout
            assert result["loss"] == pytest.approx(first[0]["loss"], abs=1e-12)
        loaded = whole(results, "loaded")
        assert set(want) - set(loaded) == set(), layout
        steps = {float(t) for n, t in loaded.items() if n.endswith("/step")}
        assert steps == {2.0}, "H136: every step counter is that of the save"
        for name, tensor in whole(results, "later").items():
            at = name if name in later else name.replace("lm_head.weight", "model.embed_tokens.weight")
            assert torch.allclose(tensor, later[at], rtol=0, atol=1e-9), (layout, name)


def test_saved_on_stages_loads_on_one_rank_and_on_shards(pool, tmp_path):
    """The tied head of the last stage is a copy: it is not stored, and it is filled from the embedding."""
    first = pool.run(save_one, 4, tmp_path, TIED, "dp=2,pp=2,precision=fp32", ADAMW, 0)
    path, want = first[0]["path"], whole(first, "saved")
    keys = {t["key"] for t in json.loads((path / "manifest.json").read_text())["tensors"]}
    assert "model/model.embed_tokens.weight" in keys
    assert not any("lm_head" in key for key in keys)
    assert "lm_head.weight" in want
    for nproc, layout in (
        (1, "precision=fp32"),
        (2, "dp=2,zero=3,precision=bf16"),
        (2, "pp=2,precision=fp32"),
    ):
        results = pool.run(load_one, nproc, path, TIED, layout, ADAMW, 0)
        for result in results:
            assert differing(result["loaded"], want) == [], layout
        assert ("lm_head.weight" in whole(results, "loaded")) == ("pp=2" in layout)


def test_a_tied_pair_on_one_rank_is_stored_once(pool, tmp_path):
    """A V-shaped pipeline has embedding and head in two stages of rank 0: two parameters, one stored tensor."""
    config = TIED | {"num_hidden_layers": 4}
    first = pool.run(save_one, 2, tmp_path, config, "pp=2,schedule=zbv,precision=fp64", ADAMW, 1)
    path, want, later = first[0]["path"], whole(first, "saved"), whole(first, "later")
    keys = {t["key"] for t in json.loads((path / "manifest.json").read_text())["tensors"]}
    assert "model/model.embed_tokens.weight" in keys
    assert not any("lm_head" in key for key in keys)
    for nproc, layout in ((2, "pp=2,schedule=zbv,precision=fp64"), (2, "dp=2,zero=2,precision=fp64")):
        results = pool.run(load_one, nproc, path, config, layout, ADAMW, 1)
        for result in results:
            assert differing(result["loaded"], want) == [], layout
        for name, tensor in whole(results, "later").items():
            assert torch.allclose(tensor, later[name], rtol=0, atol=1e-9), (layout, name)


def test_momentum_of_sgd_is_kept(pool, tmp_path):
    first = pool.run(save_one, 2, tmp_path, LLAMA, "dp=2,zero=2,precision=fp32", SGD, 0)
    results = pool.run(load_one, 1, first[0]["path"], LLAMA, "precision=fp32", SGD, 0)
    want = whole(first, "saved")
    assert any(n.endswith("/momentum_buffer") for n in want)
    assert differing(results[0]["loaded"], want) == []


def odd_values(rank: int, world: int, folder: Path) -> bool:
    run = Run(rank, LLAMA, "dp=2,zero=3,precision=bf16", seed=1)
    run.train(1, 1)
    value = 1 + 2.0**-20
    for state in run.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].to_local().fill_(value)
    for parameter in run.model.params.values():
        parameter.data.to_local().fill_(value)
    path = run.save(folder, 1)
    other = Run(rank, LLAMA, "dp=2,zero=1,precision=bf16", seed=2)
    other.load(path)
    state = {n: t for n, t in other.state().items() if not n.endswith("/step")}
    return all(t.dtype == torch.float32 and bool((t == torch.tensor(value)).all()) for t in state.values())


def test_h98_optimizer_state_keeps_its_last_bits(pool, tmp_path):
    """H98: 1 + 2^-20 survives saving and loading under bf16 mixed precision (bf16 would make it 1)."""
    assert pool.run(odd_values, 2, tmp_path) == [True, True]


def plain_pair(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Save views of one flat buffer, and a tied copy that lives beside its original."""
    from meshwright.checkpoint.save import save_checkpoint

    flat = torch.arange(12, dtype=torch.float32)
    params = {
        "a": torch.nn.Parameter(flat[:6].view(2, 3)),
        "b": torch.nn.Parameter(flat[6:].view(3, 2)),
        "copy_of_a": torch.nn.Parameter(torch.zeros(2, 3)),
    }
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    tied = {"copy_of_a": "a"}
    path = save_checkpoint(
        folder=folder,
        step=5,
        params=params,
        optimizer=optimizer,
        tied=tied,
        extra={},
        manifest={},
        world_size=world,
        rank=rank,
    )
    target = {n: torch.nn.Parameter(torch.full_like(p, -1.0)) for n, p in params.items()}
    load_checkpoint(path=path, params=target, optimizer=None, tied=tied)
    manifest = json.loads((path / "manifest.json").read_text())
    return {
        "values": {n: p.detach().flatten().tolist() for n, p in target.items()},
        "keys": sorted(t["key"] for t in manifest["tensors"]),
        "tied": manifest["tied"],
        "chunks": sum(len(f["chunks"]) for f in manifest["files"]),
    }


def test_h129_two_views_of_one_buffer_are_both_stored(pool, tmp_path):
    """H129: views are two tensors; a tied copy is none. Replicated tensors are written once."""
    for result in pool.run(plain_pair, 2, tmp_path):
        assert result["values"]["a"] == [0, 1, 2, 3, 4, 5]
        assert result["values"]["b"] == [6, 7, 8, 9, 10, 11]
        assert result["values"]["copy_of_a"] == result["values"]["a"]
        assert result["keys"] == ["model/a", "model/b"]
        assert result["tied"] == {"copy_of_a": "a"}
        assert result["chunks"] == 2


def export_one(rank: int, world: int, checkpoint: Path, out: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    from meshwright.checkpoint.export import export_command

    report = export_command(str(checkpoint), str(out), check_logits=True)
    return {"report": report, "tensors": load_file(out / "model.safetensors")}


@pytest.mark.parametrize("layout", ["dp=4,zero=3,precision=fp32", "dp=2,pp=2,zero=1,precision=fp32"])
def test_h130_an_export_of_four_ranks_is_the_live_model(pool, tmp_path, layout):
    """H130: every parameter of shards and stages is in the export, bit for bit; the tied head is not."""
    first = pool.run(save_one, 4, tmp_path, TIED, layout, ADAMW, 0)
    live = {n: t for n, t in whole(first, "saved").items() if "/" not in n and n != "lm_head.weight"}
    result = pool.run(export_one, 1, first[0]["path"], tmp_path / "out")[0]
    assert result["report"]["check_logits"]["max_abs_diff"] == 0.0
    assert result["tensors"].keys() == live.keys()
    assert differing(result["tensors"], live) == []
