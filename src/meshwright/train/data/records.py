"""Records: what fields hold text, a conversation or prompt and completion; and JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import MIB
from meshwright.train.data.answers import rendered
from meshwright.train.data.chat import ChatTemplate, Message, messages_of
from meshwright.train.data.pieces import Account, Piece, counted, cut

Form: TypeAlias = Literal["text", "chat", "completion"]
"""What a record is: plain text, a conversation, or a prompt with its completion."""

JSONL = frozenset({".jsonl", ".ndjson"})
MOST_SHOWN = 5
"""Problems of one file that are told at once."""

_CHAT_FIELDS = ("messages", "conversations", "conversation", "prompt", "chosen", "instruction")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How records become documents.

    Attributes:
        form: what a record is.
        text_field: the field with the text of form ``text``.
        template: writes conversations; needed for form ``chat``.
    """

    form: Form = "text"
    text_field: str = "text"
    template: ChatTemplate | None = None


def form_of(fields: list[str], text_field: str) -> Form:
    """Return what records with these fields are; plain text where nothing else fits."""
    if text_field in fields:
        return "text"
    if "messages" in fields or "conversations" in fields:
        return "chat"
    return "completion" if "prompt" in fields and "completion" in fields else "text"


def record_pieces(
    shape: Shape, record: Mapping[str, Any], where: str, *, place: int, source_bytes: int
) -> list[Piece] | None:
    """Return the pieces of one record, or None when it is empty.

    Raises:
        MeshwrightError: E604-E606 about its fields, E642-E644 about a conversation.
    """
    if shape.form == "text":
        text = _string(record, shape.text_field, where)
        return list(cut(text, source_bytes, place)) if text is not None and text.strip() else None
    if shape.form == "completion":
        prompt, completion = _string(record, "prompt", where), _string(record, "completion", where)
        if not completion:
            return None
        parts = [(prompt or "", False), (completion, True)]
    else:
        if "messages" not in record and "conversations" not in record:
            raise MeshwrightError(field_problem("messages", [str(k) for k in record], where))
        assert shape.template is not None
        messages = messages_of(record, where)
        for message in messages:
            _encodable(str(message["content"]), where)
        if not messages:
            return None
        return _conversation(shape.template, messages, where, place=place, source_bytes=source_bytes)
    kept = [(text, answer) for text, answer in parts if text]
    return [
        Piece(
            text=text,
            ends=index + 1 == len(kept),
            source_bytes=source_bytes if index + 1 == len(kept) else 0,
            loss=answer,
            place=place,
        )
        for index, (text, answer) in enumerate(kept)
    ]


def _conversation(
    template: ChatTemplate, messages: list[Message], where: str, *, place: int, source_bytes: int
) -> list[Piece]:
    """Return a conversation as one piece, or one per answer; the tokens of each are those of its whole text."""
    samples = rendered(template, messages, where)
    group = "\n".join(sample.text for sample in samples) if len(samples) > 1 else ""
    return [
        Piece(
            text=sample.text,
            ends=True,
            source_bytes=source_bytes if index + 1 == len(samples) else 0,
            markup=True,
            closes=sample.closes,
            place=place,
            answers=sample.answers,
            group=group,
            how=sample.how,
        )
        for index, sample in enumerate(samples)
        if sample.text
    ]


def _string(record: Mapping[str, Any], name: str, where: str) -> str | None:
    if name not in record:
        raise MeshwrightError(field_problem(name, [str(key) for key in record], where))
    text = record[name]
    if text is not None and not isinstance(text, str):
        raise MeshwrightError(
            problem("E605", where=where, found=f"{name!r} is a {type(text).__name__}, not a string")
        )
    if text is not None:
        _encodable(text, where)
    return text


def _encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MeshwrightError(
            problem("E604", where=where, found=f"half of a surrogate pair at character {error.start}")
        ) from error


def field_problem(name: str, fields: list[str], where: str) -> Problem:
    """Return the Problem of records without the field ``name``: E606 where they look like something else."""
    there = ", ".join(fields) or "none"
    if any(field in _CHAT_FIELDS for field in fields):
        return problem("E606", where=where, found=f"no field {name!r} but {there}")
    return problem("E605", where=where, found=f"no field {name!r}; there are: {there}")


def first_fields(path: Path) -> list[str]:
    """Return the fields of the first record of a JSONL file; none where that is not an object."""
    with path.open("rb") as file:
        while line := file.readline(4 * MIB):
            if line.strip():
                break
    try:
        record: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return []
    return [str(key) for key in record] if isinstance(record, Mapping) else []


def jsonl_file(
    shape: Shape, path: Path, account: Account, start: int = 0, stop: int | None = None
) -> Iterator[Piece]:
    """Yield the records of the lines that begin in the bytes ``start`` to ``stop``; places count from ``start``.

    Raises:
        MeshwrightError: with up to five broken lines by number.
    """
    problems: list[Problem] = []
    with path.open("rb") as file:
        before: int | None = None  # lines before the first one here, counted only for a message
        if start:
            file.seek(start - 1)
            file.readline()
        number = 0
        while stop is None or file.tell() < stop:
            line = file.readline()
            if not line:
                break
            number += 1
            if not line.strip():
                continue
            try:
                pieces = _line_pieces(shape, line, f"{path}:{number}", number, start == 0)
            except MeshwrightError as error:
                before = before if before is not None else lines_before(path, start)
                problems += [replace(p, where=f"{path}:{before + number}") for p in error.problems]
                if len(problems) >= MOST_SHOWN:
                    break
                continue
            if pieces is None:
                account.empty_records += 1
            elif not problems:
                yield from counted(iter(pieces), account)
    if problems:
        raise MeshwrightError(problems)


def lines_before(path: Path, start: int) -> int:
    """Return how many lines begin before byte ``start``."""
    lines = 0
    last = b"\n"
    with path.open("rb") as file:
        while start > 0 and (block := file.read(min(MIB, start))):
            lines += block.count(b"\n")
            last = block[-1:]
            start -= len(block)
    return lines + (last != b"\n")


def _line_pieces(shape: Shape, line: bytes, where: str, number: int, from_top: bool) -> list[Piece] | None:
    try:
        record: Any = json.loads(line.decode("utf-8-sig" if from_top and number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise MeshwrightError(
            problem("E604", where=where, found=f"not UTF-8 at byte {error.start} of the line")
        ) from error
    except (ValueError, RecursionError) as error:
        raise MeshwrightError(problem("E604", where=where, found=f"not JSON: {error}")) from error
    if not isinstance(record, Mapping):
        raise MeshwrightError(
            problem("E604", where=where, found=f"a {type(record).__name__} instead of an object")
        )
    return record_pieces(shape, record, where, place=number, source_bytes=len(line))
