"""What stages, and ranks that own several of them, hold at a moment of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collective import Floats
from meshwright.cost.memory import StageLoad, fullest, peak_memory
from meshwright.cost.replay import Moment, moments
from meshwright.cost.work import COMPUTE_BYTES, STATE_BYTES, Facts
from meshwright.layout.layout import LOSS_CHUNKS
from meshwright.model.logits import after_head
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
    halves = np.full(1, float(any(a.kind is ActionKind.INPUT_GRAD for a in schedule.rows[0])))
    ranks = owned(one, index, turns(index), halves)
    return fullest([peak_memory(ranks.at(in_columns(x)), outside) for x in moments(schedule)])


def turns(stages: NDArray[np.intp]) -> Floats:
    """Return 1 where a rank's next chunk is the next stage, [ranks, chunks - 1], from the stages [ranks, chunks] of each.

    There a V turns: what one stage gives the next is handed over within the rank, nothing is sent or received.
    """
    return (np.diff(stages, axis=1) == 1).astype(np.float64)


def in_columns(moment: Moment) -> Moment:
    """Return a moment of one layout, [ranks, ...], as one of a column of layouts, [1, ranks, ...]."""
    return Moment(**{f.name: getattr(moment, f.name)[None] for f in fields(Moment)})


SUMS: Final = (
    *("full", "trainable", "resting", "trainable_resting", "root", "root_trainable"),
    *("logits", "final", "kept_loss", "steps", "packed"),
)
"""Figures that add over a rank's stages."""
AT_A_MOMENT: Final = (
    *("cast", "activations", "in_flight", "losses", "back", "boundary", "graded", "graded_resting"),
    *("recast", "waits", "half"),
)
"""Figures that depend on what is held; of all others a rank has its largest stage's."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """What ranks hold of the stages (or runs of them) that they own, whatever the moment.

    Attributes:
        load: of the stages, [layouts, stages].
        owns: [ranks, chunks] the stages of each rank.
        always: [layouts, ranks] figures that no moment changes.
        messages: [layouts, ranks, chunks] bytes of a gradient that each stage sends back.
        ends: [layouts, ranks, chunks] bytes for messages at both ends of each stage.
        handed: [layouts, ranks, chunks - 1] bytes that a stage hands to the rank's next chunk.
    """

    load: StageLoad
    owns: NDArray[np.intp]
    always: Mapping[str, Floats]
    messages: Floats
    ends: Floats
    handed: Floats

    def at(self, moment: Moment) -> StageLoad:
        """Return what each rank holds at a moment whose arrays are [layouts, ranks, ...].

        Activations and weight casts are the mean over the chunks that are held then.
        """
        load, owns = self.load, self.owns
        held, waiting, half, graded = moment.held, moment.waiting, moment.half, moment.graded
        in_flight = held.sum(axis=2)
        total = np.maximum(in_flight, 1.0)
        at_end = owns[None] == load.full.shape[1] - 1
        done = np.where(at_end, waiting, 0.0).sum(axis=2)
        # the micro-batch in whose half the rank is had its loss to do when that half began
        losses = np.where(at_end, held, 0.0).sum(axis=2) - done + half * (done > 0)
        kept = (load.activations[:, owns] * held).sum(axis=2)
        in_blocks = np.minimum(load.cast, load.full - load.root)
        # until a micro-batch is through its backward none has been sent on but those that are held
        unsent = (1.0 - graded) * (1.0 - held / load.micro_batches[:, owns])
        out: dict[str, Floats] = {
            **self.always,
            "in_flight": in_flight,
            "half": half,
            "losses": losses,
            "logits": np.where(losses > 0, self.always["logits"], 0.0),
            "final": np.where(losses > 0, self.always["final"], 0.0),
            "cast": (load.cast[:, owns] * held).sum(axis=2) / total,
            # what is handed over at a turn is kept by the stage before it
            "activations": (kept + (self.handed * held[:, :, :-1]).sum(axis=2)) / total,
            # gradients that were sent: of every micro-batch but those whose backward (or input half) is still to come
            "back": (self.messages * (held - waiting)).sum(axis=2) / total,
            "boundary": (self.ends * (1.0 - 0.5 * unsent)).sum(axis=2),
            "graded": (load.graded[:, owns] * graded).sum(axis=2),
            "graded_resting": (load.graded_resting[:, owns] * graded).sum(axis=2),
            "recast": (in_blocks[:, owns] * waiting).sum(axis=2),
            "waits": (load.captured[:, owns] * waiting).sum(axis=2),
        }
        return StageLoad(**out)


def owned(load: StageLoad, owns: NDArray[np.intp], turn: Floats, halves: Floats) -> Owned:
    """Return what ranks hold of their stages: parameters add up, the largest unit is the largest of any.

    Across a turn nothing is sent or received, in either direction.

    Args:
        load: of the stages, [layouts, stages].
        owns: [ranks, chunks] the stages of each rank.
        turn: [ranks, chunks - 1] 1 where a rank's next chunk is the next stage (see ``turns``).
        halves: [layouts] 1 where the schedule splits backwards.
    """
    always: dict[str, Floats] = {
        f.name: getattr(load, f.name)[:, owns].sum(axis=2)
        if f.name in SUMS
        else getattr(load, f.name)[:, owns].max(axis=2)
        for f in fields(StageLoad)
        if f.name not in AT_A_MOMENT
    }
    at_end = owns[None] == load.full.shape[1] - 1
    always["captured"] = np.where(at_end, load.captured[:, owns], 0.0).sum(axis=2)
    always["halves"] = np.broadcast_to(halves[:, None], always["full"].shape)
    messages, ends = load.back[:, owns], load.boundary[:, owns]
    handed = turn * messages[:, :, 1:]
    messages[:, :, 1:] -= handed
    both = 2.0 * load.micro_batches[:, owns[:, 1:]] * handed
    ends[:, :, :-1] -= both
    ends[:, :, 1:] -= both
    return Owned(load=load, owns=owns, always=always, messages=messages, ends=ends, handed=handed)


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
        graded=table["trainable"],
        graded_resting=table["trainable_resting"],
        tensor=table["largest"],
        table=table["table"],
        # a tied head's gradient waits for the embedding's, and their sum is made beside both
        foot=table["table"] * first * (1.0 + 2.0 * last * float(spec.tied_embeddings)),
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
        capped=np.full(shape, 0.0 if after_head(spec).cap is None else float(facts.compute_bytes)),
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
