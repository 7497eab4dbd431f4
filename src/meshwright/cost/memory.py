"""Bytes that one rank holds at its peak, by category: the larger of the moments of a step.

The account follows what the runtime does. ``zero=0``: fp32 parameters, one fp32 gradient buffer per unit,
Adam's two moments; bf16 and fp16 by autocast, whose weight casts live from a forward to its backward.
``zero>=1`` (FSDP2): parameters rest sharded, padded to equal rows; stages 1 and 2 keep them gathered from the
first forward to the last backward, stage 3 one unit at a time (two in backward, where the next is prefetched)
beside the root unit, which is gathered around all blocks. Stage 1 keeps whole gradients in the reduce dtype
until the last backward when it accumulates; stages 2 and 3 keep shards, and one unit's whole gradients
with the buffer that is reduce-scattered. As the counter of a run has it, gathered units and whole gradients on
their way are "working", casts that autograd keeps "activations".

Where a schedule splits a backward, a micro-batch keeps from its input half to its weight half all that its forward saved
(but the log-softmax) and the gradient of every output that a weight had a part in. Weight halves add to whole gradients
of all of a stage's units, which are reduced together behind them. The first stage's input half does nothing.

All quantities are NumPy columns (one element per layout and stage), so one formula serves a single
prediction and a whole search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.base.records import MemoryBytes
from meshwright.cost.collective import Floats
from meshwright.cost.offload import BUFFERS
from meshwright.cost.offloaded import moments_away

CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "logits", "working")

LOSS_LOGITS_BYTES: Final = 12.0
"""Bytes per logit at the loss: saved log-softmax, its gradient and the logits' gradient, all fp32."""

CHUNK_LOGITS_BYTES: Final = 8.0
"""Bytes per logit of a chunk of the chunked loss: the float32 logits and their log-softmax, in one place its gradient."""

CONTEXT_BYTES: Final = 0.75 * 2**30
COMMUNICATOR_BYTES: Final = 0.15 * 2**30
"""What a GPU holds beside the allocator: context and libraries, and each communicator (assumed)."""

