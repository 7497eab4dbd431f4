"""Codes about plan files and questions asked of a plan (E450-E459)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E450",
        title="The plan file cannot be read",
        kind="input",
        why="a plan is one JSON object in a text file",
        needs="a readable plan.json",
        do="write it again with `meshwright plan ... --out plan.json`",
        page="""The file is missing, is not readable, or is not JSON. Plans are written whole or not at all (a temporary
file is renamed over the old one), so a cut-off file was damaged after it was written.""",
    ),
    CodeInfo(
        code="E451",
        title="The file is not a plan",
        kind="input",
        why="a plan with missing or foreign keys would be run with guesses",
        needs="the keys that `meshwright plan --out` writes",
        do="give a plan.json, or write one with `meshwright plan ... --out plan.json`",
        page="""The JSON lacks keys of a plan, has keys that no plan has, or a value has another type. The refusal names
each of them.""",
    ),
    CodeInfo(
        code="E452",
        title="The plan file has another format version",
        kind="input",
        why="keys may mean something else in another version",
        needs="a plan of this version",
        do="plan again with this version of meshwright",
        page="""`format` in a plan file counts the versions of the file format, not of the program. A plan is cheap to
make again: the same model, cluster and batch give it back.""",
    ),
    CodeInfo(
        code="E453",
        title="The plan's content does not match its hash",
        kind="input",
        why="the hash covers everything that changes the work: model, layout, batch, schedule, frozen parameters",
        needs="a plan whose hash is that of its content",
        do="undo the edit, or make a new plan with `meshwright plan ... --fix LAYOUT --out plan.json`",
        page="""A plan is a record: run logs, checkpoints and reports carry its hash. A plan edited by hand would no
longer be the one that its prediction is for, so it is refused.""",
    ),
    CodeInfo(
        code="E454",
        title="The plan has no such rank",
        kind="input",
        why="ranks are numbered from 0 to world size - 1",
        needs="a rank of the plan",
        do="choose a rank below the world size",
        page="""World size = dp * tp * pp * cp. Rank 0 is the first device of the first node.""",
    ),
    CodeInfo(
        code="E455",
        title="There is no such error code",
        kind="input",
        why="codes are E or W and three digits",
        needs="a code that Meshwright prints",
        do="copy the code from the refusal",
        page="""E codes are refusals, W codes are warnings. E10x-E11x: what you wrote; E12x: models; E2xx: layouts and
batches; E3xx: schedules; E4xx: clusters and plans; E5xx: the running job; E6xx: data; E7xx: checkpoints;
E8xx: commands and proofs; E9xx: not built yet, and our own faults.""",
    ),
)
