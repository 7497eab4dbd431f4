"""What ``data.path`` may be, and the documents that come out of it, in one deterministic order."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import MIB, format_bytes
from meshwright.train.data.pieces import Account, Piece, counted, cut
from meshwright.train.data.python_docs import BEYOND, LIMIT_BYTES, python_docs, python_files
from meshwright.train.data.records import JSONL, Form, Shape, first_fields, form_of, jsonl_file
from meshwright.train.data.tables import row_groups, table_fields, table_file
from meshwright.train.data.texts import text_file

PYTHON_DOCS: Final = "python-docs"
"""The built-in corpus: text that comes with every Python."""

Kind: TypeAlias = Literal["python-docs", "text", "folder", "jsonl", "parquet", "arrow"]

_SPLITS = ("train", "validation", "valid", "dev", "test", "eval")
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a corpus that is read by itself: a file, or lines or row groups of one.

    ``start`` and ``stop`` are bytes of a JSONL file or row groups of a parquet file; (0, None) is all of it.
    """

    name: str
    path: Path
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files that hold text, in reading order.

    Attributes:
        path: what the user wrote.
        kind: how the files are read.
        files: (name shown and hashed, path).
        shape: how records become documents, where there are records.
        skipped: (name, reason) of files that were left out before reading.
    """

    path: str
    kind: Kind
    files: tuple[tuple[str, Path], ...]
    shape: Shape = field(default_factory=Shape)
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def text_field(self) -> str:
        """Field or column with the text, where there are fields."""
        return self.shape.text_field

    @property
    def num_bytes(self) -> int:
        """Bytes of all files on disk."""
        return sum(path.stat().st_size for _, path in self.files)

    @property
    def expected_bytes(self) -> int:
        """About how many bytes reading will give account of (for progress and sampling)."""
        return min(self.num_bytes, LIMIT_BYTES) if self.kind == "python-docs" else self.num_bytes

    def form(self) -> Form:
        """Return what the records are, from the fields of the first one (plain text without records)."""
        for name, path in self.files:
            if self.kind in ("parquet", "arrow"):
                fields = table_fields("parquet" if self.kind == "parquet" else "arrow", path)
            elif self._is_jsonl(name):
                fields = first_fields(path)
            else:
                continue
            if fields:
                return form_of(fields, self.text_field)
        return "text"

    def _is_jsonl(self, name: str) -> bool:
        return self.kind == "jsonl" or (self.kind == "folder" and Path(name).suffix.lower() in JSONL)

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return the parts of the corpus in reading order, each of about ``unit_bytes`` where it can be cut."""
        if self.kind == "python-docs":
            return [Unit(name=self.path, path=self.files[0][1])]
        found: list[Unit] = []
        for name, path in self.files:
            size = path.stat().st_size
            if self._is_jsonl(name) and size > unit_bytes:
                edges = [*range(0, size, unit_bytes), size]
            elif self.kind == "parquet" and size > unit_bytes:
                edges = [0]
                held = 0
                for number, group in enumerate(row_groups(path), start=1):
                    held += group
                    if held >= unit_bytes:
                        edges, held = [*edges, number], 0
                if held or len(edges) == 1:
                    edges.append(max(len(row_groups(path)), 1))
            else:
                found.append(Unit(name=name, path=path))
                continue
            pairs = itertools.pairwise(edges)
            found += [Unit(name=name, path=path, start=a, stop=b) for a, b in pairs]
        return found

    def pieces(self, account: Account) -> Iterator[Piece]:
        """Yield the text of every document in order and fill ``account`` on the way.

        Raises:
            MeshwrightError: E603-E606, E614, E616, E642-E644 with all that was found wrong in a file.
        """
        account.skipped.extend(self.skipped)
        if self.kind == "python-docs":
            yield from self._python_docs(account)
            return
        for name, path in self.files:
            yield from self.unit_pieces(Unit(name=name, path=path), account)

    def unit_pieces(self, unit: Unit, account: Account) -> Iterator[Piece]:
        """Yield the text of one part of the corpus; see ``pieces``."""
        if self.kind == "python-docs":
            yield from self._python_docs(account)
        elif self.kind == "parquet" or self.kind == "arrow":
            yield from table_file(self.kind, self.shape, unit.path, account, unit.start, unit.stop)
        elif self._is_jsonl(unit.name):
            yield from jsonl_file(self.shape, unit.path, account, unit.start, unit.stop)
        else:
            yield from text_file(unit.name, unit.path, account, in_folder=self.kind == "folder")

    def _python_docs(self, account: Account) -> Iterator[Piece]:
        for name, text, reason in python_docs(list(self.files)):
            if reason == BEYOND:
                account.beyond_limit += 1
            elif reason:
                account.skipped.append((name, reason))
            else:
                yield from counted(cut(text, len(text.encode())), account)

    def shaped(self, shape: Shape) -> Corpus:
        """Return the corpus with another way to read its records."""
        return replace(self, shape=shape)


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
        return Corpus(path=path, kind="python-docs", files=tuple(files), shape=Shape(text_field=text_field))
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
    if suffix in JSONL or (suffix == ".json" and _starts_with_object_line(source)):
        kind = "jsonl"
    elif suffix == ".parquet":
        kind = "parquet"
    elif suffix == ".arrow":
        kind = "arrow"
    return Corpus(path=path, kind=kind, files=((source.name, source),), shape=Shape(text_field=text_field))


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
                shape=Shape(text_field=text_field),
                skipped=tuple(left),
            )
    return Corpus(path=path, kind="folder", files=tuple(listed), shape=Shape(text_field=text_field))


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
        shape=Shape(text_field=text_field),
        skipped=skipped,
    )
