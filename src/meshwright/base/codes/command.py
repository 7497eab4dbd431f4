"""Codes about the command line (E86x), what is not built yet (E90x) and our own faults (E99x)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E860",
        title="Unknown command",
        kind="input",
        why="there is no command of this name",
        needs="a command of meshwright --help",
        do="see meshwright --help",
        page="""The first word after meshwright names the command. The message lists the commands that look most
like the one written; `meshwright --help` lists all of them, each with one line.""",
    ),
    CodeInfo(
        code="E861",
        title="Unknown option",
        kind="input",
        why="an option that nothing reads is a setting that has no effect",
        needs="an option of this command",
        do="see the command's --help",
        page="""Options belong to one command and are never ignored or shortened. The message names the options
that look most like the one written. Values of the run file are changed with --set section.field=value.""",
    ),
    CodeInfo(
        code="E862",
        title="An argument or option is missing",
        kind="input",
        why="the command cannot know this value",
        needs="the named argument or option",
        do="add it; the command's --help shows an example",
        page="""Some arguments have no sensible default: which model, which cluster, how long a sequence is.
The message names the one that is missing, or the option whose value is missing.""",
    ),
    CodeInfo(
        code="E863",
        title="An option has a value that it cannot take",
        kind="input",
        why="the value is of the wrong type, out of range or not among the choices",
        needs="a value that the option can take",
        do="see the command's --help",
        page="""The message names the option, the value and what the option takes.
Counts are whole numbers from 1 upwards; sequences and batches are counted per optimizer step.""",
    ),
    CodeInfo(
        code="E864",
        title="These arguments do not go together",
        kind="input",
        why="two arguments say the same thing, or one of them needs another",
        needs="one way of saying it",
        do="leave one of them out, or add the one that is needed",
        page="""For instance: `train` takes --layout or --plan, because a plan has its layout in it;
`prove` takes a run file or --model; `explain` takes an error code, a plan.json, or a model with --layout.""",
    ),
    CodeInfo(
        code="E867",
        title="A file cannot be written",
        kind="world",
        why="the result would be lost",
        needs="a path in a folder that exists and may be written, on a disk with room",
        do="name another path",
        page="""The path given with --out (or --trace) cannot be written: its folder does not exist, may not be written,
the path is a folder, the file exists already, or the disk is full. Nothing else was changed.""",
    ),
    CodeInfo(
        code="E868",
        title="The model cannot be fetched from the Hub",
        kind="world",
        why="the Hub could not be reached, or it has no such model for this user",
        needs="a network connection and the right to read the model",
        do="give a folder with a config.json, or a name from meshwright models",
        page="""`meshwright init` takes a Hub id such as owner/name where there is a network, and fetches its config.json.
Without a network, with a gated model or a mistyped id, download config.json by another way and give its folder.""",
    ),
    CodeInfo(
        code="E900",
        title="Not built yet",
        kind="code",
        why="this part of Meshwright is planned and not there yet",
        needs="a command or option that works today",
        do="use what the message names",
        page="""Commands and options that are described but not built refuse, instead of doing half of the work.
The message names what works today in their place.""",
    ),
    CodeInfo(
        code="E901",
        title="This setting is not honoured yet",
        kind="code",
        why="the setting is described, but nothing would read it, and a setting without effect misleads",
        needs="the default",
        do="remove it from the run file",
        page="""The key exists in the run file's schema because it will be honoured, and today only its default is.
Setting it to something else is refused, so that nobody relies on it.""",
    ),
    CodeInfo(
        code="E999",
        title="A fault of ours",
        kind="fault",
        why="Meshwright met a case that it does not handle",
        needs="nothing from you",
        do="please report it with the named file",
        page="""An exception that should never reach a user ended the command. The message names a file that holds the
technical details (the traceback, the versions and the command). Nothing on your side has to be wrong.
Please report it with that file; a smaller model or another layout may get you further meanwhile.""",
    ),
)
