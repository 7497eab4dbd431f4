"""What a model does to its logits behind the head: a division (Granite), a factor (Cohere), a scaled tanh (Gemma)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshwright.model.spec import ModelSpec

_CAP: Final = MappingProxyType({"gemma2": 30.0, "gemma3": None})
"""``final_logit_softcapping`` where the config does not name it, of the families that read it."""


@dataclass(frozen=True, kw_only=True)
class AfterHead:
    """Logits z of the head's product y: z = y / divisor, then z = cap * tanh(z / cap) with a cap."""

    divisor: float = 1.0
    cap: float | None = None

    @property
    def changes(self) -> bool:
        """Whether logits are not the head's product itself."""
        return self.divisor != 1.0 or self.cap is not None


def after_head(spec: ModelSpec) -> AfterHead:
    """Return what the model of ``spec`` does to its logits."""
    if spec.family in _CAP:
        cap = spec.config.get("final_logit_softcapping", _CAP[spec.family])
        return AfterHead(cap=None if cap is None else float(cap))
    if spec.family == "granite":
        return AfterHead(divisor=float(spec.config.get("logits_scaling", 1.0)))
    if spec.family in ("cohere", "cohere2"):
        return AfterHead(divisor=1.0 / float(spec.config.get("logit_scale", 0.0625)))
    return AfterHead()
