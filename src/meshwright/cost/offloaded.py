"""Parameters away from the device: what remains there at each moment of a step, and what their travel costs.

With ``zero=0`` the device holds the root unit, the block in use and the one that is brought next, and the gradients of
the root unit and of two blocks: the one that backward works on, and the one being reduced. With ``zero`` from 1 it holds
what FSDP2 gathers and reduces, as without offload, but no shards. The update runs where the parameters rest.

Travel of a step, per rank. ``zero=0``: the root unit in once, each block in for every forward and backward, gradients
out for every micro-batch and in again before all but the first. ``zero=3``: shards in for every gather; gradients out
for every micro-batch. Stages 1 and 2: shards in once; gradients out once (stage 1) or for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.cost.offload import exposed_seconds, file_seconds, is_away, travel_seconds
from meshwright.cost.pieces import Pricer
from meshwright.cost.rows import Index

if TYPE_CHECKING:
    from meshwright.cost.memory import StageLoad

OVERLAP: Final = 0.90
"""Share of a compute window behind which parameters can come on a GPU (assumed, as for gathers)."""
HOST_MEMORY: Final = 200e9
"""Bytes a second at which AdamW runs through a node's host memory, which its ranks share (assumed)."""
HOST_BYTES: Final = 256 * 2**30
"""Host memory of a node for each of its devices, where offload is proposed (assumed: 2 TiB beside 8 devices)."""
UPDATE_BYTES: Final = 28.0
"""Bytes that AdamW moves per fp32 parameter: reads weight, gradient, two moments; writes three."""


def away_codes(kinds: Sequence[str], kind_of: Index, dp: Floats) -> Floats:
    """Return [layouts] what of a rank's state is away: 0 nothing, 1 the optimizer's, 2 parameters and gradients too.

    It is 3 where several replicas then reduce gradients, so that those of two blocks are on the device.
    """
    code = np.array([2.0 if k.startswith("parameters") else float(is_away(k)) for k in kinds])[kind_of]
    return np.where((code > 1) & (dp > 1), 3.0, code)


def moments_away(x: StageLoad, moments: list[dict[str, Floats]]) -> list[dict[str, Floats]]:
    """Return a step's moments - loss, head, block, end, update, and any others - with parameters away where they are.

    With ``zero=0`` there is one more, a block later: its gradients beside those that are still being reduced.
    """
    two = x.away > 1
    if not two.any():
        return moments
    sharded, none = x.zero >= 1, np.zeros_like(x.full)
    size = x.storage
    second = np.where(x.away > 2, x.block_trainable, 0.0)
    root = np.where(x.logits > 0, x.root_trainable, 0.0)  # an embedding's gradient comes last
    whole = np.where((x.zero == 1) & (x.micro_batches > 1), x.reduce * x.trainable, 0.0)
    shown = (
        (x.root, none, whole),
        (x.root, root, whole),
        (x.root + 2.0 * x.block, root + x.block_trainable, whole),
        (x.root, x.root_trainable + second, none),
        (none, none, none),
    )
    blocks = np.maximum((x.full - x.root) / np.maximum(x.block, 1.0), 1.0)
    # autocast's casts wait for their block's backward, but for those of blocks that run again
    casts = np.where(x.recompute > 0, 0.0, x.autocast * x.compute * x.cast)
    out = list(moments)
    for i, (values, sums, shards) in enumerate(shown):
        before = moments[i]
        gathered = before["parameters"] - size * x.resting
        own = {
            "parameters": np.where(sharded, gathered, x.packed + size * values),
            "gradients": np.where(sharded, shards, size * sums),
            "optimizer": none,
            "working": before["working"],
        }
        out[i] = {
            name: np.where(two, own[name], held) if name in own else held for name, held in before.items()
        }
    later = out[2] | {
        "gradients": out[2]["gradients"] + size * second,
        "activations": out[2]["activations"] - (x.activations + casts) / blocks,
    }
    some = two & ~sharded & (blocks > 1)
    return [*out, {name: np.where(some, held, 0.0) for name, held in later.items()}]


