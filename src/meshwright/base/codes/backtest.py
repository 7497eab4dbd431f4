"""Codes about measured runs and scoring predictions against them (E46x, W46x)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E460",
        title="The table of measured runs cannot be read",
        kind="input",
        why="there is no table to score",
        needs="a CSV file in UTF-8 with one header line and one row per measured run",
        do="name a file that exists and may be read",
        page="""`meshwright backtest RUNS.csv` reads a comma-separated table with a header. The file does not exist, may
not be read, is a folder, is empty, or is not text.""",
    ),
    CodeInfo(
        code="E461",
        title="The table of measured runs lacks columns",
        kind="input",
        why="a run is described by its model, its hardware, its layout and what was measured",
        needs="every column of the table that the page of backtest lists",
        do="add the columns; a value that is not known is an empty cell",
        page="""The columns are fixed, so that two tables can be joined and no value is guessed from a name. The message
lists those that are missing, with the nearest column of the file where one looks like a misspelling. Cells may be
empty; columns may not be absent. `notes` may be.""",
    ),
    CodeInfo(
        code="E462",
        title="Measurements are in another unit than their column",
        kind="input",
        why="a step faster than the device's dense peak, or a peak above the device's memory, cannot have been measured",
        needs="seconds in step_time_s, tokens per second and device in tokens_per_s_per_gpu, GB in peak_mem_gb (or GiB: "
        "mem_unit=GiB in notes)",
        do="convert the column, or say mem_unit=GiB or mem_unit=GB in notes",
        page="""Each measured step is compared with the shortest and the longest step that its model and devices allow:
above the dense peak, or below a thousandth of it, the unit is wrong - milliseconds in a column of seconds are the common
case. Each peak is compared with the device's memory: bytes, MiB, or GB written down as GiB are told. A single such row
is skipped with this reason; when half of a file's measurements are impossible, the file is refused.""",
    ),
    CodeInfo(
        code="E463",
        title="A cell is not a finite number",
        kind="input",
        why="NaN, an infinity or an overflow would spread through every mean",
        needs="finite numbers within the range that the message names, or empty cells",
        do="leave the cell empty when the value is not known",
        page="""NaN, inf, 1e400, negative degrees and sizes beyond anything that exists are refused before anything is
predicted, with the row and the column. An empty cell means "not known": the row is then scored on what is there, or
skipped with a reason.""",
    ),
    CodeInfo(
        code="E464",
        title="The folds do not fit the table",
        kind="input",
        why="folds are whole sweeps, and a fold without a sweep scores nothing",
        needs="between 2 folds and as many as there are sweeps",
        do="choose fewer folds, or leave --calibrate out",
        page="""A sweep is every row of equal source, model, device, number of devices and sequence length. Folds take
whole sweeps, so that a row is never predicted by a fit that saw its neighbours. --folds needs --calibrate.""",
    ),
    CodeInfo(
        code="E465",
        title="No row of the table can be scored",
        kind="input",
        why="every row lacks something that a prediction needs",
        needs="at least one row with model dims, a known device, a layout and a step time, a token rate or a peak",
        do="see the reasons in the message, most frequent first",
        page="""A row is skipped when its model's dims, its device's rates, its layout or its measurement is missing, or
when its columns contradict each other. The message counts the reasons.""",
    ),
    CodeInfo(
        code="E466",
        title="Two rows share an id",
        kind="input",
        why="skipped rows and profiles name their rows by id",
        needs="one id per row",
        do="rename or remove one of them",
        page="""Ids are how a profile says which rows it was fitted on, and how a report names a skipped row.""",
    ),
)
