"""What compiled blocks are refused with, and what they go with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout.check import check_built
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model

SPEC = read_model("recipes/models/tiny-llama")


@pytest.mark.parametrize(
    "beside", ["recompute=selective", "pp=2,schedule=zb-h1", "pp=2,schedule=zbv,chunks=2,tp=2"]
)
def test_refused_with_a_way_out(beside: str) -> None:
    (problem,) = check_built(parse_layout(f"compile=blocks,{beside}"), SPEC)
    assert problem.code == "E279"
    assert "compile=off" in problem.do


@pytest.mark.parametrize(
    "beside",
    [
        *("dp=2,zero=3", "pp=2", "recompute=full", "pp=2,schedule=interleaved,chunks=2"),
        *("tp=2", "cp=2", "cp=2,cp_style=ulysses,tp=2,pp=2"),
    ],
)
def test_goes_with(beside: str) -> None:
    assert check_built(parse_layout(f"compile=blocks,{beside}"), replace(SPEC, dropout=0.1)) == []


def test_goes_with_experts_over_ranks() -> None:
    spec = read_model("recipes/models/tiny-qwen3-moe")
    assert check_built(parse_layout("compile=blocks,dp=2,ep=2"), spec) == []
