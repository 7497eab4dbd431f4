"""The sentinel: recognises gradients that are wrong by a constant factor, and says which mistake makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.program.plan import Plan
from meshwright.prove.parity import TensorDiff

TOLERANCE = 1e-6
"""Relative distance within which gradients are a multiple of the reference, and a factor is a known one."""


def find_factor(diffs: Mapping[str, TensorDiff], tolerance: float = TOLERANCE) -> float | None:
    """Return r when the tensors together equal r times their reference within ``tolerance``, else None."""
    dot = sum(d.dot for d in diffs.values())
    ref = sum(d.ref_square for d in diffs.values())
    square = sum(d.square for d in diffs.values())
    if ref == 0.0 or square == 0.0:
        return None
    factor = dot / ref
    # |g - r ref|^2 = |g|^2 - 2 r <g, ref> + r^2 |ref|^2; cancellation leaves about 1e-16 |g|^2.
    residual = max(0.0, square - 2 * factor * dot + factor * factor * ref)
    return factor if residual <= max(tolerance**2, 1e-15) * square and factor > 0 else None


def causes(plan: Plan) -> list[tuple[float, str]]:
    """Return (factor, mistake) for the constants of this layout, likeliest first."""
    layout, batch = plan.layout, plan.batch
    table = [
        (layout.dp, "dp", "data-parallel ranks"),
        (batch.accumulation, "micro-batches", "accumulation steps of a replica"),
        (layout.pp, "pp", "pipeline stages"),
        (layout.cp, "cp", "ranks of the context axis"),
        (layout.dp * layout.cp, "dp x cp", "ranks that gradients are summed over"),
        (layout.dp_shard, "dp_shard", "ranks of the shard group"),
        (layout.dp_replicate, "dp_replicate", "replicas of the shard group"),
        (layout.ep, "ep", "ranks that the experts are spread over"),
        (layout.dp * batch.accumulation, "dp x micro-batches", "all micro-batches of the step"),
        (layout.world_size, "world size", "ranks of the job"),
    ]
    found: list[tuple[float, str]] = []
    for number, name, words in table:
        if number > 1:
            found.append(
                (
                    1.0 / number,
                    f"x 1/{number}: divided by {name} ({words}) once too often - a mean where the loss is already "
                    "divided by the global number of valid tokens",
                )
            )
            found.append(
                (
                    float(number),
                    f"x {number}: summed {name} times ({words}) - a sum that counts equal parts again, or a division "
                    "by the global number of valid tokens that was left out on each of them",
                )
            )
    return found


def sentinel(
    diffs: Mapping[str, TensorDiff], stage_of: Mapping[str, int], plan: Plan, tolerance: float = TOLERANCE
) -> dict[str, Any] | None:
    """Return {factor, cause, tensors} when gradients are off by a constant factor, else None.

    Looks at all tensors together, then at each pipeline stage, then at each tensor alone.
    """
    groups: list[tuple[str, dict[str, TensorDiff]]] = [("all tensors", dict(diffs))]
    for stage in sorted(set(stage_of.values())):
        groups.append((f"stage {stage}", {n: d for n, d in diffs.items() if stage_of[n] == stage}))
    groups += [(name, {name: d}) for name, d in diffs.items()]
    for where, members in groups:
        factor = find_factor(members, tolerance)
        if factor is None or abs(factor - 1.0) <= tolerance:
            continue
        known = [text for value, text in causes(plan) if abs(value / factor - 1.0) <= 1e-4]
        cause = " | or ".join(known) if known else "a constant that is no degree of this layout"
        return {"factor": factor, "cause": cause, "tensors": where}
    return None
