"""Saved activation bytes per block against the saved-tensor hooks of the transformers modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from family_configs import LATER
from meshwright.layout.built import CONTEXT_FAMILIES
from meshwright.model.counts import saved_activation_bytes
from meshwright.model.randomness import drops_probabilities
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.parallel.context import ContextAxis, take_over
from meshwright.parallel.dropout import Dropout, use_dropout

MICRO_BATCH, SEQ_LEN, BLOCK = 2, 24, 1
DTYPE_BYTES = {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LATENT = _COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "topk_group": 1,
}
_FALCON = {k: v for k, v in _COMMON.items() if k not in ("num_key_value_heads", "intermediate_size")}
_FALCON |= {"ffn_hidden_size": 112}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"head_dim": 16},
    "gpt2": {"vocab_size": 64, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 64} | _NO_DROPOUT,
    "qwen3": _COMMON | {"head_dim": 16},
    "qwen2": dict(_COMMON),
    "mistral": _COMMON | {"sliding_window": 8},
    "phi3": dict(_COMMON),
    "gemma2": _COMMON | {"head_dim": 16},
    "gemma3_text": _COMMON | {"head_dim": 16},
    "gemma": _COMMON | {"head_dim": 16},
    "granite": _COMMON | {"residual_multiplier": 0.2, "attention_multiplier": 0.1},
    "smollm3": _COMMON | {"no_rope_layer_interval": 3},
    "olmo2": dict(_COMMON),
    "starcoder2": dict(_COMMON),
    "gpt_neox": {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
    "mixtral": _COMMON | {"head_dim": 16, "num_local_experts": 4},
    "qwen3_moe": _COMMON
    | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "deepseek_v2": _LATENT | {"n_shared_experts": 2, "n_group": 1},
    "deepseek_v3": _LATENT | {"n_shared_experts": 1, "n_group": 2},
    "opt": {
        "vocab_size": 64,
        "hidden_size": 40,
        "ffn_dim": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
    "bloom": {"vocab_size": 64, "hidden_size": 40, "n_layer": 2, "n_head": 4},
    "seed_oss": _COMMON | {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm": _COMMON | {"head_dim": 16},
    "glm4": _COMMON | {"head_dim": 16},
    "glm4_moe": _COMMON
    | {"head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": True},
    "qwen2_moe": _COMMON
    | {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 32},
    "cohere": _COMMON | {"head_dim": 16, "use_qk_norm": True},
    "cohere2": _COMMON | {"head_dim": 16, "sliding_window": 8},
    "stablelm": _COMMON | {"qk_layernorm": True, "use_parallel_residual": True},
    "phi": _COMMON | {"partial_rotary_factor": 0.4},
    "olmo3": _COMMON | {"sliding_window": 8},
    "ernie4_5": _COMMON | {"head_dim": 16},
    "falcon": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": _COMMON
    | {"head_dim": 16, "num_local_experts": 4, "intermediate_size": 24, "num_experts_per_tok": 2}
    | {"sliding_window": 8},
}
CASES = [
    pytest.param(kind, precision, marks=pytest.mark.slow if kind in LATER and precision == "bf16" else ())
    for kind in CONFIGS
    for precision in ("fp32", "bf16")
]
CASES += [(kind, "autocast") for kind in ("llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "deepseek_v3")]
CASES += [(kind, "autocast") for kind in ("glm4", "glm4_moe", "qwen2_moe", "cohere", "stablelm", "gpt_oss")]


def attends_in_parts(model: torch.nn.Module, spec: ModelSpec) -> None:
    """Give a model the attention of a context axis, of one rank that holds the whole sequence."""
    if drops_probabilities(spec):
        dropout = Dropout(0, rows_B=torch.arange(MICRO_BATCH))
        use_dropout(model, dropout, attends=True)
    at = torch.arange(SEQ_LEN)
    group: Any = None
    axis = ContextAxis(group, "ring", (((0, SEQ_LEN),),), SEQ_LEN, SEQ_LEN, at, at[None])
    take_over(model, spec, axis)


def measured_bytes(kind: str, precision: str, config: dict[str, Any], in_parts: bool = False) -> int:
    """Bytes of the unique storages that one block's forward saves, weights and their casts left out."""
    torch.manual_seed(0)
    theirs = AutoConfig.for_model(kind, use_cache=False, **config)
    model = AutoModelForCausalLM.from_config(theirs).train()
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    spec = spec_from_config({"model_type": kind, **config}, kind)
    if in_parts:
        attends_in_parts(model, spec)
    block = model.get_submodule(spec.paths.blocks)[BLOCK]
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    cast_shapes = {
        s for p in block.parameters() for s in (tuple(p.shape), tuple(p.shape)[::-1]) if p.dim() == 2
    }
    running = False
    kept: dict[int, torch.Tensor] = {}

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal running
        running = True
        for value in kwargs.values():  # cos and sin, masks: shared by all blocks
            for t in value if isinstance(value, tuple) else (value,):
                if isinstance(t, torch.Tensor):
                    weights.add(t.untyped_storage().data_ptr())

    def leave(*_: Any) -> None:
        nonlocal running
        running = False

    def pack(t: torch.Tensor) -> torch.Tensor:
        pointer = t.untyped_storage().data_ptr()
        cast = precision == "autocast" and tuple(t.shape) in cast_shapes
        if running and pointer not in weights and not cast:
            kept[pointer] = t
        return t

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave)
    ids = torch.randint(0, 64, (MICRO_BATCH, SEQ_LEN))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"),
    ):
        model(input_ids=ids)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_saved_bytes_of_a_block(kind: str, precision: str) -> None:
    spec = spec_from_config({"model_type": kind, **CONFIGS[kind]}, kind)
    compute, residual = DTYPE_BYTES[precision]
    kernel = "math" if spec.attention.kind == "mla" else "flash"  # the CPU has no fused kernel for MLA
    predicted = saved_activation_bytes(
        spec, spec.blocks[BLOCK], SEQ_LEN, MICRO_BATCH, compute, kernel, residual_bytes=residual
    )
    assert predicted == pytest.approx(measured_bytes(kind, precision, CONFIGS[kind]), rel=0.002)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mistral", {"sliding_window": SEQ_LEN}),  # as long as the sequence: the mask is still built
        ("mistral", {"sliding_window": SEQ_LEN + 1}),
        ("phi3", {"sliding_window": SEQ_LEN - 1}),
        ("gpt2", {"resid_pdrop": 0.1}),
        ("gpt2", {"activation_function": "gelu"}),
        ("llama", {"num_key_value_heads": 1}),
        ("cohere", {"use_qk_norm": False}),
        ("stablelm", {"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.1}),
        ("phi", {"qk_layernorm": True}),
        ("falcon", {"new_decoder_architecture": False}),
        (
            "falcon",
            {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "alibi": True},
        ),
    ],
)
def test_windows_dropout_and_activations(kind: str, extra: dict[str, Any]) -> None:
    config = CONFIGS[kind] | extra
    spec = spec_from_config({"model_type": kind, **config}, kind)
    predicted = saved_activation_bytes(spec, spec.blocks[BLOCK], SEQ_LEN, MICRO_BATCH, 4, mask_bytes=4)
    assert predicted == pytest.approx(measured_bytes(kind, "fp32", config), rel=0.002)


