"""What stages, and ranks that own several of them, hold at a moment of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats
from meshwright.cost.memory import StageLoad, fullest, peak_memory
from meshwright.cost.replay import moments
from meshwright.cost.work import COMPUTE_BYTES, STATE_BYTES, Facts
from meshwright.layout.layout import LOSS_CHUNKS
from meshwright.schedule.actions import ActionKind, Schedule


def over_ranks(values: Floats, schedule: Schedule) -> Floats:
    """Return the sums over each pipeline rank's stages of per-stage ``values``, [stages] to [ranks]."""
    out = np.zeros(schedule.num_ranks)
    np.add.at(out, list(schedule.stage_ranks), values[: schedule.num_stages])
    return out


def rank_peaks(load: StageLoad, row: int, schedule: Schedule, outside: Floats) -> dict[str, Floats]:
    """Return bytes by category of each pipeline rank, [1, ranks], at its peak, from the stages of layout ``row``."""
    owns: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
    for stage, rank in enumerate(schedule.stage_ranks):
        owns[rank].append(stage)
    names = {f.name for f in fields(StageLoad)}
    one = replace(load, **{n: getattr(load, n)[row : row + 1, : schedule.num_stages] for n in names})
    index = np.array(owns, dtype=np.intp)
    turn = turns(index)
    halves = np.full(1, float(any(a.kind is ActionKind.INPUT_GRAD for a in schedule.rows[0])))
    found = [
        peak_memory(over_owned(one, index, turn, x.held[None], x.waiting[None], x.half[None], halves), outside)
        for x in moments(schedule)
    ]
    return fullest(found)


def turns(stages: NDArray[np.intp]) -> Floats:
    """Return, from the stages [ranks, chunks] of each rank, 1 where the next chunk is the next stage, [ranks, chunks - 1].

    There a V turns: what one stage gives the next is handed over within the rank, nothing is sent or received.
    """
    return (np.diff(stages, axis=1) == 1).astype(np.float64)