PEAK_SPREAD: Final = 0.03
"""Relative standard deviation of the peak, allocator slack included (assumed until calibrated): the 1 % gate
then stands at 0.935 of the memory, where out-of-memory rows of public sweeps separate best."""


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What a stage holds, in elements and bytes. ``full`` is padded to the shard group, after tp and ep.

    Attributes:
        zero, micro_batches, in_flight: of the layout and its schedule.
        resting, trainable_resting: elements of all units that one rank of their shard groups holds.
        full, trainable: elements of all units; ``tensor`` of the largest single tensor that trains, ``table`` of the
            root unit's, ``foot`` of the embedding's gradients and ``matrix`` of a block's largest one; ``stage`` the
            trainable elements of the largest stage.
        graded, graded_resting: of ``trainable`` and ``trainable_resting`` those that a micro-batch has left gradients of.
        root, root_trainable, block, block_trainable: of the root unit and of the largest block.
        cast: elements of matmul weights (which autocast casts).
        packed: bytes of matrices in 4 bits, ``packed_block`` those of the largest block. Every rank holds them, but stage
            3 shards and gathers them like parameters.
        unpacked: the elements of the largest one, which is whole while it is multiplied with.
        activations: bytes that one micro-batch keeps until its backward.
        recompute: bytes alive beside them while a block is recomputed.
        transient, inside: bytes of gradients of activations inside the largest block's feed-forward, at most and while
            weight gradients are made.
        gone, whole: bytes of what a block kept that are freed when its backward is through the feed-forward (which has
            then made ``grown`` elements of weight gradients), and at its end.
        norm: bytes alive inside a norm's backward.
        boundary: bytes that the pipeline keeps for messages, as if every gradient had been sent back; ``back`` of them
            are those of one micro-batch's.
        steps: micro-batches of a step, of all of the rank's stages.
        final: the part of ``activations`` that is gone before a block's backward (final norm, head's input).
        logits: elements of logits alive at once on this rank (0 but on the last stage).
        kept_loss: bytes that the loss keeps of a micro-batch until its backward.
        capped: bytes per logit of the scaled tanh, which keeps its output until its backward (0 without one).
        losses: micro-batches whose loss is kept (in flight on the last stage).
        chunked: 1 where the loss runs by chunks of tokens, else 0.
        storage, compute, reduce: bytes per element at rest, computing, and when reduced.
        vocab: 1 where the loss runs on logits that are spread over the tensor axis, else 0.
        copies: copies of what a reduce-scatter takes in that are alive at once (gloo makes one more).
        autocast: 1 where weights are cast by autocast (zero = 0 in 16 bit), else 0.
        away: what rests away from the device: 0 nothing, 1 the optimizer's state, 2 (3) parameters and
            gradients too (of several replicas).
        recast: elements of matrices in blocks that ran again for micro-batches between their halves, which keep casts.
        noise: bytes of random numbers while a block's dropout runs.
        captured: bytes that a micro-batch keeps between the halves of its backward beside ``activations``; of a rank:
            the one whose input half ends.
        waits: bytes that all micro-batches between their halves keep so.
        half: 1 where the rank is in a half of a backward, else 0.
        halves: 1 where its schedule splits backwards, else 0.
        edge: bytes of gradients of activations at the end of a backward.
    """

    zero: Floats
    resting: Floats
    trainable_resting: Floats
    micro_batches: Floats
    in_flight: Floats
    full: Floats
    trainable: Floats
    graded: Floats
    graded_resting: Floats
    tensor: Floats
    table: Floats
    foot: Floats
    matrix: Floats
    stage: Floats
    root: Floats
    root_trainable: Floats
    block: Floats
    block_trainable: Floats
    cast: Floats
    packed: Floats
    packed_block: Floats
    unpacked: Floats
    activations: Floats
    recompute: Floats
    transient: Floats
    inside: Floats
    gone: Floats
    whole: Floats
    norm: Floats
    grown: Floats
    boundary: Floats
    back: Floats
    steps: Floats
    final: Floats
    logits: Floats
    kept_loss: Floats
    capped: Floats
    losses: Floats
    chunked: Floats
    storage: Floats
    compute: Floats
    reduce: Floats
    vocab: Floats
    copies: Floats
    autocast: Floats
    away: Floats
    recast: Floats
    noise: Floats
    captured: Floats
    waits: Floats
    half: Floats
    halves: Floats
    edge: Floats


def peak_memory(load: StageLoad, outside: Floats) -> dict[str, Floats]:
    """Return bytes by category at the peak of the step, with ``peak`` their sum.

    ``outside`` are the bytes beside the allocator, which are always there.
    """
    moments = moments_away(load, _moments(load))
    totals = _totals(load, moments)
    at = np.argmax(totals, axis=0)
    out: dict[str, Floats] = {}
    for name in CATEGORIES:
        rows = np.stack([np.broadcast_to(m[name], load.full.shape) for m in moments])
        out[name] = np.take_along_axis(rows, at[np.newaxis], axis=0)[0]
    out["outside_allocator"] = np.broadcast_to(outside, load.full.shape)
    out["peak"] = totals.max(axis=0) + outside
    return out


def peak_bytes(load: StageLoad, outside: Floats) -> Floats:
    """Return the bytes at the peak of the step, as ``peak_memory`` has them, and nothing else."""
    out: Floats = _totals(load, moments_away(load, _moments(load))).max(axis=0) + outside
    return out


def _totals(load: StageLoad, moments: Sequence[Mapping[str, Floats]]) -> Floats:
    """Return [moments, ...] bytes of each moment's categories together."""
    out = np.zeros((len(moments), *load.full.shape))
    for total, moment in zip(out, moments, strict=True):
        for values in moment.values():
            total += values
    return out


