"""A fault of ours: the traceback goes to a file that is named, the user gets one paragraph."""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from meshwright import __version__
from meshwright.base.errors import Problem, problem

RUN_FOLDER = "run folder: "
"""A note of this form on an exception (``error.add_note``) says where its details should be kept."""


def fault(error: BaseException, args: Sequence[str]) -> Problem:
    """Return E999 for an exception that should not have reached the user; its details are written to a file."""
    path = _write(_details(error, args), _run_folder(error))
    kept = f"; the details are in {path}" if path else ""
    last = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {last[0]}" if last else type(error).__name__
    return problem(
        "E999",
        where="meshwright",
        found=f"an unexpected {said}{kept}",
        do=f"please report it with {path}" if path else "please report it with the command and its input",
    )


def _details(error: BaseException, args: Sequence[str]) -> str:
    torch = sys.modules.get("torch")
    lines = [
        f"meshwright {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch {getattr(torch, '__version__', '')}" if torch else "torch was not imported",
        f"command: meshwright {shlex.join(args)}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    return "\n".join(lines)


def _run_folder(error: BaseException) -> Path | None:
    for note in getattr(error, "__notes__", ()):
        folder = Path(str(note).removeprefix(RUN_FOLDER))
        if str(note).startswith(RUN_FOLDER) and folder.is_dir():
            return folder
    return None


def _write(text: str, folder: Path | None) -> str:
    """Return the file that now holds ``text``, or "" where nothing could be written."""
    for place in (folder, None):
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", prefix="meshwright-fault-", suffix=".txt", dir=place, delete=False
            ) as file:
                file.write(text)
            return file.name
        except OSError:
            continue
    return ""
