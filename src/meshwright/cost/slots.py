"""The stages of one pipeline, told once: runs of stages that are alike, and runs of ranks that hold alike stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.collective import Floats
from meshwright.cost.loads import turns
from meshwright.cost.pieces import Pricer
from meshwright.cost.rows import Index
from meshwright.layout.cut import resolve_cut
from meshwright.layout.layout import Layout
from meshwright.schedule.generate import V_SHAPED, placement


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The stages and ranks of one pipeline degree, stages per rank, cut and placement.

    A run is a maximal row of neighbours that cost the same; ``first`` and ``last`` hold its ends.

    Attributes:
        cut: layers of each stage.
        run_of: [stages] the run of each stage.
        counts: [runs, kinds] blocks of each kind in one stage of the run.
        first, last: [runs] first and last stage of each run; ``length`` their number.
        ranks_first, ranks_last: [rank runs] first and last pipeline rank of each run of ranks.
        owns: [rank runs, chunks] the stage run of each chunk of such a rank.
        stages: [rank runs, chunks] the stages of the first of these ranks.
        turn: [rank runs, chunks - 1] 1 where a V turns within the rank; such a rank is a run of its own.
    """

    pp: int
    chunks: int
    cut: tuple[int, ...]
    run_of: Index
    counts: Floats
    first: Index
    last: Index
    length: Floats
    ranks_first: Index
    ranks_last: Index
    owns: Index
    stages: Index
    turn: Floats

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.pp * self.chunks


def kind_counts(pricer: Pricer, cut: Sequence[int]) -> Floats:
    """Return [stages, kinds] how many blocks of each kind a stage holds."""
    counts = np.zeros((len(cut), len(pricer.kinds)))
    block = 0
    for stage, layers in enumerate(cut):
        for _ in range(layers):
            counts[stage, pricer.kind_of[block]] += 1
            block += 1
    return counts


def make_slot(pricer: Pricer, layout: Layout, *, every: bool = False) -> Slot:
    """Return the stages of ``layout``; with ``every`` each stage and each rank is a run of its own.

    Raises:
        MeshwrightError: E211 or E212 for a cut that cannot be.
    """
    cut = resolve_cut(pricer.spec, layout, pricer.seq_len)
    counts = kind_counts(pricer, cut)
    stages = len(cut)
    ends = [(s == 0, s == stages - 1, tuple(counts[s])) for s in range(stages)]
    starts = [s for s in range(stages) if every or s == 0 or ends[s] != ends[s - 1]]
    run_of = np.zeros(stages, dtype=np.intp)
    run_of[starts[1:]] = 1
    run_of = np.cumsum(run_of)
    home = placement(layout.schedule if layout.schedule in V_SHAPED else "1f1b", layout.pp, layout.chunks)
    homes: list[list[int]] = [[] for _ in range(layout.pp)]
    for stage, rank in enumerate(home):
        homes[rank].append(stage)
    owned = [[int(run_of[stage]) for stage in held] for held in homes]
    turn = turns(np.asarray(homes, dtype=np.intp))
    alike = [(held, tuple(turned)) for held, turned in zip(owned, turn, strict=True)]
    heads = [r for r in range(layout.pp) if every or r == 0 or alike[r] != alike[r - 1]]
    first = np.asarray(starts, dtype=np.intp)
    ranks_first = np.asarray(heads, dtype=np.intp)
    return Slot(
        pp=layout.pp,
        chunks=layout.chunks,
        cut=cut,
        run_of=run_of,
        counts=counts[first],
        first=first,
        last=np.append(first[1:], stages) - 1,
        length=np.diff(np.append(first, stages)).astype(np.float64),
        ranks_first=ranks_first,
        ranks_last=np.append(ranks_first[1:], layout.pp) - 1,
        owns=np.asarray([owned[r] for r in heads], dtype=np.intp),
        stages=np.asarray([homes[r] for r in heads], dtype=np.intp),
        turn=turn[heads],
    )
