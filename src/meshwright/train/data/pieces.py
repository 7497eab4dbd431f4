"""Documents on their way from files to tokens: pieces of text, and the account of what reading came across."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.base.units import KIB

PIECE_BYTES = 256 * KIB
"""Long documents are tokenised in pieces of about this size, cut after a line."""
GROUP_TEXT = 1 << 20
GROUP_PIECES = 4096
"""A group of pieces that are tokenised at once is closed at so many characters or pieces."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of one document or of a part of it; ``ends`` marks a document's last piece.

    Attributes:
        source_bytes: what was read to get here since the last piece (for progress).
        loss: whether its tokens are predicted; those of a prompt are not.
        markup: special tokens written in it are tokens (a chat template's), not text.
        closes: an end-of-text token follows its last piece.
        place: line or row of its file, from 1; 0 where a file is one document.
        answers: characters whose tokens are predicted, as (first, end), where that is not one thing for all of them.
        group: documents of one record have the same; they are held out together. "" is the document's own text.
        how: how a conversation was written (see ``answers``); "" for other records.
    """

    text: str
    ends: bool
    source_bytes: int = 0
    loss: bool = True
    markup: bool = False
    closes: bool = True
    place: int = 0
    answers: tuple[tuple[int, int], ...] | None = None
    group: str = ""
    how: str = ""


@dataclass(kw_only=True)
class Account:
    """What reading came across: the report's raw material. Filled while the pieces are consumed."""

    documents: int = 0
    text_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    empty_records: int = 0
    beyond_limit: int = 0
    written: dict[str, int] = field(default_factory=dict[str, int])
    """Samples of conversations by how they were written, and "rewritten": the conversations behind "per answer"."""

    def add(self, other: Account) -> None:
        """Add what another reader came across."""
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.skipped += other.skipped
        self.empty_records += other.empty_records
        self.beyond_limit += other.beyond_limit
        for name, count in other.written.items():
            self.written[name] = self.written.get(name, 0) + count


def cut(text: str, source_bytes: int = 0, place: int = 0) -> Iterator[Piece]:
    """Yield a document in pieces cut after a line (or, in a very long line, anywhere)."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind("\n", start, start + PIECE_BYTES) + 1
        if end <= start:
            end = start + PIECE_BYTES
        yield Piece(text=text[start:end], ends=False, place=place)
        start = end
    yield Piece(text=text[start:], ends=True, source_bytes=source_bytes, place=place)


def counted(pieces: Iterator[Piece], account: Account) -> Iterator[Piece]:
    """Yield the pieces, and count them and their bytes in ``account``."""
    for piece in pieces:
        account.text_bytes += len(piece.text.encode())
        account.documents += piece.ends
        if piece.how and piece.ends:
            account.written[piece.how] = account.written.get(piece.how, 0) + 1
            if piece.how == "per answer" and piece.source_bytes:
                account.written["rewritten"] = account.written.get("rewritten", 0) + 1
        yield piece


def piece_groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups to be tokenised at once, each closed at ``GROUP_TEXT`` characters or ``GROUP_PIECES``."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= GROUP_TEXT or len(group) >= GROUP_PIECES:
            yield group
            group, size = [], 0
    if group:
        yield group
