"""The ladder: which rungs a layout has, and that the first rung with a fault is named."""

from __future__ import annotations

from typing import Any

import pytest
from proofs import prove
from test_prove_tensor import LLAMA, QWEN3

from meshwright.layout.parse import parse_layout
from meshwright.prove.ladder import Rung, climb, rungs

pytestmark = pytest.mark.gloo

FULL = "dp=4,zero=3,shard=4,tp=2,pp=2,schedule=zbv,chunks=2,cp=2,ep=4,loss=parallel,precision=fp64"


def test_rungs_add_one_axis_each():
    ladder = rungs(parse_layout(FULL))
    assert [r.adds for r in ladder] == [
        "one device",
        "tp=2, its shards in one process",
        "tp=2",
        "sequence parallel",
        "pp=2",
        "cp=2",
        "dp=2",
        "ep=4",
        "dp=4",
        "zero=3",
        "shard=4",
    ]
    assert ladder[-1].layout == parse_layout(FULL)
    assert [r.simulated for r in ladder].index(True) == 1
    assert sum(r.simulated for r in ladder) == 1


@pytest.mark.parametrize(
    "text", ["dp=1", "dp=2,zero=3", "pp=2,schedule=gpipe", "tp=2,sp=off", "dp=4,zero=1,order=dp/tp/cp/pp"]
)
def test_the_last_rung_is_the_layout(text):
    layout = parse_layout(text)
    assert rungs(layout)[-1] == Rung(rungs(layout)[-1].adds, layout)


def climbed(
    pool: Any, layout: str, config: Any, fault_from: str | None = None, fault: Any = None
) -> dict[str, Any]:
    reached: list[str] = []

    def at_rung(rung: Rung) -> dict[str, Any]:
        reached.append(rung.adds)
        broken = fault if fault_from in reached else None
        return prove(pool, rung.layout.text(), config=config, steps=1, simulated=rung.simulated, fault=broken)

    return climb(parse_layout(f"{layout},precision=fp64"), at_rung, lambda line: None)


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN3 | {"tie_word_embeddings": True}], ids=lambda c: c["model_type"]
)
def test_every_rung_passes(pool, config):
    result = climbed(pool, "dp=2,zero=2,tp=2,pp=2,loss=chunked", config)
    assert result["passed"], result["ladder"]
    assert result["first_failing_rung"] is None
    assert len(result["ladder"]) == 7
    assert max(line["max_rel_diff"] for line in result["ladder"]) <= 1e-10
    assert result["world_size"] == 8


def spoil(model: Any, step: int) -> None:
    """Make one gradient a little wrong, as a cut that forgets a share would."""
    model.gradients()["model.layers.1.mlp.up_proj.weight"].mul_(1.001)


@pytest.mark.parametrize("rung", ["tp=2, its shards in one process", "tp=2", "dp=2"])
def test_the_first_failing_rung_and_its_tensor_are_named(pool, rung):
    result = climbed(pool, "dp=2,tp=2,sp=off", LLAMA, rung, spoil)
    failed = result["first_failing_rung"]
    assert not result["passed"]
    assert failed["adds"] == rung
    assert failed["worst"]["tensor"] == "model.layers.1.mlp.up_proj.weight"
    assert result["ladder"][-1] == failed