def _moments(x: StageLoad) -> list[dict[str, Floats]]:
    sharded = x.zero >= 1
    three = x.zero >= 3
    accumulates = x.micro_batches > 1
    rest = x.storage * x.resting + x.packed * np.where(three, x.resting / np.maximum(x.full, 1.0), 1.0)
    kept = np.where(sharded & ~three, x.compute * x.full, 0.0)  # gathered from first forward to last backward
    optimizer = np.where(x.away > 0, 0.0, 2.0 * x.storage * x.trainable_resting)
    gradient_shards = x.storage * x.trainable_resting
    # autocast's casts wait for their block's backward; those of a block that runs again are gone until then
    again = x.recompute > 0
    all_casts = x.autocast * x.compute * x.cast
    head_casts = x.autocast * x.compute * np.maximum(x.cast - (x.full - x.root), 0.0)
    recast = x.autocast * x.compute * x.recast
    casts = np.where(again, head_casts * x.in_flight + recast, all_casts * x.in_flight)
    own = x.autocast * x.compute * np.minimum(x.block, x.cast) - (1.0 - x.half) * head_casts
    casts_in_block = casts + np.where(again, own, 0.0)
    # where a message outweighs what its micro-batch keeps, a rank with hardly any in flight is as full
    boundary = x.boundary - np.minimum(x.back, x.activations) * x.in_flight
    # FSDP2 holds on to the last reduce-scatter's input (the root unit's) until the next micro-batch reduces
    stale = np.where((x.zero >= 2) & accumulates & (x.graded > 0), x.reduce * x.root_trainable, 0.0)
    # what accumulation has left when the last micro-batch is computed
    held = np.where(
        ~sharded,
        x.storage * x.trainable,
        np.where(accumulates, np.where(x.zero == 1, x.reduce * x.graded, x.storage * x.graded_resting), 0.0),
    )
    acts = x.in_flight * x.activations + x.waits
    # with every micro-batch of the step in flight either none has left gradients yet, or one is gone
    # (the moments of a schedule that splits backwards say it themselves)
    fresh = sharded & accumulates & (x.in_flight >= x.steps) & (x.halves < 1)
    none_yet = fresh & (x.activations >= held + stale)
    held, stale = (np.where(none_yet, 0.0, values) for values in (held, stale))
    acts = acts - np.where(fresh & ~none_yet, x.activations, 0.0)
    # every other micro-batch in flight keeps its log-softmax, or the gradients that a chunked loss made
    kept_logits = x.kept_loss * np.maximum(x.losses - 1.0, 0.0)
    chunked = x.chunked > 0
    always = {"parameters": rest, "gradients": held, "optimizer": optimizer}
    # stage 3 at the loss: root and one block gathered, with the next one's flat buffer beside it in a block's backward
    ends = np.where(three, x.compute * (x.root + x.block) + x.packed_block, kept)
    inside = np.where(three, x.compute * (x.root + 2.0 * x.block) + 2.0 * x.packed_block, kept)
    loss_bytes = np.where(x.vocab > 0, 4.0 + np.maximum(x.compute, 4.0), LOSS_LOGITS_BYTES)
    loss_bytes = loss_bytes + np.where((x.vocab > 0) & (x.compute < 4.0), x.compute, 0.0) + x.capped
    # a chunk's two float32 sets of logits, then its gradient beside the product that is added to the weight's
    chunk = CHUNK_LOGITS_BYTES * x.logits
    chunk = np.where(x.compute < 4.0, np.maximum(chunk, x.compute * (x.logits + x.table)), chunk)
    # the first forward also holds the flat buffer that the last block was gathered into
    buffer = np.where(
        sharded & ~three & ~accumulates, np.maximum(x.compute * x.block - 2.0 * x.logits, 0.0), 0.0
    )
    loss = always | {
        "activations": acts - x.half * x.captured + casts,
        "logits": np.where(chunked, chunk + x.kept_loss, loss_bytes * x.logits) + kept_logits,
        "working": ends + buffer + boundary + stale,
    }
    # the head's gradient beside that of the logits, when the head's cast is gone; whole ones are float32 at once
    wide = np.where((x.compute < 4.0) & ~sharded, x.compute + 4.0, x.compute)
    at_head = (x.logits > 0) & ~chunked
    head = always | {
        "activations": acts + casts - np.where(at_head, head_casts, 0.0),
        "logits": np.where(chunked, x.kept_loss, x.compute * x.logits) + kept_logits,
        "working": ends + stale + boundary + np.where(at_head, wide * x.table, 0.0),
    }
    block = always | {
        "activations": acts - x.final + casts_in_block,
        "logits": kept_logits,
        "working": inside + boundary + x.recompute + _inside_block(x, stale, wide) + x.compute * x.unpacked,
    }
    # the end of backward: this micro-batch's activations are gone, the root unit is reduced
    last = np.where(sharded, gradient_shards, held)
    share = x.trainable_resting / np.maximum(x.trainable, 1.0)  # of a tensor, on one rank of its shard group
    reduced = np.maximum((x.copies + share) * x.root_trainable, x.block_trainable)
    # a dense gradient of the embedding has the table's dtype
    swept = np.where(
        sharded,
        x.compute * x.root_trainable + x.reduce * reduced,
        np.maximum(x.storage * x.foot, wide * x.matrix),
    )
    # weight gradients that a split backward adds by hand stay whole until all of a stage's units are reduced
    whole = x.compute * x.stage + x.copies * x.reduce * x.block_trainable
    around = np.where(
        three | ~((x.halves > 0) & accumulates & (x.zero == 2)),
        np.where(sharded, x.compute * x.root, 0.0),
        kept,
    )
    end = {
        "parameters": rest,
        "gradients": last,
        "optimizer": optimizer,
        "activations": acts
        - x.activations
        - x.half * x.captured
        + np.where(again, 0.0, all_casts * (x.in_flight - 1.0)),
        "logits": kept_logits,
        "working": around + boundary + np.where(sharded & (x.halves > 0), np.maximum(swept, whole), swept),
    }
    # the update itself matters only where state comes for it: pieces of at most the largest tensor, two at a time
    buffers = BUFFERS * 2.0 * x.storage * x.tensor * share
    none = np.zeros_like(x.full)
    update = {
        "parameters": rest,
        "gradients": last,
        "optimizer": np.where(x.away > 0, buffers, optimizer),
        "activations": none,
        "logits": none,
        "working": none,
    }
    moments = [loss, head, block, end, update]
    if x.noise.any():  # numbers of a dropout behind attention, while a block runs forward (perhaps again)
        drop = always | {
            "activations": acts - x.final - x.gone + casts_in_block,
            "logits": kept_logits,
            "working": inside + boundary + stale + x.recompute + x.noise,
        }
        moments.append(_only(x.noise > 0, drop))
    if not x.half.any():
        return moments
    # the end of an input half, and the start of a weight half: nothing of this micro-batch is freed
    unfinished = np.where((x.logits > 0) & ~chunked, x.kept_loss, 0.0)
    always = always | {"activations": acts + casts_in_block}
    inputs = always | {
        "logits": kept_logits + unfinished,
        "working": inside + boundary + stale + x.edge,
    }
    unit = np.where(sharded, x.compute * x.stage, wide * x.tensor)
    weights = always | {"logits": kept_logits, "working": inside + boundary + stale + unit}
    full = [_only(x.half < 1, moment) for moment in (head, block)]
    moments[1:3] = full
    return [*moments, *(_only(x.half > 0, moment) for moment in (inputs, weights))]


