"""What compiled blocks are refused with, and what they go with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout.check import check_built
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model

SPEC = read_model("recipes/models/tiny-llama")


@pytest.mark.parametrize(
    "beside", ["recompute=selective", "tp=2", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv,chunks=2", "cp=2"]
)
def test_refused_with_a_way_out(beside: str) -> None:
    (problem,) = check_built(parse_layout(f"compile=blocks,{beside}"), SPEC)
    assert problem.code == "E279"
    assert "compile=off" in problem.do


def test_what_it_needs_names_every_axis_it_is_refused_with() -> None:
    spec = read_model("recipes/models/tiny-qwen3-moe")
    for beside, needed in (("tp=2", "tp = 1"), ("cp=2", "cp = 1"), ("dp=2,ep=2", "ep = 1")):
        (problem,) = check_built(parse_layout(f"compile=blocks,{beside}"), spec)
        assert problem.code == "E279"
        assert needed in problem.needs


def test_dropout_reads_what_a_compiled_block_would_keep() -> None:
    (problem,) = check_built(parse_layout("compile=blocks"), replace(SPEC, dropout=0.1))
    assert problem.code == "E279"
    assert "dropout 0.1" in problem.found


@pytest.mark.parametrize(
    "beside", ["dp=2,zero=3", "pp=2", "recompute=full", "pp=2,schedule=interleaved,chunks=2"]
)
def test_goes_with(beside: str) -> None:
    assert check_built(parse_layout(f"compile=blocks,{beside}"), SPEC) == []
