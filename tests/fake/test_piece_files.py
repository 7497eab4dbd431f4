"""Pieces of a checkpoint: torch's own readers take them, ours reads rows into place, damage changes a checksum."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_runs import LLAMA, Run
from meshwright.checkpoint.manifest import find_damage, hash_file
from meshwright.checkpoint.metadata import read_index
from meshwright.checkpoint.piece_files import HEAD_BYTES, PieceFile, read_rows

TENSORS = {
    "matrix": torch.randn(5, 7),
    "number": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "cut": torch.randn(9, 8).bfloat16()[2:7],
    "turned": torch.randn(6, 4).T,
    "flags": torch.tensor([True, False, True]),
    "whole": torch.arange(12, dtype=torch.int64).reshape(2, 3, 2),
    "eighth": torch.randn(6).to(torch.float8_e4m3fn),
    "large": torch.randn(700, 1000),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]], PieceFile]:
    path = tmp_path_factory.mktemp("pieces") / "__0_0.distcp"
    with PieceFile(path) as file:
        places = {name: file.add(name, tensor) for name, tensor in TENSORS.items()}
    return path, places, file


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_each_piece(
    written: tuple[Path, dict[str, tuple[int, int]], PieceFile], name: str
) -> None:
    import io

    path, places, file = written
    offset, length = places[name]
    content = path.read_bytes()[offset : offset + length]
    got = torch.load(io.BytesIO(content), weights_only=True)
    assert got.dtype == TENSORS[name].dtype
    assert got.shape == TENSORS[name].shape
    assert torch.equal(got.view(torch.uint8) if name == "eighth" else got, _plain(name))
    chunk = next(c for c in file.stored.chunks if c.key == name)
    assert (chunk.offset, chunk.length, chunk.crc32) == (offset, length, zlib.crc32(content))


def _plain(name: str) -> torch.Tensor:
    return TENSORS[name].view(torch.uint8) if name == "eighth" else TENSORS[name]


@pytest.mark.parametrize(
    ("name", "first", "count"), [("matrix", 0, 5), ("matrix", 2, 2), ("large", 699, 1), ("cut", 1, 3)]
)
def test_rows_are_read_into_place(
    written: tuple[Path, dict[str, tuple[int, int]], PieceFile], name: str, first: int, count: int
) -> None:
    path, places, _ = written
    tensor = TENSORS[name]
    out = torch.full((count, *tensor.shape[1:]), 7.0, dtype=tensor.dtype)
    with path.open("rb") as stream:
        assert read_rows(stream.fileno(), places[name][0], tuple(tensor.shape), tensor.dtype, first, out)
        assert torch.equal(out, tensor[first : first + count])
        wrong = torch.zeros(1, 3, dtype=tensor.dtype)
        assert not read_rows(stream.fileno(), places[name][0], (4, 3), tensor.dtype, 0, wrong)  # another head
        assert not read_rows(
            stream.fileno(), places[name][0], tuple(tensor.shape), tensor.dtype, 0, out.double()
        )
        assert not wrong.any()


def test_the_file_is_its_pieces_and_every_byte_is_checked(
    written: tuple[Path, dict[str, tuple[int, int]], PieceFile],
) -> None:
    path, places, file = written
    entry = file.stored.as_dict()
    assert entry["bytes"] == path.stat().st_size == sum(length for _, length in places.values())
    assert find_damage(path.parent, [entry]) == []
    content = path.read_bytes()
    offset, length = places["whole"]
    for at in (offset, offset + HEAD_BYTES + 3, offset + length - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        for quick in (False, True):
            (damage,) = find_damage(path.parent, [entry], quick=quick)
            assert damage.tensors == ("whole",)
            assert "CRC-32" in damage.why
    path.write_bytes(content + b"x")
    assert find_damage(path.parent, [entry])
    path.write_bytes(content)
    assert find_damage(path.parent, [entry]) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_takes_a_checkpoint(tmp_path: Path) -> None:
    """Plain dcp.load, with its own reader, gives the same tensors."""
    run = Run(0, LLAMA, "precision=fp32", seed=1)
    run.train(1, 1)
    path = run.save(tmp_path / "checkpoints", 1)
    state = {f"model/{n}": torch.empty_like(p) for n, p in run.model.params.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(state[f"model/{n}"], p) for n, p in run.model.params.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    """Pieces that torch.save wrote, and a SHA-256 of each file: loaded, and damage found by both checksums."""
    run = Run(0, LLAMA, "precision=fp32", seed=1)
    run.train(1, 1)
    path = run.save(tmp_path / "checkpoints", 1)
    want = run.state()
    state = {k: torch.load(_slice(path, k), weights_only=True) for k in read_index(path).state_dict_metadata}
    (path / ".metadata").unlink()
    for file in path.glob("*.distcp"):
        file.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    index = read_index(path)
    pieces = [(w.fqn, p.offset, p.length) for w, p in (index.storage_data or {}).items()]
    files = [hash_file(path / "__0_0.distcp", pieces).as_dict(), hash_file(path / ".metadata").as_dict()]
    manifest = json.loads((path / "manifest.json").read_text()) | {"format_version": 1, "files": files}
    (path / "manifest.json").write_text(json.dumps(manifest))
    other = Run(0, LLAMA, "precision=fp32", seed=5)
    other.load(path)
    got = other.state()
    assert all(torch.equal(got[k], want[k]) for k in want if isinstance(want[k], torch.Tensor))
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[1000] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(content))
    for quick in (False, True):
        assert "SHA-256" in find_damage(path, files, quick=quick)[0].why


def _slice(path: Path, key: str) -> object:
    import io

    place = next(p for w, p in (read_index(path).storage_data or {}).items() if w.fqn == key)
    return io.BytesIO((path / place.relative_path).read_bytes()[place.offset : place.offset + place.length])


def test_a_full_disk_ends_the_write_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), PieceFile(tmp_path / "f") as file:
        file.add("a", torch.zeros(3))
    assert file.stored.chunks == ()


def test_large_and_many_pieces_are_written_whole(tmp_path: Path) -> None:
    """Pieces of more than one call of the system, and more than it takes in one call: every byte and checksum."""
    tensors = {"large": torch.arange(9_000_000)} | {f"{k}": torch.full((k % 7, 3), k) for k in range(700)}
    path = tmp_path / "__0_0.distcp"
    with PieceFile(path) as file:
        places = {name: file.add(name, tensor) for name, tensor in tensors.items()}
    content = path.read_bytes()
    assert len(content) == file.stored.bytes
    chunks = {c.key: c for c in file.stored.chunks}
    for name, tensor in tensors.items():
        offset, length = places[name]
        assert chunks[name].crc32 == zlib.crc32(content[offset : offset + length])
        out = torch.empty_like(tensor)
        with path.open("rb") as stream:
            assert read_rows(stream.fileno(), offset, tuple(tensor.shape), tensor.dtype, 0, out)
        assert torch.equal(out, tensor)
