"""The pages behind the error codes: one table per subsystem, joined here.

``docs/errors.md`` and ``meshwright explain CODE`` are made from these tables.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from meshwright.base.codes import (
    adapter,
    away,
    backtest,
    checkpoint,
    cluster,
    command,
    data,
    documents,
    exact,
    faults,
    feedback,
    layout,
    layout_text,
    model,
    plan_file,
    report,
    run,
    schedule,
    world,
    written,
)
from meshwright.base.codes.info import CodeInfo

TABLES: Final[tuple[tuple[CodeInfo, ...], ...]] = (
    written.CODES,
    model.CODES,
    layout.CODES,
    adapter.CODES,
    away.CODES,
    schedule.CODES,
    layout_text.CODES,
    plan_file.CODES,
    cluster.CODES,
    world.CODES,
    data.CODES,
    documents.CODES,
    checkpoint.CODES,
    faults.CODES,
    command.CODES,
    report.CODES,
    backtest.CODES,
    exact.CODES,
    feedback.CODES,
    run.CODES,
)

_ALL = [info for table in TABLES for info in table]
CODES: Final = MappingProxyType({info.code: info for info in _ALL})
"""Every code by its name."""

if len(CODES) != len(_ALL):  # a mistake of ours, found by the first import
    raise ValueError("two error codes share a name")

__all__ = ["CODES", "TABLES", "CodeInfo"]
