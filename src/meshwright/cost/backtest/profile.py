"""Stored profiles: coefficients with covariance and bands, the rows they were fitted on, and a fingerprint.

The package ships one, fitted on the public rows that it names. ``plan`` reads its constants from the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from meshwright.cost.backtest import memory_model, model
from meshwright.cost.backtest.calibrate import MemoryProfile, Profile
from meshwright.cost.backtest.case import Case
from meshwright.cost.collective import Floats
from meshwright.cost.shipped import profile_json


@dataclass(frozen=True)
class Shipped:
    """A stored profile, read."""

    date: str
    time: Profile
    memory: MemoryProfile
    rows: frozenset[str]
    stack_bands: Mapping[str, float]
    cold_band: float

    def band(self, stack: str) -> float:
        """Return the half-width of the 80 % band of log time for a stack; a stack that was never seen has the widest."""
        return self.stack_bands.get(stack, self.cold_band)


def _named(names: Sequence[str], values: Floats) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in zip(names, values, strict=True)}


def profile_dict(
    date: str,
    time: Profile,
    memory: MemoryProfile,
    stack_bands: Mapping[str, float],
    cold_band: float,
    cases: Sequence[Case],
) -> dict[str, Any]:
    """Return the JSON form: for each stack its coefficients, their covariance, its rows and its fingerprint."""

    def fingerprint(mine: Sequence[Case]) -> dict[str, Any]:
        return {
            "devices": sorted({case.gpu for case in mine}),
            "links": sorted({f"{case.inter / 1e9:g} GB/s" for case in mine if case.n_gpus > case.node}),
            "sources": sorted({case.source for case in mine}),
        }

    stacks: dict[str, Any] = {}
    for name in sorted({*time.stacks, *memory.stacks}):
        mine = [case for case in cases if case.stack == name]
        entry: dict[str, Any] = {"fingerprint": fingerprint(mine), "rows": [case.id for case in mine]}
        if name in time.stacks:
            entry["time"] = _named(model.NAMES, time.stacks[name])
            entry["time_covariance"] = np.round(time.covariances[name], 7).tolist()
            entry["devices"] = {
                k.split("/", 1)[1]: v for k, v in time.offsets.items() if k.split("/", 1)[0] == name
            }
            entry["band_80"] = stack_bands.get(name, cold_band)
        if name in memory.stacks:
            entry["memory"] = _named(memory_model.MEMORY_NAMES, memory.stacks[name])
        stacks[name] = entry
    return {
        "fitted": date,
        "meaning": "logarithms of factors on the priors of cost/backtest/model.py and memory_model.py",
        "common": {
            "factors": {
                name: float(f"{prior * np.exp(value):.6g}")
                for name, prior, value in zip(model.NAMES, model.PRIORS, time.common, strict=True)
            },
            "time": _named(model.NAMES, time.common),
            "time_covariance": np.round(time.common_covariance, 7).tolist(),
            "memory": _named(memory_model.MEMORY_NAMES, memory.common),
            "band_80": cold_band,
            "fingerprint": fingerprint(cases),
        },
        "stacks": stacks,
    }


def read_profile(raw: Mapping[str, Any]) -> Shipped:
    """Return a profile from its JSON form."""

    def time_of(values: Mapping[str, float]) -> Floats:
        return np.array([values.get(name, 0.0) for name in model.NAMES])

    def memory_of(values: Mapping[str, float]) -> Floats:
        return np.array([values.get(name, 0.0) for name in memory_model.MEMORY_NAMES])

    stacks: Mapping[str, Any] = raw["stacks"]
    with_time = {name: s for name, s in stacks.items() if "time" in s}
    time = Profile(
        common=time_of(raw["common"]["time"]),
        common_covariance=np.array(raw["common"]["time_covariance"]),
        stacks={name: time_of(s["time"]) for name, s in with_time.items()},
        covariances={name: np.array(s["time_covariance"]) for name, s in with_time.items()},
        offsets={f"{name}/{gpu}": v for name, s in with_time.items() for gpu, v in s["devices"].items()},
    )
    memory = MemoryProfile(
        memory_of(raw["common"]["memory"]),
        {n: memory_of(s["memory"]) for n, s in stacks.items() if "memory" in s},
    )
    return Shipped(
        date=raw["fitted"],
        time=time,
        memory=memory,
        rows=frozenset(row for s in stacks.values() for row in s["rows"]),
        stack_bands={name: s["band_80"] for name, s in with_time.items()},
        cold_band=raw["common"]["band_80"],
    )


@cache
def shipped() -> Shipped:
    """Return the profile that the package ships."""
    return read_profile(profile_json())
