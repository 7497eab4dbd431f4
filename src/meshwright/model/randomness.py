"""What a model draws at random in training: which dropouts it has, and what would differ from layout to layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
        "seed_oss": ("residual_dropout", 0.1),
        "stablelm": ("hidden_dropout", 0.0),
        "phi": ("resid_pdrop", 0.0),
        "falcon": ("hidden_dropout", 0.0),
    }
)
"""Config key and its default of dropout on what a block adds to the residual stream, by family."""

_PROBABILITIES: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {"gpt2": ("attn_pdrop", 0.1), "seed_oss": ("attention_dropout", 0.1)}
)
"""The same of dropout of attention probabilities, where it is not ``attention_dropout`` with default 0."""

_BY_FUNCTION: Final = ("opt", "bloom", "starcoder2", "seed_oss", "falcon")
"""Families whose dropout is a function call, not a module: torch's own random numbers, rank by rank."""


def _probability(spec: ModelSpec, key: str, default: float) -> float:
    value = spec.config.get(key, default)
    return float(value) if isinstance(value, int | float) else 0.0


def drops_residual(spec: ModelSpec) -> bool:
    """Return whether blocks drop elements of what they add to the residual stream."""
    return spec.family in _RESIDUAL and _probability(spec, *_RESIDUAL[spec.family]) > 0


def residual_drops(spec: ModelSpec) -> int:
    """Return how many sums of a block have dropout, where ``drops_residual``: StableLM has it on its feed-forward's."""
    return 1 if spec.family in ("stablelm", "falcon") else 2


def drops_probabilities(spec: ModelSpec) -> bool:
    """Return whether the model drops attention probabilities, which takes attention apart."""
    return _probability(spec, *_PROBABILITIES.get(spec.family, ("attention_dropout", 0.0))) > 0


def layout_dependent(spec: ModelSpec) -> tuple[str, ...]:
    """Return what the model draws from torch's own random numbers, which differ from layout to layout."""
    found: list[str] = []
    if spec.dropout > 0 and spec.family in _BY_FUNCTION:
        found.append(f"dropout {spec.dropout:g} of family {spec.family}")
    jitter = _probability(spec, "router_jitter_noise", 0.0)
    if jitter > 0:
        found.append(f"router_jitter_noise {jitter:g}")
    return tuple(found)


def at_rest(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` without dropout, as a model in evaluation mode computes."""
    keys = [
        found[0] for table in (_RESIDUAL, _PROBABILITIES) if (found := table.get(spec.family)) is not None
    ]
    off = dict.fromkeys([*keys, "attention_dropout"], 0.0)
    return replace(spec, dropout=0.0, config={**spec.config, **off})


def draws_alike(spec: ModelSpec) -> bool:
    """Return whether the model has dropout and all of it has the same masks in every layout."""
    return spec.dropout > 0 and not layout_dependent(spec)
