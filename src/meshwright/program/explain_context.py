"""The context axis as ``explain`` tells it: what a rank holds of a sequence, and its exchange in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from meshwright.base.units import format_bytes
from meshwright.layout.batch import Batch
from meshwright.layout.context import padded_length, runs
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import coordinates, group
from meshwright.program.step import Collective, Op


def positions_held(layout: Layout, batch: Batch, rank: int) -> str:
    """Return the positions that ``rank`` holds, for people: "0-15 and 48-63 of 64"."""
    padded = padded_length(layout, batch.seq_len)
    held = runs(layout.cp_style, layout.cp, coordinates(layout, rank)["cp"], padded)
    text = " and ".join(f"{start}-{start + n - 1}" for start, n in held) + f" of {padded}"
    extra = padded - batch.seq_len
    return text + (f" (the last {extra} are padding)" if extra else "")


def is_exchange(op: Op | None) -> TypeGuard[Collective]:
    """Return whether an operation is a message of attention over the context axis."""
    return isinstance(op, Collective) and op.axis == "cp" and op.kind != "all_reduce"


def merge_exchange(ops: Sequence[Op]) -> list[Op]:
    """Return the operations with each run of attention's messages of one micro-batch as its first, bytes summed.

    Sends and receives of a ring are as many and as large: only sends are counted.
    """
    out: list[Op] = []
    for op in ops:
        last = out[-1] if out else None
        if not is_exchange(op):
            out.append(op)
        elif is_exchange(last) and last.micro_batch == op.micro_batch:
            more = op.num_bytes if op.kind != "recv" else 0
            gradients = "" if "gradient" in last.what or "gradient" not in op.what else " and their gradients"
            out[-1] = replace(last, num_bytes=last.num_bytes + more, what=last.what + gradients)
        else:
            out.append(replace(op, what=op.what.rpartition(" of layer")[0]))
    return out


def tell_exchange(op: Collective, layout: Layout, rank: int) -> str:
    """Return a merged exchange as one sentence without its end."""
    members = group(layout, rank, "cp")
    if op.kind == "all_to_all":
        gradients = "gradients of " if "gradient" in op.what else ""
        others = ", ".join(str(r) for r in members)
        return (
            f"in each layer swap tokens for heads with ranks {others} (all-to-all, cp), {gradients}queries, keys and "
            f"values before attention and outputs after it: {format_bytes(op.num_bytes)} in all, "
            f"you send {format_bytes(op.volume_bytes)}"
        )
    at = coordinates(layout, rank)["cp"]
    there, back = members[(at + 1) % layout.cp], members[(at - 1) % layout.cp]
    return (
        f"in each layer pass {op.what} on to rank {there} and receive others from rank {back} (ring, cp), "
        f"while you attend to those at hand: you send {format_bytes(op.num_bytes)} in all"
    )
