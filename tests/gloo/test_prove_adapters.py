"""LoRA against one device with plain peft, in float64: the factors' gradients, the untouched base, the ledger."""

from __future__ import annotations

import pytest
from proofs import SMALL, prove

from meshwright.model.spec import AdapterSpec

pytestmark = pytest.mark.gloo

LORA = AdapterSpec(kind="lora", rank=3, alpha=5.0)
TIED = {**SMALL, "tie_word_embeddings": True}
LAYOUTS = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=3,zero=3",
    "dp=4,zero=3,shard=2",
    "pp=2",
    "dp=2,zero=3,pp=2",
    "dp=2,zero=3,recompute=full",
]


def holds(result):
    assert result["passed"], {
        k: v for k, v in result.items() if k in ("gradients", "ledger", "checks", "loss")
    }
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]
    assert result["placement"]["complete"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_peft_on_one_device(pool, layout):
    holds(prove(pool, layout, config=SMALL, adapter=LORA, steps=3))


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "pp=2", "dp=2,zero=1,pp=2"])
def test_tied_embeddings_stay_frozen_on_both_ends(pool, layout):
    holds(prove(pool, layout, config=TIED, adapter=LORA, steps=2))


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2,zero=2,pp=2"])
def test_families(pool, family, layout):
    """GPT-2 stores its matrices transposed; Mixtral's fused experts take no adapter, its attention does."""
    holds(prove(pool, layout, config=f"recipes/models/{family}", adapter=LORA, steps=2, seq_len=16))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",)])
def test_named_targets(pool, targets):
    adapter = AdapterSpec(kind="lora", rank=2, alpha=4.0, targets=targets)
    holds(prove(pool, "dp=2,zero=3", config=SMALL, adapter=adapter, steps=2))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_h109_every_factor_has_a_gradient_beside_recompute(pool, recompute):
    """H109: the embedding is frozen, so a recomputed block's input needs no gradient; its adapters must get one."""
    result = prove(pool, f"dp=1,recompute={recompute}", config=SMALL, adapter=LORA, steps=2)
    holds(result)
    assert not result["gradients"]["missing"]


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2,zero=2", "dp=4,zero=3,pp=2"])
def test_frozen_first_blocks_are_not_gathered_again(pool, layout, blocks):
    """A frozen prefix: FSDP2's backward hooks do not run there, and the ledger says so."""
    freeze = ("model.embed_tokens.*", *(f"model.layers.{i}.*" for i in range(blocks)))
    holds(prove(pool, layout, config={**SMALL, "num_hidden_layers": 8}, freeze=freeze, steps=2))


def test_only_the_head_trains(pool):
    holds(prove(pool, "dp=2,zero=3", config=SMALL, freeze=("model.*",), steps=2))


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2",
        "tp=2,sp=off",
        "tp=4,dp=2,kv_heads=replicate",
        "dp=2,zero=3,tp=2",
        "tp=2,pp=2,schedule=zbv,chunks=2",
        "tp=2,recompute=full",
        "tp=2,sp=off,recompute=selective,loss=chunked",
        "dp=2,zero=1,tp=2,pp=2",
    ],
)
def test_tensor_parallel(pool, layout):
    """A column-cut matrix's B is cut and its A summed, a row-cut one's the other way round; tp=4 copies kv heads."""
    holds(prove(pool, layout, config=SMALL, adapter=LORA, steps=2))


