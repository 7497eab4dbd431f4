"""Codes about what people write: run files and their overrides (E10x)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E100",
        title="The run file cannot be read",
        kind="input",
        why="everything about a run is in its run file",
        needs="a readable YAML, JSON or TOML file",
        do="check the path, or write a new one with meshwright init MODEL",
        page="""The path does not exist, is a folder, may not be read, or is not UTF-8 text.
A relative path is taken from the folder in which the command runs.
`meshwright init MODEL --out run.yaml` writes a commented run file to start from.""",
    ),
    CodeInfo(
        code="E101",
        title="The run file does not parse",
        kind="input",
        why="a file that is cut off or mistyped must not be guessed at",
        needs="well-formed YAML (or JSON, TOML by the file's suffix)",
        do="repair the named line; YAML indents with spaces, never with tabs",
        page="""The message names the line and what the parser found there; the cause is often on the line before:
an open bracket or quote, a tab, a missing space after a colon, or lines of different indentation.
Run files hold plain values only: tags such as !!python/object are refused.
Aliases (&name, *name) work as long as the file does not unfold without end.""",
    ),
    CodeInfo(
        code="E102",
        title="The run file is empty or not a mapping",
        kind="input",
        why="a run file is sections with keys in them",
        needs="sections such as model:, data:, batch: and run: at the top level",
        do="write the sections, or start from meshwright init MODEL",
        page="""The file has no content, or its top level is a list or a single value.
A run file begins with a section name and a colon, its keys indented below it.""",
    ),
    CodeInfo(
        code="E103",
        title="A key is written twice",
        kind="input",
        why="most readers keep the last value in silence, and the first one seems to be in force",
        needs="each key once",
        do="remove one of the two",
        page="""The same key stands twice in one section (or one section twice in the file).
The message names both lines. Meshwright does not choose between them.""",
    ),
    CodeInfo(
        code="E104",
        title="Unknown key",
        kind="input",
        why="a key that nothing reads is a setting that has no effect",
        needs="a key that exists (meshwright config schema lists all of them)",
        do="correct or remove it",
        page="""Run files, --set options and sections accept only keys that Meshwright reads.
The message names the keys that look most like the one written. Names that other programs use
(learning_rate, gradient_accumulation_steps, max_grad_norm, bf16 ...) are recognised, and the message says
where that setting lives here. `meshwright config schema` prints every key with its type and default.""",
    ),
    CodeInfo(
        code="E105",
        title="A value has the wrong type",
        kind="input",
        why="values are not converted in silence: 010 and no can each be read in two ways",
        needs="a value of the key's type",
        do="write the value in the type that is needed",
        page="""Numbers are written without quotes and without leading zeros; 1e-4 is a number.
Switches are true or false (yes, no, on and off are words, not switches).
Text that looks like a number is written in quotes. Only `layout` may be auto: everything else is a value,
so that the run record says what was in force.""",
    ),
    CodeInfo(
        code="E106",
        title="A value is out of range",
        kind="input",
        why="training with this value would fail later or mean nothing",
        needs="a value in the key's range",
        do="choose a value in the range",
        page="""The type is right, the value is not: a negative count, a share of 1 or more, an infinite or NaN number,
or a name that is not among the choices. The message names the range or the choices.
To switch something off, write what its description says (null for clip.max_norm, 0 for intervals).""",
    ),
    CodeInfo(
        code="E107",
        title="A required key is missing",
        kind="input",
        why="there is no value that is right for every run",
        needs="the key with a value",
        do="add the key to the run file, or give it with --set",
        page="""model.config, data.seq_len, batch.sequences and run.steps have no defaults, and there is either data.path
or data.sources. Everything else has one; `meshwright config show RUN.yaml --origin` prints every value in force and
where it came from.""",
    ),
    CodeInfo(
        code="E108",
        title="Two settings contradict each other",
        kind="input",
        why="two owners of one setting disagree, and only one of them can be in force",
        needs="settings that agree",
        do="change one of the two named values",
        page="""Each setting has one owner. Accumulation, for instance, follows from batch.sequences and the layout:
accumulation = sequences / (dp * micro_batch). A file that also states it must state the same number.
Evaluation needs held-out text, so eval_every > 0 needs data.eval_fraction > 0.
The message names both settings and both values.""",
    ),
    CodeInfo(
        code="E109",
        title="A --set option cannot be read",
        kind="input",
        why="an override that is not understood must not be dropped",
        needs="--set section.field=value",
        do="write it as section.field=value, for instance --set optimizer.lr=1e-3",
        page="""--set takes a dotted key, an equals sign and a value; the value is read like in the run file.
The first equals sign ends the key, so --set layout=dp=2,zero=3 sets the layout to "dp=2,zero=3".
Lists are written in brackets: --set optimizer.betas=[0.9,0.99]. The same key may be given once only.""",
    ),
    CodeInfo(
        code="W101",
        title="A setting has no effect",
        kind="input",
        why="another setting takes its place or switches it off",
        needs="only settings that something reads",
        do="remove it, or change the setting that it depends on",
        page="""A value was written that nothing will read in this run: momentum with adamw, betas with sgd,
min_lr_ratio with a constant schedule, eval_batches without held-out text, a warm-up that is longer than the run.
The run goes on; the setting simply does nothing.""",
    ),
)
