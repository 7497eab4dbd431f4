"""What commands print: JSON, Problems and plain tables, without colour codes; standard output holds results only."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem


def finite(value: Any) -> Any:
    """Return ``value`` with every number that is not finite as None, so that the JSON is JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [finite(held) for held in value]
    return value


def show_json(value: Any) -> None:
    """Print one JSON document: one line, or indented where a person reads it."""
    print(json.dumps(finite(value), indent=2 if sys.stdout.isatty() else None, allow_nan=False))


def show_line(text: str) -> None:
    """Print one line of progress on standard error, at once.

    Nobody may be there to read it (a closed terminal or pipe, a full disk): work does not end for that.
    """
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed at the start
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def show_problems(problems: Sequence[Problem], as_json: bool) -> None:
    """Print Problems: as the JSON of the contract on standard output, or as text on standard error."""
    if as_json:
        with contextlib.suppress(OSError):  # the exit code still says it
            show_json({"problems": [p.as_dict() for p in problems]})
            sys.stdout.flush()
    else:
        show_line("\n".join(p.text() for p in problems))


def show_warnings(problems: Iterable[Problem]) -> None:
    """Print warnings on standard error; the command goes on."""
    for warning in problems:
        show_line(warning.text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return aligned columns; columns in ``right`` (numbers) are right-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def one(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([one(lines[0]), one(["-" * w for w in widths]), *(one(line) for line in lines[1:])])


def check_writable(path: str | Path, option: str = "--out", replace: bool = True) -> Path:
    """Return ``path`` if a file can be written there as far as can be seen beforehand.

    Raises:
        MeshwrightError: E867 for a folder, a folder that does not exist or takes no new file, or a file that must not be
            replaced.
    """
    target = Path(path)
    found = ""
    if target.is_dir():
        found = "is a folder"
    elif target.exists() and not replace:
        found = "exists already"
    elif not target.parent.is_dir():
        found = f"the folder {target.parent} does not exist"
    if found:
        raise MeshwrightError(problem("E867", where=f"{option} {path}", found=found))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        found = f"{target.parent} takes no new file: {error.strerror or error}"
        raise MeshwrightError(
            problem("E867", where=f"{option} {path}", found=found), ExitCode.ENVIRONMENT
        ) from error
    return target


def write_new_text(path: str | Path, text: str, option: str = "--out", replace: bool = True) -> Path:
    """Write ``text`` to ``path`` and return it.

    Raises:
        MeshwrightError: E867 when the file cannot be written, or exists and ``replace`` is off.
    """
    target = check_writable(path, option, replace)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        found = error.strerror or str(error)
        raise MeshwrightError(
            problem("E867", where=f"{option} {path}", found=found), ExitCode.ENVIRONMENT
        ) from error
    return target
