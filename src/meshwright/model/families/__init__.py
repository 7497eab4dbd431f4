"""The model families, one file each, and the table by which a config finds its own."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from meshwright.model.families import (
    bloom,
    cohere,
    deepseek,
    ernie4_5,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
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
    gpt_oss.FAMILY,
    qwen2_moe.FAMILY,
    glm4.FIRST,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    cohere.FAMILY,
    cohere.SECOND,
    stablelm.FAMILY,
    phi.FAMILY,
    falcon.FAMILY,
    seed_oss.FAMILY,
    olmo2.THIRD,
    ernie4_5.FAMILY,
)

BY_MODEL_TYPE: Final = MappingProxyType({kind: f for f in FAMILIES for kind in f.model_types})
"""Family by the ``model_type`` field."""

BY_ARCHITECTURE: Final = MappingProxyType({f.architecture: f for f in FAMILIES})
"""Family by the causal-LM class that ``architectures`` names."""

__all__ = ["BY_ARCHITECTURE", "BY_MODEL_TYPE", "FAMILIES", "Family"]
