"""Checkpoint folders in one process: what is safe to read, what is complete, what is damaged."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_runs import TIED, Run
from meshwright.base.codes.checkpoint import CODES
from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.inspect import inspect_command, passed_over_warnings, verify_command
from meshwright.checkpoint.load import latest_checkpoint, load_checkpoint
from meshwright.checkpoint.manifest import METADATA, find_damage, hash_file, manifest_text, step_name
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.checkpoint.save import clean, publish, save_checkpoint
from meshwright.checkpoint.state import create_state, rank_state


@pytest.fixture(scope="module")
def run() -> Run:
    run = Run(0, TIED, "precision=fp32", seed=1)
    run.train(1, 2)
    return run


@pytest.fixture
def checkpoint(run: Run, tmp_path: Path) -> Path:
    return run.save(tmp_path / "checkpoints", 2, note="x")


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(MeshwrightError) as caught:
        call(*args, **kwargs)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0].code


def change_manifest(path: Path, **values: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | values))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(bytes(content))


# -- code in a pickle ---------------------------------------------------------------------------------------


class Marker:
    """Makes a file when it is unpickled by a reader that runs what it reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def tensor_entry() -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([2]), [chunk])


def index_of(
    entries: dict[str, Any] | None = None, file: str = "__0_0.distcp", transforms: Any = None
) -> Metadata:
    where = MetadataIndex("model/a", torch.Size([0]))
    return Metadata(
        entries if entries is not None else {"model/a": tensor_entry()},
        planner_data={"model/a": ("model/a",)},
        storage_data={where: _StorageInfo(file, 0, 10, transforms)},
    )


def test_a_crafted_index_runs_nothing(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """torch reads .metadata with pickle.load: a marker folder would be made. Here nothing is called (E710)."""
    marker = tmp_path / "executed"
    hostile = index_of()
    hostile.planner_data = {"model/a": Marker(marker)}
    (checkpoint / METADATA).write_bytes(pickle.dumps(hostile))
    assert code_of(read_index, checkpoint) == "E710"
    assert code_of(run.load, checkpoint, verify=False) in ("E710", "E702")
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    now = hash_file(checkpoint / METADATA)
    fixed = [f if f["file"] != METADATA else now.as_dict() for f in files]
    change_manifest(checkpoint, files=fixed)  # whoever can write the index can write the manifest
    assert code_of(run.load, checkpoint) == "E710"
    assert not marker.exists()
    pickle.loads((checkpoint / METADATA).read_bytes())
    assert marker.exists(), "the crafted file does run code under plain pickle, so the test means something"


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(index_of({"model/a": BytesStorageMetadata()})),
        pickle.dumps(index_of(file="../elsewhere.distcp")),
        pickle.dumps(index_of(file="/etc/hostname")),
        pickle.dumps(index_of(transforms=["zstd"])),
        pickle.dumps({"model/a": 1}),
        pickle.dumps(index_of())[:-40],
        b"\x80\x04cbuiltins\neval\n(V1+1\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x13serialization._load\x93.",
        b"ctorch\nload\n(Vx\ntR.",
    ],
    ids=["object", "parent", "absolute", "transform", "other", "cut", "eval", "dotted", "torch.load"],
)
def test_an_index_of_anything_but_tensors_here_is_refused(tmp_path: Path, content: bytes) -> None:
    """E710: object entries (torch would unpickle them), files elsewhere, transforms, foreign names."""
    (tmp_path / METADATA).write_bytes(content)
    assert code_of(read_index, tmp_path) == "E710"


def test_a_plain_index_is_read(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(index_of()))
    assert read_index(tmp_path).state_dict_metadata["model/a"].size == torch.Size([2])


