"""One layout priced exactly: its schedule's rows on the clock, its memory per stage, its time by cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from meshwright.base.errors import MeshwrightError, problem, refuse
from meshwright.base.records import MemoryBytes, Prediction, RankRecord, TimeSeconds
from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import Floats
from meshwright.cost.fast import Columns, columns
from meshwright.cost.loads import over_ranks, rank_peaks
from meshwright.cost.memory import PEAK_SPREAD, memory_record
from meshwright.cost.pieces import Pricer, make_pricer
from meshwright.cost.pipeline import contention
from meshwright.cost.replay import part_of
from meshwright.cost.shipped import cold_band
from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import coordinates, strides
from meshwright.model.counts import flops_per_token
from meshwright.model.spec import ModelSpec
from meshwright.schedule.actions import Schedule
from meshwright.schedule.clock import Clock, run_clock
from meshwright.schedule.generate import generate

BAND_QUANTILE: Final = 1.2816
"""Standard deviations on each side of an 80 % band."""
PROBED_SPREAD: Final = 0.12
"""Standard deviation of the log of predicted over measured time after a probe (assumed)."""
OOM_GATE: Final = 0.01
"""A layout is said to fit when it runs out of memory with at most this probability."""
MAX_RANK_RECORDS: Final = 64


def check_world(layout: Layout, cluster: ClusterSpec) -> None:
    """Refuse a layout that has another number of ranks than the cluster has devices (E407)."""
    if layout.world_size != cluster.num_gpus:
        raise MeshwrightError(
            problem(
                "E407",
                where="layout",
                found=f"{layout.world_size} ranks (dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp}) "
                f"on {cluster.num_gpus} devices of {cluster.name}",
                do=f"--gpus {layout.world_size}, or degrees whose product is {cluster.num_gpus}",
            )
        )


def oom_probability(peak_bytes: float, capacity_bytes: float) -> float:
    """Return the probability that the peak exceeds the device's memory, by the assumed spread of the peak."""
    if peak_bytes <= 0:
        return 0.0
    return 0.5 * math.erfc((capacity_bytes / peak_bytes - 1.0) / PEAK_SPREAD / math.sqrt(2.0))


def fits(prediction: Prediction) -> bool:
    """Return whether the prediction's probability of running out of memory is at most 1 %."""
    return prediction.oom_probability <= OOM_GATE


def predict(
    spec: ModelSpec,
    plan_layout: Layout,
    batch: Batch,
    schedule: Schedule,
    cluster: ClusterSpec,
    frozen: Sequence[str] = (),
) -> Prediction:
    """Return what one optimizer step of ``plan_layout`` costs on ``cluster``.

    Raises:
        MeshwrightError: E405 a figure is not known, E407 another number of ranks, E408 above the peak.
    """
    check_world(plan_layout, cluster)
    pricer = make_pricer(spec, cluster, batch.seq_len, plan_layout.precision, frozen)
    return predict_with(pricer, plan_layout, batch, schedule)