@pytest.mark.parametrize("family", ["tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_tensor_parallel_families(pool, family):
    holds(prove(pool, "tp=2,dp=2", config=f"recipes/models/{family}", adapter=LORA, steps=2, seq_len=16))


MIXTRAL = {
    **SMALL,
    "num_hidden_layers": 2,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
BEFORE = AdapterSpec(kind="lora", rank=2, alpha=4.0, targets=("k_proj",))
BEHIND = AdapterSpec(kind="lora", rank=2, alpha=4.0, targets=("o_proj", "down_proj"))


CONTEXT = [
    "cp=2",
    "cp=2,cp_style=ulysses",
    "cp=4,zero=3",
    "cp=2,dp=2,zero=2",
    "cp=2,recompute=full",
    "cp=2,cp_style=ulysses,recompute=selective",
    "cp=2,tp=2",
    "cp=2,pp=2,dp=2,zero=1,schedule=zb-h1",
]


@pytest.mark.parametrize(
    ("layout", "adapter"),
    [
        *((layout, LORA) for layout in CONTEXT),
        *((layout, BEFORE) for layout in CONTEXT[:6]),
        *((layout, BEHIND) for layout in CONTEXT[:6]),
    ],
    ids=str,
)
def test_context_axis(pool, layout, adapter):
    """Gradients of the factors are sums over cp; the ring sends back from the first layer with one before attention."""
    holds(prove(pool, layout, config=SMALL, adapter=adapter, steps=2, packed=adapter is BEFORE))


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2",
        "dp=2,ep=2,zero=1",
        "dp=2,ep=2,zero=2",
        "dp=4,ep=2,zero=3",
        "dp=4,ep=2,zero=3,shard=2",
        "cp=2,ep=2",
        "dp=2,ep=2,pp=2,zero=3",
        "dp=2,ep=2,tp=2,recompute=full",
        "dp=2,cp=2,ep=4,zero=3",
    ],
)
def test_expert_axis(pool, layout):
    """The experts stay frozen and spread: gradients pass through their exchange to the factors before it."""
    holds(prove(pool, layout, config=MIXTRAL, adapter=LORA, steps=2))


EXPERTS = AdapterSpec(kind="lora", rank=3, alpha=5.0, targets=("q_proj", "experts"))
DOWN = AdapterSpec(kind="lora", rank=4, alpha=5.0, targets=("experts.down_proj",))


@pytest.mark.parametrize("layout", ["dp=2,ep=2,tp=2,recompute=full"])
def test_adapters_on_experts(pool, layout):
    """peft adds B A to the stacked experts; here every expert's rows meet its own factors, cut like the experts."""
    holds(prove(pool, layout, config=MIXTRAL, adapter=EXPERTS, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [EXPERTS, DOWN], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "dp=4,zero=3,shard=2",
        "dp=2,ep=2,tp=2,recompute=full",
        "cp=2,ep=2,tp=2",
        "tp=2",
        "tp=2,sp=off",
        "tp=4,kv_heads=replicate,dp=2,zero=3",
        "pp=2",
        "dp=2,pp=2,zero=2,recompute=selective",
        "cp=2,cp_style=ulysses",
        "dp=2,ep=2",
        "dp=2,ep=2,zero=1",
        "dp=4,ep=2,zero=2",
        "dp=4,ep=2,zero=3,shard=2",
        "dp=2,cp=2,ep=4",
        "dp=2,ep=2,tp=2,zero=3,loss=chunked",
        "dp=2,ep=2,tp=2,pp=2",
        "dp=2,ep=2,pp=2,schedule=zb-h1,recompute=full",
        "dp=4,ep=4,zero=1,recompute=selective",
    ],
)
def test_adapters_on_experts_beside_every_axis(pool, layout, adapter):
    holds(prove(pool, layout, config=MIXTRAL, adapter=adapter, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,ep=2,zero=3", "tp=2,pp=2", "dp=2,ep=2,cp=2"])
def test_adapters_on_experts_of_qwen3(pool, layout):
    """A layer without experts before those with some."""
    config = {
        **MIXTRAL,
        "num_hidden_layers": 4,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "head_dim": 8,
    }
    targets = ("experts", "o_proj")
    holds(
        prove(
            pool,
            layout,
            config=config,
            adapter=AdapterSpec(kind="lora", rank=2, alpha=4.0, targets=targets),
            steps=2,
        )
    )


def test_dropout_beside_adapters(pool):
    """The model's own dropout is on in a proof; its masks are those of one device with peft around the model."""
    config = {
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
    }
    holds(prove(pool, "dp=2,zero=3", config=config, adapter=LORA, steps=2))
