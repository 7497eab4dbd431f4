"""Codes about pipeline schedules (E3xx)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E301",
        title="This pipeline schedule is not built yet",
        kind="code",
        why="Meshwright has no generator for it so far",
        needs="a schedule that is built: gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev",
        do="schedule=1f1b | schedule=gpipe",
        page="""No rows can be made for this name. gpipe runs all forwards before all backwards; 1f1b alternates them, so
that a rank holds at most as many micro-batches as there are stages from it to the last. interleaved has several
stages per rank and a shorter bubble; zb-h1 runs weight gradients late to fill the bubble; zbv and dualpipev do both,
with two stages per rank in a V. Other orders can be written as a schedule file (schedule=@FILE).""",
    ),
    CodeInfo(
        code="E302",
        title="A schedule text has a cell that is not an action",
        kind="input",
        why="a row is a list of actions such as 0F0 (stage 0, forward, micro-batch 0)",
        needs="<stage>F<micro-batch> or <stage>B<micro-batch>",
        do="correct the cell under the arrow",
        page="""One line per pipeline rank, cells separated by commas. F: forward, B: full backward, I and W: its input
and weight halves. Sends, receives and reductions are added by Meshwright when it lowers the rows.""",
    ),
    CodeInfo(
        code="E303",
        title="A schedule does not do every forward and backward exactly once",
        kind="math",
        why="a missing or doubled backward makes a gradient that no single device would compute",
        needs="each stage's forward and backward of each micro-batch exactly once",
        do="add the missing cells and remove the doubled ones",
        page="""For every stage and every micro-batch 0..m-1 a schedule has one F and one B (or one I and one W). m is
the number of accumulation steps: global batch / (dp * micro_batch).""",
    ),
    CodeInfo(
        code="E304",
        title="A schedule places a stage on the wrong rank",
        kind="math",
        why="a stage's parameters live on one pipeline rank",
        needs="all actions of one stage in one row, stages numbered from 0 without a gap",
        do="move the cell to the row of its stage",
        page="""Row r of a schedule is pipeline rank r. With one stage per rank, row r holds stage r only.""",
    ),
    CodeInfo(
        code="E305",
        title="A schedule cannot finish: ranks wait for each other",
        kind="math",
        why="a forward waits for the stage before it, a backward for its own forward and for the stage after it",
        needs="an order in which some rank can always go on",
        do="move the cell under the arrow behind what it waits for",
        page="""The rows are played through before anything runs. When no rank can do its next cell, the job would
hang; the refusal points at the first cell that can never start and says what it waits for.""",
    ),
    CodeInfo(
        code="E306",
        title="A schedule needs at least one rank and one micro-batch",
        kind="input",
        why="a step without a micro-batch has nothing to learn from",
        needs="pp >= 1 and accumulation >= 1",
        do="give a positive number",
        page="""The number of micro-batches of a schedule is the accumulation: global batch / (dp * micro_batch).""",
    ),
    CodeInfo(
        code="E307",
        title="A schedule file does not fit the layout",
        kind="math",
        why="rows are pipeline ranks, micro-batches are accumulation steps, and chunks are stages per rank",
        needs="as many rows as pp, micro-batches as accumulation, and stages as pp * chunks",
        do="change pp, chunks, the batch or the file",
        page="""A schedule file is written for one number of ranks and one number of micro-batches. Change
pp to the number of its rows, chunks to its stages per row, and global batch or micro_batch so that accumulation is
its number of micro-batches.""",
    ),
    CodeInfo(
        code="E308",
        title="DualPipeV has too few micro-batches",
        kind="math",
        why="its two directions fill the pipeline with 2p forwards before they can alternate",
        needs="accumulation >= 2 * pp",
        do="a larger global batch, a smaller micro_batch, or schedule=zbv",
        page="""DualPipeV alternates forwards of a rank's first stage with backwards of its second. Before that starts,
2 * pp micro-batches are on their way. zbv has the same stages per rank and runs with any number of micro-batches.""",
    ),
    CodeInfo(
        code="W301",
        title="Fewer micro-batches than pipeline stages",
        kind="cost",
        why="ranks wait while the pipeline fills and drains, and too few micro-batches leave little else",
        needs="micro-batches >= stages to keep all ranks busy at some moment",
        do="raise the global batch or lower micro_batch, pp or dp",
        page="""With m micro-batches over p equal stages the idle share of a step is (p-1)/(m+p-1): 0.6 for p=4, m=2;
0.27 for p=4, m=8. The step is right in any case; it only wastes time, so this is a warning.""",
    ),
)
