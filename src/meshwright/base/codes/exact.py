"""Codes about the exact memory tier, ``estimate --exact`` (E467-E472, W469)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E467",
        title="This cannot be played without values",
        kind="code",
        why="a played rank runs the runtime's own code on tensors that have shapes and no elements",
        needs="a layout that the runtime runs operation by operation, with state on the device or in host memory",
        do="change the value named, or leave --exact out",
        page="""`estimate --exact` runs one step of one rank on tensors without memory. A compiled block has other
intermediate tensors than its operations have, and a compiler wants real ones; its memory is that of the kernels it
writes. What is named in the message is played by no rank; the message says which value is.""",
    ),
    CodeInfo(
        code="E468",
        title="This model has no parts that a layout could take hold of",
        kind="code",
        why="data parallelism shards a model by its repeated blocks and takes tokens in at an embedding",
        needs="a causal language model of transformers with an embedding, a list of blocks and a head",
        do="name a model of a family that `meshwright models` lists, or leave --exact out",
        page="""A model that no family file describes is described by transformers' own module: its largest list of
equal blocks, its input embedding and its head. Where one of them is missing the module is no causal language model, or
it is built in another way.""",
    ),
    CodeInfo(
        code="W469",
        title="Memory only: the cost model does not know this model",
        kind="code",
        why="times come from the shapes of a family's matrix products, and no family file describes this model",
        needs="a model of a family that `meshwright models` lists, for a time",
        do="use the memory; for a time, run a few steps with meshwright train, or pick a known family",
        page="""`estimate --exact` answers for any causal language model that transformers builds from the config with
fused attention, because it runs that very module. The closed form, and every time, need a description of the blocks:
which matrices there are, what attention is, what is routed. Without one no time is guessed: `predicted`, `closed_form`
and `difference` are null.""",
    ),
    CodeInfo(
        code="E470",
        title="The model asks for values that a played step does not have",
        kind="code",
        why="sizes or branches of this model depend on floating-point values, which a played step does not compute",
        needs="a model whose shapes follow from the sizes of its input",
        do="leave --exact out, or measure a real step with meshwright train",
        page="""Whole numbers are computed even in a played step: positions, counts, indices. Routers' choices are
assumed to be balanced. A module that reads anything else - the largest element of an activation, say - cannot go on.
The message names the operation.""",
    ),
    CodeInfo(
        code="E471",
        title="Playing a rank failed",
        kind="fault",
        why="an operation failed on tensors without memory which the runtime runs on real ones, or we have a fault",
        needs="a step that runs",
        do="please report it with the message; leave --exact out meanwhile",
        page="""The process that played the rank ended with an exception that is not one of the refusals. The message has
its last line and where it happened.""",
    ),
    CodeInfo(
        code="E472",
        title="The process that played a rank is gone",
        kind="world",
        why="a process that is killed says nothing; most often the machine ran out of memory",
        needs="a few hundred MiB of memory for each process that plays a rank",
        do="free memory, or leave --exact out",
        page="""Each class of pipeline stages is played in a process of its own, a few hundred MiB each. The message has
the signal or exit status that it ended with.""",
    ),
)
