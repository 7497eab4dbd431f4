"""What backward runs again of a forward: products, attention, elementwise operations, tensor communication."""

from __future__ import annotations

from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.shapes import dense_gemms


def again_shares(c: Case) -> dict[str, float]:
    """Return the shares of a forward's products, attention and elementwise operations that backward runs again.

    torch's checkpoint without reentrance stops when the last tensor that backward needs is there: the product at the end
    of a block is not run again (torch.utils.checkpoint, set_checkpoint_early_stop; a compiler drops it too).
    """
    whole = 1.0 - _last_share(c) if c.ran.early_stop else 1.0
    matmul, attention, rest = {
        "full": (whole, 1.0, 1.0),
        "every-second-layer": (0.5 * whole, 0.5, 0.5),
        "modules": (0.1, 0.1, 0.1),
        "core": (0.0, 1.0, 0.0),
        "per-op": (_per_op_share(c), 0.0, 1.0),
        "minimal": (0.35, 0.0, 1.0),
    }.get(c.recompute, (0.0, 0.0, 0.0))
    return {"again": rest, "again_matmul": matmul, "again_attention": attention}


def _last_share(c: Case) -> float:
    """Return the share of a dense layer's products that its last one has."""
    gemms = dense_gemms(c)
    return gemms[-1].flops / sum(g.flops for g in gemms)


def _per_op_share(c: Case) -> float:
    """Return the share of a layer's products that torchtitan's selective recompute runs again.

    Its policy keeps every other product in 16 bits (of q, k, v, o, gate, up, down: all but k, o and up), attention's
    output and what a reduce-scatter of the tensor axis gives, which spares o; asynchronous tensor parallelism does not
    keep the latter (pull request 965). Products in 8 bits are another operation, which the policy's list does not have:
    all but the last are run again (pytorch/torchtitan, the save list of its selective recompute).
    """
    if not c.gated or c.experts or c.kv_lora:
        return 0.45
    h, kv = float(c.hidden), float(c.kv_heads) * c.head_dim
    q = float(c.heads) * c.head_dim
    kept = c.tp > 1 and not c.ran.overlap_tp
    out = 0.0 if kept else h * q
    again = h * kv + out + h * c.ffn
    if c.fp8:
        again = h * (q + 2.0 * kv) + out + 2.0 * h * c.ffn
    return again / (2.0 * h * q + 2.0 * h * kv + 3.0 * h * c.ffn)


def tensor_again(c: Case) -> float:
    """Return the part of a forward's tensor communication that a backward repeats.

    A layer's forward has two gathers and two scatters. Megatron's layers keep the cut input and gather it again beside
    another product, counted as half hidden, on top of a recomputed forward. Those on DTensors keep what was gathered:
    without recompute nothing is repeated; selective recompute repeats the gathers (and, where their output is not kept,
    one of the scatters), full recompute all but the last scatter.
    """
    full = {"full": 1.0, "every-second-layer": 0.5, "modules": 0.1}.get(c.recompute, 0.0)
    if not c.ran.keeps_gathered:
        return full + (0.5 if c.sp else 0.0)
    if c.recompute == "per-op":
        return 0.75 if c.ran.overlap_tp else 0.5
    return 0.75 * full
