"""Arguments and options that several commands share, so that they read and check the same everywhere."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from meshwright.layout.batch import MOST_SEQUENCES, MOST_TOKENS

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a Hugging Face config.json, such a file, or a name from `meshwright models`.",
        show_default=False,
    ),
]
Cluster: TypeAlias = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="A name from `meshwright clusters`, or a JSON file by `meshwright probe` or by hand.",
        show_default=False,
    ),
]
Gpus: TypeAlias = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="Number of GPUs; without it, one node.")
]
SeqLen: TypeAlias = Annotated[
    int,
    typer.Option(
        "--seq-len", min=1, max=MOST_TOKENS, metavar="S", help="Tokens per sequence.", show_default=False
    ),
]
GlobalBatch: TypeAlias = Annotated[
    int,
    typer.Option(
        "--global-batch",
        min=1,
        max=MOST_SEQUENCES,
        metavar="B",
        help="Sequences per optimizer step over the whole job.",
        show_default=False,
    ),
]
MaybeSeqLen: TypeAlias = Annotated[
    int | None, typer.Option("--seq-len", min=1, max=MOST_TOKENS, metavar="S", help="Tokens per sequence.")
]
MaybeGlobalBatch: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        max=MOST_SEQUENCES,
        metavar="B",
        help="Sequences per optimizer step over the whole job.",
    ),
]
MaybeLayout: TypeAlias = Annotated[
    str | None, typer.Option("--layout", metavar="LAYOUT", help='Layout text, such as "dp=2,zero=3,pp=2".')
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.FIELD=VALUE", help="Override one value of the run file (repeatable)."
    ),
]
Freeze: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--freeze", metavar="PATTERN", help="Names of parameters that do not train (repeatable)."),
]
Adapter: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="[q]lora:RANK[:ALPHA]",
        help="Train low-rank adapters in place of the model; qlora holds its matrices in 4 bits.",
    ),
]
Nproc: TypeAlias = Annotated[
    int | None, typer.Option("--nproc", min=1, metavar="N", help="Number of local ranks.")
]
