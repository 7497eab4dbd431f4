"""Exchanges of a case: seconds of bytes on links and counts of calls, of rings and of the axes inside layers."""

from __future__ import annotations

from meshwright.cost.backtest.again import tensor_again
from meshwright.cost.backtest.case import Case
from meshwright.cost.collective import call_share

CALL_BYTES = 20e6
"""Payload at which a collective has half of what it takes beside its bytes; all-reduces over 8 devices of A100, H100 and
B200 nodes take 1.28, 1.0 and 1.07 of their bytes over the link's rate, 0.03 ms, and 0.15 ms x n / (n + 20 MB)."""
SMALL_RING = 0.6
"""What short rings inside a node lose, times the square of their size: all-reduces of 1 GiB over 2, 4 and 8 A100 of an
NVSwitch node reach 197, 222 and 229 GB/s a device (vTrain's traces), gathers on H100 268, 325 and 345, rings on H200 363
over 4 and 366 over 8."""


def calls(num_bytes: float, count: float) -> float:
    """Return ``count`` calls, each weighed by how much of the full overhead its payload has."""
    return count * (0.2 + num_bytes / (num_bytes + CALL_BYTES))


def ring(
    c: Case, payload: float, size: int, stride: int, count: float = 1.0, both: bool = False
) -> tuple[float, float, float]:
    """Return (inner seconds, outer seconds, latency hops) of an all-gather or reduce-scatter, ``both`` an all-reduce."""
    if size < 2:
        return 0.0, 0.0, 0.0
    per_node = max(1, min(size, c.node // stride)) if stride < c.node else 1
    nodes = -(-size // per_node)
    twice = 2.0 if both else 1.0
    if nodes == 1:
        small = 1.0 + SMALL_RING / size**2
        return twice * small * payload * (size - 1) / size / c.intra, 0.0, 0.0
    # one ring over all ranks; the members on a node share its network cards with the groups beside them
    outer = twice * payload * (size - 1) / size / per_node / c.inter
    return 0.0, outer, twice * count * (nodes - 1.0) ** 0.75


def layer_exchanges(c: Case) -> dict[str, float]:
    """Return communication of the tensor, context and expert axes in a forward of all layers; backward is as much."""
    out: dict[str, float] = dict.fromkeys(
        ("tp_in", "tp_out", "tp_calls", "tp_again", "tp_end", "tp_copies"), 0.0
    )
    out |= dict.fromkeys(("cp_in", "cp_out", "cp_calls", "cp_copies", "cp_behind"), 0.0)
    out |= dict.fromkeys(("ep_in", "ep_out", "ep_calls"), 0.0)
    message = c.tokens * c.hidden * 2.0
    moe_layers = float(c.layers - c.dense_layers) if c.experts else 0.0
    if c.tp > 1:
        pairs = 2.0 * c.layers
        inner, outer, _ = ring(c, message, c.tp, 1, both=True)
        out["tp_in"], out["tp_out"] = pairs * inner, pairs * outer
        # gathers along a dim that is not the first are followed by a copy, scatters preceded by one
        out["tp_copies"] = pairs * 4.0 * message / c.device.memory_rate.value if c.ran.tp_copies else 0.0
        # overlapped, a gather is a chain of sends beside the parts of a product: no ring of its own
        share = 1.0 if c.ran.overlap_tp else call_share(min(c.tp, c.node), c.sp)
        out["tp_calls"] = calls(message, pairs) * share
        out["tp_again"] = tensor_again(c)
        out["tp_end"] = (
            0.5 / c.layers
        )  # the embedding's output and the gradient of the head's input: one pair each
    if c.cp > 1:
        out |= context_exchanges(c)
    if c.ep > 1 and moe_layers:
        payload = c.tokens * c.topk * c.hidden * 2.0 / (c.tp if c.sp else 1)
        per_node = max(1, min(c.ep, c.node // c.tp))
        far = (c.ep - per_node) / c.ep
        near = (per_node - 1) / c.ep
        out["ep_in"] = 2.0 * moe_layers * payload * near / c.intra
        out["ep_out"] = 2.0 * moe_layers * payload * far / c.inter
        out["ep_calls"] = calls(payload, 2.0 * moe_layers)
    return out


def context_exchanges(c: Case) -> dict[str, float]:
    """Return communication of the context axis in a forward of all layers, and how much of it backward has.

    Rings pass keys and values on, and their gradients too in backward. All-to-alls (four a layer: queries, keys, values,
    output) are as many in backward, each between two copies that bring what goes to one rank together.
    """
    layers = float(c.layers)
    if c.ran.cp_style == "ulysses":
        moved = c.tokens * 2.0 * (c.heads + max(c.kv_heads, c.tp)) / c.tp * c.head_dim * 2.0
        inner, outer, _ = ring(c, moved, c.cp, c.tp)
        weighed, copies, behind = 0.5 * calls(moved / 4.0, 4.0 * layers), 4.0 * moved, 1.0
    else:
        kv = 2.0 * c.tokens * max(1.0, c.kv_heads / c.tp) * c.head_dim * 2.0
        inner, outer, _ = ring(c, kv * c.cp, c.cp, c.tp)
        weighed, copies, behind = calls(kv, layers) * (c.cp - 1.0) / c.cp, 0.0, 2.0
    return {
        "cp_in": inner * layers,
        "cp_out": outer * layers,
        "cp_calls": weighed,
        "cp_copies": copies * layers / c.device.memory_rate.value,
        "cp_behind": behind,
    }
