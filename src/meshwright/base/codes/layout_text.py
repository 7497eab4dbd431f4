"""Codes about layout text (E110-E119)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E110",
        title="An item of the layout text is not key=value",
        kind="input",
        why="a layout is a list of key=value items, separated by commas",
        needs="items such as dp=2 or schedule=1f1b",
        do="write every item as key=value",
        page="""A layout text is read left to right as comma-separated key=value items, in any order; spaces around
an item do not matter. What is not written has its default. Example:

    dp=2,zero=1,tp=2,pp=2,schedule=1f1b,micro_batch=2""",
    ),
    CodeInfo(
        code="E111",
        title="The layout text has a key that does not exist",
        kind="input",
        why="a key that is ignored would be a silent change of the layout",
        needs="a key of the layout text",
        do="use one of the known keys",
        page="""The keys are: dp, zero, shard, tp, sp, pp, chunks, cut, order, loss, kv_heads, compile, schedule, cp,
cp_style, ep, micro_batch, recompute, offload, precision.
The refusal names the known keys that look most like the one that was written.""",
    ),
    CodeInfo(
        code="E112",
        title="A key of the layout text has a value that is not allowed",
        kind="input",
        why="each key takes one type of value",
        needs="a value of the right type",
        do="write one of the allowed values",
        page="""Degrees (dp, tp, pp, cp, ep, shard, chunks, micro_batch) are whole numbers from 1 upwards, written in
decimal digits; zero is 0, 1, 2 or 3; sp is on or off; cut is "auto", "even" or layers per stage such as 7/9/8/8;
order names tp, cp, dp and pp once each, innermost first; the other keys take one of a few words, which the
refusal lists.""",
    ),
    CodeInfo(
        code="E113",
        title="A key of the layout text is written twice",
        kind="input",
        why="which of two values is meant cannot be known",
        needs="each key once",
        do="remove one of the two",
        page="""Meshwright does not let the later of two values win: both are shown, and you choose.""",
    ),
    CodeInfo(
        code="E114",
        title="The schedule file of the layout cannot be read",
        kind="input",
        why="schedule=@FILE takes the pipeline schedule from that file",
        needs="a readable text file with one row of actions per pipeline rank",
        do="check the path, which is relative to the current folder",
        page="""A schedule file has one line per pipeline rank; a line is a list of actions separated by commas, such as
0F0,0F1,0B0,0B1 for stage 0. F is a forward, B a full backward, the number after it the micro-batch.
`meshwright explain E303` says what makes a schedule complete.""",
    ),
)
