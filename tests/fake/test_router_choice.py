"""H88: which experts a token goes to does not depend on the dtype that a softmax would be cast to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hazard_runs import MINI, Rig
from meshwright.parallel.router_loss import RouterLoss
from meshwright.parallel.stage import StageModule

MIXTRAL = MINI | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
QWEN3_MOE = MINI | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "output_router_logits": True,
}
NEAR = (0.5, 0.50390625)
"""Two numbers that bf16 tells apart, and whose softmax in bf16 is 0.5 and 0.5."""


def test_the_pair_is_a_tie_once_its_softmax_is_bf16() -> None:
    logits = torch.tensor(NEAR, dtype=torch.bfloat16)
    assert logits[0] < logits[1]
    assert torch.softmax(logits, -1).tolist() == [0.5, 0.5]
    assert torch.softmax(torch.tensor([1.0, 1.001]), -1).argmax() == 1  # the row's own numbers, in float32
    assert torch.softmax(torch.tensor([1.0, 1.001]).bfloat16(), -1).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_h88_near_ties_go_the_same_way_in_every_precision(
    config: dict[str, Any], precision: str, gathered: bool
) -> None:
    """H88: logits 0.5 and 0.50390625 pick the second expert, in the routing and in what the loss counts.

    ``gathered``: parameters and hidden states in 16 bit, as ZeRO gathers them; else autocast.
    """
    rig = Rig(0, f"dp=1,precision={precision}", config=config)
    stage: Any = rig.model.stages[0]
    assert isinstance(stage, StageModule)
    gate: Any = stage.causal_lm.get_submodule("model.layers.0.mlp.gate")
    hidden = torch.zeros(3, 16, dtype=gate.weight.dtype)
    hidden[:, 0] = 1.0
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[:, 0] = torch.tensor(NEAR)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if gathered and low is not None:
        gate, hidden = gate.to(low), hidden.to(low)
    router = stage.router_loss
    assert isinstance(router, RouterLoss)
    with stage.forward_context(), router.recording():
        out = gate(hidden)
    assert out[2].flatten().tolist() == [1, 1, 1]
    _, chosen_BE = router.noted(torch.zeros(1, 3))
    assert chosen_BE.tolist() == [[0.0, 3.0]]
