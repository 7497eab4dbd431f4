"""Tiny configs of every family, as tests of stages, axes and packed rows use them."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_SIZE = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "intermediate_size")}
_LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FALCON = _ONE_SIZE | {"ffn_hidden_size": 48}
PHI3: dict[str, Any] = {"model_type": "phi3", **SMALL, "sliding_window": 7}
NEWER: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        **SMALL,
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
    }
    | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 5}
    | {"sliding_window_pattern": 2, "final_logit_softcapping": 0.3},
    "granite": {"model_type": "granite", **SMALL, "embedding_multiplier": 12.0, "logits_scaling": 4.0}
    | {"residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "smollm3": {"model_type": "smollm3", **SMALL, "no_rope_layer_interval": 2, "tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": 7},
    "starcoder2": {"model_type": "starcoder2", **SMALL, "sliding_window": 6},
    "gpt_neox": {"model_type": "gpt_neox", **_ONE_SIZE, "intermediate_size": 48},
    "gpt_neox-serial": {"model_type": "gpt_neox", **_ONE_SIZE, "intermediate_size": 48}
    | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", **SMALL},
    "opt": {"model_type": "opt", **_ONE_SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 5, "n_head": 4},
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT, "q_lora_rank": None, "n_shared_experts": 2}
    | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT, "q_lora_rank": 12, "n_shared_experts": 1}
    | {"n_group": 2, "topk_group": 1},
    "gpt_oss": {"model_type": "gpt_oss", **SMALL, **_MIXTURE, "head_dim": 16, "sliding_window": 5}
    | {"swiglu_limit": 0.05, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **SMALL, **_MIXTURE, "num_experts": 4}
    | {"shared_expert_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 5},
    "glm": {"model_type": "glm", **SMALL, "head_dim": 16},
    "glm4": {"model_type": "glm4", **SMALL, "head_dim": 16},
    "glm4_moe": {"model_type": "glm4_moe", **SMALL, **_MIXTURE, "n_routed_experts": 4, "use_qk_norm": True}
    | {"attention_bias": True, "n_group": 2, "n_shared_experts": 2},
    "cohere": {"model_type": "cohere", **SMALL, "logit_scale": 0.3},
    "cohere-norms": {"model_type": "cohere", **SMALL, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {"model_type": "cohere2", **SMALL, "sliding_window": 5, "sliding_window_pattern": 2},
    "stablelm": {"model_type": "stablelm", **SMALL, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm-parallel": {"model_type": "stablelm", **SMALL, "use_parallel_residual": True}
    | {"partial_rotary_factor": 0.25, "qk_layernorm": True},
    "phi": {"model_type": "phi", **SMALL},
    "phi-norms": {"model_type": "phi", **SMALL, "qk_layernorm": True, "tie_word_embeddings": True},
    "falcon": {"model_type": "falcon", **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-one-norm": {
        "model_type": "falcon",
        **_FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    }
    | {"num_ln_in_parallel_attn": 1, "bias": True},
    "falcon-multi-query": {"model_type": "falcon", **_FALCON},
    "falcon-serial": {"model_type": "falcon", **_FALCON, "multi_query": False, "parallel_attn": False},
    "falcon-alibi": {"model_type": "falcon", **_FALCON, "multi_query": False, "parallel_attn": False}
    | {"alibi": True, "bias": True},
    "seed_oss": {"model_type": "seed_oss", **SMALL, "head_dim": 16, "attention_out_bias": True}
    | {"mlp_bias": True, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "olmo3": {"model_type": "olmo3", **SMALL, "sliding_window": 5},
    "ernie4_5": {"model_type": "ernie4_5", **SMALL, "head_dim": 16, "use_bias": True},
}
"""Numbers that make each peculiarity felt: caps near the scores, windows below the sequence, factors that are not 1."""

LATER = frozenset(list(NEWER)[list(NEWER).index("gpt_oss") :])
"""Of these ``make test`` tries less than of the others."""
