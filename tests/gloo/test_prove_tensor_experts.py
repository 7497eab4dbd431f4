"""The tensor axis through mixtures of experts: each expert cut like a feed-forward, routing the same on all ranks."""

from __future__ import annotations

import pytest
from test_prove_tensor import LLAMA, proven

pytestmark = pytest.mark.gloo

MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
FAMILIES = pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])


@FAMILIES
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2,sp=off",
        "tp=2",
        "tp=4,kv_heads=replicate",
        "dp=2,zero=3,tp=2",
        "tp=2,recompute=full,loss=chunked",
    ],
)
def test_equals_one_device(pool, config, layout):
    """A dense layer before the mixtures in qwen3_moe; routers get whole gradients (H-rows on router gradients)."""
    proven(pool, layout, config=config)


def test_in_a_pipeline(pool):
    proven(pool, "tp=2,pp=2,schedule=zbv,chunks=2", config=MIXTRAL | {"num_hidden_layers": 4})


@pytest.mark.parametrize("freeze", [("*.gate.weight",), ("*experts*",), ("*embed_tokens*", "*.0.*")])
def test_frozen(pool, freeze):
    proven(pool, "tp=2", config=MIXTRAL, freeze=freeze)


def test_lower_precision(pool):
    proven(pool, "dp=2,tp=2", config=MIXTRAL | {"intermediate_size": 64}, precision="bf16")
