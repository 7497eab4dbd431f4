"""From what the ranks found to one verdict: the JSON of ``meshwright prove``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from meshwright.layout.ranks import EP
from meshwright.program.plan import Plan
from meshwright.program.step import LedgerLine
from meshwright.prove.parity import merge_ranks, relative, worst_of
from meshwright.prove.reference import Reference
from meshwright.prove.sentinel import TOLERANCE, sentinel
from meshwright.prove.worker import RankProof

FP64 = {"loss": 1e-10, "gradients": 1e-10, "grad_norm": 1e-10, "weights": 1e-9}
"""Bounds in float64: sums in another order differ by about 1e-15 relative, AdamW stretches that for tiny gradients."""

ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff of the compute precision: what one rounding of a logit does to the loss, relative."""

SLACK = 4.0
"""In a lower precision a layout may be this many times as far from float64 as one device is."""


def tolerances(
    precision: str, own_error: Mapping[str, float] | None, largest_loss: float = 0.0
) -> dict[str, Any]:
    """Return the bounds of a proof and what they rest on.

    In float64 they are fixed. In a lower precision they are ``SLACK`` times one device's own distance from
    float64 - the larger of the batch as it is and the batch with its rows in reverse order - so that a layout
    passes when it is as close to the exact result as one device is. The loss and the norm are single numbers whose
    own error may vanish by chance, so their bounds are at least one unit roundoff, relative.
    """
    if precision == "fp64":
        return FP64 | {"basis": "fixed: summation order in float64"}
    assert own_error is not None
    bounds = {name: SLACK * value for name, value in own_error.items()}
    bounds["loss"] = max(bounds["loss"], ROUNDOFF[precision] * largest_loss)
    bounds["grad_norm"] = max(bounds["grad_norm"], ROUNDOFF[precision])
    return bounds | {
        "basis": f"{SLACK:g} x the error of one device in {precision} against float64, rows in both orders; "
        "loss and norm at least one unit roundoff",
        "own_error": dict(own_error),
    }


def verdict(
    plan: Plan,
    reference: Reference,
    proofs: Sequence[RankProof],
    tolerance: Mapping[str, Any],
    tied: Mapping[str, str],
) -> dict[str, Any]:
    """Return the verdict with the keys of the command-line contract."""
    steps = len(reference.losses)
    first = proofs[0]
    loss_diff = max(_distance(a, b) for p in proofs for a, b in zip(p.losses, reference.losses, strict=True))
    norm_diff = max(
        _distance(a, b) / b for p in proofs for a, b in zip(p.norms, reference.norms, strict=True) if b > 0
    )
    gradient_steps = [merge_ranks([p.gradients[k] for p in proofs]) for k in range(steps)]
    weight_steps = [merge_ranks([p.weights[k] for p in proofs]) for k in range(steps)]
    gradients = [relative(d, reference.gradient_max[k], tied) for k, d in enumerate(gradient_steps)]
    weights = [relative(d, reference.weight_max[k], tied) for k, d in enumerate(weight_steps)]
    worst_gradient, worst_weight = worst_of(gradients), worst_of(weights)
    missing = sorted({name for p in proofs for name in p.missing})
    ledger = ledger_verdict(proofs)
    checks = {
        "loss": loss_diff <= tolerance["loss"],
        "gradients": worst_gradient is not None and worst_gradient["rel_diff"] <= tolerance["gradients"],
        "missing": not missing,
        "grad_norm": norm_diff <= tolerance["grad_norm"],
        "weights": worst_weight is not None and worst_weight["rel_diff"] <= tolerance["weights"],
        "ledger": ledger["matches"],
        "placement": first.placement["complete"],
        "tied_copies_equal": all(p.tied_copies_equal for p in proofs),
        "order": all(p.order_matches for p in proofs),
    }
    guess = None
    if not checks["gradients"]:
        guess = sentinel(
            gradient_steps[0], _stages(proofs), plan, max(TOLERANCE, 4 * float(tolerance["gradients"]))
        )
    return {
        "passed": all(checks.values()),
        "layout": plan.layout.text(),
        "plan_hash": plan.hash,
        "world_size": plan.world_size,
        "steps": steps,
        "precision": plan.layout.precision,
        "loss": {"max_abs_diff": loss_diff, "reference": list(reference.losses)},
        "gradients": {
            "max_rel_diff": worst_gradient["rel_diff"] if worst_gradient else math.inf,
            "worst": worst_gradient,
            "missing": missing,
            "tensors": len(gradient_steps[0]),
        },
        "grad_norm": {"max_rel_diff": norm_diff, "reference": list(reference.norms)},
        "weights": {
            "max_rel_diff": worst_weight["rel_diff"] if worst_weight else math.inf,
            "worst": worst_weight,
            "not_compared": _not_compared(reference),
        },
        "tolerance": dict(tolerance),
        "sentinel": guess,
        "ledger": ledger,
        "placement": first.placement,
        "checks": checks,
    }


