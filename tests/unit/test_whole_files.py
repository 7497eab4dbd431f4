"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshwright.base.files import whole_folder, write_whole


@pytest.mark.parametrize("content", ["ü\n", b"\x00\xff"])
def test_a_file_is_replaced_whole(tmp_path: Path, content: str | bytes) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    write_whole(target, content)
    assert target.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    reference = tmp_path / "plain"
    reference.write_text("")
    assert target.stat().st_mode == reference.stat().st_mode  # others may read it as any file of this user


@pytest.mark.parametrize("fault", ["fsync", "replace"])
def test_a_fault_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if fault == "fsync" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_whole_and_the_first_of_two_stays(tmp_path: Path) -> None:
    target = tmp_path / "above" / "folder"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(OSError, match="not empty"), whole_folder(target) as folder:
        (folder / "a").write_text("2")
    with whole_folder(target, first_wins=True) as folder:
        (folder / "a").write_text("3")
    with pytest.raises(KeyError), whole_folder(tmp_path / "never") as folder:
        raise KeyError
    assert (target / "a").read_text() == "1"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "above", "folder"]
