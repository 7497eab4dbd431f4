"""What ``data.path`` may be, and the documents that come out of it, in one deterministic order."""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.base.units import KIB, MIB, format_bytes
from meshwright.train.data.python_docs import BEYOND, LIMIT_BYTES, python_docs, python_files

PYTHON_DOCS: Final = "python-docs"
"""The built-in corpus: text that comes with every Python."""

Kind: TypeAlias = Literal["python-docs", "text", "folder", "jsonl", "parquet", "arrow"]

PIECE_BYTES = 256 * KIB
"""Long documents are tokenised in pieces of about this size, cut after a line."""

_JSONL = frozenset({".jsonl", ".ndjson"})
_CHAT_FIELDS = ("messages", "conversations", "conversation", "prompt", "chosen", "instruction")
_SPLITS = ("train", "validation", "valid", "dev", "test", "eval")
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of one document or of a part of it; ``ends`` marks a document's last piece.

    ``source_bytes`` is what was read to get here since the last piece (for progress).
    """

    text: str
    ends: bool
    source_bytes: int = 0


@dataclass(kw_only=True)
class Account:
    """What reading came across: the report's raw material. Filled while the pieces are consumed."""

    documents: int = 0
    text_bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    empty_records: int = 0
    beyond_limit: int = 0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that hold text, in reading order.

    Attributes:
        path: what the user wrote.
        kind: how the files are read.
        files: (name shown and hashed, path).
        text_field: field or column with the text, where there are fields.
        skipped: (name, reason) of files that were left out before reading.
    """

    path: str
    kind: Kind
    files: tuple[tuple[str, Path], ...]
    text_field: str = "text"
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(path.stat().st_size for _, path in self.files)

    @property
    def expected_bytes(self) -> int:
        """About how many bytes reading will give account of (for progress and sampling)."""
        return min(self.num_bytes, LIMIT_BYTES) if self.kind == "python-docs" else self.num_bytes

    def pieces(self, account: Account) -> Iterator[Piece]:
        """Yield the text of every document in order and fill ``account`` on the way.

        Raises:
            MeshwrightError: E603, E604, E605, E606, E614, E616 with all that was found wrong in a file.
        """
        account.skipped.extend(self.skipped)
        if self.kind == "python-docs":
            for name, text, reason in python_docs(list(self.files)):
                if reason == BEYOND:
                    account.beyond_limit += 1
                elif reason:
                    account.skipped.append((name, reason))
                else:
                    yield from _counted(_cut(text, len(text.encode())), account)
            return
        for name, path in self.files:
            if self.kind in ("parquet", "arrow"):
                yield from _table_file(self, name, path, account)
            elif path.suffix.lower() in _JSONL or self.kind == "jsonl":
                yield from _jsonl_file(self, name, path, account)
            else:
                yield from _text_file(self, name, path, account)


def open_corpus(path: str, text_field: str = "text") -> Corpus:
    """Return the files behind ``data.path`` and how they are read, without reading them.

    Raises:
        MeshwrightError: E601 when nothing readable is there, E602 when it holds no files or only empty ones,
            E616 when a dataset folder is incomplete.
    """
    if path == PYTHON_DOCS:
        files = python_files()
        if not files:
            raise MeshwrightError(
                problem(
                    "E601",
                    where="data.path=python-docs",
                    found="this Python comes without the sources of its standard library",
                    do="set data.path to a text file or folder",
                )
            )
        return Corpus(path=path, kind="python-docs", files=tuple(files), text_field=text_field)
    source = Path(path).expanduser()
    try:
        if not source.exists():
            raise MeshwrightError(
                problem("E601", where=f"data.path={path}", found=f"no file or folder {source.absolute()}")
            )
        corpus = _folder(path, source, text_field) if source.is_dir() else _file(path, source, text_field)
        size = corpus.num_bytes
    except OSError as error:
        raise MeshwrightError(
            problem("E601", where=f"data.path={path}", found=f"{error.strerror or error}: {error.filename}")
        ) from error
    if size == 0:
        found = f"{len(corpus.files)} files with 0 bytes" if corpus.files else "no files"
        raise MeshwrightError(
            problem("E602", where=f"data.path={path}", found=found + _skips(corpus.skipped))
        )
    return corpus


def empty_problem(corpus: Corpus, account: Account) -> Problem:
    """Return the Problem of a corpus in which no text was found, with what was skipped."""
    found = f"{len(corpus.files)} files with {format_bytes(corpus.num_bytes)}, but no text"
    if account.empty_records:
        found += f"; {account.empty_records} records with an empty or null {corpus.text_field!r}"
    return problem("E602", where=f"data.path={corpus.path}", found=found + _skips(account.skipped))


def _skips(skipped: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> str:
    if not skipped:
        return ""
    shown = ", ".join(f"{name} ({reason})" for name, reason in skipped[:_MAX_SHOWN])
    more = f" and {len(skipped) - _MAX_SHOWN} more" if len(skipped) > _MAX_SHOWN else ""
    return f"; skipped {len(skipped)}: {shown}{more}"


def _file(path: str, source: Path, text_field: str) -> Corpus:
    suffix = source.suffix.lower()
    kind: Kind = "text"
    if suffix in _JSONL or (suffix == ".json" and _starts_with_object_line(source)):
        kind = "jsonl"
    elif suffix == ".parquet":
        kind = "parquet"
    elif suffix == ".arrow":
        kind = "arrow"
    return Corpus(path=path, kind=kind, files=((source.name, source),), text_field=text_field)


def _starts_with_object_line(source: Path) -> bool:
    with source.open("rb") as file:
        line = file.readline(4 * MIB)
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _folder(path: str, source: Path, text_field: str) -> Corpus:
    if (source / "dataset_dict.json").is_file():
        splits = json.loads((source / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        if "train" not in splits or not (source / "train").is_dir():
            raise MeshwrightError(
                problem(
                    "E616",
                    where=f"data.path={path}",
                    found=f"a dataset with the splits {', '.join(splits) or 'none'} and no train",
                    do="set data.path to the folder of one split",
                )
            )
        skipped = tuple((name, "another split than train") for name in splits if name != "train")
        return _saved_dataset(path, source / "train", text_field, skipped)
    if (source / "state.json").is_file() and (source / "dataset_info.json").is_file():
        return _saved_dataset(path, source, text_field, ())
    listed = _walk(source)
    for suffix, kind in ((".parquet", "parquet"), (".arrow", "arrow")):
        tables = [(name, file) for name, file in listed if file.suffix.lower() == suffix]
        if tables:
            train = [item for item in tables if _split_of(item[0]) == "train"]
            used = train or [item for item in tables if _split_of(item[0]) is None]
            if not used:
                raise MeshwrightError(
                    problem(
                        "E616",
                        where=f"data.path={path}",
                        found=f"{len(tables)} {suffix} files, none of the split train: {tables[0][0]}, ...",
                        do="set data.path to one of the files or to the folder of one split",
                    )
                )
            left = [
                (
                    name,
                    "another split than train" if file.suffix.lower() == suffix else f"not a {suffix} file",
                )
                for name, file in listed
                if (name, file) not in used
            ]
            return Corpus(
                path=path,
                kind="parquet" if kind == "parquet" else "arrow",
                files=tuple(used),
                text_field=text_field,
                skipped=tuple(left),
            )
    return Corpus(path=path, kind="folder", files=tuple(listed), text_field=text_field)


def _split_of(name: str) -> str | None:
    """Return the split that a file's name or folder says, as on the Hub (train-00000-of-00002.parquet)."""
    for part in reversed(name.lower().split("/")):
        for split in _SPLITS:
            if part == split or part.startswith((f"{split}-", f"{split}.", f"{split}_")):
                return split
    return None


