"""Volume: bytes a rank sends for data parallelism in one step, by formula and from a StepProgram."""

from __future__ import annotations

from meshwright.layout.ranks import EXPERT_REPLICATE, EXPERT_SHARD
from meshwright.program.step import StepProgram

DATA_AXES = frozenset({"dp_replicate", "dp_shard", EXPERT_REPLICATE, EXPERT_SHARD})


def data_parallel_volume(program: StepProgram) -> float:
    """Return the bytes that this rank sends on the data axes in one step, with ring algorithms."""
    return sum(c.volume_bytes for c in program.collectives if c.axis in DATA_AXES)


def ring_volume(
    zero: int, num_ranks: int, gradient_bytes: float, parameter_bytes: float, m: int = 1
) -> float:
    """Return the bytes a rank sends per step over ``num_ranks`` with ``m`` micro-batches (no padding, no HSDP).

    With M bytes of either kind and m = 1: 2M, 2M, 2M and 3M times (N-1)/N for ZeRO 0, 1, 2 and 3.

    Args:
        zero: ZeRO stage.
        num_ranks: N, ranks in the group.
        gradient_bytes: bytes of all gradients in the reduce dtype.
        parameter_bytes: bytes of all parameters in the gather dtype.
        m: accumulation steps.

    Source: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 7.
    """
    share = (num_ranks - 1) / num_ranks
    if zero == 0:
        return 2 * share * gradient_bytes
    gathers = 2 * m if zero == 3 else 1
    scatters = 1 if zero == 1 else m
    return share * (gathers * parameter_bytes + scatters * gradient_bytes)
