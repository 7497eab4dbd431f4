"""Meshwright: plan, run and prove parallel training of language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import RankInfo, inspect, parallelize, plan, rank_info
    from meshwright.base.errors import MeshwrightError

__version__ = "0.1.0"

__all__ = ["MeshwrightError", "RankInfo", "__version__", "inspect", "parallelize", "plan", "rank_info"]


def __getattr__(name: str) -> Any:
    """Load the API at its first use, so that importing a part of the package stays cheap."""
    if name == "MeshwrightError":
        return importlib.import_module("meshwright.base.errors").MeshwrightError
    if name in __all__:
        return getattr(importlib.import_module("meshwright.api"), name)
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
