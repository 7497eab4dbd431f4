"""This machine as a cluster: a quick probe, kept in the user's cache for as long as the machine stays the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch

from meshwright.mesh.env import cache_folder, torchrun_facts
from meshwright.orchestrate.proving import write_json
from meshwright.probe.run import run_probe
from meshwright.probe.topology import machine_facts

VERSION = 4
"""Counts changes of what a probe measures."""


def machine_probe(nproc: int, show: Callable[[str], None], *, fresh: bool = False) -> dict[str, Any]:
    """Return a quick probe of ``nproc`` ranks, measured now or found in the cache.

    Ranks of torchrun on several nodes always measure: one node's cache may have what another's has not, and a probe needs
    all of them.
    """
    joined = torchrun_facts()
    fresh = fresh or (joined is not None and joined.world_size > joined.local_world_size)
    facts = [VERSION, nproc, machine_fingerprint()]
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


def machine_fingerprint() -> str:
    """Return the fingerprint of this machine with its libraries, as probes carry it."""
    return machine_facts("cuda" if torch.cuda.is_available() else "cpu")["fingerprint"]
