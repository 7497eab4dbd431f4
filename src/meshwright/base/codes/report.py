"""Codes about the report page (E85x)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E850",
        title="the target of the report does not exist",
        kind="input",
        needs="a run folder or a plan.json that exists",
        why="a report shows what a run wrote or what a plan says; there is nothing to read here",
        do="name the folder that `meshwright train` printed (run.dir), or a file from `meshwright plan --out`",
        page=(
            "`meshwright report TARGET` reads one of two things: the run folder that `meshwright train` wrote,\n"
            "or a plan.json that `meshwright plan --out plan.json` wrote.\n"
            "The path is taken from the folder you are in. Check its spelling, and that the run was started on\n"
            "this machine or that its folder is mounted here."
        ),
    ),
    CodeInfo(
        code="E851",
        title="the target is neither a run folder nor a plan",
        kind="input",
        needs="a folder with run.json, metrics.jsonl, events.jsonl, prove.json or probe.json, or a plan.json",
        why="the page is made from these files only; guessing from others could show wrong figures",
        do="pass the run folder itself (not its checkpoints folder), or a plan.json",
        page=(
            "A run folder holds at least one of run.json, metrics.jsonl, events.jsonl, prove.json, probe.json.\n"
            "A plan.json is a JSON object with a `layout`.\n"
            "Common causes: the parent of the run folder was named (runs/ in place of runs/demo), a checkpoint\n"
            "folder was named, or the file was cut short while it was written or copied."
        ),
    ),
    CodeInfo(
        code="E852",
        title="there is nothing to show",
        kind="input",
        needs="one file of the run folder with readable content",
        why="the run's files exist, but every one of them is empty or damaged",
        do="start the run again if it died before its first step, or name another run folder",
        page=(
            "The folder has the names of a run's files, but none of them could be read: empty, not JSON, or\n"
            "every line damaged. A single damaged line does not stop a report: damaged lines are left out,\n"
            "counted and said on the page.\n"
            "A run that was killed before it wrote run.json leaves such a folder."
        ),
    ),
    CodeInfo(
        code="E853",
        title="the page cannot be written",
        kind="world",
        needs="a path in a folder that can be written, with free space",
        why="the page is written beside its final name and then renamed, so the folder itself must be writable",
        do="give another place with --out page.html, or make room",
        page=(
            "The page goes to RUN_DIR/report.html, or to --out. It is first written under a temporary name in\n"
            "the same folder and then renamed, so that a reader never sees half a page and an older page stays\n"
            "whole if the disk fills up.\n"
            "Common causes: the folder is read-only, the disk is full, or --out names a folder."
        ),
    ),
)