def test_no_folder_of_the_machine_is_written_into_a_checkpoint(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        assert str(checkpoint.parent).encode() not in path.read_bytes()


# -- complete and damaged -----------------------------------------------------------------------------------


def test_inspect_says_what_is_there(run: Run, checkpoint: Path) -> None:
    report = inspect_command(str(checkpoint.parent.parent))  # a run folder: its newest checkpoint
    assert report["path"] == str(checkpoint)
    assert report["step"] == 2
    assert report["complete"] is True
    assert report["plan_hash"] == run.plan.hash
    assert report["extra"] == {"step": 2, "plan_hash": run.plan.hash, "note": "x"}
    assert report["parameters"]["elements"] == run.spec.num_parameters
    assert report["parameters"]["bytes"] == 4 * run.spec.num_parameters
    count = len(run.model.params)
    assert report["optimizer"]["class"] == "AdamW"
    assert report["optimizer"]["entries"] == {"exp_avg": count, "exp_avg_sq": count, "step": count}
    assert report["tensors"] == 4 * count
    assert report["bytes"] == sum(p.stat().st_size for p in checkpoint.iterdir() if p.name != "manifest.json")
    assert inspect_command(str(checkpoint)) == report


def test_verify_names_the_file_and_the_tensor_of_a_flipped_byte(checkpoint: Path) -> None:
    assert verify_command(str(checkpoint))["ok"] is True
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = next(f for f in manifest["files"] if f["file"].startswith("__0_"))
    chunk = next(c for c in entry["chunks"] if c["key"] == "optimizer/model.norm.weight/exp_avg_sq")
    flip(checkpoint / entry["file"], chunk["offset"] + chunk["length"] // 2)
    report = verify_command(str(checkpoint))
    assert report["ok"] is False
    assert [d["file"] for d in report["damaged"]] == [entry["file"]]
    assert report["damaged"][0]["tensors"] == ["optimizer/model.norm.weight/exp_avg_sq"]


def test_every_flipped_byte_of_a_shard_is_found_by_its_pieces(checkpoint: Path) -> None:
    """The quick look that loading takes (CRC-32 by piece) covers every byte: the pieces fill the file."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    entry = next(f for f in files if f["file"].startswith("__0_"))
    assert sum(c["length"] for c in entry["chunks"]) == entry["bytes"]
    assert find_damage(checkpoint, files, quick=True) == []
    path = checkpoint / entry["file"]
    content = path.read_bytes()
    for at in (0, 1, len(content) // 3, len(content) // 2, len(content) - 1):
        flip(path, at)
        assert [d.file for d in find_damage(checkpoint, files, quick=True)] == [entry["file"]], at
        path.write_bytes(content)
    path.write_bytes(content + b"x")
    assert len(find_damage(checkpoint, files, quick=True)) == 1


@pytest.mark.parametrize("fault", ["manifest", "short", "gone"])
def test_a_damaged_newer_checkpoint_is_not_passed_over_in_silence(
    run: Run, checkpoint: Path, fault: str
) -> None:
    """An older whole one is taken, and said to be; to verify is to find the damage."""
    newest = run.save(checkpoint.parent, 3, note="y")
    run.save(checkpoint.parent, 4, note="z").rename(
        checkpoint.parent / ".step-4.tmp-0f"
    )  # a save that did not finish
    folder = str(checkpoint.parent.parent)
    assert verify_command(folder)["ok"]
    assert passed_over_warnings(folder) == []
    largest = max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size)
    if fault == "manifest":
        (newest / "manifest.json").write_text("")
    elif fault == "short":
        os.truncate(largest, largest.stat().st_size - 100)
    else:
        largest.unlink()
    report = verify_command(folder)
    assert (report["ok"], Path(report["path"]).name) == (False, "step-2")
    assert [d["file"] for d in report["damaged"]] == ["step-3"]
    (warning,) = passed_over_warnings(folder)
    assert (warning.code, Path(warning.where).name) == ("W655", "step-3")
    assert warning.found.endswith("taken is step-2")
    assert verify_command(str(checkpoint))["ok"]  # the one that is named itself is whole
    assert passed_over_warnings(str(checkpoint)) == []


def test_verify_names_a_damaged_index(checkpoint: Path) -> None:
    flip(checkpoint / METADATA, 30)
    report = verify_command(str(checkpoint))
    assert report["ok"] is False
    assert report["damaged"][0]["file"] == METADATA
    assert "index" in report["damaged"][0]["why"]


def test_h121_a_cut_or_missing_file_makes_it_incomplete(run: Run, checkpoint: Path) -> None:
    """H121: completeness is the manifest and the sizes; the reason is said."""
    run.save(checkpoint.parent, 3)
    newest = checkpoint.parent / "step-3"
    assert latest_checkpoint(checkpoint.parent) == (newest, [])
    shard = next(newest.glob("__0_*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    path, reasons = latest_checkpoint(checkpoint.parent)
    assert path == checkpoint
    assert reasons == [f"step-3: {shard.name} has {len(content) - 7} bytes, the manifest says {len(content)}"]
    assert verify_command(str(newest))["ok"] is False
    assert verify_command(str(newest))["incomplete"]
    assert code_of(run.load, newest) == "E702"
    shard.unlink()
    assert "is missing" in latest_checkpoint(checkpoint.parent)[1][0]
    (newest / "manifest.json").unlink()
    assert "written last" in latest_checkpoint(checkpoint.parent)[1][0]
    assert code_of(inspect_command, str(newest)) == "E702"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "not that of a checkpoint"),
        ('{"format": "meshwright-checkpoint"}', "does not say"),
        ('{"format": "meshwright-checkpoint", "complete": true, "files": 3}', "cannot be read"),
        (
            '{"format": "meshwright-checkpoint", "complete": true, "step": 1, '
            '"files": [{"file": "../x", "bytes": 1}]}',
            "outside the folder",
        ),
    ],
)
def test_a_manifest_that_is_not_one_is_passed_over(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text(text)
    path, reasons = latest_checkpoint(tmp_path)
    assert path is None
    assert reason in reasons[0]


def test_newest_is_by_number_and_other_folders_do_not_count(run: Run, tmp_path: Path) -> None:
    for step in (9, 10):
        run.save(tmp_path, step)
    for name in ("step-99x", "best", "step--3"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-10", [])
    assert latest_checkpoint(tmp_path / "nothing") == (None, [])


def test_nothing_there_is_said(tmp_path: Path) -> None:
    assert code_of(inspect_command, str(tmp_path)) == "E701"
    assert code_of(verify_command, str(tmp_path / "step-4")) == "E701"
    assert code_of(inspect_command, str(tmp_path / "none")) == "E701"


def test_a_newer_format_is_refused(run: Run, checkpoint: Path) -> None:
    change_manifest(checkpoint, format_version=99)
    assert code_of(run.load, checkpoint) == "E718"


def test_a_crash_between_the_two_renames_loses_nothing(run: Run, tmp_path: Path) -> None:
    """The replaced folder waits under another name; it counts, and the next save brings it back."""
    run.save(tmp_path, 4)
    aside = tmp_path / ".step-4.old-0123456789ab"
    (tmp_path / "step-4").rename(aside)
    assert latest_checkpoint(tmp_path)[0] == aside
    clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def test_publish_replaces_a_folder(tmp_path: Path) -> None:
    for name, text in (("step-1", "old"), (".step-1.tmp-ab", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(text)
    publish(tmp_path / ".step-1.tmp-ab", tmp_path / step_name(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert (tmp_path / "step-1" / "content").read_text() == "new"


# -- state --------------------------------------------------------------------------------------------------


def test_one_process_loads_what_it_saved(run: Run, checkpoint: Path) -> None:
    other = Run(0, TIED, "precision=fp32", seed=7)
    extra = other.load(checkpoint)
    assert extra["note"] == "x"
    want, got = run.state(), other.state()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[n], got[n]) for n in want)


def test_creating_state_changes_neither_parameters_nor_gradients() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -0.0, 0.0, -3.5]))
    gradient = torch.ones(4)
    weight.grad = gradient
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, fused=True)
    create_state(optimizer)
    assert weight.detach().tolist() == [1.0, -0.0, 0.0, -3.5]
    assert torch.equal(torch.signbit(weight), torch.tensor([False, True, False, True]))
    assert weight.grad is gradient
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_numbers_in_optimizer_state_are_kept_as_numbers(tmp_path: Path) -> None:
    def made(value: float) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        params = {"a": torch.nn.Parameter(torch.full((2,), value))}
        optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
        params["a"].grad = torch.full((2,), value)
        optimizer.step()
        optimizer.state[params["a"]] |= {"count": int(value), "mean": value / 2, "none": None}
        return params, optimizer

    params, optimizer = made(3.0)
    path = save_checkpoint(
        folder=tmp_path,
        step=1,
        params=params,
        optimizer=optimizer,
        tied={},
        extra={},
        manifest={},
        world_size=1,
        rank=0,
    )
    target, other = made(1.0)
    load_checkpoint(path=path, params=target, optimizer=other, tied={})
    entries = other.state[target["a"]]
    assert (entries["count"], entries["mean"], entries["none"]) == (3, 1.5, None)
    assert isinstance(entries["count"], int)
    assert torch.equal(entries["momentum_buffer"], torch.full((2,), 3.0))


def test_state_that_is_no_tensor_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["history"] = [1, 2]
    assert code_of(rank_state, {"a": weight}, optimizer, {}, with_copies=False) == "E716"


def test_a_piece_of_another_shape_is_not_pasted(checkpoint: Path) -> None:
    index = read_index(checkpoint)
    key = "model/model.norm.weight"
    assert read_tensor(checkpoint, index, key).shape == (18,)
    entry = index.state_dict_metadata[key]
    entry.chunks[0].sizes = torch.Size([17])
    entry.size = torch.Size([17])
    assert code_of(read_tensor, checkpoint, index, key) == "E711"


def test_every_code_has_its_page() -> None:
    sevens = [c.code for c in CODES if c.code.startswith("E7")]
    assert sevens == [f"E{n}" for n in range(701, 701 + len(sevens))]
    assert all(c.why and c.needs and c.do and c.page for c in CODES if c.code.startswith("E"))


def test_a_manifest_is_json_with_a_line_per_row() -> None:
    """Nested rows, texts with quotes, empty lists: the same values back, and people can read it line by line."""
    rows = [{"file": "a", "chunks": [{"key": 'x"y', "offset": 0}, {"key": "z", "offset": 3}]}, {"file": "b"}]
    held = {"files": rows, "extra": {"rng": [1, 2], "none": None}, "empty": [], "name": "ü\n"}
    text = manifest_text(held)
    assert json.loads(text) == held
    assert any(line.strip().startswith('{"key": "z"') for line in text.splitlines())
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest_text({"loss": float("nan")})
