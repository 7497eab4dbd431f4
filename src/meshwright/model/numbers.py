"""Numbers of a config.json that no computation survives: a norm's zero epsilon, a negative base of the rotary positions.

Sizes are checked where a family reads them (``Fields.size``); these numbers go to transformers as they are, where they
would be NaN some steps later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeGuard, cast

from meshwright.model.fields import Fields

ABOVE_ZERO: Final = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "rope_theta",
    "rotary_emb_base",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
)
"""Divided by, or under a root or a logarithm."""

CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")
"""Divided by, in the families whose name begins with ``gemma``."""

NOT_BELOW_ZERO: Final = ("initializer_range", "init_std", "router_jitter_noise")
"""Widths of what is drawn."""

ANY_SIZE: Final = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "routed_scaling_factor",
    "router_aux_loss_coef",
)

SHARES: Final = ("partial_rotary_factor", "rotary_pct")
"""Parts of a head that are turned."""

ROPE: Final = ("rope_parameters", "rope_scaling")
ROPE_ABOVE_ZERO: Final = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
ROPE_LISTS: Final = ("short_factor", "long_factor")

Rule = tuple[str, Callable[[float], bool]]

_RULES: Final[Mapping[str, Rule]] = {
    "above": ("a number above 0", lambda x: x > 0),
    "not below": ("a number that is not below 0", lambda x: x >= 0),
    "share": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "any": ("a finite number", lambda x: True),
}


def note_impossible_numbers(fields: Fields, family: str) -> None:
    """Note E123 for every number of the config that cannot be; a field that is absent or null is left alone."""
    above = (*ABOVE_ZERO, *(CAPS if family.startswith("gemma") else ()))
    for rule, keys in (("above", above), ("not below", NOT_BELOW_ZERO), ("share", SHARES), ("any", ANY_SIZE)):
        for key in keys:
            _note(fields, key, fields.config.get(key), rule)
    for name, rope in _ropes(fields.config):
        for key in ROPE_ABOVE_ZERO:
            _note(fields, f"{name}.{key}", rope.get(key), "above")
        for key in SHARES:
            _note(fields, f"{name}.{key}", rope.get(key), "share")
        for key in ROPE_LISTS:
            listed = rope.get(key)
            for value in cast("list[Any]", listed) if isinstance(listed, list) else [listed]:
                if not _note(fields, f"{name}.{key}", value, "above"):
                    break
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if _number(low) and _number(high) and 0 < high <= low:
            fields.wrong(f"{name}.high_freq_factor", f"{high!r}", f"a number above low_freq_factor = {low!r}")


def _ropes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings of rotary parameters with their names; Gemma-3 has one for each kind of layer."""
    for key in ROPE:
        value = config.get(key)
        if not isinstance(value, Mapping):
            continue
        rope = cast("Mapping[str, Any]", value)
        yield key, rope
        for name, inner in rope.items():
            if isinstance(inner, Mapping):
                yield f"{key}.{name}", cast("Mapping[str, Any]", inner)


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _note(fields: Fields, key: str, value: Any, rule: str) -> bool:
    """Return whether the value is one that can be (or none at all); else note it."""
    needs, holds = _RULES[rule]
    if value is None or (_number(value) and holds(value)):
        return True
    kind = (
        "" if isinstance(value, int | float) and not isinstance(value, bool) else f" ({type(value).__name__})"
    )
    fields.wrong(key, f"{value!r}"[:80] + kind, needs)
    return False
