"""Text files: what is text and what is not, and one file as one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import MeshwrightError, problem
from meshwright.base.units import MIB
from meshwright.train.data.pieces import PIECE_BYTES, Account, Piece, counted, cut


@dataclass(frozen=True, kw_only=True)
class NotText:
    """Why a file is not text: the offset of the first wrong byte and how many of how many are wrong."""

    offset: int
    wrong: int
    size: int
    what: str

    def __str__(self) -> str:
        share = 100.0 * self.wrong / max(self.size, 1)
        return (
            f"{self.what} at byte {self.offset}; {self.wrong} of {self.size} bytes are wrong ({share:.2g} %)"
        )


def not_text(path: Path) -> NotText | None:
    """Return what makes a file not UTF-8 text, or None; reads the file once.

    Wrong bytes are NUL bytes and bytes that no UTF-8 character holds.
    """
    size = path.stat().st_size
    first: int | None = None
    what = ""
    wrong = 0
    done = 0
    ignoring = codecs.getincrementaldecoder("utf-8")("ignore")
    kept = 0
    with path.open("rb") as file:
        while True:
            block = file.read(MIB)
            if done == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return NotText(offset=0, wrong=size, size=size, what="a UTF-16 byte order mark")
            nul = block.find(b"\0")
            text = ignoring.decode(block, final=not block)
            kept += len(text.encode())
            pending = len(ignoring.getstate()[0])
            lost = done + len(block) - kept - pending
            if first is None and (nul >= 0 or lost):
                offset = _first_invalid(path) if lost else size
                first = min(offset, done + nul if nul >= 0 else size)
                what = "a NUL byte" if nul >= 0 and done + nul == first else "a byte that is not UTF-8"
            wrong += block.count(b"\0")
            done += len(block)
            if not block:
                break
    if first is None:
        return None
    return NotText(offset=first, wrong=wrong + done - kept, size=size, what=what)


def _first_invalid(path: Path) -> int:
    """Return the offset of the first byte that is not UTF-8 (the size when there is none)."""
    strict = codecs.getincrementaldecoder("utf-8")("strict")
    done = 0
    with path.open("rb") as file:
        while True:
            block = file.read(MIB)
            pending = len(strict.getstate()[0])
            try:
                strict.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return done - pending + error.start
            done += len(block)
            if not block:
                return done


def text_file(name: str, path: Path, account: Account, *, in_folder: bool) -> Iterator[Piece]:
    """Yield one file as one document; in a folder, what is not text is counted instead of refused.

    Raises:
        MeshwrightError: E601 or E603 for a file outside a folder.
    """
    try:
        size = path.stat().st_size
        wrong = not_text(path)
    except OSError as error:
        wrong, size = error.strerror or str(error), 0
        if not in_folder:
            raise MeshwrightError(problem("E601", where=str(path), found=wrong)) from error
    if wrong is not None:
        if in_folder:
            account.skipped.append((name, str(wrong)))
            return
        raise MeshwrightError(problem("E603", where=str(path), found=str(wrong)))
    if size == 0:
        account.skipped.append((name, "empty"))
        return
    if not _has_text(path):
        account.skipped.append((name, "only white space"))
        return
    yield from counted(_stream(path), account)


def _has_text(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", newline="") as file:
        while block := file.read(MIB):
            if not block.isspace():
                return True
    return False


def _stream(path: Path) -> Iterator[Piece]:
    """Yield one file as one document, without holding more than a few pieces of it."""
    held = ""
    with path.open(encoding="utf-8-sig", newline="") as file:
        while block := file.read(4 * PIECE_BYTES):
            held += block
            *pieces, last = cut(held)
            for piece in pieces:
                yield Piece(text=piece.text, ends=False, source_bytes=len(piece.text.encode()))
            held = last.text
    yield Piece(text=held, ends=True, source_bytes=len(held.encode()))