def _walk(source: Path) -> list[tuple[str, Path]]:
    """Return every file below a folder by relative name; hidden files and folders are no corpus."""

    def fail(error: OSError) -> None:
        raise error

    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(source, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in names:
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file():
                found.append((file.relative_to(source).as_posix(), file))
    return sorted(found)


def _saved_dataset(path: str, source: Path, text_field: str, skipped: tuple[tuple[str, str], ...]) -> Corpus:
    where = f"data.path={path}"
    try:
        state = json.loads((source / "state.json").read_text(encoding="utf-8"))
        names = [str(item["filename"]) for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeshwrightError(
            problem("E616", where=where, found=f"state.json: {type(error).__name__}: {error}")
        ) from error
    if state.get("_indices_data_files"):
        raise MeshwrightError(
            problem(
                "E616",
                where=where,
                found="state.json selects rows by an indices file, which is not read",
                do="call flatten_indices() before save_to_disk",
            )
        )
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise MeshwrightError(
            problem(
                "E616",
                where=where,
                found=f"state.json names {len(names)} files; {len(missing)} are missing: {missing[0]}",
            )
        )
    return Corpus(
        path=path,
        kind="arrow",
        files=tuple((name, source / name) for name in names),
        text_field=text_field,
        skipped=skipped,
    )


# -- text ---------------------------------------------------------------------------------------------------


def _cut(text: str, source_bytes: int = 0) -> Iterator[Piece]:
    """Yield a document in pieces cut after a line (or, in a very long line, anywhere)."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = text.rfind("\n", start, start + PIECE_BYTES) + 1
        if end <= start:
            end = start + PIECE_BYTES
        yield Piece(text=text[start:end], ends=False)
        start = end
    yield Piece(text=text[start:], ends=True, source_bytes=source_bytes)


def _counted(pieces: Iterator[Piece], account: Account) -> Iterator[Piece]:
    for piece in pieces:
        account.text_bytes += len(piece.text.encode())
        account.documents += piece.ends
        yield piece


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


def _text_file(corpus: Corpus, name: str, path: Path, account: Account) -> Iterator[Piece]:
    try:
        size = path.stat().st_size
        wrong = not_text(path)
    except OSError as error:
        wrong, size = error.strerror or str(error), 0
        if corpus.kind != "folder":
            raise MeshwrightError(problem("E601", where=str(path), found=wrong)) from error
    if wrong is not None:
        if corpus.kind == "folder":
            account.skipped.append((name, str(wrong)))
            return
        raise MeshwrightError(problem("E603", where=str(path), found=str(wrong)))
    if size == 0:
        account.skipped.append((name, "empty"))
        return
    if not _has_text(path):
        account.skipped.append((name, "only white space"))
        return
    yield from _counted(_stream(path), account)


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
            *pieces, last = _cut(held)
            for piece in pieces:
                yield Piece(text=piece.text, ends=False, source_bytes=len(piece.text.encode()))
            held = last.text
    yield Piece(text=held, ends=True, source_bytes=len(held.encode()))


# -- JSONL --------------------------------------------------------------------------------------------------


def _jsonl_file(corpus: Corpus, name: str, path: Path, account: Account) -> Iterator[Piece]:
    problems: list[Problem] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                text = _text_of(corpus, line, where, first=number == 1)
            except MeshwrightError as error:
                problems.extend(error.problems)
                if len(problems) >= _MAX_SHOWN:
                    break
                continue
            if text is None or not text.strip():
                account.empty_records += 1
            elif not problems:
                yield from _counted(_cut(text, len(line)), account)
    if problems:
        raise MeshwrightError(problems)


def _text_of(corpus: Corpus, line: bytes, where: str, first: bool) -> str | None:
    try:
        record: Any = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
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
    fields = [str(key) for key in record]
    if corpus.text_field not in record:
        raise MeshwrightError(_field_problem(corpus.text_field, fields, where))
    text = record[corpus.text_field]
    if text is not None and not isinstance(text, str):
        raise MeshwrightError(
            problem(
                "E605", where=where, found=f"{corpus.text_field!r} is a {type(text).__name__}, not a string"
            )
        )
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MeshwrightError(
                problem("E604", where=where, found=f"half of a surrogate pair at character {error.start}")
            ) from error
    return text


def _field_problem(text_field: str, fields: list[str], where: str) -> Problem:
    there = ", ".join(fields) or "none"
    if any(name in _CHAT_FIELDS for name in fields):
        return problem("E606", where=where, found=f"no field {text_field!r} but {there}")
    return problem("E605", where=where, found=f"no field {text_field!r}; there are: {there}")


# -- tables -------------------------------------------------------------------------------------------------


def _table_file(corpus: Corpus, name: str, path: Path, account: Account) -> Iterator[Piece]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MeshwrightError(
            problem(
                "E614",
                where=str(path),
                found="pyarrow is not installed",
                needs="pyarrow 18 or newer",
                do="pip install 'meshwright[run]'",
            ),
            ExitCode.ENVIRONMENT,
        )
    pyarrow = importlib.import_module("pyarrow")
    size = path.stat().st_size
    rows = 0
    try:
        for batch, total in _batches(path, corpus):
            share = size * batch.num_rows // max(total, 1)
            column = batch.column(0)
            for text in column.to_pylist():
                if text is None or not text.strip():
                    account.empty_records += 1
                else:
                    yield from _counted(_cut(text), account)
            rows += batch.num_rows
            yield Piece(text="", ends=False, source_bytes=share)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(
            problem("E616", where=str(path), found=f"after {rows} rows: {type(error).__name__}: {error}")
        ) from error


def _batches(path: Path, corpus: Corpus) -> Iterator[tuple[Any, int]]:
    """Yield (record batch with the text column only, rows of the file or 0 when not known before)."""
    pyarrow = importlib.import_module("pyarrow")
    column = corpus.text_field
    if corpus.kind == "parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(path)
        _check_column(pyarrow, table.schema_arrow, column, path)
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            yield batch, table.metadata.num_rows
        return
    source = pyarrow.memory_map(str(path))
    try:
        reader = pyarrow.ipc.open_stream(source)
        _check_column(pyarrow, reader.schema, column, path)
        for batch in reader:
            yield batch.select([column]), 0
    except pyarrow.ArrowInvalid:
        source.seek(0)
        reader = pyarrow.ipc.open_file(source)
        _check_column(pyarrow, reader.schema, column, path)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number).select([column]), 0


def _check_column(pyarrow: Any, schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise MeshwrightError(_field_problem(column, list(schema.names), str(path)))
    kind = schema.field(column).type
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise MeshwrightError(
            problem("E605", where=str(path), found=f"column {column!r} is of type {kind}, not string")
        )
