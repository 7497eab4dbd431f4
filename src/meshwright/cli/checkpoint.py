"""``meshwright checkpoint``: look into, verify and export checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from meshwright.base.errors import ExitCode
from meshwright.cli.not_built import ANY_ARGUMENTS, refuse_not_built
from meshwright.cli.options import Json
from meshwright.cli.output import show_json, table

app = typer.Typer(
    help="Look into, verify and export checkpoints.", rich_markup_mode=None, no_args_is_help=False
)

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="A checkpoint folder, such as RUN_DIR/checkpoints/step-60.")
]


@app.command("inspect")
def inspect_checkpoint(folder: Folder, as_json: Json = False) -> None:
    """Show what a checkpoint holds: step, layout, tensors and bytes."""
    from meshwright.checkpoint.inspect import inspect_command

    result = inspect_command(folder)
    if as_json:
        show_json(result)
    else:
        print(table(("checkpoint", str(result["path"])), _rows(result)))


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a result's entries as rows; nested ones by dotted key, empty ones left out."""
    rows: list[tuple[str, str]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows.extend((f"{key}.{name}", text) for name, text in _rows(value))
        elif key != "path" and value not in (None, "", []):
            rows.append((key, ", ".join(str(v) for v in value) if isinstance(value, list) else str(value)))
    return rows


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Read every tensor of a checkpoint; exit 1 and its name when one is damaged."""
    from meshwright.checkpoint.inspect import verify_command

    result = verify_command(folder)
    if as_json:
        show_json(result)
    elif result["ok"]:
        print(f"{result['path']}: intact, {result['files']} files")
    else:
        if result["incomplete"]:
            print(f"{result['path']}: incomplete: {result['incomplete']}")
        for item in result["damaged"]:
            print(f"damaged: {item['file']}: {item['why']}; tensors {', '.join(item['tensors']) or 'none'}")
    if not result["ok"]:
        raise typer.Exit(int(ExitCode.NO))


@app.command()
def export(
    folder: Folder,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default=False)],
    check_logits: Annotated[
        bool,
        typer.Option("--check-logits", help="Reload with transformers (or peft) and compare the logits."),
    ] = False,
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Write the whole model, an adapter added to its weights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as Hugging Face safetensors; an adapter's as a folder that peft loads."""
    from meshwright.checkpoint.export import export_command

    result = export_command(folder, out, check_logits, merge=merge_adapter)
    if as_json:
        show_json(result)
    else:
        print(table(("exported to", out), _rows(result)))


@app.command(context_settings=ANY_ARGUMENTS)
def merge(context: typer.Context) -> None:
    """Merge a checkpoint into Hugging Face safetensors, streamed (not built yet)."""
    refuse_not_built("meshwright checkpoint merge", "use meshwright checkpoint export DIR --out DIR")


@app.command(context_settings=ANY_ARGUMENTS)
def reshard(context: typer.Context) -> None:
    """Rewrite a checkpoint for another layout (not built yet)."""
    refuse_not_built(
        "meshwright checkpoint reshard", "use meshwright train --resume --layout L, which reshards on load"
    )
