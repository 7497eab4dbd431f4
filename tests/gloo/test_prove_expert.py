"""The expert axis against one device in float64: alone, with ZeRO, pipelines, recompute, and with the routers' loss."""

from __future__ import annotations

import time

import pytest
import torch
from proofs import SMALL, prove

pytestmark = pytest.mark.gloo

MIXTRAL = {
    **SMALL,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "head_dim": 8,
    "norm_topk_prob": True,
}
"""Experts 20 wide: no row of 16 bytes in 2-byte dtypes."""

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def proven(pool, layout, **options):
    result = prove(pool, layout, **options)
    assert result["passed"], (result["checks"], result["gradients"], result["ledger"])
    if options.get("precision", "fp64") == "fp64":
        assert result["gradients"]["max_rel_diff"] <= 1e-10
    return result


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4"])
def test_expert_axis_equals_one_device(pool, config, layout):
    """H81: gradients of experts and of all else are one device's for every ep, in one measure."""
    proven(pool, layout, config=config)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,zero=3",
        "dp=4,ep=4,zero=1",
        "dp=4,ep=2,zero=1",
        "dp=4,ep=2,zero=2",
        "dp=4,ep=2,zero=3",
        "dp=4,ep=2,zero=1,shard=2",
        "dp=8,ep=2,zero=2,shard=4",
    ],
)
def test_with_zero(pool, layout):
    """H82: also where a shard group has one rank, and where replicas have one rank each."""
    proven(pool, layout, config=MIXTRAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,cp=2,ep=2,zero=1,shard=2,order=tp/dp/cp/pp",
        "dp=4,cp=2,ep=4,zero=3,shard=4,order=tp/dp/cp/pp",
        "dp=4,ep=4,zero=1,shard=2",
        "dp=4,ep=4,zero=3,shard=2,tp=2",
    ],
)
def test_replicas_inside_the_context_axis_and_several_shard_groups(pool, layout):
    """Replicas are no neighbours of experts; where ep takes in several shard groups an expert is on one rank of each."""
    proven(pool, layout, config=MIXTRAL)


def test_more_shards_than_experts(pool):
    """Two experts on a rank over four shards: some hold padding only, and the account still closes."""
    proven(pool, "dp=8,ep=2,zero=3", config=MIXTRAL)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,pp=2",
        "dp=2,ep=2,pp=2,schedule=zb-h1",
        "dp=2,ep=2,pp=2,schedule=zbv,zero=1",
        "dp=2,ep=2,pp=2,schedule=dualpipev",
        "dp=4,ep=2,pp=2,schedule=zbv,zero=2",
        "dp=2,ep=2,pp=2,schedule=interleaved,zero=3",
        "dp=4,ep=4,pp=2,zero=3,recompute=full",
    ],
)
def test_with_pipelines(pool, layout):
    """Split backwards too: the exchanges run in the half that makes the gradient of the input."""
    proven(pool, layout, config=QWEN3_MOE | {"num_hidden_layers": 4})


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,tp=2",
        "dp=2,ep=2,tp=2,sp=off,order=dp/tp/cp/pp",
        "dp=2,ep=2,tp=2,zero=3,recompute=full",
        "dp=4,ep=2,tp=2,zero=1",
        "dp=2,ep=2,tp=2,pp=2,schedule=zbv,zero=1",
    ],
)
def test_h21_with_the_tensor_axis(pool, layout):
    """H21: one norm over matrices cut by tp, replicated ones, and slices of the experts that a rank has."""
    proven(pool, layout, config=MIXTRAL | {"num_hidden_layers": 4})


@pytest.mark.parametrize(
    "layout",
    [
        "cp=2,ep=2",
        "dp=2,cp=2,ep=4,zero=1",
        "dp=2,cp=2,ep=2,cp_style=ulysses",
        "dp=2,cp=2,ep=2,order=tp/dp/cp/pp",
        "dp=4,cp=2,ep=2,zero=2,shard=4",
        "dp=2,cp=2,ep=2,pp=2,schedule=zbv,zero=1",
        "dp=2,cp=2,ep=2,tp=2,zero=3",
    ],
)
def test_with_the_context_axis(pool, layout):
    """Experts borrowed from dp x cp: ranks with parts of one sequence exchange like ranks with other sequences."""
    proven(pool, layout, config=MIXTRAL | {"num_hidden_layers": 4})


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,recompute=full",
        "dp=2,ep=2,zero=3,recompute=selective",
        "dp=4,ep=2,zero=2,recompute=full,loss=chunked",
    ],
)
def test_with_recompute_and_chunked_loss(pool, layout):
    proven(pool, layout, config=MIXTRAL)


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=4,zero=3"])
def test_shared_experts_stay_where_they_are(pool, layout):
    """DeepSeek: dense first layer, latent attention, shared experts on every rank, routed ones spread."""
    proven(pool, layout, config=DEEPSEEK_V3)