KINDS = {"gemma3": "gemma3_text"}
PARTS = [
    pytest.param(KINDS.get(f, f), {}, p, marks=pytest.mark.slow if f in LATER and p == "bf16" else ())
    for f in CONTEXT_FAMILIES
    for p in ("fp32", "bf16")
]
PARTS += [("llama", {}, "autocast"), ("gpt2", {}, "autocast")]
PARTS += [
    (kind, extra, "fp32")
    for kind, extra in (("gpt2", {"attn_pdrop": 0.2}), ("qwen2", {"attention_dropout": 0.2}))
]


@pytest.mark.parametrize(("kind", "extra", "precision"), PARTS)
def test_attention_over_a_context_axis_keeps_no_scores(
    kind: str, extra: dict[str, Any], precision: str
) -> None:
    """Also with windows and with dropout on its probabilities."""
    config = CONFIGS[kind] | extra
    spec = spec_from_config({"model_type": kind, **config}, kind)
    compute, residual = DTYPE_BYTES[precision]
    predicted = saved_activation_bytes(
        spec, spec.blocks[BLOCK], SEQ_LEN, MICRO_BATCH, compute, "parts", residual_bytes=residual
    )
    assert predicted == pytest.approx(measured_bytes(kind, precision, config, in_parts=True), rel=0.002)