def _inside_block(x: StageLoad, stale: Floats, wide: Floats) -> Floats:
    """Return the most that the backward of a block adds to all that its forward kept: gradients, less what is freed.

    Backward goes through the feed-forward, the norm between, attention, and the norm at the entry. Whole gradients of a
    sharded unit wait for its end, where they are copied into the buffer that is reduced; that buffer lives until the
    next unit's takes its place, so that the next block computes beside it. ``stale`` is the one before the first block.
    ``wide`` are the bytes per element of a gradient that is being made.
    """
    sharded = x.zero >= 1
    c, block = x.compute, x.block_trainable
    # inside the feed-forward, behind it, and at the end
    grown = np.maximum(c * x.matrix + x.transient, c * np.minimum(x.grown, block) + x.norm - x.gone)
    grown = np.maximum(grown, c * block + x.norm - x.whole)
    buffer = x.reduce * block
    # stage 1 puts the buffer in the place of the gradients that have accumulated
    once = (x.zero == 1) & (x.micro_batches > 1)
    beside = np.where(once, 0.0, buffer)
    # from block to block what forward kept is freed; shards of gradients pile up where there are none from before
    blocks = (x.full - x.root) / np.maximum(x.block, 1.0) - 1.0
    shard = x.storage * block * x.trainable_resting / np.maximum(x.trainable, 1.0)
    more = np.where(x.micro_batches > 1, 0.0, shard) - (x.whole - x.recompute)
    # in the last micro-batch stages 1 and 2 free units as they are reduced
    more = more - np.where((x.zero == 1) | ((x.zero == 2) & (x.micro_batches <= 1)), c * x.block, 0.0)
    later = grown + beside + more * np.where(more > 0, np.maximum(blocks, 1.0), 1.0)
    # a unit is freed before its gradients are reduced, but where stage 2 keeps it for the next micro-batch
    reduced = x.copies * buffer - x.whole + np.where(x.zero == 2, c * block, 0.0)
    reduced = reduced - np.where(once, c * x.block, 0.0)
    # stage 1 reduces in the last micro-batch only, when the others are gone
    others = np.where(once, np.maximum(x.in_flight - 1.0, 0.0) * x.activations, 0.0)
    later = np.where(blocks > 0.5, later - others, 0.0)
    reduced = reduced - others
    # the root's gradient is the head's by then; an embedding's comes last
    head = np.where(x.logits > 0, c * np.minimum(x.table, x.root_trainable), 0.0)
    made = head + np.maximum(np.maximum(grown + stale, later), reduced)
    # a gradient that is made whole takes the place of its matrix's cast
    one = (wide - x.autocast * c) * np.minimum(x.matrix, block)
    return np.where(sharded, made, np.maximum(x.transient, x.inside + one))


def _only(rows: NDArray[np.bool_], moment: dict[str, Floats]) -> dict[str, Floats]:
    """Return a moment that only ``rows`` have; the others hold nothing then."""
    return {name: np.where(rows, values, 0.0) for name, values in moment.items()}


def fullest(moments: Sequence[dict[str, Floats]]) -> dict[str, Floats]:
    """Return each element's bytes by category from the moment, of several of ``peak_memory``, with the highest peak."""
    at = np.argmax(np.stack([m["peak"] for m in moments]), axis=0)[np.newaxis]
    return {
        name: np.take_along_axis(np.stack([m[name] for m in moments]), at, axis=0)[0] for name in moments[0]
    }


def outside_allocator(groups: Floats, *, is_cpu: bool) -> Floats:
    """Return the bytes that a device holds beside the allocator, with ``groups`` communicators (0 on a CPU)."""
    return np.zeros_like(groups) if is_cpu else CONTEXT_BYTES + COMMUNICATOR_BYTES * groups


def memory_record(columns: Mapping[str, Any]) -> MemoryBytes:
    """Return the record of one element of ``peak_memory``'s columns."""
    return MemoryBytes(**{name: round(float(columns[name])) for name in (*CATEGORIES, "outside_allocator")})