@pytest.mark.parametrize(
    "freeze",
    [
        ("*embed_tokens*", "*.0.*"),
        ("*experts*",),
        ("*experts.down*",),
        ("*embed_tokens*", "*layers.0.*", "*layers.1.self_attn*", "*layers.1.*norm*"),
    ],
)
def test_frozen(pool, freeze):
    """The backward exchanges nothing where no gradient flows, and the derived ledger knows it."""
    for layout in ("dp=2,ep=2", "dp=2,ep=2,zero=1,recompute=full"):
        proven(pool, layout, config=MIXTRAL, freeze=freeze)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])
@pytest.mark.parametrize(
    "layout",
    ["dp=1", "dp=2", "dp=2,micro_batch=2", "dp=2,ep=2,micro_batch=2", "dp=4,ep=4,zero=3,recompute=full"],
)
def test_h78_h79_router_loss_is_one_devices(pool, config, layout):
    """H78, H79: the load-balancing term has its gradient, in one strength whatever dp, ep and micro-batch are."""
    with_term = proven(pool, layout, config=config | ROUTED, steps=1, global_batch=8)
    without = prove(pool, layout, config=config, steps=1, global_batch=8)
    assert abs(with_term["loss"]["reference"][0] - without["loss"]["reference"][0]) > 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=2,zero=3"])
def test_lower_precision(pool, layout, precision):
    """One step: in 16 bit a token near a tie goes to another expert later on, on one device as on several."""
    for config in (MIXTRAL, QWEN3_MOE):
        proven(pool, layout, config=config, precision=precision, steps=1)


def _scaled_experts(model, step):
    for name, grad in model.gradients().items():
        if "experts" in name:
            grad.mul_(2.0)


def test_expert_gradients_twice_too_large_are_seen(pool):
    result = prove(pool, "dp=2,ep=2", config=MIXTRAL, steps=1, fault=_scaled_experts)
    assert not result["passed"]
    assert not result["checks"]["gradients"]
    assert "experts" in result["gradients"]["worst"]["tensor"]


def _one_exchange_more(model, step):
    import torch.distributed as dist

    group = model.view.groups["ep"]
    dist.all_to_all_single(torch.empty(2), torch.zeros(2), group=group)


def test_an_exchange_too_many_is_in_the_ledger(pool):
    result = prove(pool, "dp=2,ep=2", config=MIXTRAL, steps=1, fault=_one_exchange_more)
    assert [k for k, good in result["checks"].items() if not good] == ["ledger"]
    assert (
        result["ledger"]["routed_bytes"]["recorded"] - result["ledger"]["routed_bytes"]["expected"] == 2 * 8
    )


def _same_rows(rank, world, layout, tie):
    """A step in which all tokens of all ranks are one token, so that they choose the same experts."""
    from hazard_runs import Rig, tokens

    config = MIXTRAL | {"vocab_size": 128}
    rig = Rig(rank, layout, config=config, global_batch=4)
    if tie:
        with torch.no_grad():
            for name, p in rig.model.params.items():
                if name.endswith("mlp.gate.weight"):
                    p.zero_()
    rows = tokens(4)
    batch = (torch.zeros_like(rows[0]), rows[1])
    seen = {}
    result = rig.step(1, batch=batch, on_gradients=lambda m: seen.update(rig.gradients()))
    return result.loss, {n: g.clone() for n, g in seen.items()}


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=2,ep=2,zero=2", "dp=4,ep=4,recompute=full"])
@pytest.mark.parametrize("tie", [False, True])
def test_h86_h85_experts_without_a_token(pool, layout, tie):
    """H86, H85: one rank's experts get nothing (and all router logits tie): no hang, gradients one device's."""
    world = 2 if "dp=2" in layout else 4
    start = time.monotonic()
    found = pool.run(_same_rows, world, layout, tie, timeout_s=60.0)
    assert time.monotonic() - start < 30
    loss, want = pool.run(_same_rows, 1, "dp=1", tie, timeout_s=60.0)[0]
    empty = 0
    for rank, (other, got) in enumerate(found):
        assert other == pytest.approx(loss, abs=1e-12)
        for name, grad in got.items():
            full = want[name]
            if "experts" in name:
                each = full.shape[0] // world
                full = full[rank * each : (rank + 1) * each]
                empty += int((full.flatten(1) == 0).all(1).sum())
            assert torch.allclose(grad, full, rtol=1e-10, atol=1e-14), (rank, name)
    assert empty
