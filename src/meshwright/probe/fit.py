"""What measured points mean: bus bandwidth, latency and peak, ring order, the small-tensor rule, advice.

Pure functions; nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.base.units import GB, format_bytes, format_seconds

SLOW_LINK_BYTES_PER_S: Final = 2 * GB
FAST_LINK_BYTES_PER_S: Final = 15 * GB
"""Below the first a link is for pipeline stages only; above the second it carries tensor parallelism."""

QUIET: Final = 0.9
"""Below this share of the cores the ranks of a probe were disturbed by other programs."""


def busbw_factor(collective: str, group_size: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of ``collective`` in a group of ``group_size`` ranks.

    Source: nccl-tests, doc/PERFORMANCE.md; bytes are those of ``program.step.Collective.num_bytes``.
    """
    n = group_size
    if collective == "all_reduce":
        return 2 * (n - 1) / n
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n
    if collective in ("broadcast", "send_recv"):
        return 1.0
    raise ValueError(f"{collective!r} is not a collective that is measured")


@dataclass(frozen=True)
class Line:
    """time = latency_s + bytes / rate_bytes_per_s."""

    latency_s: float
    rate_bytes_per_s: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Return the latency and rate that explain (bytes, seconds), ascending, best.

    Best is the least sum of |log(predicted / measured)|, so that one disturbed point does not count much, among the
    lines whose time for the largest message is within 25 %: that message takes longest, is disturbed least and alone
    says what the rate is. Such a line passes through two of the points, or through one with latency 0; all of them
    are tried. Latency is never negative.
    """
    if not points:
        raise ValueError("a line needs at least one point")
    lines = [(0.0, t / s) for s, t in points]
    for i, (s0, t0) in enumerate(points):
        for s1, t1 in points[i + 1 :]:
            slope = (t1 - t0) / (s1 - s0)
            latency = t0 - slope * s0
            if slope > 0 and latency >= 0:
                lines.append((latency, slope))

    def error(line: tuple[float, float], size: float, time_s: float) -> float:
        return abs(math.log((line[0] + line[1] * size) / time_s))

    sound = [line for line in lines if error(line, *points[-1]) < math.log(1.25)]
    latency, slope = min(sound, key=lambda line: sum(error(line, s, t) for s, t in points))
    return Line(latency_s=latency, rate_bytes_per_s=1.0 / slope)


def link(ranks: Sequence[int], collective: str, points: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Return the JSON of one measured link: its points with both bandwidths, its latency and its peak.

    ``points`` are (bytes, seconds), or (bytes, seconds, processor seconds of a rank).
    """
    factor = busbw_factor(collective, len(ranks))
    line = fit_line([(p[0], p[1]) for p in points])
    return {
        "ranks": list(ranks),
        "collective": collective,
        "points": [
            {
                "bytes": size,
                "time_s": time_s,
                "algbw_bytes_per_s": size / time_s,
                "busbw_bytes_per_s": factor * size / time_s,
            }
            | ({"processor_s": more[0]} if more else {})
            for size, time_s, *more in points
        ],
        "latency_s": line.latency_s,
        "peak_busbw_bytes_per_s": factor * line.rate_bytes_per_s,
    }


