"""Saves and loads that fail on one rank: all ranks hear of it, nothing hangs, and older checkpoints stay."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoint_runs import ADAMW, LLAMA, SGD, TIED, Run, differing
from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.manifest import why_incomplete
from meshwright.mesh.rank_report import RankFailure

LAYOUT = "dp=2,zero=3,precision=fp32"


def codes(run: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """Return (code, found) of every Problem that a call raises; empty when it succeeds."""
    try:
        run(*args, **kwargs)
    except MeshwrightError as error:
        return [(p.code, p.found) for p in error.problems]
    return []


def killed_while_saving(rank: int, world: int, folder: Path) -> None:
    run = Run(rank, LLAMA, LAYOUT, seed=1)
    run.train(1, 1)
    run.save(folder, 10)

    def die(temporary: Path, files: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(save_module, "sealed_files", die):
        run.save(folder, 20)


def test_h121_killed_between_the_shards_and_the_manifest(pool, tmp_path):
    """H121: the older checkpoint is taken and the reason said; a file cut short later is found by its size."""
    with pytest.raises(RankFailure):
        pool.run(killed_while_saving, 2, tmp_path)
    newest, reasons = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-10"
    assert len(reasons) == 1
    assert ".step-20.tmp" in reasons[0]
    assert "did not finish" in reasons[0]
    shard = sorted(newest.glob("__1_*"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    newest, reasons = latest_checkpoint(tmp_path)
    assert newest is None
    assert any(shard.name in r and "bytes, the manifest says" in r for r in reasons)


def save_beside_leftovers(rank: int, world: int, folder: Path) -> list[str]:
    run = Run(rank, LLAMA, LAYOUT, seed=1)
    run.train(1, 1)
    path = run.save(folder, 20)
    first = run.state()
    run.train(2, 2)
    assert run.save(folder, 20) == path  # a complete one of the same step is replaced
    second = run.state()
    other = Run(rank, LLAMA, LAYOUT, seed=3)
    other.load(path)
    loaded = other.state()
    assert differing(loaded, first) != []
    return differing(loaded, second)


def test_h123_leftovers_of_the_same_step_do_not_stop_a_save(pool, tmp_path):
    """H123: a partial step-20 and a temporary folder are there; all ranks save."""
    for name in ("step-20", ".step-20.tmp-0123456789ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"partial")
    assert pool.run(save_beside_leftovers, 2, tmp_path) == [[], []]
    assert [p.name for p in tmp_path.iterdir()] == ["step-20"]
    assert why_incomplete(tmp_path / "step-20") == ""


def save_with_faults(rank: int, world: int, folder: Path) -> dict[str, list[tuple[str, str]]]:
    run = Run(rank, LLAMA, LAYOUT, seed=1)
    run.train(1, 1)
    run.save(folder, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    found: dict[str, list[tuple[str, str]]] = {}

    def on_rank(guilty: int, name: str, **what: Any) -> None:
        with mock.patch.object(save_module, name, **what) if rank == guilty else mock.MagicMock():
            found[f"{name} on {guilty}"] = codes(run.save, folder, 2)

    def write_data(self: Any, plan: Any, planner: Any) -> None:
        raise full

    with mock.patch.object(save_module._Writer, "write_data", write_data) if rank == 1 else mock.MagicMock():
        found["write"] = codes(run.save, folder, 2)
    on_rank(1, "sealed_files", side_effect=full)
    on_rank(0, "write_manifest", side_effect=full)
    on_rank(0, "clean", side_effect=PermissionError(13, "Permission denied"))
    with mock.patch.object(Path, "is_dir", return_value=False) if rank == 1 else mock.MagicMock():
        found["another folder on 1"] = codes(run.save, folder, 2)

    def longer(temporary: Path, files: Any) -> Any:
        return [save_module.StoredFile(file=f.file, bytes=f.bytes + 1) for f in files]

    sealing = found.pop("sealed_files on 1")
    on_rank(1, "sealed_files", new=longer)
    found["not seen by rank 0"] = found.pop("sealed_files on 1")
    found["sealed_files on 1"] = sealing
    found["extra"] = codes(run.save, folder, 2, value={1, 2} if rank == 1 else 0)
    found["infinite"] = codes(run.save, folder, 2, value=float("inf"))
    stranger = torch.nn.Parameter(torch.zeros(3))
    if rank == 1:
        run.optimizer.add_param_group({"params": [stranger]})
    found["stranger"] = codes(run.save, folder, 2)
    return found


def test_a_fault_on_one_rank_ends_the_save_on_all(pool, tmp_path):
    """H123: E703, E704, E716 and E717 reach both ranks in the same words; step 1 stays, nothing is left over."""
    one, two = pool.run(save_with_faults, 2, tmp_path)
    assert one == two
    by_case = {case: [code for code, _ in found] for case, found in one.items()}
    assert by_case == {
        "write": ["E703"],
        "write_manifest on 0": ["E703"],
        "clean on 0": ["E703"],
        "another folder on 1": ["E704"],
        "sealed_files on 1": ["E703"],
        "not seen by rank 0": ["E704"],
        "extra": ["E717"],
        "infinite": ["E717"],
        "stranger": ["E716"],
    }
    assert "rank 1" in one["write"][0][1]
    assert "No space left" in one["write"][0][1]
    assert "[3]" in one["stranger"][0][1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def load_with_faults(rank: int, world: int, folder: Path) -> dict[str, Any]:
    run = Run(rank, TIED, "pp=2,precision=fp32", seed=1)
    run.train(1, 1)
    path = run.save(folder, 1)
    found: dict[str, Any] = {}
    untied = Run(rank, LLAMA, "pp=2,precision=fp32", seed=2)
    before = {n: p.detach().clone() for n, p in untied.model.params.items()}
    found["untied"] = codes(untied.load, path)
    found["unchanged"] = all(torch.equal(before[n], p) for n, p in untied.model.params.items())
    found["sgd"] = codes(Run(rank, TIED, "pp=2,precision=fp32", seed=2, optimizer=SGD).load, path)
    wider = TIED | {"intermediate_size": 28}
    found["shape"] = codes(Run(rank, wider, "pp=2,precision=fp32", seed=2).load, path)
    found["dtype"] = codes(Run(rank, TIED, "pp=2,precision=fp64", seed=2).load, path)
    prefixed = Run(rank, TIED, "pp=2,precision=fp32", seed=2)
    prefixed.model.params = {f"module.{n}": p for n, p in prefixed.model.params.items()}
    prefixed.optimizer = None
    found["prefix"] = codes(prefixed.load, path)
    found["absent"] = codes(run.load, folder / "step-9")
    if rank == 0:
        shard = sorted(path.glob("__1_*"))[0]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(bytes(content))
    torch.distributed.barrier()
    found["damaged"] = codes(run.load, path)
    return found


def test_h131_what_does_not_match_is_listed_by_name_on_every_rank(pool, tmp_path):
    """H131: missing, unexpected, shape, dtype and prefix; nothing is loaded. Damage is named too (E709)."""
    one, two = pool.run(load_with_faults, 2, tmp_path)
    assert one == two
    assert one["unchanged"]
    by_case = {case: [code for code, _ in found] for case, found in one.items() if case != "unchanged"}
    assert by_case == {
        "untied": ["E705"],
        "sgd": ["E705", "E706"],
        "shape": ["E707"],
        "dtype": ["E708"],
        "prefix": ["E705", "E706"],
        "absent": ["E701"],
        "damaged": ["E709"],
    }
    assert "model/lm_head.weight" in one["untied"][0][1]
    assert "optimizer/lm_head.weight/exp_avg" in one["untied"][0][1]
    assert "momentum_buffer" in one["sgd"][0][1]
    assert "0 of" in one["prefix"][0][1]
    assert "'module.' before them" in one["prefix"][0][1]
    assert "model/module." in one["prefix"][0][1]
    assert "[26, 18]" in one["shape"][0][1]
    assert "[28, 18]" in one["shape"][0][1]
    assert "float64" in one["dtype"][0][1]
    assert "CRC-32" in one["damaged"][0][1]


def load_unreadable(rank: int, world: int, folder: Path) -> list[tuple[str, str]]:
    run = Run(rank, LLAMA, LAYOUT, seed=1)
    run.train(1, 1)
    path = run.save(folder, 1)
    if rank == 0:
        shard = sorted(path.glob("__1_*"))[0]
        shard.write_bytes(b"\0" * shard.stat().st_size)
    torch.distributed.barrier()
    return codes(run.load, path, verify=False)


def test_a_shard_that_cannot_be_read_ends_the_load_on_all_ranks(pool, tmp_path):
    one, two = pool.run(load_unreadable, 2, tmp_path)
    assert one == two
    assert {code for code, _ in one} == {"E711"}


def save_before_training(rank: int, world: int, folder: Path) -> int:
    run = Run(rank, LLAMA, LAYOUT, seed=1, optimizer=ADAMW)
    path = run.save(folder, 0)
    later = Run(rank, LLAMA, LAYOUT, seed=2)
    later.train(1, 1)
    later.load(path)
    assert differing(later.state(), run.state()) == []
    return len(later.optimizer.state)


def test_a_save_before_the_first_update_has_no_optimizer_state(pool, tmp_path):
    """H136: loading it forgets the moments that were there, instead of keeping foreign ones."""
    assert pool.run(save_before_training, 2, tmp_path) == [0, 0]
