"""This machine as a cluster: a quick probe, kept in the user's cache for as long as the machine stays the same."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from meshwright.mesh.env import cache_folder
from meshwright.orchestrate.proving import write_json
from meshwright.probe.run import run_probe

VERSION = 1
"""Counts changes of what a probe measures."""


def machine_probe(nproc: int, show: Callable[[str], None], *, fresh: bool = False) -> dict[str, Any]:
    """Return a quick probe of ``nproc`` local ranks, measured now or found in the cache."""
    facts = [
        VERSION,
        nproc,
        os.cpu_count(),
        platform.machine(),
        platform.node(),
        torch.__version__,
        _processor(),
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    file = cache_folder() / f"machine-{key}.json"
    if not fresh:
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
    probe = run_probe(nproc, True, show)
    write_json(file, probe)
    return probe


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
