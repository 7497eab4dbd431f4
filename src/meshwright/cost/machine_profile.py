"""A machine's profile: its factors on a probe's figures, with their covariance, errors and date; put on a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from meshwright.cluster.spec import ClusterSpec, CollectiveFit, Figure
from meshwright.cost.collective import Floats

FORMAT: Final = 3
"""Version of the profile's format, and of the factors' meaning."""
NAMES: Final = ("matmul", "moved", "launch", "collective", "optimizer")
"""What the factors are of: seconds of matrix products and attention, of moved bytes, of launches, of collectives, of the
update."""


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Factors of one machine on one probe.

    Attributes:
        factors: logarithms by name; 0 is what the probe says.
        covariance: of the factors, in the order of ``NAMES``.
        runs: rows that were used; ``left_out`` of the machine were disturbed or could not be predicted.
        before_pct, after_pct: mean error of step times with the probe's figures, and with the factors.
        held_out_pct: mean error when each run is predicted from the others (linearised); None for one run.
        spread: deviation of the log of predicted over measured.
        date: day of the fit.
    """

    factors: Mapping[str, float]
    covariance: Sequence[Sequence[float]]
    runs: int
    left_out: int
    before_pct: float
    after_pct: float
    held_out_pct: float | None
    spread: float
    date: str

    def sentence(self) -> str:
        """Return where the figures come from, in words."""
        told = "" if self.held_out_pct is None else f", {self.held_out_pct:.1f} % on a run it has not seen"
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return (
            f"probe, fitted on {runs} of this machine ({self.date}): error {self.before_pct:.1f} % before, "
            f"{self.after_pct:.1f} % after{told}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format": FORMAT,
            "factors": {name: math.exp(value) for name, value in self.factors.items()},
            "log_factors": dict(self.factors),
            "covariance": [list(row) for row in self.covariance],
            "runs": self.runs,
            "left_out": self.left_out,
            "before_pct": self.before_pct,
            "after_pct": self.after_pct,
            "held_out_pct": self.held_out_pct,
            "spread": self.spread,
            "date": self.date,
        }


def profile_from_dict(data: Mapping[str, Any]) -> MachineProfile:
    """Return the profile whose ``as_dict`` is ``data``. Raises KeyError, TypeError or ValueError for other things."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}")
    held = data["held_out_pct"]
    return MachineProfile(
        factors={name: float(data["log_factors"][name]) for name in NAMES},
        covariance=[[float(x) for x in row] for row in data["covariance"]],
        runs=int(data["runs"]),
        left_out=int(data["left_out"]),
        before_pct=float(data["before_pct"]),
        after_pct=float(data["after_pct"]),
        held_out_pct=None if held is None else float(held),
        spread=float(data["spread"]),
        date=str(data["date"]),
    )


def adjusted(cluster: ClusterSpec, profile: MachineProfile) -> ClusterSpec:
    """Return the cluster with a profile's factors on its measured figures, and with its source said."""
    said = profile.sentence()
    scaled = scaled_by(cluster, np.array([profile.factors[name] for name in NAMES]))

    def told(figure: Figure) -> Figure:
        return replace(figure, source=said, kind="fitted")

    device = replace(
        scaled.device,
        matmul_flops={p: told(f) for p, f in scaled.device.matmul_flops.items()},
        memory_rate=told(scaled.device.memory_rate),
        launch_s=told(scaled.device.launch_s),
    )
    intra = replace(scaled.intra, rate=told(scaled.intra.rate), latency=told(scaled.intra.latency))
    measured = {**scaled.measured, "log_time_spread": profile.spread}
    return replace(scaled, device=device, intra=intra, measured=measured, source=f"{cluster.source}; {said}")


def scaled_by(cluster: ClusterSpec, theta: Floats) -> ClusterSpec:
    """Return the cluster with every measured figure times its factor: seconds longer, or rates lower."""
    matmul, moved, launch, collective, optimizer = (float(x) for x in np.exp(theta))
    by_kind = {
        "matmul_flops_per_s": 1.0 / matmul,
        "attention_forward_s": matmul,
        "attention_backward_s": matmul,
        "elementwise_bytes_per_s": 1.0 / moved,
        "copy_bytes_per_s": 1.0 / moved,
        "op_s": launch,
        "backward_op_s": launch,
        "collective_s": collective,
        "shard_s": collective,
        "tensor_s": collective,
        "meet_s": collective,
        "accumulate_s": launch,
        "checkpoint_s": launch,
        "region_s": launch,
        "pass_forward_s": launch,
        "pass_backward_s": launch,
        "optimizer_bytes_per_s": 1.0 / optimizer,
        "optimizer_tensor_s": optimizer,
    }
    measured = {
        key: value * by_kind.get(key.partition("/")[0], 1.0) for key, value in cluster.measured.items()
    }

    def times(figure: Figure, factor: float) -> Figure:
        return replace(figure, value=figure.value * factor)

    device = replace(
        cluster.device,
        matmul_flops={p: times(f, 1.0 / matmul) for p, f in cluster.device.matmul_flops.items()},
        memory_rate=times(cluster.device.memory_rate, 1.0 / moved),
        launch_s=times(cluster.device.launch_s, launch),
    )
    intra = replace(
        cluster.intra,
        rate=times(cluster.intra.rate, 1.0 / collective),
        latency=times(cluster.intra.latency, collective),
        fits={
            name: CollectiveFit(
                latency_s=f.latency_s * collective, busbw_bytes_per_s=f.busbw_bytes_per_s / collective
            )
            for name, f in cluster.intra.fits.items()
        },
    )
    return replace(cluster, device=device, intra=intra, measured=measured)
