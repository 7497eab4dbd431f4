"""The context axis, ring and Ulysses, against one device in float64."""

from __future__ import annotations

from typing import Any

import pytest
from proofs import SMALL, prove

from meshwright.base.errors import MeshwrightError
from meshwright.layout.parse import parse_layout
from meshwright.prove.ladder import Rung, climb

pytestmark = pytest.mark.gloo

LLAMA = {"architectures": ["LlamaForCausalLM"], **SMALL, "num_hidden_layers": 2}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 8,
    "tie_word_embeddings": True,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {
    **LLAMA,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 5,
}
PHI3 = {**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 67,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def proven(pool: Any, layout: str, **options: Any) -> dict[str, Any]:
    result = prove(pool, layout, seq_len=options.pop("seq_len", 32), **options)
    assert result["passed"], result
    if options.get("precision", "fp64") == "fp64":
        assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"], result["ledger"]
    assert result["placement"]["complete"]
    return result


@pytest.mark.parametrize("layout", ["cp=2", "cp=4", "cp=2,cp_style=ulysses", "cp=4,cp_style=ulysses"])
def test_context_axis_equals_one_device(pool: Any, layout: str) -> None:
    """Four ranks for two key/value heads; a loss at every border between ranks."""
    proven(pool, layout, config=LLAMA)


@pytest.mark.parametrize("style", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "config", [QWEN3, QWEN2, MISTRAL, PHI3, MIXTRAL, QWEN3_MOE, GPT2], ids=lambda c: c["model_type"]
)
def test_families(pool: Any, config: dict[str, Any], style: str) -> None:
    """Norms per head, windows of 5 positions, fused matrices, experts, learned positions - all of them used."""
    proven(pool, f"cp=2,cp_style={style}", config=config, steps=1)


@pytest.mark.parametrize(("layout", "seq_len"), [("cp=2", 31), ("cp=4", 27), ("cp=4,cp_style=ulysses", 30)])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c["model_type"])
def test_h71_sequences_that_do_not_split_are_padded(
    pool: Any, config: dict[str, Any], layout: str, seq_len: int
) -> None:
    """GPT-2's table of positions is just as long as the sequence: padding must not reach behind it."""
    if config is GPT2:
        config = GPT2 | {"n_positions": seq_len}
    proven(pool, layout, config=config, seq_len=seq_len, steps=1)


@pytest.mark.parametrize(
    "layout",
    [
        "cp=2,dp=2",
        "cp=2,dp=2,zero=1",
        "cp=2,dp=2,zero=2",
        "cp=2,dp=2,zero=3",
        "cp=2,dp=2,zero=3,shard=2",
        "cp=2,dp=2,cp_style=ulysses,zero=2",
        "cp=4,zero=3",
        "cp=2,dp=2,order=dp/cp/tp/pp",
        "cp=2,dp=2,zero=1,order=dp/cp/tp/pp",
        "cp=2,pp=2",
        "cp=2,pp=2,schedule=gpipe,cp_style=ulysses",
    ],
)
def test_two_axes(pool: Any, layout: str) -> None:
    """H18: accumulation, unequal valid tokens and an empty micro-batch; gradients are sums over dp x cp."""
    proven(pool, layout, config=LLAMA, global_batch=8)


@pytest.mark.parametrize(
    "layout",
    [
        "cp=2,pp=2,dp=2,zero=2",
        "cp=2,pp=2,dp=2",
        "cp=2,pp=2,dp=2,zero=3",
        "cp=2,tp=2,dp=2,zero=3",
        "cp=2,tp=2,pp=2",
    ],
)
def test_three_axes(pool: Any, layout: str) -> None:
    result = proven(pool, layout, config=QWEN3)
    assert result["checks"]["tied_copies_equal"]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_schedules(pool: Any, style: str, schedule: str) -> None:
    """Backwards in two halves exchange once, in the half that goes to the stage before."""
    config = QWEN3 | {"num_hidden_layers": 4}
    proven(pool, f"cp=2,cp_style={style},pp=2,schedule={schedule}", config=config, steps=1)


@pytest.mark.parametrize(
    ("layout", "seq_len"),
    [
        ("cp=2,tp=2", 30),
        ("cp=2,tp=2,sp=off,cp_style=ulysses", 31),
        ("cp=2,tp=2,cp_style=ulysses,loss=chunked", 29),
        ("cp=2,tp=4,kv_heads=replicate", 27),
        ("cp=2,tp=2,recompute=full", 30),
        ("tp=2,cp=2,order=cp/tp/dp/pp", 32),
    ],
)
@pytest.mark.parametrize("config", [QWEN3, GPT2], ids=lambda c: c["model_type"])
def test_with_the_tensor_axis(pool: Any, config: dict[str, Any], layout: str, seq_len: int) -> None:
    """Padding to a length that both axes divide; key/value heads of a rank, one or two of them."""
    proven(pool, layout, config=config, seq_len=seq_len, steps=1)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_recompute_exchanges_again(pool: Any, style: str, recompute: str) -> None:
    proven(pool, f"cp=2,cp_style={style},recompute={recompute}", config=LLAMA, steps=1)


