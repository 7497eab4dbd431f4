"""The load-balancing term of a model in parts, against transformers' own on one device, in float64."""

from __future__ import annotations

import pytest
from proofs import prove
from test_prove_expert import MIXTRAL, QWEN3_MOE, ROUTED, proven

pytestmark = pytest.mark.gloo

MIX = MIXTRAL | ROUTED | {"num_hidden_layers": 4}
QWEN = QWEN3_MOE | ROUTED | {"num_hidden_layers": 4}
DENSE_FIRST = QWEN | {"mlp_only_layers": [0, 1]}
CONFIGS = pytest.mark.parametrize("config", [MIX, QWEN], ids=lambda c: c["model_type"])


@CONFIGS
@pytest.mark.parametrize(
    "layout",
    ["pp=2", "pp=2,schedule=zbv", "tp=2", "tp=2,sp=off", "cp=2", "cp=2,cp_style=ulysses", "dp=2,ep=2"],
)
def test_h78_h79_on_each_axis(pool, config, layout):
    """H78, H79: 29 tokens, so that cp pads and no average is exact in binary."""
    proven(pool, layout, config=config, seq_len=28 if layout == "tp=2" else 29)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("spread", ["pp=2", "pp=2,schedule=zbv", "tp=2", "cp=2"])
def test_with_spread_experts(pool, config, spread):
    proven(pool, f"dp=2,ep=2,{spread}", config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2,cp=2,pp=2",
        "pp=2,schedule=dualpipev,micro_batch=2",
        "dp=2,zero=3,pp=2,loss=chunked,micro_batch=2",
        "dp=2,zero=2,tp=2,pp=2,schedule=zb-h1,recompute=selective",
        "dp=2,ep=2,zero=1,pp=2,schedule=zbv,recompute=full",
        "dp=2,zero=1,pp=2,schedule=interleaved,recompute=full",
        "dp=2,cp=2,ep=4,zero=1",
    ],
)
def test_with_several(pool, layout):
    proven(pool, layout, config=QWEN, global_batch=8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,schedule=zbv,recompute=full", "pp=4"])
def test_a_stage_without_routers(pool, layout):
    proven(pool, layout, config=DENSE_FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [("*embed_tokens*", "*.0.*"), ("*.gate.weight",)])
def test_frozen(pool, freeze):
    for layout in ("pp=2,schedule=zb-h1", "tp=2,pp=2"):
        proven(pool, layout, config=MIX, freeze=freeze)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["pp=2,schedule=zbv", "dp=2,zero=1,pp=2", "tp=2,pp=2", "cp=2"])
def test_lower_precision(pool, layout, precision):
    proven(pool, layout, config=MIX, precision=precision, steps=1)


def _on_every_rank(model, step):
    for stage in model.stages.values():
        stage.router_loss._counted = True


def _own_choices_only(model, step):
    for stage in model.stages.values():
        stage.router_loss._context = None


@pytest.mark.parametrize(("layout", "fault"), [("tp=2", _on_every_rank), ("cp=2", _own_choices_only)])
def test_a_term_counted_wrongly_is_seen(pool, layout, fault):
    """The faults planted after the first step: a gradient on every tensor rank; choices that nobody summed."""
    result = prove(pool, layout, config=MIX, fault=fault)
    assert not result["passed"]
    assert result["gradients"]["worst"]["step"] == 2
    assert not result["checks"]["gradients"]
