"""Batch arithmetic: the user states sequences per step, the rest is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.base.errors import Problem, problem, refuse
from meshwright.layout.layout import Layout

MOST_SEQUENCES: Final = 2**20
MOST_TOKENS: Final = 2**27
"""Largest global batch in sequences and longest sequence: far above any run, and small enough to count with."""

MOST_ACTIONS: Final = 2**17
"""Most micro-batches x stages of one step: a schedule is written out action by action."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch arithmetic of one step: ``global_batch = dp * micro_batch * accumulation`` sequences.

    ``accumulation`` is also the number of micro-batches that flow through a pipeline.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over the whole job."""
        return self.global_batch * self.seq_len


def derive_batch(layout: Layout, global_batch: int, seq_len: int) -> Batch:
    """Return the batch arithmetic of ``global_batch`` sequences of ``seq_len`` tokens per optimizer step.

    Raises:
        MeshwrightError: E220 when dp * micro_batch does not divide the batch (with the nearest batches), E221
            when the batch is smaller than that product, E222 for a number below 1 or beyond counting.
    """
    refuse(check_batch(layout, global_batch, seq_len))
    return Batch(
        global_batch=global_batch,
        micro_batch=layout.micro_batch,
        accumulation=global_batch // (layout.dp * layout.micro_batch),
        dp=layout.dp,
        seq_len=seq_len,
    )


def nearest_batches(layout: Layout, global_batch: int) -> tuple[int, ...]:
    """Return the one or two global batches nearest to ``global_batch`` that the layout divides, smaller first."""
    unit = layout.dp * layout.micro_batch
    below = global_batch // unit * unit
    if below == global_batch and below:
        return (below,)
    return tuple(n for n in (below, below + unit) if n > 0)


def check_batch(layout: Layout, global_batch: int, seq_len: int) -> list[Problem]:
    """Return what is wrong with the batch (E220, E221, E222); see ``derive_batch``."""
    problems = [
        problem(
            "E222",
            where=where,
            found=f"{where} = {value}",
            needs=f"1 <= {where} <= {most}",
            do=f"{where} = {1 if value < 1 else most}, or the number that is meant",
        )
        for where, value, most in (
            ("global batch", global_batch, MOST_SEQUENCES),
            ("seq_len", seq_len, MOST_TOKENS),
        )
        if not 1 <= value <= most
    ]
    if not 1 <= global_batch <= MOST_SEQUENCES:
        return problems
    dp, micro = layout.dp, layout.micro_batch
    unit = dp * micro
    if global_batch % unit == 0:
        return problems
    near = nearest_batches(layout, global_batch)
    choices = [f"global batch = {' | '.join(str(n) for n in near)}"]
    if global_batch % dp == 0:
        local = global_batch // dp
        fits = [m for m in range(1, min(local, 4 * micro) + 1) if local % m == 0]
        best = sorted(sorted(fits, key=lambda m: (abs(m - micro), m))[:2])
        choices.append(f"micro_batch = {' | '.join(str(m) for m in best)}")
    degrees = [d for d in range(1, min(4 * dp, global_batch // micro) + 1) if global_batch % (d * micro) == 0]
    if degrees:
        best = sorted(sorted(degrees, key=lambda d: (abs(d - dp), d))[:2])
        choices.append(f"dp = {' | '.join(str(d) for d in best)}")
    found = f"global batch {global_batch} with dp = {dp} and micro_batch = {micro}: "
    if global_batch < unit:
        found += f"one micro-batch on each replica already takes {unit} sequences"
        code, needs = "E221", f"global batch >= dp * micro_batch = {unit}"
    else:
        found += f"{global_batch} / ({dp} * {micro}) = {global_batch / unit:.3f} micro-batches per replica"
        code, needs = "E220", f"global batch % {unit} == 0"
    problems.append(problem(code, where="batch", found=found, needs=needs, do="; or ".join(choices)))
    return problems


def check_actions(layout: Layout, accumulation: int) -> list[Problem]:
    """Return E224 when a step has more micro-batches x stages than a schedule is written out for."""
    most = MOST_ACTIONS // layout.num_stages
    if accumulation <= most:
        return []
    unit = layout.dp * layout.micro_batch
    return [
        problem(
            "E224",
            where="batch",
            found=f"{accumulation} micro-batches over {layout.num_stages} stages in one step",
            needs=f"at most {most} micro-batches (micro-batches x stages <= {MOST_ACTIONS})",
            do=f"global batch = {most * unit} or less, or a larger micro_batch or dp",
        )
    ]
