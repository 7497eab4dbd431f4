"""``meshwright checkpoint``: look into, verify, export, merge and reshard checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from meshwright.base.errors import ExitCode
from meshwright.cli.options import Json
from meshwright.cli.output import show_json, show_warnings, table

app = typer.Typer(
    help="Look into, verify, export, merge and reshard checkpoints.",
    rich_markup_mode=None,
    no_args_is_help=False,
)

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="A checkpoint folder, such as RUN_DIR/checkpoints/step-60.")
]

CONFIG_HELP = "The model's folder or config.json, where the checkpoint does not say what the model is (FSDP, DeepSpeed)."
DTYPE_HELP = "Cast to fp64, fp32, bf16 or fp16; without it the stored dtype stays."


@app.command("inspect")
def inspect_checkpoint(folder: Folder, as_json: Json = False) -> None:
    """Show what a checkpoint holds: step, layout, tensors and bytes."""
    from meshwright.checkpoint.inspect import inspect_command, passed_over_warnings

    show_warnings(passed_over_warnings(folder))
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
    else:
        print("\n".join(_verdict(result)))
    if not result["ok"]:
        raise typer.Exit(int(ExitCode.NO))


def _verdict(result: dict[str, Any]) -> list[str]:
    """Return the lines of a verification: intact or what is not, and what another program's files let us compare."""
    lines: list[str] = []
    if result["ok"]:
        lines.append(f"{result['path']}: intact, {result['files']} files")
    if result["incomplete"]:
        lines.append(f"{result['path']}: incomplete: {result['incomplete']}")
    for item in result["damaged"]:
        where = f"{item['file']}: " if item["file"] else ""
        lines.append(f"damaged: {where}{item['why']}; tensors {', '.join(item['tensors']) or 'none'}")
    if result.get("kind"):
        told = result["compared_with"]
        config = f"names and shapes compared with {told}" if told else "no model to compare with"
        lines.append(
            f"{result['kind']}: {result['tensors']} tensors; checksums: {result['checksums']}; {config}"
        )
    for name, count in result.get("not_finite", {}).items():
        lines.append(f"not finite: {name}: {count} elements")
    return lines


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
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help=DTYPE_HELP)] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="MODEL", help=CONFIG_HELP)] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as Hugging Face safetensors; an adapter's as a folder that peft loads."""
    from meshwright.checkpoint.export import export_command
    from meshwright.checkpoint.inspect import passed_over_warnings

    show_warnings(passed_over_warnings(folder))
    result = export_command(folder, out, check_logits, dtype, merge=merge_adapter, config=config)
    if as_json:
        show_json(result)
    else:
        print(table(("exported to", out), _rows(result)))


@app.command()
def merge(
    folder: Folder,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default=False)],
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help=DTYPE_HELP)] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="MODEL", help=CONFIG_HELP)] = None,
    as_json: Json = False,
) -> None:
    """Merge a checkpoint's shards into Hugging Face safetensors, one tensor at a time (the same as export)."""
    from meshwright.checkpoint.export import export_command
    from meshwright.checkpoint.inspect import passed_over_warnings

    show_warnings(passed_over_warnings(folder))
    result = export_command(folder, out, dtype=dtype, config=config)
    if as_json:
        show_json(result)
    else:
        print(table(("merged into", out), _rows(result)))


@app.command()
def reshard(
    folder: Folder,
    layout: Annotated[
        str,
        typer.Option(
            "--layout", metavar="LAYOUT", help="Layout text, such as dp=2,tp=2.", show_default=False
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder that gets step-N.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint as another layout would have saved it, and compare every tensor afterwards."""
    from meshwright.checkpoint.inspect import passed_over_warnings
    from meshwright.checkpoint.reshard import reshard_command

    show_warnings(passed_over_warnings(folder))
    result = reshard_command(folder, layout, out)
    if as_json:
        show_json(result)
    else:
        print(table(("resharded to", str(result["out"])), _rows(result)))
