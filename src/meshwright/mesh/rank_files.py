"""What a rank leaves in the folder of its job: printed lines, and where it is in its step."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POSITION_BYTES = 4096


class Tail:
    """Reads the lines that rank 0 prints, while it prints them."""

    def __init__(self, path: str, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._read = 0
        self._rest = b""

    def forward(self, last: bool = False) -> None:
        """Hand over every whole line that is new; with ``last``, an unfinished one too."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))


def position_file(folder: str, rank: int) -> str:
    """Return the path of the file that holds where a rank is."""
    return os.path.join(folder, f"position-{rank}")


class Position:
    """One rank's page: a counter that is odd while it is being written, a length and JSON text."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _POSITION_BYTES)
        self._count = 0

    def write(self, position: Mapping[str, Any]) -> None:
        """Store the position; what does not fit on the page is cut to its step and action."""
        data = json.dumps(position, default=str).encode()
        if len(data) > _POSITION_BYTES - 16:
            short = {k: str(v)[:500] for k, v in position.items() if k in ("step", "action")}
            data = json.dumps(short).encode()
        struct.pack_into("<QQ", self._page, 0, self._count + 1, len(data))
        self._page[16 : 16 + len(data)] = data
        self._count += 2
        struct.pack_into("<Q", self._page, 0, self._count)


def read_position(folder: str, rank: int) -> dict[str, Any]:
    """Return what the rank last said; empty when it said nothing, or was killed while it wrote."""
    try:
        page = Path(position_file(folder, rank)).read_bytes()
        count, length = struct.unpack_from("<QQ", page, 0)
        if count == 0 or count % 2:
            return {}
        position = json.loads(page[16 : 16 + length])
    except (OSError, ValueError, struct.error):
        return {}
    return position if isinstance(position, dict) else {}


def print_line(line: str) -> None:
    """Print a line of a rank at once."""
    print(line, flush=True)
