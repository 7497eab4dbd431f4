"""The model families, one file each, and the table by which a config finds its own."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from meshwright.model.families import (
    bloom,
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from meshwright.model.families.pieces import Family

FAMILIES: Final[tuple[Family, ...]] = (
    gpt2.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    starcoder2.FAMILY,
    gpt_neox.FAMILY,
    mixtral.FAMILY,
    qwen3_moe.FAMILY,
    deepseek.V2,
    deepseek.V3,
    opt.FAMILY,
    bloom.FAMILY,
)

BY_MODEL_TYPE: Final = MappingProxyType({kind: f for f in FAMILIES for kind in f.model_types})
"""Family by the ``model_type`` field."""

BY_ARCHITECTURE: Final = MappingProxyType({f.architecture: f for f in FAMILIES})
"""Family by the causal-LM class that ``architectures`` names."""

__all__ = ["BY_ARCHITECTURE", "BY_MODEL_TYPE", "FAMILIES", "Family"]
