"""The factors that a fit on public whole-step measurements gives, as the package ships them.

``cost/data/profiles.json`` is written by ``meshwright backtest ... --calibrate --save-profile``; it names the rows it was
fitted on. ``plan`` and ``estimate`` price datasheet devices with these factors; a probe's own measurements come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def profile_json() -> Mapping[str, Any]:
    """Return the stored profile."""
    text = (files("meshwright.cost") / "data" / "profiles.json").read_text(encoding="utf-8")
    return json.loads(text)


def factors() -> Mapping[str, float]:
    """Return factors by name, as ``backtest.model`` describes them: those that all stacks share."""
    return profile_json()["common"]["factors"]


def cold_band() -> float:
    """Return the half-width of the 80 % band of log time of a stack that was never measured."""
    return float(profile_json()["common"]["band_80"])


def source() -> str:
    """Return where the factors come from, in words."""
    raw = profile_json()
    rows = sum(len(stack["rows"]) for stack in raw["stacks"].values())
    return f"fitted on {rows} public runs of {len(raw['stacks'])} stacks ({raw['fitted']})"
