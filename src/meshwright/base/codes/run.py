"""Codes about a run and a proof as they execute (E54x, E8xx of the runtime)."""

from __future__ import annotations

from typing import Final

from meshwright.base.codes.info import CodeInfo

CODES: Final[tuple[CodeInfo, ...]] = (
    CodeInfo(
        code="E540",
        title="A parameter is not placed exactly once",
        kind="fault",
        needs="shards x replicas = logical, for every tensor of the model",
        why="training would go on with a part of the model missing or doubled",
        do="report this with the model's config.json and the layout; pp=1 avoids the cut",
        page="Before the first step every rank tells which parts of which parameters it holds. The parts of every\n"
        "logical tensor must add up to that tensor times its number of replicas, on one stage. When they do not,\n"
        "nothing is trained.",
    ),
    CodeInfo(
        code="E541",
        title="The run folder already holds another run",
        kind="input",
        needs="a new or empty run.dir, or --resume with the same model and data",
        why="two runs in one folder would mix their metrics and checkpoints",
        do="choose another folder with --set run.dir=..., or continue with --resume",
    ),
    CodeInfo(
        code="E542",
        title="There is nothing to resume",
        kind="input",
        needs="a run folder with a complete checkpoint",
        why="a resumed run starts from a checkpoint",
        do="start it without --resume, or name the folder that holds checkpoints/step-N",
    ),
    CodeInfo(
        code="E543",
        title="A step has no valid token",
        kind="input",
        needs="at least one label that is not -100 in the global batch",
        why="the loss is a sum over valid tokens divided by their number",
        do="look at the data: a step without any label is skipped, never NaN",
    ),
    CodeInfo(
        code="E544",
        title="Too many skipped steps in a row",
        kind="world",
        needs="finite gradients at some loss scale",
        why="fp16 gradients overflowed at every scale that was tried",
        do="precision=bf16, or a smaller learning rate; the named tensor overflowed first",
    ),
    CodeInfo(
        code="E545",
        title="A loss or gradient is not finite",
        kind="world",
        needs="a finite loss and gradient norm",
        why="updating with NaN or inf would destroy the weights",
        do="look at the named step: learning rate, data, precision; nothing was written for that step",
    ),
    CodeInfo(
        code="E546",
        title="No trainable parameter",
        kind="input",
        needs="at least one parameter that no freeze pattern matches, on every pipeline stage",
        why="a stage without a trainable parameter has no backward",
        do="narrow the freeze pattern",
    ),
    CodeInfo(
        code="E547",
        title="The model's auxiliary loss is not built yet",
        kind="code",
        needs="output_router_logits = false",
        why="the router's auxiliary loss is not added to the loss yet, and leaving it out silently would train another model",
        do='set "output_router_logits": false in config.json',
    ),
    CodeInfo(
        code="E548",
        title="A parameter got no gradient",
        kind="world",
        needs="every trainable parameter takes part in the loss",
        why="the optimizer would never move it, and nobody would notice",
        do="freeze the named parameters, or look at why the forward does not use them",
    ),
    CodeInfo(
        code="E810",
        title="Parity failed",
        kind="fault",
        needs="loss, gradients and weights within the stated tolerance of one device",
        why="the layout does not compute what one device computes",
        do="read the named tensor and the recognised cause; do not train with this layout",
    ),
    CodeInfo(
        code="E811",
        title="The model cannot be built",
        kind="input",
        needs="a config.json that the installed transformers can build",
        why="the runtime uses the model's own class from transformers, unchanged",
        do="check the architecture and its version; meshwright inspect shows what is read without it",
    ),
    CodeInfo(
        code="E812",
        title="A freeze pattern matches nothing",
        kind="input",
        needs="each pattern to match at least one parameter name (shell wildcards)",
        why="a pattern without a match is a misspelling that would train what should rest",
        do="compare with the names that meshwright inspect prints",
    ),
    CodeInfo(
        code="E813",
        title="A result cannot be written",
        kind="world",
        needs="a folder that can be written, with space left",
        why="a result that is not on disk is lost",
        do="choose another folder, or free space",
    ),
    CodeInfo(
        code="E549",
        title="No repeated blocks were found",
        kind="input",
        needs="a module list of at least two blocks of one class",
        why="sharding by block needs to know the blocks",
        do='name the list: parallelize(..., blocks="path.to.blocks")',
    ),
    CodeInfo(
        code="W540",
        title="A step was skipped",
        kind="world",
        why="its gradients were not finite; all ranks agreed to leave the weights as they were",
    ),
)
