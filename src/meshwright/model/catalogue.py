"""The catalogue of known models: config fields, published size and source, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One known model.

    Attributes:
        name: the name that commands take.
        config: the fields of its config.json that decide shapes.
        published_parameters: the parameter count that its source states.
        published_within: how far a count may be from it: half the last digit stated, or 0 where exact.
        source: where the fields and the count come from.
    """

    name: str
    published_parameters: int
    published_within: int
    source: str
    config: Mapping[str, Any] = field(compare=False)


def entries() -> tuple[ModelEntry, ...]:
    """Return every model of the catalogue, in its order (by family, then by size)."""
    text = (files("meshwright.model") / "data" / "catalogue.json").read_text(encoding="utf-8")
    return tuple(ModelEntry(**row) for row in json.loads(text))


def find(name: str) -> ModelEntry | None:
    """Return the entry called ``name``; letter case and an organisation prefix do not matter."""
    wanted = name.rsplit("/", 1)[-1].lower()
    return next((e for e in entries() if e.name == wanted), None)
