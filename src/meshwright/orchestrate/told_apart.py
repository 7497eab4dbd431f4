"""What ranks measured of a step, told apart by cause as far as it can be, and set beside its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final

from meshwright.base.records import Measurement, Prediction, RankRecord, TimeSeconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.pipeline import contention
from meshwright.model.counts import flops_per_token
from meshwright.probe.processor import core_share
from meshwright.probe.steps import RankSteps
from meshwright.program.plan import Plan, plan_spec
from meshwright.schedule.clock import run_clock
from meshwright.schedule.text import parse_schedule

GROUPS: Final = {
    "compute": ("compute", "recompute"),
    "communication": ("tensor", "sequence", "pipeline", "context", "expert", "data", "offload"),
    "bubble": ("bubble",),
    "optimizer": ("optimizer",),
    "other": ("other",),
}
"""The terms that a run can tell apart, and what of a prediction they hold."""


def measured(plan: Plan, ranks: Sequence[RankSteps], cluster: ClusterSpec) -> Measurement:
    """Return a run's Measurement; on a CPU with its step in compute, communication, bubble, optimizer and the rest."""
    spec = plan_spec(plan)
    walls = [max(r.wall_s[i] for r in ranks) for i in range(len(ranks[0].wall_s))]
    step_s = median(walls)
    tokens, world = plan.batch.tokens, plan.world_size
    flops = flops_per_token(spec, plan.batch.seq_len).causal * tokens
    peak = cluster.device.peak_flops.get(plan.layout.precision)
    rate = flops / step_s / world
    records = tuple(RankRecord(rank=r.rank, stage=r.stage, memory=r.memory) for r in ranks)
    worst = max(records, key=lambda r: r.peak_memory_bytes)
    spread = quantiles(walls, n=10)[-1] - quantiles(walls, n=10)[0] if len(walls) > 1 else 0.0
    time = _parts(plan, ranks, cluster, step_s)
    return Measurement(
        step_time_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / world,
        model_tflops_per_gpu=rate / 1e12,
        mfu_pct=None if peak is None else 100.0 * rate / peak.value,
        flops_convention="causal",
        bubble_share_of_total=time.bubble / step_s if cluster.device.is_cpu else None,
        memory=worst.memory,
        time=time,
        ranks=records,
        steps=len(walls),
        step_time_spread_s=spread,
    )


def _parts(plan: Plan, ranks: Sequence[RankSteps], cluster: ClusterSpec, step_s: float) -> TimeSeconds:
    """Return a step's seconds by cause, of the busiest rank; on a GPU the whole step is ``other``.

    Compute: processor seconds of the rank's own thread, over its share of a core (it sleeps while it waits, but what
    it spends on sending counts). Bubble: the schedule's clock with each stage's measured seconds. Communication (in
    ``data``) is what remains of forward, backward and reduction. ``other`` is counting tokens and what is between.
    """
    if not cluster.device.is_cpu:
        return TimeSeconds(other=step_s)
    layout = plan.layout
    share = core_share(layout.world_size, cluster.measured.get("cores", float(layout.world_size)))
    busiest = max(ranks, key=lambda r: r.busy_s)
    whole = busiest.phases_s["forward_backward"] + busiest.phases_s["reduce"]
    compute = min(busiest.busy_s / share, whole)
    bubble = 0.0
    if layout.pp > 1:
        bare, longest = _played(plan, ranks, cluster, share)
        compute = min(compute, bare, whole)
        bubble = max(0.0, min(bare, whole) - min(longest, compute))
    update = busiest.phases_s["optimizer"]
    return TimeSeconds(
        compute=compute,
        data=max(0.0, whole - compute - bubble),
        bubble=bubble,
        optimizer=update,
        other=max(0.0, step_s - whole - update),
    )


def _played(
    plan: Plan, ranks: Sequence[RankSteps], cluster: ClusterSpec, share: float
) -> tuple[float, float]:
    """Return the schedule's length without sends, by measured seconds of its actions, and the busiest rank's."""
    schedule = parse_schedule(plan.schedule_text, name=plan.layout.schedule)
    ahead = [0.0] * schedule.num_stages
    behind = [0.0] * schedule.num_stages
    weights = [0.0] * schedule.num_stages
    for rank in ranks:
        for kind, into in (("F", ahead), ("BIW", behind), ("W", weights)):
            for stage in range(schedule.num_stages):
                own = {a: s for a, s in rank.actions_s.items() if _is(a, stage, kind)}
                if own:
                    rounds = schedule.num_micro_batches
                    into[stage] = max(into[stage], sum(own.values()) / rounds / share)
    clock = run_clock(schedule, ahead, behind, weight_s=weights if any(weights) else None)
    return clock.makespan_s * contention(clock, cluster, plan.layout), max(clock.busy_s)


def _is(action: str, stage: int, kinds: str) -> bool:
    """Return whether an action's text is one of ``kinds`` of ``stage``: "3F0" is a forward of stage 3."""
    head = action.rstrip("0123456789")
    return bool(head) and head[-1] in kinds and head[:-1] == str(stage)


def terms(predicted: Prediction, now: Measurement) -> dict[str, dict[str, float]]:
    """Return predicted and measured seconds of each term that a run can tell apart, and bytes by category."""
    said, found = predicted.time.as_dict(), now.time.as_dict()
    out: dict[str, dict[str, float]] = {}
    if now.time.compute:
        for name, parts in GROUPS.items():
            out[f"{name}_s"] = {
                "predicted": sum(said[p] for p in parts),
                "measured": sum(found[p] for p in parts),
            }
    out["step_s"] = {"predicted": predicted.step_time_s, "measured": now.step_time_s}
    held, seen = predicted.memory.as_dict(), now.memory.as_dict()
    # a run counts what the loss saves as activations and its gradients as working: only their sum is comparable
    merged = {"activations_and_working": ("activations", "logits", "working", "outside_allocator")}
    for name in ("parameters", "gradients", "optimizer", "activations_and_working"):
        parts = merged.get(name, (name,))
        out[f"{name}_bytes"] = {
            "predicted": float(sum(held[p] for p in parts)),
            "measured": float(sum(seen[p] for p in parts)),
        }
    out["peak_bytes"] = {
        "predicted": float(predicted.peak_memory_bytes),
        "measured": float(now.peak_memory_bytes),
    }
    return out


def stolen_share(ranks: Sequence[RankSteps], cluster: ClusterSpec) -> float | None:
    """Return which share of a step ranks on a CPU waited for a core, where each has one of its own; else None."""
    cores = cluster.measured.get("cores", 0.0)
    waits = [r.queued_s for r in ranks if r.queued_s is not None]
    if not cluster.device.is_cpu or len(ranks) > cores or not waits:
        return None
    return max(waits) / median(ranks[0].wall_s)
