"""Names, shapes, order, counts and module paths against transformers' own modules on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.model import catalogue
from meshwright.model.families import BY_MODEL_TYPE
from meshwright.model.read_hf import read_model, spec_from_config

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LATENT = _COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_shared_experts": 2,
}
_MOE = _COMMON | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NEOX = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
_OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_FALCON = {k: v for k, v in _NEOX.items() if k != "intermediate_size"} | {"ffn_hidden_size": 48}
_GLM = _MOE | {"n_routed_experts": 4, "n_shared_experts": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", _GPT2),
    ("gpt2", _GPT2 | {"n_inner": 80, "tie_word_embeddings": False}),
    ("llama", _COMMON),
    ("llama", _COMMON | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"} | {"head_dim": 16}),
    ("mistral", _COMMON),
    ("mistral", _COMMON | {"head_dim": 16, "sliding_window": None}),
    ("qwen2", _COMMON | {"tie_word_embeddings": True}),
    ("qwen3", _COMMON),
    ("qwen3", _COMMON | {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("gemma", _COMMON | {"head_dim": 16}),
    ("gemma", _COMMON | {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}),
    ("gemma2", _COMMON | {"head_dim": 16}),
    ("gemma2", _COMMON | {"attention_bias": True}),
    ("gemma3_text", _COMMON | {"head_dim": 16}),
    ("phi3", _COMMON),
    ("granite", _COMMON),
    ("granite", _COMMON | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("smollm3", _COMMON),
    ("smollm3", _COMMON | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("olmo2", _COMMON),
    ("olmo2", _COMMON | {"attention_bias": True, "tie_word_embeddings": True}),
    ("starcoder2", _COMMON),
    ("starcoder2", _COMMON | {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt_neox", _NEOX),
    ("gpt_neox", _NEOX | {"attention_bias": False, "tie_word_embeddings": True}),
    ("mixtral", _COMMON | {"num_local_experts": 4}),
    ("mixtral", _COMMON | {"num_local_experts": 4, "head_dim": 16, "tie_word_embeddings": True}),
    ("qwen3_moe", _MOE),
    ("qwen3_moe", _MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "head_dim": 16}),
    ("deepseek_v2", _LATENT | {"n_group": 1, "topk_group": 1}),
    ("deepseek_v2", _LATENT | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", _LATENT | {"n_group": 2, "topk_group": 1}),
    ("deepseek_v3", _LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("opt", _OPT),
    ("opt", _OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("seed_oss", _COMMON | {"head_dim": 16}),
    ("seed_oss", _COMMON | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("glm", _COMMON),
    ("glm4", _COMMON | {"head_dim": 16}),
    ("glm4", _COMMON | {"attention_bias": False, "tie_word_embeddings": True}),
    ("glm4_moe", _GLM),
    ("glm4_moe", _GLM | {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0}),
    ("qwen2_moe", _MOE | {"shared_expert_intermediate_size": 24}),
    ("qwen2_moe", _MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "qkv_bias": False}),
    ("cohere", _COMMON),
    ("cohere", _COMMON | {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}),
    ("cohere2", _COMMON | {"head_dim": 16}),
    ("stablelm", _COMMON),
    ("stablelm", _COMMON | {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    ("phi", _COMMON),
    ("phi", _COMMON | {"qk_layernorm": True, "tie_word_embeddings": True}),
    ("falcon", _FALCON),
    ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    ("falcon", _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("olmo3", _COMMON),
    ("ernie4_5", _COMMON | {"head_dim": 16}),
    ("ernie4_5", _COMMON | {"use_bias": True, "tie_word_embeddings": False}),
    ("gpt_oss", _COMMON | {"num_local_experts": 4, "head_dim": 16}),
    ("gpt_oss", _COMMON | {"num_local_experts": 4, "attention_bias": False, "sliding_window": None}),
]


def _meta_model(kind: str, config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))


def _compare(model: Any, config: dict[str, Any], kind: str) -> None:
    spec = spec_from_config({"model_type": kind, **config}, kind)
    theirs = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    ours = [(t.name, t.shape) for t in spec.tensors() if t.tied_to is None]
    assert dict(ours) == dict(theirs)
    if kind not in ("opt", "glm4", "falcon"):  # norms are registered in another order than they are computed
        assert ours == theirs
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert spec.architecture == type(model).__name__
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert spec.tied_embeddings is tied
    assert spec.head[0].shape == tuple(model.get_output_embeddings().weight.shape)

    paths = spec.paths
    assert model.get_submodule(paths.embedding) is model.get_input_embeddings()
    assert model.get_submodule(paths.head) is model.get_output_embeddings()
    assert len(model.get_submodule(paths.blocks)) == spec.num_layers
    assert hasattr(model.get_submodule(paths.final_norm), "weight")
    base = model.get_submodule(paths.base)
    placed = {paths.embedding, paths.blocks, paths.final_norm, *paths.embedding_extras} | (
        {paths.positions} if paths.positions else set()
    )
    for path in placed:
        assert path.startswith(f"{paths.base}.")
        model.get_submodule(path)
    left_out = {f"{paths.base}.{name}" for name, _ in base.named_children()} - placed
    assert all("rotary" in path for path in left_out), f"a stage would lose {left_out}"
    for block in spec.blocks:
        module = model.get_submodule(paths.blocks)[block.index]
        prefix = f"{paths.blocks}.{block.index}."
        assert {t.name for t in block.tensors} == {prefix + n for n, _ in module.named_parameters()}


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_small_configs_of_every_family(kind: str, config: dict[str, Any]) -> None:
    _compare(_meta_model(kind, config), config, kind)


def test_every_family_is_compared() -> None:
    families = {BY_MODEL_TYPE[kind].name for kind, _ in CASES}
    assert families == {f.name for f in BY_MODEL_TYPE.values()}


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-3-12b", "deepseek-v2-lite", "phi-3-medium"])
def test_catalogue_entries_at_full_size(name: str) -> None:
    entry = next(e for e in catalogue.entries() if e.name == name)
    config = {k: v for k, v in entry.config.items() if k not in ("model_type", "architectures")}
    if entry.config["model_type"] == "phi3":
        config["pad_token_id"] = 0
    _compare(_meta_model(entry.config["model_type"], config), config, entry.config["model_type"])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "qwen3_moe", "phi3"])
@pytest.mark.parametrize(
    "extra", [{}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}]
)
def test_sliding_windows_per_layer(kind: str, extra: dict[str, Any]) -> None:
    config = (_MOE if kind == "qwen3_moe" else _COMMON) | {"head_dim": 8, "num_hidden_layers": 8} | extra
    theirs = AutoConfig.for_model(kind, **config)
    spec = spec_from_config({"model_type": kind, **config}, kind)
    kinds = getattr(theirs, "layer_types", None)
    window = theirs.sliding_window
    expected = [window if kinds is None or kinds[i] == "sliding_attention" else None for i in range(8)]
    assert [b.sliding_window for b in spec.blocks] == expected


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_tiny_models_of_the_recipes(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.config.rootpath / "recipes" / "models" / name
    spec = read_model(str(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [
        (t.name, t.shape) for t in spec.tensors() if t.tied_to is None
    ]