def predict_with(pricer: Pricer, layout: Layout, batch: Batch, schedule: Schedule) -> Prediction:
    """Return the prediction, pricing pieces with ``pricer`` (which keeps what it has priced).

    ``schedule`` may hold the first ``replay.part_of`` micro-batches of a very long step only; of one that holds all, no
    more are played.
    """
    part = part_of(schedule.name, schedule.num_ranks, layout.chunks, batch.accumulation)
    if part < schedule.num_micro_batches:
        schedule = generate(schedule.name, schedule.num_ranks, part, layout.chunks)
    cols = columns(pricer, [layout], [batch], schedule)
    depth = schedule.num_stages
    forward = [float(x) for x in cols.forward[0, :depth]]
    backward = [float(x) for x in cols.backward[0, :depth]]
    send = float(cols.send[0])
    weight = [float(x) for x in cols.weight[0, :depth]]
    clock = run_clock(schedule, forward, backward, send, weight)
    without = run_clock(schedule, forward, backward, 0.0, weight) if send else clock
    m = float(batch.accumulation)
    busy = over_ranks(np.array([m * (f + b) for f, b in zip(forward, backward, strict=True)]), schedule)
    slowest = int(busy.argmax())

    def of_rank(values: Floats) -> float:
        return float(over_ranks(values[0], schedule)[slowest])

    made = _makespan(clock, schedule, m, (forward, backward, weight), send)
    length = made * contention(clock, pricer.cluster, layout)
    bare = made if without is clock else _makespan(without, schedule, m, (forward, backward, weight), 0.0)
    bare *= contention(without, pricer.cluster, layout)
    once = float(over_ranks(cols.once[0], schedule).max())
    extra_data = once - of_rank(cols.once)
    # on a CPU with fewer cores than ranks a whole step can be shorter than one rank's measured share
    longest = float(busy[slowest])
    scale = min(1.0, bare / longest) if longest else 1.0
    per_step = of_rank(cols.data) - of_rank(cols.once)
    time = TimeSeconds(
        compute=of_rank(cols.compute) * scale,
        recompute=of_rank(cols.recompute) * scale,
        tensor=of_rank(cols.tensor) * scale,
        context=of_rank(cols.context) * scale,
        expert=of_rank(cols.expert) * scale,
        data=per_step * scale + of_rank(cols.once) + extra_data,
        pipeline=max(0.0, length - bare),
        bubble=max(0.0, bare - longest * scale),
        optimizer=float(cols.optimizer[0]),
        offload=float(cols.offload[0]),
        other=float(cols.other[0]),
    )
    step_s = time.total
    stages = rank_memory(cols, schedule)
    peak = max(range(layout.pp), key=lambda s: stages[s].total)
    world = layout.world_size
    spec = pricer.spec
    flops = flops_per_token(spec, pricer.seq_len).causal * batch.tokens
    rate = flops / step_s / world
    ceiling = pricer.cluster.device.peak_flops.get("fp8" if pricer.eight else pricer.precision)
    mfu = None if ceiling is None else 100.0 * rate / ceiling.value
    if mfu is not None and mfu > 100.0:
        refuse(
            [problem("E408", where=f"device {pricer.cluster.device.name}", found=f"{mfu:.1f} % of the peak")]
        )
    spread = PROBED_SPREAD if pricer.cluster.measured else cold_band() / BAND_QUANTILE
    fitted = pricer.cluster.measured.get("log_time_spread")
    spread = spread if fitted is None else fitted
    memory = pricer.cluster.device.memory
    sources = (
        *pricer.rates.sources,
        f"memory: {memory.source} ({memory.kind})",
        f"link inside a node: {pricer.cluster.intra.rate.source} ({pricer.cluster.intra.rate.kind})",
        *_between(pricer.cluster),
        *_bubble_note(clock.bubble_share_of_total, made, length, depth),
        f"band: 80 %, {'assumed' if fitted is None else 'fitted'} spread of {100 * spread:.0f} %"
        f"{' until calibrated' if fitted is None else ''}; "
        f"peak: assumed spread of {100 * PEAK_SPREAD:.0f} %",
    )
    return Prediction(
        step_time_s=step_s,
        tokens_per_s_per_gpu=batch.tokens / step_s / world,
        model_tflops_per_gpu=rate / 1e12,
        mfu_pct=mfu,
        flops_convention="causal",
        bubble_share_of_total=1.0 - float(busy.sum()) / (made * schedule.num_ranks) if depth > 1 else 0.0,
        memory=stages[peak],
        time=time,
        ranks=rank_records(layout, stages),
        step_time_low_s=step_s * math.exp(-BAND_QUANTILE * spread),
        step_time_high_s=step_s * math.exp(BAND_QUANTILE * spread),
        oom_probability=oom_probability(stages[peak].total, memory.value),
        hidden_s={"data": of_rank(cols.hidden)},
        sources=sources,
    )


def _makespan(
    clock: Clock,
    schedule: Schedule,
    m: float,
    times: tuple[list[float], list[float], list[float]],
    send: float,
) -> float:
    """Return the length of a step of ``m`` micro-batches, of which ``clock`` has played all or the first rounds.

    ``times`` are seconds of forward, backward and a weight half, each [stages].
    """
    more, ranks = m - schedule.num_micro_batches, schedule.num_ranks
    if more <= 0:
        return clock.makespan_s
    chunks = schedule.num_stages // ranks
    less = generate(schedule.name, ranks, schedule.num_micro_batches - ranks, chunks)
    forward, backward, weight = times
    round_s = clock.makespan_s - run_clock(less, forward, backward, send, weight).makespan_s
    return clock.makespan_s + more / ranks * round_s


def _bubble_note(waits: float, made: float, length: float, depth: int) -> tuple[str, ...]:
    """Return a sentence where waiting ranks leave their cores to others: the bubble is then hardly exposed."""
    if depth == 1 or length >= made:
        return ()
    return (
        f"bubble: ranks wait {100 * waits:.0f} % of the schedule, but there are fewer cores "
        "than ranks and a waiting rank leaves its core to another; time_s.bubble is what remains exposed",
    )


def _between(cluster: ClusterSpec) -> tuple[str, ...]:
    if cluster.inter is None or cluster.num_nodes < 2:
        return ()
    return (f"link between nodes: {cluster.inter.rate.source} ({cluster.inter.rate.kind})",)


def rank_memory(cols: Columns, schedule: Schedule, row: int = 0) -> list[MemoryBytes]:
    """Return each pipeline rank's memory at its peak with the chunks in flight of its schedule."""
    found = rank_peaks(cols.load, row, schedule, cols.outside[row : row + 1])
    return [memory_record({name: found[name][0, r] for name in found}) for r in range(schedule.num_ranks)]


def rank_records(layout: Layout, stages: Sequence[MemoryBytes]) -> tuple[RankRecord, ...]:
    """Return one record per rank up to 64 ranks, else one per stage (its first rank)."""
    world = layout.world_size
    apart = strides(layout)["pp"]
    ranks = range(world) if world <= MAX_RANK_RECORDS else range(0, apart * layout.pp, apart)
    at = [(rank, coordinates(layout, rank)["pp"]) for rank in ranks]
    return tuple(RankRecord(rank=rank, stage=stage, memory=stages[stage]) for rank, stage in at)
