"""What a model draws at random in training: which dropouts it has, and what would differ from layout to layout."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from meshwright.model.spec import ModelSpec

_RESIDUAL: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "gpt2": ("resid_pdrop", 0.1),
        "phi3": ("resid_pdrop", 0.0),
        "opt": ("dropout", 0.1),
        "bloom": ("hidden_dropout", 0.0),
        "gpt_neox": ("hidden_dropout", 0.0),
        "starcoder2": ("residual_dropout", 0.0),
    }
)
"""Config key and its default of dropout on what a block adds to the residual stream, by family."""

_BY_FUNCTION: Final = ("opt", "bloom", "starcoder2")
"""Families whose dropout is a function call, not a module: torch's own random numbers, rank by rank."""


def _probability(spec: ModelSpec, key: str, default: float) -> float:
    value = spec.config.get(key, default)
    return float(value) if isinstance(value, int | float) else 0.0


def drops_residual(spec: ModelSpec) -> bool:
    """Return whether blocks drop elements of what they add to the residual stream."""
    return spec.family in _RESIDUAL and _probability(spec, *_RESIDUAL[spec.family]) > 0


def drops_probabilities(spec: ModelSpec) -> bool:
    """Return whether the model drops attention probabilities, which takes attention apart."""
    if spec.family == "gpt2":
        return _probability(spec, "attn_pdrop", 0.1) > 0
    return _probability(spec, "attention_dropout", 0.0) > 0


def layout_dependent(spec: ModelSpec) -> tuple[str, ...]:
    """Return what the model draws from torch's own random numbers, which differ from layout to layout."""
    found: list[str] = []
    if spec.dropout > 0 and spec.family in _BY_FUNCTION:
        found.append(f"dropout {spec.dropout:g} of family {spec.family}")
    jitter = _probability(spec, "router_jitter_noise", 0.0)
    if jitter > 0:
        found.append(f"router_jitter_noise {jitter:g}")
    return tuple(found)


def draws_alike(spec: ModelSpec) -> bool:
    """Return whether the model has dropout and all of it has the same masks in every layout."""
    return spec.dropout > 0 and not layout_dependent(spec)
