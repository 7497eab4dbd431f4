"""The precision table."""

from __future__ import annotations

import pytest

from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import precision_table


@pytest.mark.parametrize(
    ("text", "storage", "compute", "gather", "reduce", "wire", "autocast"),
    [
        ("dp=2,precision=fp32", "fp32", "fp32", "fp32", "fp32", "fp32", False),
        ("dp=2,precision=bf16", "fp32", "bf16", "fp32", "fp32", "fp32", True),
        ("dp=2,precision=fp16", "fp32", "fp16", "fp32", "fp32", "fp32", True),
        ("dp=2,precision=fp64", "fp64", "fp64", "fp64", "fp64", "fp64", False),
        ("dp=2,zero=1,precision=bf16", "fp32", "bf16", "bf16", "fp32", "bf16", False),
        ("dp=2,zero=3,precision=fp16", "fp32", "fp16", "fp16", "fp32", "fp16", False),
        ("dp=2,zero=3,precision=fp64", "fp64", "fp64", "fp64", "fp64", "fp64", False),
        # one rank shards nothing: the same as zero=0
        ("dp=1,zero=3,precision=bf16", "fp32", "bf16", "fp32", "fp32", "fp32", True),
    ],
)
def test_table(
    text: str, storage: str, compute: str, gather: str, reduce: str, wire: str, autocast: bool
) -> None:
    table = precision_table(parse_layout(text))
    assert (table.storage, table.compute, table.gather) == (storage, compute, gather)
    assert (table.reduce, table.wire, table.autocast) == (reduce, wire, autocast)
    assert table.gradient == table.master == table.optimizer == storage


def test_bytes_and_rows() -> None:
    table = precision_table(parse_layout("dp=2,zero=3"))
    assert [table.bytes_of(n) for n in ("storage", "gather", "wire", "reduce")] == [4, 2, 2, 4]
    rows = table.rows()
    assert [r[0] for r in rows][:2] == ["storage", "compute"]
    assert all(size == table.bytes_of(name) and note for name, _, size, note in rows)
