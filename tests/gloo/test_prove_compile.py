"""Compiled blocks against one device that compiles nothing, in float64, traced ahead and run by torch's own kernels."""

from __future__ import annotations

from functools import partial

import pytest
from proofs import SMALL, prove

import hazard_runs
from meshwright.model.spec import AdapterSpec
from meshwright.parallel.apply import apply_plan

pytestmark = pytest.mark.gloo


def holds(result):
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]


@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2", "dp=2,recompute=full", "dp=2,zero=3,recompute=full"],
)
def test_equals_one_device(pool, layout):
    holds(prove(pool, f"{layout},compile=blocks", config=SMALL))


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_families(pool, family):
    holds(prove(pool, "dp=2,zero=3,compile=blocks", config=f"recipes/models/{family}", steps=1, seq_len=16))


def test_interleaved(pool):
    holds(prove(pool, "pp=2,schedule=interleaved,chunks=2,dp=2,zero=1,compile=blocks", config=SMALL))


def test_adapters(pool):
    lora = AdapterSpec(kind="lora", rank=3, alpha=5.0)
    holds(prove(pool, "dp=2,zero=2,compile=blocks", config=SMALL, adapter=lora))


MIXTRAL = {
    **SMALL,
    "num_hidden_layers": 2,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 67,
    "n_positions": 64,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""With dropout everywhere, whose masks are drawn between the compiled parts."""


BESIDE = [
    ("tp=2,pp=2", SMALL),
    ("tp=2,sp=off,recompute=full,dp=2,zero=3", SMALL),
    ("cp=2,cp_style=ulysses,zero=2", SMALL),
    ("cp=2,recompute=full", SMALL),
    ("dp=2,ep=2,cp=2", MIXTRAL),
    ("dp=2,ep=2,zero=3", MIXTRAL),
    ("dp=2,ep=2,tp=2,recompute=full", MIXTRAL),
    ("tp=2", MIXTRAL),
    ("dp=2,recompute=full", MIXTRAL),
    ("dp=2,zero=3,pp=2", GPT2),
    ("tp=2,recompute=full", GPT2),
    ("cp=2", GPT2),
]


@pytest.mark.parametrize(
    ("layout", "config"),
    [("cp=2", SMALL), *(pytest.param(*case, marks=pytest.mark.slow) for case in BESIDE)],
    ids=lambda v: v if isinstance(v, str) else v["model_type"],
)
def test_axes_that_communicate_inside_blocks_and_dropout(pool, layout, config):
    holds(prove(pool, f"{layout},compile=blocks", config=config))


@pytest.mark.slow
def test_packed_documents_over_the_context_axis(pool):
    holds(prove(pool, "cp=2,compile=blocks", config=SMALL, packed=True, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2,ep=2"])
def test_adapters_on_experts(pool, layout):
    lora = AdapterSpec(kind="lora", rank=3, alpha=5.0, targets=("q_proj", "experts"))
    holds(prove(pool, f"{layout},compile=blocks", config=MIXTRAL, adapter=lora))


def compiled_products(rank, world, layout, layers):
    """Return how many linear layers ran inside compiled parts in one step's forwards."""
    import torch._dynamo

    torch._dynamo.reset()
    ran = []

    def backend(graph, inputs):
        linears = sum("linear" in str(node.target) for node in graph.graph.nodes)

        def run(*args):
            ran.append(linears)
            return graph.forward(*args)

        return run

    hazard_runs.apply_plan = partial(apply_plan, compile_backend=backend)
    try:
        rig = hazard_runs.Rig(rank, layout, config={**SMALL, "num_hidden_layers": layers}, global_batch=world)
        rig.step(1)
    finally:
        hazard_runs.apply_plan = apply_plan
        torch._dynamo.reset()
    return sum(ran) / rig.plan.batch.accumulation


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "each"), [("tp=2", 5), ("cp=2", 7)])
def test_every_layer_is_compiled_past_the_limit_of_torch(pool, layout, each):
    """Twelve layers, each a version of its own: past eight torch would run the rest uncompiled in silence.

    With tp, q, k, v, gate and up are compiled; the row-cut two run as they are, before their sum over ranks.
    """
    for count in pool.run(compiled_products, 2, f"{layout},compile=blocks", 12, timeout_s=200.0):
        assert count == 12 * each
