"""The table of measured runs: columns, numbers and units, checked before anything is predicted."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshwright.base.errors import MeshwrightError, Problem, nearest, problem, refuse

TEXT: Final = ("id", "source", "model_name", "gpu", "framework", "dtype", "zero_stage_or_fsdp", "offload")
OPTIONAL_TEXT: Final = ("source_where", "notes", "tflops_definition", "activation_recompute")
NUMBERS: Final = (
    *(
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
        "vocab",
        "seq_len",
        "tied_embeddings",
        "gated_mlp",
    ),
    *("moe_experts", "moe_topk", "params_b", "gpu_mem_gb", "n_gpus", "gpus_per_node", "intra_bw", "inter_bw"),
    *("tp", "sp", "pp", "cp", "ep", "dp", "micro_batch", "grad_accum", "global_batch_sequences"),
    *("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "hfu_pct", "peak_mem_gb"),
    *("compile", "float8"),
)
LOOSE: Final = ("vpp",)
"""Columns whose cells may be a number or words."""
NEEDED: Final = (*TEXT, "activation_recompute", *NUMBERS, *LOOSE)

LARGEST: Final = 1e12
"""No size, count or rate of any run is above this."""
MAX_TOLD: Final = 12
"""Problems of one kind that are listed one by one."""


@dataclass(frozen=True)
class Row:
    """One row: text cells, and numbers that were there (an empty or wordy cell is absent)."""

    line: int
    text: Mapping[str, str]
    number: Mapping[str, float]
    words: Mapping[str, str]

    @property
    def id(self) -> str:
        """The row's id."""
        return self.text["id"]

    @property
    def source(self) -> str:
        """Where it was published."""
        return self.text["source"]


def read_table(path: str | Path) -> tuple[Row, ...]:
    """Return the rows of a table of measured runs.

    Raises:
        MeshwrightError: E460 not readable, E461 columns missing, E463 not a finite number, E466 ids twice.
    """
    where = f"table {path}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        found = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise MeshwrightError(problem("E460", where=where, found=f"cannot be read: {found}")) from None
    return parse_table(text, where)


def parse_table(text: str, where: str = "table") -> tuple[Row, ...]:
    """Return the rows of a table that was read; see ``read_table``."""
    if "\0" in text:
        raise MeshwrightError(problem("E460", where=where, found="it is not text"))
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise MeshwrightError(problem("E460", where=where, found=f"is not a CSV file: {error}")) from None
    lines = [(number, cells) for number, cells in enumerate(lines, 1) if any(cell.strip() for cell in cells)]
    if not lines:
        raise MeshwrightError(problem("E460", where=where, found="is empty"))
    header = [cell.strip() for cell in lines[0][1]]
    _check_header(header, where)
    if len(lines) == 1:
        raise MeshwrightError(problem("E460", where=where, found="has a header and no row"))
    problems: list[Problem] = []
    rows = [_row(number, header, cells, where, problems) for number, cells in lines[1:]]
    seen: dict[str, int] = {}
    for row in rows:
        if row.id in seen:
            found = f"lines {seen[row.id]} and {row.line} are both {row.id or '(empty)'}"
            problems.append(problem("E466", where=where, found=found))
        seen[row.id] = row.line
    if len(problems) > MAX_TOLD:
        code = problems[MAX_TOLD].code
        more = problem(code, where=where, found=f"and {len(problems) - MAX_TOLD} more like these")
        problems = [*problems[:MAX_TOLD], more]
    refuse(problems)
    return tuple(rows)


def _check_header(header: Sequence[str], where: str) -> None:
    missing = [name for name in NEEDED if name not in header]
    twice = sorted({name for name in header if header.count(name) > 1 and name})
    if twice:
        raise MeshwrightError(problem("E461", where=where, found=f"columns twice: {', '.join(twice)}"))
    if not missing:
        return
    unknown = [name for name in header if name not in NEEDED and name not in OPTIONAL_TEXT]
    hints: list[str] = []
    for name in missing[:MAX_TOLD]:
        near = nearest(name, unknown, 1)
        hints.append(f"{name} (there is {near[0]})" if near else name)
    if len(missing) > MAX_TOLD:
        hints.append(f"and {len(missing) - MAX_TOLD} more")
    raise MeshwrightError(problem("E461", where=where, found=f"missing: {', '.join(hints)}"))


def _row(line: int, header: Sequence[str], cells: Sequence[str], where: str, problems: list[Problem]) -> Row:
    cell = {name: value.strip() for name, value in zip(header, [*cells, *[""] * len(header)], strict=False)}
    label = f"{where}, line {line} ({cell['id'] or 'no id'})"
    if len(cells) > len(header):
        found = f"{len(cells)} cells under {len(header)} columns"
        problems.append(problem("E460", where=label, found=found, do="quote cells that hold commas"))
    numbers: dict[str, float] = {}
    words: dict[str, str] = {}
    for name in (*NUMBERS, *LOOSE):
        value = cell[name]
        if not value:
            continue
        try:
            number = float(value)
        except ValueError:
            words[name] = value
            continue
        if not math.isfinite(number) or not 0 <= number <= LARGEST:
            found = f"{name} = {value[:40]}"
            problems.append(
                problem("E463", where=label, found=found, needs=f"0 <= {name} <= {LARGEST:.0e}, or empty")
            )
            continue
        numbers[name] = number
    texts = {name: cell.get(name, "") for name in (*TEXT, *OPTIONAL_TEXT)}
    return Row(line, texts, numbers, words)
