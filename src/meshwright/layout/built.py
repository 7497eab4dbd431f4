"""What can be run today, as data: a later axis or option switches a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

AXES: Final = frozenset({"dp", "pp", "tp", "cp", "ep"})
"""Axes whose degree may be above 1."""

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"),
        "loss": ("eager", "chunked", "parallel"),
        "recompute": ("none", "selective", "full"),
        "offload": ("none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme"),
        "compile": ("off", "blocks"),
        "precision": ("fp32", "bf16", "fp16", "fp64"),
    }
)
"""Values that run, by key of the layout text; a schedule file (``@FILE``) runs too."""

_GROUPED: Final = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "smollm3",
    "starcoder2",
    "gpt_neox",
    "olmo2",
    "gpt_oss",
    "qwen2_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "cohere",
    "cohere2",
    "stablelm",
    "phi",
    "seed_oss",
    "olmo3",
    "ernie4_5",
)
"""Families whose attention comes from transformers' registry, with positions given and heads that can be cut."""

_LATENT: Final = ("deepseek_v2", "deepseek_v3")

PIPELINE_FAMILIES: Final = (*_GROUPED, "opt", "bloom", "falcon", *_LATENT)
"""Model families that can be cut in stages."""

EXPERT_FAMILIES: Final = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen2_moe",
    "glm4_moe",
)
"""Model families whose experts can be spread over ranks."""

TENSOR_FAMILIES: Final = (*_GROUPED, "opt", "bloom", "falcon", *_LATENT)
"""Model families that the tensor axis can cut."""

CONTEXT_FAMILIES: Final = (*_GROUPED, "opt", *_LATENT)
"""Model families whose attention the context axis can take over."""

PACKING_FAMILIES: Final = (*(f for f in _GROUPED if f != "gpt_oss"), "falcon", *_LATENT)
"""Model families of which it is tested that documents packed in one row do not see each other.

gpt-oss makes its masks without the positions, so on one device its documents do see each other.
"""