def over_owned(
    load: StageLoad,
    owns: NDArray[np.intp],
    turn: Floats,
    held: Floats,
    waiting: Floats,
    half: Floats,
    halves: Floats,
) -> StageLoad:
    """Return what each rank holds at a moment, [layouts, ranks], of the stages (or runs of them) that it owns.

    Parameters and messages add over a rank's stages, the largest unit is the largest of any. Activations and weight
    casts are the mean over the chunks that are held then. Across a turn nothing waits to be sent or received: the stage
    behind it reads what the one before it keeps until its own backward.

    Args:
        load: of the stages, [layouts, stages].
        owns: [ranks, chunks] the stages of each rank.
        turn: [ranks, chunks - 1] 1 where a rank's next chunk is the next stage (see ``turns``).
        held: [layouts, ranks, chunks] micro-batches of each stage that are held at that moment.
        waiting: the same of those whose input half is done.
        half: [layouts, ranks] 1 where a rank is in a half of a backward.
        halves: [layouts] 1 where the schedule splits backwards.
    """
    in_flight = held.sum(axis=2)
    total = np.maximum(in_flight, 1.0)
    end = load.full.shape[1] - 1

    def added(values: Floats) -> Floats:
        return values[:, owns].sum(axis=2)

    def largest(values: Floats) -> Floats:
        return values[:, owns].max(axis=2)

    def mean(values: Floats) -> Floats:
        return (values[:, owns] * held).sum(axis=2) / total

    sums = (
        *("full", "trainable", "resting", "trainable_resting", "root", "root_trainable"),
        *("boundary", "logits", "final", "kept_loss", "steps", "packed"),
    )
    means = ("cast", "activations")
    out = {
        f.name: (added if f.name in sums else mean if f.name in means else largest)(getattr(load, f.name))
        for f in fields(StageLoad)
    }
    at_end = owns[None] == end
    done = np.where(at_end, waiting, 0.0).sum(axis=2)
    # the micro-batch in whose half the rank is had its loss to do when that half began
    losses = np.where(at_end, held, 0.0).sum(axis=2) - done + half * (done > 0)
    out |= {n: np.where(losses > 0, out[n], 0.0) for n in ("logits", "final")}
    out |= {"in_flight": in_flight, "losses": losses}
    # gradients that were sent back: of every micro-batch but those whose backward (or input half) is still to come
    message = load.back[:, owns]
    handed = turn * message[:, :, 1:]
    message[:, :, 1:] -= handed
    out["back"] = (message * (held - waiting)).sum(axis=2) / total
    # both directions of either stage's end; the handed output itself is kept
    out["boundary"] = out["boundary"] - (4.0 * load.micro_batches[:, owns[:, 1:]] * handed).sum(axis=2)
    out["activations"] = out["activations"] + (handed * held[:, :, :-1]).sum(axis=2) / total
    in_blocks = np.minimum(load.cast, load.full - load.root)
    out["recast"] = (in_blocks[:, owns] * waiting).sum(axis=2)
    out["captured"] = np.where(at_end, load.captured[:, owns], 0.0).sum(axis=2)
    out["waits"] = (load.captured[:, owns] * waiting).sum(axis=2)
    return StageLoad(**out | {"half": half, "halves": np.broadcast_to(halves[:, None], half.shape)})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of a layout its memory depends on beside its stages, [layouts]; flags are 0 or 1.

    ``tokens`` are those of a micro-batch on one rank.
    """

    zero: Floats
    micro_batches: Floats
    tp: Floats
    tokens: Floats
    autocast: Floats
    chunked: Floats
    piped: Floats
    away: Floats


def stage_load(
    facts: Facts,
    sizes: Sizes,
    table: Mapping[str, Floats],
    per_stage: Callable[[str], Floats],
    worst: Callable[[str], Floats],
    in_flight: Floats,
    first: Floats,
    last: Floats,
) -> StageLoad:
    """Return what each stage holds, [layouts, stages].

    ``per_stage`` sums a figure of ``Work`` over a stage, ``worst`` takes its largest block's; ``first`` and ``last``
    are 1 on the stages with embedding and head.
    """
    shape = in_flight.shape

    def wide(column: Floats) -> Floats:
        return np.broadcast_to(column[:, None], shape)

    spec = facts.spec
    m, chunked = sizes.micro_batches, sizes.chunked
    parts = sizes.tp * np.where(chunked > 0, np.ceil(LOSS_CHUNKS / sizes.tp), 1)
    message = sizes.tokens * spec.hidden_size * np.where(sizes.autocast > 0, 4.0, float(facts.compute_bytes))
    # receive buffers of every micro-batch, and what is sent, which is held until the step ends
    one = wide(sizes.piped * message)
    boundary = one * 2.0 * wide(m) * ((1.0 - first) + (1.0 - last))
    return StageLoad(
        zero=wide(sizes.zero),
        resting=table["resting"],
        trainable_resting=table["trainable_resting"],
        micro_batches=wide(m),
        in_flight=in_flight,
        full=table["full"],
        trainable=table["trainable"],
        tensor=table["largest"],
        table=table["table"],
        foot=table["table"] * first,
        matrix=table["matrix"],
        root=table["root"],
        root_trainable=table["root_trainable"],
        block=table["block"],
        block_trainable=table["block_trainable"],
        cast=table["matmul"],
        packed=table["packed"],
        packed_block=table["packed_block"],
        unpacked=table["unpacked"],
        # what a later stage's first block is given is in its receive buffer
        activations=per_stage("kept") - wide(sizes.piped) * (1.0 - first) * worst("entry"),
        recompute=worst("again"),
        transient=worst("transient"),
        inside=worst("inside"),
        gone=worst("gone"),
        whole=worst("whole"),
        norm=worst("norm"),
        grown=worst("grown"),
        boundary=boundary,
        back=one * (1.0 - first),
        steps=wide(m),
        stage=table["trainable"],
        final=per_stage("final"),
        kept_loss=per_stage("loss"),
        chunked=wide(chunked),
        logits=last * wide(sizes.tokens * spec.vocab_size / parts),
        losses=in_flight,
        storage=np.full(shape, float(STATE_BYTES[facts.precision])),
        compute=np.full(shape, float(COMPUTE_BYTES[facts.precision])),
        reduce=np.full(shape, float(STATE_BYTES[facts.precision])),
        autocast=wide(sizes.autocast),
        vocab=np.full(shape, 1.0) * (wide(sizes.tp) > 1.0),
        copies=np.full(shape, 2.0 if facts.cluster.device.is_cpu else 1.0),
        away=wide(sizes.away),
        recast=np.zeros(shape),
        noise=worst("noise"),
        captured=per_stage("captured"),
        waits=np.zeros(shape),
        half=np.zeros(shape),
        halves=np.zeros(shape),
        edge=worst("edge"),
    )