def _not_compared(reference: Reference) -> list[str]:
    """Return the tensors with entries whose gradient on one device is rounding alone, and how many where not all are."""
    return [
        name if count == whole else f"{name} ({count} of {whole} entries)"
        for name, (count, whole) in reference.rounding.items()
    ]


def simulated_verdict(plan: Plan, found: Mapping[str, Any], tolerance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict of a tensor axis whose shards ran in one process: the first step's loss and gradients."""
    checks = {
        "loss": found["loss_diff"] <= tolerance["loss"],
        "gradients": found["max_rel_diff"] <= tolerance["gradients"],
    }
    return {
        "passed": all(checks.values()),
        "layout": plan.layout.text(),
        "plan_hash": plan.hash,
        "world_size": 1,
        "steps": 1,
        "precision": plan.layout.precision,
        "loss": {"max_abs_diff": found["loss_diff"]},
        "gradients": {"max_rel_diff": found["max_rel_diff"], "worst": found["worst"], "missing": []},
        "tolerance": dict(tolerance),
        "sentinel": None,
        "checks": checks,
    }


def _distance(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) else math.inf


def _stages(proofs: Sequence[RankProof]) -> dict[str, int]:
    stages: dict[str, int] = {}
    for proof in proofs:
        stages |= {n: s for n, s in proof.stage_of.items() if n in proof.gradients[0]}
    return stages


def ledger_verdict(proofs: Sequence[RankProof]) -> dict[str, Any]:
    """Return {matches, expected, recorded, rank, differing_ranks}: of rank 0, or of the first rank that differs.

    What a rank sends in an all_to_all between experts depends on the routing; their number is compared by rank, their
    bytes as the sum over all ranks, which does not (``routed_bytes``).
    """
    wrong = [p for p in proofs if _fixed(p.expected) != _fixed(p.recorded)]
    routed = {which: _routed(proofs, which) for which in ("expected", "recorded")}
    if routed["expected"] != routed["recorded"]:
        wrong = wrong or list(proofs)
    shown = wrong[0] if wrong else proofs[0]
    return {
        "matches": not wrong,
        "rank": shown.rank,
        "differing_ranks": [p.rank for p in wrong],
        "expected": [_line(x) for x in shown.expected],
        "recorded": [_line(x) for x in shown.recorded],
    } | ({"routed_bytes": routed} if routed["expected"] or routed["recorded"] else {})


def _fixed(lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    return [replace(x, num_bytes=0) if x.kind == "all_to_all" and x.axis == EP else x for x in lines]


def _routed(proofs: Sequence[RankProof], which: str) -> int:
    lines = [x for p in proofs for x in getattr(p, which)]
    return sum(x.num_bytes for x in lines if x.kind == "all_to_all" and x.axis == EP)


def _line(line: LedgerLine) -> dict[str, Any]:
    return asdict(line)