def ring_order(rates: Mapping[tuple[int, int], float], num_ranks: int) -> list[int]:
    """Return the ranks in the order of a good ring over measured pair rates (bytes/s), beginning with rank 0.

    Greedy from every start, taking the fastest unused neighbour; kept is the ring whose slowest link is fastest,
    then the one with the greatest sum, then the one nearest to 0, 1, 2, ... Pairs are unordered.
    """

    def rate(a: int, b: int) -> float:
        return rates.get((min(a, b), max(a, b)), 0.0)

    def quality(ring: Sequence[int]) -> tuple[float, float]:
        edges = [rate(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
        return min(edges), sum(edges)

    plain = list(range(num_ranks))
    if num_ranks < 3:
        return plain
    best, best_quality = plain, quality(plain)
    for start in range(num_ranks):
        ring, left = [start], set(plain) - {start}
        while left:
            here = ring[-1]
            step = min(left, key=lambda r: (-rate(here, r), r))
            ring.append(step)
            left.remove(step)
        found = quality(ring)
        if found > best_quality:
            best, best_quality = ring, found
    at = best.index(0)
    return best[at:] + best[:at]


def crossover_bytes(
    broadcast: Sequence[tuple[float, float]], all_reduce: Sequence[tuple[float, float]]
) -> float | None:
    """Return the size up to which a broadcast is faster than an all-reduce: 0 if never, None if always.

    Both are (bytes, seconds) at the same sizes, ascending. Between two points the ratio of the times is taken as
    straight over the logarithm of the size; the first crossing counts.
    """
    last: tuple[float, float] | None = None
    for (size, t_b), (_, t_a) in zip(broadcast, all_reduce, strict=True):
        ratio = math.log(t_b / t_a)
        if ratio >= 0:
            if last is None:
                return 0.0
            share = -last[1] / (ratio - last[1])
            return math.exp(math.log(last[0]) + share * (math.log(size) - math.log(last[0])))
        last = (size, ratio)
    return None


def advice(
    *,
    world_size: int,
    cores: float,
    is_cpu: bool,
    links: Sequence[Mapping[str, Any]],
    matmul: Sequence[Mapping[str, Any]],
    rank_slowness: Sequence[float],
    pair_rates: Mapping[tuple[int, int], float],
    order: Sequence[int],
    broadcast_below_bytes: float | None,
    quiet_share: float = 1.0,
) -> list[str]:
    """Return sentences, each with the figure that it comes from; only those that apply.

    ``rank_slowness`` is each rank's compute time over the median of all ranks, ``quiet_share`` the part of the cores
    that the ranks had while they were measured.
    """
    lines: list[str] = []
    if quiet_share < QUIET:
        lines.append(
            f"other programs had {100 * (1 - quiet_share):.0f} % of the cores while this was measured: the seconds of "
            "collectives are too long, those of compute are corrected; probe again when the machine is quiet"
        )
    if is_cpu and world_size > cores:
        lines.append(
            f"{world_size} ranks share {cores:g} cores: they take turns, so more ranks on this machine prove a layout "
            "but do not make it faster; the figures hold for this number of ranks only"
        )
    slow = [(r, s) for r, s in enumerate(rank_slowness) if s > 1.25]
    lines += [
        f"rank {r} computes {100 * (s - 1):.0f} % slower than the median rank: every step waits for it"
        for r, s in slow
    ]
    worlds = [x for x in links if len(x["ranks"]) == world_size and x["collective"] == "all_reduce"]
    if worlds and world_size > 1:
        peak, latency = worlds[0]["peak_busbw_bytes_per_s"], worlds[0]["latency_s"]
        lines.append(
            f"all-reduce over {world_size} ranks: {peak / GB:.2f} GB/s bus bandwidth, {format_seconds(latency)} latency; "
            f"below {format_bytes(latency * peak)} the latency is most of its time"
        )
        if peak < SLOW_LINK_BYTES_PER_S:
            lines.append(
                f"{peak / GB:.2f} GB/s is below 2 GB/s: put pipeline stages on this link, and keep tensor "
                "parallelism and zero=3 off it unless memory demands them"
            )
        elif peak < FAST_LINK_BYTES_PER_S:
            lines.append(
                f"{peak / GB:.2f} GB/s lies between 2 and 15 GB/s: enough for data parallelism, slow for tensor "
                "parallelism"
            )
        else:
            lines.append(f"{peak / GB:.2f} GB/s is above 15 GB/s: fast enough for tensor parallelism")
        if broadcast_below_bytes is None:
            lines.append("a broadcast was faster than an all-reduce at every size measured")
        elif broadcast_below_bytes == 0:
            lines.append("an all-reduce was as fast as a broadcast from the smallest size on")
        else:
            lines.append(
                f"a broadcast is faster than an all-reduce up to {format_bytes(broadcast_below_bytes)}"
            )
    if len(pair_rates) > 1:
        low, high = min(pair_rates.values()), max(pair_rates.values())
        if high > 1.5 * low:
            pair = min(pair_rates, key=lambda p: pair_rates[p])
            lines.append(
                f"the slowest pair of ranks ({pair[0]}, {pair[1]}) has {low / GB:.2f} GB/s, the fastest "
                f"{high / GB:.2f} GB/s"
            )
            if list(order) != sorted(order) and not is_cpu:
                lines.append(f"order the devices for rings: CUDA_VISIBLE_DEVICES={','.join(map(str, order))}")
    best: dict[str, float] = {}
    for row in matmul:
        best[row["precision"]] = max(best.get(row["precision"], 0.0), row["flops_per_s"])
    if best.get("bf16", 0.0) and best.get("fp32", 0.0):
        ratio = best["bf16"] / best["fp32"]
        if ratio < 1.0:
            lines.append(
                f"bf16 matmuls run at {ratio:.2f} of fp32's speed here: choose fp32 for time, bf16 for memory only"
            )
        elif ratio >= 1.5:
            lines.append(f"bf16 matmuls run {ratio:.1f} times as fast as fp32 here")
    return lines