def away_bytes(x: StageLoad, *, files: bool) -> tuple[Floats, Floats]:
    """Return the bytes that each stage keeps in host memory and in files; gradients are always in host memory."""
    gradients = np.where(x.away > 1, x.storage * x.trainable_resting, 0.0)
    state = np.where(x.away > 0, 2.0 * x.storage * x.trainable_resting, 0.0)
    state = state + np.where(x.away > 1, x.storage * x.resting, 0.0)
    return (gradients, state) if files else (gradients + state, np.zeros_like(state))


def away_seconds(
    pricer: Pricer,
    kinds: Sequence[str],
    kind_of: Index,
    table: Mapping[str, Floats],
    m: Floats,
    zero: Floats,
    ahead: Floats,
    behind: Floats,
    update: Floats,
) -> Floats:
    """Return [layouts, stages] seconds of a step that wait for what rests away from the device.

    Args:
        pricer: of all layouts.
        kinds: values of the offload key.
        kind_of: [layouts] which of them a layout has.
        table: sizes of stages in elements, [layouts, stages] each.
        m: [layouts, 1] micro-batches.
        zero: [layouts, 1] ZeRO stages that have something to shard.
        ahead: [layouts, stages] seconds of a micro-batch's forward.
        behind: [layouts, stages] seconds of its backward with recompute.
        update: [layouts, stages] seconds of the update as it runs on the device.
    """
    out = np.zeros_like(update)
    if set(kinds) <= {"none"}:
        return out
    moments = 2.0 * pricer.state_bytes * table["trainable_resting"]
    for k, kind in enumerate(kinds):
        at = np.flatnonzero(kind_of == k)
        if not len(at) or kind == "none":
            continue
        if not kind.startswith("parameters"):
            travel = travel_seconds(kind, moments[at], pricer.rates)
            out[at] = exposed_seconds(travel, update[at], pricer.rates)
            continue
        some = {name: column[at] for name, column in table.items()}
        rows = (m[at], zero[at], ahead[at], behind[at])
        out[at] = _parameter_seconds(pricer, kind, some, moments[at], rows)
    return out


def _parameter_seconds(
    pricer: Pricer,
    kind: str,
    table: Mapping[str, Floats],
    moments: Floats,
    rows: tuple[Floats, Floats, Floats, Floats],
) -> Floats:
    m, zero, ahead, behind = rows
    rates, size = pricer.rates, float(pricer.state_bytes)
    files = kind.endswith("-nvme")
    blocks, rest = table["full"] - table["root"], table["resting"]
    three = zero == 3
    # bytes that come before one forward (and again before its backward), and those that come once a step
    each = size * np.where(zero == 0, blocks, np.where(three, rest, 0.0))
    once = size * np.where(zero == 0, table["root"], np.where(three, 0.0, rest))
    out = size * np.where(
        zero == 0,
        (2.0 * m - 1.0) * table["trainable"],
        np.where(zero == 1, 1.0, m) * table["trainable_resting"],
    )
    update = np.zeros_like(rest)
    if files:
        # moments are read and written, and written parameters are put down
        update = file_seconds(moments, moments, rates)
        update += file_seconds(np.zeros_like(rest), size * table["trainable_resting"], rates)
    if not rates.overlaps:
        # a CPU copies what zero=0 brings; FSDP2 reads shards where they are, and sums later gradients there
        copied = np.where(zero == 0, 2.0 * m * each + once + out, size * table["trainable_resting"])
        read = file_seconds(2.0 * m * each + once, np.zeros_like(rest), rates) if files else 0.0
        return 2.0 * copied / rates.copy_rate + read + update
    update += (
        table["trainable_resting"] * size / 4.0 * UPDATE_BYTES / (HOST_MEMORY / pricer.cluster.gpus_per_node)
    )
    if files:
        come, come_once = (file_seconds(n, np.zeros_like(n), rates) for n in (each, once))
        come, come_once = (
            np.maximum(come, each / rates.host_rate),
            np.maximum(come_once, once / rates.host_rate),
        )
    else:
        come, come_once = each / rates.host_rate, once / rates.host_rate
    waits = np.maximum(0.0, come - OVERLAP * ahead) + np.maximum(0.0, come - OVERLAP * behind)
    return m * waits + come_once + out / rates.host_rate + update
