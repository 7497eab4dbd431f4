"""Files and folders that are there whole or not at all: written aside, brought to the disk, renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Final

TEMPORARY: Final = ".tmp-"
"""How the names of files and folders begin that are not whole yet."""


def aside(target: Path) -> Path:
    """Return a name beside ``target`` that no other process takes."""
    return target.parent / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:12]}"


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(target: Path, content: str | bytes, *, synced: bool = True) -> None:
    """Write ``content`` (text as UTF-8) so that a reader sees the old file or the new one, never a part.

    Without ``synced`` that holds for other processes, not for a machine that loses its power.

    Raises:
        OSError: what the system said; the old file is as it was, and nothing is left beside it.
    """
    temporary = aside(target)
    try:
        with temporary.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if synced:
        sync(target.parent)


@contextlib.contextmanager
def whole_folder(target: Path, *, first_wins: bool = False) -> Generator[Path]:
    """Yield a temporary folder that becomes ``target`` when the block ends well, and vanishes otherwise.

    Args:
        target: not there yet, or an empty folder; the folders above it are made.
        first_wins: another process may make an equal folder meanwhile; the first to finish stays.

    Raises:
        OSError: what the system said.
    """
    temporary = aside(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                sync(path)
        sync(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not (first_wins and target.is_dir()):
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