@pytest.mark.parametrize("layout", ["cp=2", "cp=2,cp_style=ulysses", "cp=2,recompute=full", "cp=2,zero=1"])
@pytest.mark.parametrize("freeze", [("*embed_tokens*",), ("*embed_tokens*", "*.0.*")], ids=["table", "layer"])
def test_frozen(pool: Any, layout: str, freeze: tuple[str, ...]) -> None:
    """The backward sends nothing where no gradient flows, and the derived ledger knows it."""
    proven(pool, layout, config=LLAMA, freeze=freeze, steps=1)


@pytest.mark.parametrize("layout", ["cp=2", "cp=2,cp_style=ulysses", "cp=2,zero=3", "cp=2,loss=chunked"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_lower_precision(pool: Any, layout: str, precision: str) -> None:
    proven(pool, layout, config=LLAMA, precision=precision)


@pytest.mark.slow
def test_the_ladder_has_a_rung_for_it(pool: Any) -> None:
    def at_rung(rung: Rung) -> dict[str, Any]:
        return prove(pool, rung.layout.text(), config=QWEN3, steps=1, simulated=rung.simulated)

    result = climb(parse_layout("dp=2,zero=2,tp=2,cp=2,precision=fp64"), at_rung, lambda line: None)
    assert result["passed"], result["ladder"]
    assert "cp=2" in [line["adds"] for line in result["ladder"]]


def test_a_rank_that_counts_its_positions_from_0_is_found(pool: Any) -> None:
    """The proof can fail: local positions on every rank change the gradients."""
    result = pool.run(_with_local_positions, 2, timeout_s=120.0)
    assert all(diff > 1e-6 for diff in result), result


def _with_local_positions(rank: int, world: int) -> float:
    import torch

    from meshwright.layout.context import runs
    from meshwright.mesh.device_mesh import build_mesh
    from meshwright.model.read_hf import spec_from_config
    from meshwright.parallel.build import build_model
    from meshwright.parallel.context import use_context

    layout = parse_layout("cp=2,precision=fp64")
    spec = spec_from_config(LLAMA, "small")
    ids = torch.arange(16)[None]
    whole = build_model(spec.config, seed=0, dtype=torch.float64)
    want = whole(input_ids=ids, use_cache=False).logits
    cut = build_model(spec.config, seed=0, dtype=torch.float64)
    axis = use_context(cut, spec, build_mesh(layout, rank), 16)
    assert axis.positions.tolist() == [*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)]
    assert runs("ring", 2, rank, 16) == axis.runs[rank]
    mine = axis.part(ids, 0)
    right = cut(input_ids=mine, use_cache=False, position_ids=axis.position_ids).logits
    assert (right - want[:, axis.positions]).abs().max() < 1e-12
    wrong = cut(input_ids=mine, use_cache=False).logits
    return (wrong - want[:, axis.positions]).abs().max().item()


def _masked(rank: int, world: int) -> list[str]:
    import torch

    from meshwright.mesh.device_mesh import build_mesh
    from meshwright.model.read_hf import spec_from_config
    from meshwright.parallel.build import build_model
    from meshwright.parallel.context import context_attention, use_context

    spec = spec_from_config(LLAMA, "small")
    model: Any = build_model(spec.config, seed=0)
    axis = use_context(model, spec, build_mesh(parse_layout("cp=2,precision=fp32"), rank), 16)
    ids = axis.part(torch.arange(16)[None], 0)
    x = torch.zeros(1, 4, 8, 8)
    attention = model.model.layers[0].self_attn
    found: list[str] = []
    for call in (
        lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False),
        lambda: context_attention(attention, x, x, x, torch.ones(1, 1, 8, 8)),
        lambda: context_attention(attention, x, x, x, None, dropout=0.1),
        lambda: context_attention(attention, x, x, x, None, position_bias=x),
        lambda: context_attention(attention, x, x, x, None, is_causal=False),
        lambda: context_attention(model, x, x, x, None),
    ):
        try:
            call()
        except MeshwrightError as error:
            found += [f"{p.code} {p.found}" for p in error.problems]
    return found


def test_h75_masks_that_are_not_done_are_refused_never_dropped(pool: Any) -> None:
    for found in pool.run(_masked, 2):
        assert [f.split()[0] for f in found] == ["E262"] * 6
        for said, part in zip(
            found,
            ("padding", "mask", "dropout 0.1", "position_bias", "not causal", "does not name"),
            strict=True,
        ):
            assert part in said
