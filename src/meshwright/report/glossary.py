"""The field's words in one line each, for the page and for docs/glossary.md."""

from __future__ import annotations

import re
from typing import Final

TERMS: Final[tuple[tuple[str, str], ...]] = (
    ("rank", "One process that drives one device, numbered from 0; the unit that sends and receives."),
    ("world size", "How many ranks the job has."),
    ("local rank", "The number of a rank's device inside its own node."),
    ("node", "One machine; links inside it are faster than links between machines."),
    ("mesh", "All ranks laid out as a grid whose directions have names."),
    ("axis", "A named direction of the mesh: pp, dp_replicate, dp_shard, cp or tp."),
    ("degree", "How many ranks an axis has."),
    ("coordinate", "Where a rank stands on each axis."),
    ("group", "Ranks that differ in one coordinate only; a collective runs over one group."),
    ("replica", "One full copy of the model, over all the ranks that hold it together."),
    ("shard", "The part of a tensor that one rank keeps."),
    ("placement", "How a tensor lies on one axis: a copy on each rank, cut along a dim, or parts still to be summed."),
    ("layout", "How the whole job is cut over the mesh: every degree and every policy."),
    ("plan", "A layout with its schedule, its prediction and the reasons for it; its hash names the work exactly."),
    ("collective", "An exchange in which every rank of a group takes part: all-reduce, all-gather, reduce-scatter ..."),
    ("all-reduce", "Every rank gives a tensor and receives the sum of all."),
    ("reduce-scatter", "Every rank gives a tensor and receives one piece of the sum."),
    ("all-gather", "Every rank gives its piece and receives the whole."),
    ("point-to-point", "One rank sends, one receives."),
    ("algorithm bandwidth", "Payload bytes over time."),
    (
        "bus bandwidth",
        "Algorithm bandwidth times the share a ring really sends, so that collectives and group sizes compare.",
    ),
    ("volume", "Bytes that one rank sends in one step."),
    ("payload", "Bytes of the full tensor that a collective works on."),
    ("bucket", "Gradients that travel together in one collective."),
    ("global batch", "Sequences that the whole job uses for one optimizer step."),
    ("local batch", "The global batch over the data-parallel degree: the sequences of one replica."),
    ("micro-batch", "The sequences that one forward of one replica sees."),
    ("accumulation", "How many micro-batches a replica sums before the optimizer steps."),
    ("step", "One update of the weights."),
    ("stage", "Neighbouring layers that run as one unit of a pipeline."),
    ("chunk", "One of several stages on the same pipeline rank."),
    ("schedule", "Which rank runs which action, in which order."),
    ("action", "One cell of a schedule: F is a forward, B a backward, each of one micro-batch."),
    ("warm-up", "The first part of a pipeline step, where later stages still wait for work."),
    ("bubble", "Time in which a pipeline rank waits; a share of the total step, or of the ideal step without waiting."),
    ("in flight", "Micro-batches that went forward and not yet backward; a rank holds their activations."),
    ("DDP", "Every rank keeps the whole model and the gradients are all-reduced."),
    ("ZeRO-1", "Optimizer state is cut over the shard group; parameters and gradients stay whole."),
    ("ZeRO-2", "Optimizer state and gradients are cut over the shard group."),
    ("ZeRO-3", "Optimizer state, gradients and parameters are cut; parameters are gathered when needed."),
    ("FSDP", "PyTorch's own sharded data parallelism (fully_shard)."),
    ("HSDP", "State is cut inside a shard group and copied over several such groups."),
    ("tensor parallel", "Each matrix is cut over the ranks of the tp axis."),
    ("context parallel", "Each sequence is cut over the ranks of the cp axis."),
    ("expert parallel", "The experts of a mixture are spread over ranks."),
    ("unshard", "Gather the whole parameters of a unit for a moment."),
    ("reshard", "Drop the gathered parameters again and keep the own part."),
    ("recompute", "Run a forward again in the backward, in place of keeping its activations."),
    ("checkpoint", "The state of a run on disk."),
    ("offload", "Keep state in CPU memory or on NVMe while it is not used."),
    ("exposed", "Not hidden: communication that compute has to wait for."),
    ("MFU", "Model FLOPs a second over the device's peak, recompute not counted; the page says how attention counts."),
    ("prediction", "What the cost model says before a run."),
    ("measurement", "What a run showed, in the terms of the prediction."),
    ("parity", "Equality with one device, within a stated tolerance."),
    ("ledger", "The collectives of one step, expected or recorded: kind, axis, count, bytes."),
    ("sentinel", "The check that recognises gradients that are all wrong by one factor."),
    ("activations", "What the forward keeps for the backward."),
    ("optimizer state", "What the optimizer remembers of each parameter; two averages in AdamW."),
    ("gradient norm", "The length of the whole gradient; clipping limits it."),
    ("live bytes", "Bytes of tensors that exist at a moment; the measure of memory on a CPU."),
    ("allocated", "Bytes that the GPU's allocator has given out; it reserves more than that."),
    ("GiB", "2^30 bytes; MiB is 2^20, KiB 2^10."),
    ("GB", "10^9 bytes; used for rates such as GB/s."),
)  # fmt: skip
"""(term, what it means), in reading order."""


def terms_in(text: str) -> tuple[tuple[str, str], ...]:
    """Return the terms that occur in ``text`` as whole words (a plural s is allowed), in glossary order."""
    lowered = text.lower()
    return tuple(
        (term, meaning)
        for term, meaning in TERMS
        if re.search(
            rf"(?<![\w-]){re.escape(term.lower())}s?(?![\w-])",
            text if term in ("GB", "GiB", "MFU", "DDP") else lowered,
            re.IGNORECASE,
        )
    )


def as_markdown() -> str:
    """Return the glossary as the page docs/glossary.md."""
    rows = [f"| {term} | {meaning} |" for term, meaning in TERMS]
    return "\n".join(
        [
            "# Glossary",
            "",
            "One name for one thing, in the order in which they build on each other. The report prints those that a page",
            "uses; this list is made from the same table (`meshwright.report.glossary`).",
            "",
            "| term | meaning |",
            "|---|---|",
            *rows,
            "",
        ]
    )
