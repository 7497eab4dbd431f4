"""A made-up probe of a machine, and runs on it whose true factors are known: what the tests of feeding back share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cluster.load import cluster_from_probe
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.ledger import LedgerRow
from meshwright.cost.machine_fit import predict_plan
from meshwright.cost.machine_profile import NAMES, MachineProfile, adjusted
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan

MODEL = str(Path(__file__).resolve().parents[1] / "recipes" / "models" / "tiny-llama")
LAYOUTS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2", "dp=2,micro_batch=4", "tp=2,micro_batch=8")
TRUTH = (0.2, 0.1, 0.3, 0.6, -0.1)
"""Logarithms of the factors that this machine really has on its probe."""


def probe(world: int = 2, machine: str = "feedc0de") -> dict[str, Any]:
    """Return the JSON of a probe of ``world`` CPU ranks on as many cores."""
    links = [
        {
            "ranks": list(range(world)),
            "collective": kind,
            "points": [
                {
                    "bytes": size,
                    "time_s": t,
                    "processor_s": t / 4,
                    "algbw_bytes_per_s": 1.0,
                    "busbw_bytes_per_s": 1.0,
                }
                for size, t in ((1024, 2e-4), (65536, 3e-4), (4194304, 4e-3))
            ],
            "latency_s": 2e-4,
            "peak_busbw_bytes_per_s": 1e9,
        }
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    ]
    shapes = ((128, 64, 64), (256, 64, 256), (512, 128, 512), (512, 256, 8192))
    return {
        "device": "cpu",
        "world_size": world,
        "backend": "gloo",
        "cores": float(world),
        "links": links,
        "matmul": [
            {
                "precision": p,
                "m": m,
                "k": k,
                "n": n,
                "time_s": t,
                "processor_s": t / 2,
                "flops_per_s": 2.0 * m * k * n / t,
            }
            for p in ("fp32", "bf16")
            for m, k, n in shapes
            for t in (2.0 * m * k * n / 8e10,)
        ],
        "attention": [
            {
                "precision": "fp32",
                "batch": 2,
                "heads": 4,
                "seq": 128,
                "head_dim": 16,
                "forward_s": 2e-4,
                "backward_s": 4e-4,
                "forward_processor_s": 1e-4,
                "backward_processor_s": 2e-4,
            }
        ],
        "memory": {
            "total_bytes": 2.4e10,
            "available_bytes": 2e10,
            "copy_bytes_per_s": 2e10,
            "elementwise_bytes_per_s": 2e10,
        },
        "overhead": {
            "op_s": 3e-6,
            "backward_op_s": 4e-6,
            "optimizer_bytes_per_s": 3e10,
            "optimizer_tensor_s": 3e-6,
        },
        "processor": {
            "memory": {"copy_bytes_per_s": 4e10, "elementwise_bytes_per_s": 4e10},
            "overhead": {
                "op_s": 1.5e-6,
                "backward_op_s": 2e-6,
                "optimizer_bytes_per_s": 6e10,
                "optimizer_tensor_s": 1.5e-6,
            },
        },
        "machine": {"fingerprint": machine},
    }


def cluster(world: int = 2) -> ClusterSpec:
    """Return the probed cluster."""
    return cluster_from_probe(probe(world))


def plan(layout: str) -> Plan:
    """Return the tiny model's plan with 16 sequences of 128 tokens."""
    return make_plan(read_model(MODEL), parse_layout(f"{layout},precision=fp32"), 16, 128, MODEL)


def truth(world: int = 2) -> ClusterSpec:
    """Return the cluster as it really is."""
    factors = dict(zip(NAMES, TRUTH, strict=True))
    none = np.zeros((len(NAMES), len(NAMES))).tolist()
    known = MachineProfile(
        factors=factors,
        covariance=none,
        runs=0,
        left_out=0,
        before_pct=0.0,
        after_pct=0.0,
        held_out_pct=None,
        spread=0.1,
        date="",
    )
    return adjusted(cluster(world), known)


def row(layout: str, *, times: float = 1.0, spread: float = 0.05, **change: Any) -> LedgerRow:
    """Return the row of a run of ``layout`` that took ``times`` what it really takes."""
    made = plan(layout)
    seconds = times * predict_plan(made, truth(made.world_size)).step_time_s
    facts: dict[str, Any] = {
        "machine": "feedc0de",
        "when": "2026-01-01T00:00:00+00:00",
        "source": layout,
        "plan": made,
        "step_time_s": seconds,
        "spread_s": spread * seconds,
        "steps": 8,
        "peak_memory_bytes": 1000,
        "predicted_s": None,
        "predicted_bytes": None,
        "processor_s": None,
        "time_s": {"compute": seconds},
        "memory_bytes": {"parameters": 1000},
    }
    return LedgerRow(**(facts | change))


def rows(layouts: Sequence[str] = LAYOUTS, noise: float = 0.02) -> list[LedgerRow]:
    """Return a quiet machine's rows: measured within about ``noise``, the same at every call."""
    random = np.random.default_rng(5)
    return [row(layout, times=math.exp(noise * random.standard_normal())) for layout in layouts]
