"""Files that are either whole or not there: temporary name, flush, rename. And the fingerprint that names them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from meshwright.base import files
from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.units import MIB, format_seconds

Show: TypeAlias = Callable[[str], None]
"""Takes one line of progress for a person."""

WHOLE_HASH_BYTES = 256 * MIB
"""Files up to this size are fingerprinted by content, larger ones by size, time and both ends."""

_STALE_SECONDS = 24 * 3600.0


class Progress:
    """Says how far long work is, at most once a second and never for work shorter than that."""

    def __init__(self, what: str, total: int, show: Show | None, every_s: float = 1.0) -> None:
        self.what = what
        self.total = max(total, 1)
        self.show = show
        self.every_s = every_s
        self.started = time.perf_counter()
        self.said = self.started

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.perf_counter() - self.started

    def at(self, done: int) -> None:
        """Say the share that is done, if it is time to."""
        now = time.perf_counter()
        if self.show is None or now - self.said < self.every_s:
            return
        self.said = now
        share = min(done / self.total, 1.0)
        left = f", {format_seconds((now - self.started) * (1.0 - share) / share)} left" if share else ""
        self.show(f"{self.what}: {100 * share:.0f} %{left}")


def fingerprint(named: Sequence[tuple[str, Path]], show: Show | None = None) -> str:
    """Return a hash of names and contents of files, in the order given.

    Files above 256 MiB count by size, modification time and their first and last MiB, so that a large
    corpus is not read twice at every start.
    """
    total = hashlib.sha256()
    progress = Progress("reading", sum(path.stat().st_size for _, path in named), show)
    done = 0
    for name, path in named:
        status = path.stat()
        part = hashlib.sha256()
        with path.open("rb") as file:
            if status.st_size <= WHOLE_HASH_BYTES:
                while block := file.read(8 * MIB):
                    part.update(block)
                    done += len(block)
                    progress.at(done)
            else:
                part.update(f"{status.st_size} {status.st_mtime_ns}".encode())
                part.update(file.read(MIB))
                file.seek(-MIB, os.SEEK_END)
                part.update(file.read(MIB))
                done += status.st_size
        total.update(name.encode("utf-8", "surrogateescape") + b"\0" + part.digest())
    return total.hexdigest()


def _sweep(parent: Path) -> None:
    """Remove what interrupted writers left a day ago or earlier."""
    for left in parent.glob(f"{files.TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` when the block ends well, and vanishes otherwise.

    Two processes may do this at once: each has its own temporary folder, the first to finish wins and the
    other's equal folder is dropped.

    Raises:
        MeshwrightError: E615 when the file system refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with files.whole_folder(target, first_wins=True) as temporary:
            yield temporary
    except OSError as error:
        raise _refused(target, error) from error


def discard_folder(target: Path) -> None:
    """Remove a damaged folder: gone under its name at once, also when another process does the same.

    Raises:
        MeshwrightError: E615 when the file system refuses.
    """
    aside = files.aside(target)
    try:
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
            shutil.rmtree(aside)
    except OSError as error:
        raise _refused(target, error) from error


def write_whole(target: Path, content: bytes) -> None:
    """Write ``content`` to ``target`` so that a reader sees the old file or the new one, never a part.

    Raises:
        MeshwrightError: E615 when the file system refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(target, content)
    except OSError as error:
        raise _refused(target, error) from error


def _refused(target: Path, error: OSError) -> MeshwrightError:
    return MeshwrightError(
        problem("E615", where=str(target.parent), found=f"{error.strerror or error}"),
        ExitCode.ENVIRONMENT,
    )
