"""Tables: parquet and arrow files of a Hugging Face dataset, read in batches of rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.train.data.pieces import Account, Piece, counted
from meshwright.train.data.records import Shape, field_problem, record_pieces

TableKind: TypeAlias = Literal["parquet", "arrow"]

_BATCH_ROWS = 1024


def _pyarrow(path: Path) -> Any:
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
    return importlib.import_module("pyarrow")


def table_file(
    kind: TableKind, shape: Shape, path: Path, account: Account, start: int = 0, stop: int | None = None
) -> Iterator[Piece]:
    """Yield the records of one table file; ``start`` and ``stop`` are row groups of a parquet file.

    Raises:
        MeshwrightError: E605, E606 a column, E614 without pyarrow, E616 a file that cannot be read, and what
            ``record_pieces`` refuses, with the number of the row.
    """
    pyarrow = _pyarrow(path)
    size = path.stat().st_size
    rows = 0
    try:
        for batch, first, total in _batches(pyarrow, kind, shape, path, start, stop):
            names = batch.schema.names
            columns = [batch.column(n).to_pylist() for n in range(batch.num_columns)]
            for number, values in enumerate(zip(*columns, strict=True), start=first + 1):
                record = dict(zip(names, values, strict=True))
                pieces = record_pieces(shape, record, f"{path} row {number}", place=number, source_bytes=0)
                if pieces is None:
                    account.empty_records += 1
                else:
                    yield from counted(iter(pieces), account)
            rows += batch.num_rows
            yield Piece(text="", ends=False, source_bytes=size * batch.num_rows // max(total, 1))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MeshwrightError(
            problem("E616", where=str(path), found=f"after {rows} rows: {type(error).__name__}: {error}")
        ) from error


def table_fields(kind: TableKind, path: Path) -> list[str]:
    """Return the names of the columns; none where the file cannot be read (reading it says why)."""
    if importlib.util.find_spec("pyarrow") is None:
        return []
    pyarrow = importlib.import_module("pyarrow")
    try:
        if kind == "parquet":
            return list(importlib.import_module("pyarrow.parquet").read_schema(path).names)
        with pyarrow.memory_map(str(path)) as source:
            return list(_reader(pyarrow, source)[0].schema.names)
    except (pyarrow.ArrowException, OSError):
        return []


def row_groups(path: Path) -> list[int]:
    """Return the bytes of each row group of a parquet file; none where it cannot be read."""
    if importlib.util.find_spec("pyarrow") is None:
        return []
    pyarrow = importlib.import_module("pyarrow")
    try:
        meta = importlib.import_module("pyarrow.parquet").read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        return []
    return [meta.row_group(n).total_byte_size for n in range(meta.num_row_groups)]


def _reader(pyarrow: Any, source: Any) -> tuple[Any, bool]:
    """Return the reader of an arrow file, and whether it is a stream."""
    try:
        return pyarrow.ipc.open_stream(source), True
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_file(source), False


def _batches(
    pyarrow: Any, kind: TableKind, shape: Shape, path: Path, start: int, stop: int | None
) -> Iterator[tuple[Any, int, int]]:
    """Yield (record batch with the wanted columns only, rows before it, rows of the file or 0 if not known)."""
    if kind == "parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(path)
        columns = _columns(pyarrow, table.schema_arrow, shape, path)
        meta = table.metadata
        groups = list(range(start, meta.num_row_groups if stop is None else stop))
        row = sum(meta.row_group(n).num_rows for n in range(start))
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns, row_groups=groups):
            yield batch, row, meta.num_rows
            row += batch.num_rows
        return
    source = pyarrow.memory_map(str(path))
    reader, is_stream = _reader(pyarrow, source)
    columns = _columns(pyarrow, reader.schema, shape, path)
    batches = reader if is_stream else (reader.get_batch(n) for n in range(reader.num_record_batches))
    row = 0
    for batch in batches:
        for offset in range(0, batch.num_rows, _BATCH_ROWS):
            part = batch.slice(offset, _BATCH_ROWS).select(columns)
            yield part, row, 0
            row += part.num_rows


def _columns(pyarrow: Any, schema: Any, shape: Shape, path: Path) -> list[str]:
    """Return the columns to read, after a look at their types."""
    names = list(schema.names)
    if shape.form == "chat":
        wanted = ["messages" if "messages" in names else "conversations"]
        kinds = "list of messages"
    else:
        wanted = [shape.text_field] if shape.form == "text" else ["prompt", "completion"]
        kinds = "string"
    types = pyarrow.types
    for name in wanted:
        if name not in names:
            raise MeshwrightError(
                field_problem(wanted[0] if shape.form == "chat" else name, names, str(path))
            )
        kind = schema.field(name).type
        if shape.form == "chat":
            good = types.is_list(kind) or types.is_large_list(kind)
        else:
            good = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if not good:
            raise MeshwrightError(
                problem("E605", where=str(path), found=f"column {name!r} is of type {kind}, not {kinds}")
            )
    return wanted
