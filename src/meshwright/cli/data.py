"""``meshwright data``: tokenise a corpus once, look into the result, verify it."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.cli.options import Json
from meshwright.cli.output import show_json, show_line, table

app = typer.Typer(
    help="Tokenise a corpus once, look into the result, verify it.",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A folder by `meshwright data build`.")]
FORMS = ("text", "chat", "completion")


@app.command()
def build(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A text file, a folder, JSONL, a Hugging Face dataset folder, or python-docs.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default=False)],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json or a folder with one.", show_default=False
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORM", help="text, chat or completion; without it, by the first record."
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option("--text-field", metavar="NAME", help="The field that holds the text.")
    ] = "text",
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="FILE", help="A Jinja file; without it, the tokenizer's template."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, metavar="N", help="Processes; without it, one for each core."),
    ] = None,
    shard_mib: Annotated[
        int, typer.Option("--shard-mib", min=1, max=4096, metavar="M", help="MiB of source for each shard.")
    ] = 64,
    as_json: Json = False,
) -> None:
    """Tokenise a corpus into memory-mapped shards; a stopped build goes on where it stood.

    Example: meshwright data build chat.jsonl --tokenizer model/ --out data/chat
    """
    if form is not None and form not in FORMS:
        found = f"--format {form}"
        raise MeshwrightError(
            problem("E864", where="meshwright data build", found=found, needs="one of " + ", ".join(FORMS))
        )
    from meshwright.config.resolve import DataSettings
    from meshwright.orchestrate.documents import build_command

    settings = DataSettings(
        path=path,
        tokenizer=tokenizer,
        seq_len=2,
        format=form,  # pyright: ignore[reportArgumentType]  # checked above
        text_field=text_field,
        chat_template=chat_template,
    )
    result = build_command(settings, out, jobs, shard_mib, show_line)
    if as_json:
        show_json(result)
    else:
        print(
            f"{out}: {result['documents']:,} documents, {result['tokens']:,} tokens in {result['shards']} shards "
            f"({result['form']}), {result['seconds']:.1f} s"
        )


@app.command("inspect")
def inspect_data(folder: Folder, as_json: Json = False) -> None:
    """Show what a folder of documents holds: form, documents, tokens, tokenizer, what was skipped."""
    from meshwright.orchestrate.documents import inspect_documents

    result = inspect_documents(folder)
    if as_json:
        show_json(result)
        return
    rows = [(key, str(value)) for key, value in result.items() if key not in ("path", "source")]
    source = result["source"]
    rows += [(f"source.{key}", str(value)) for key, value in source.items() if value not in (None, "", [])]
    print(table(("documents", str(result["path"])), rows))


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Read every byte of a folder of documents; exit 1 and the file's name when one is damaged."""
    from meshwright.orchestrate.documents import verify_command

    result = verify_command(folder)
    if as_json:
        show_json(result)
    elif result["ok"]:
        print(f"{result['path']}: intact, {result['files']} files")
    else:
        for item in result["damaged"]:
            origin = f" (from {item['source']})" if item["source"] else ""
            print(f"damaged: {item['file']}{origin}: {item['why']}")
    if not result["ok"]:
        raise typer.Exit(int(ExitCode.NO))
