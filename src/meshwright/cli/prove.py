"""``meshwright prove``: a layout against one device."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.cli.options import Adapter, Freeze, Json, MaybeGlobalBatch, MaybeLayout, MaybeSeqLen, Sets
from meshwright.cli.output import check_writable, show_json, show_line, show_warnings, table
from meshwright.cli.target import one_layout


class Precision(StrEnum):
    """Precisions that a proof can run in."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"


class Device(StrEnum):
    """Where the ranks of a proof run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Valid(StrEnum):
    """Which tokens of a proof's batches carry a loss."""

    UNEQUAL = "unequal"
    ALL = "all"


def prove(
    run_file: Annotated[
        str | None, typer.Argument(metavar="[RUN.yaml]", help="A run file, or --model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Instead of a run file.")
    ] = None,
    layout: MaybeLayout = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Optimizer steps to compare.")
    ] = 3,
    seq_len: MaybeSeqLen = None,
    global_batch: MaybeGlobalBatch = None,
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", help="Overrides the layout's precision; fp64 without it."),
    ] = None,
    freeze: Freeze = None,
    adapter: Adapter = None,
    tie: Annotated[bool, typer.Option("--tie", help="Tie the head to the embedding.")] = False,
    valid: Annotated[
        Valid, typer.Option("--valid", help="unequal: one micro-batch has no valid token at all.")
    ] = Valid.UNEQUAL,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed", help="Rows of several documents that do not see each other (as data.rows: pack)."
        ),
    ] = False,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="From one device upwards, one axis at a time.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Prove that a run that was killed and resumed equals an unbroken one."),
    ] = False,
    resume_layout: Annotated[
        str | None,
        typer.Option(
            "--resume-layout", metavar="LAYOUT", help="With --resume: go on in this layout instead."
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option("--device", help="Of the ranks; auto: GPUs where each rank can have one.")
    ] = Device.AUTO,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Also write the JSON to a file.")
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Prove that a layout computes what one device computes; exit 1 when it does not.

    Example: meshwright prove --model recipes/models/tiny-llama --layout "dp=2,zero=3,pp=2" --precision fp64
    """
    if resume_layout is not None and not resume:
        found, do = "--resume-layout without --resume", "give both, or none"
        raise MeshwrightError(problem("E864", where="meshwright prove", found=found, do=do))
    if out is not None:
        check_writable(out)
    run, text = _resolved(run_file, model, layout, tuple(sets or ()))
    from meshwright.mesh.imports import load_modules

    load_modules(("meshwright.orchestrate.proving",))
    from meshwright.orchestrate.proving import prove_command

    result = prove_command(
        run,
        model=model,
        layout=text,
        steps=steps,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision.value if precision is not None else None,
        freeze=tuple(freeze or ()),
        adapter=adapter,
        tie=tie,
        valid=valid.value,
        packed=packed,
        ladder=ladder,
        resume=resume,
        resume_layout=resume_layout,
        device=device.value,
        json_output=as_json,
        out=out,
        show=show_line,
    )
    if as_json:
        show_json(result)
    elif resume:
        from meshwright.orchestrate.proving_resume import verdict_text as resume_text

        print(resume_text(result))
    else:
        print(verdict_text(result))
    if not result["passed"]:
        raise typer.Exit(int(ExitCode.NO))


def _resolved(
    run_file: str | None, model: str | None, layout: str | None, sets: tuple[str, ...]
) -> tuple[Any | None, str]:
    """Return the resolved run (None for --model) and the layout to prove."""
    where = "meshwright prove"
    if (run_file is None) == (model is None):
        code, found = (
            ("E862", "neither a run file nor --model")
            if model is None
            else ("E864", "a run file and --model")
        )
        needs = "a run file or --model"
        raise MeshwrightError(problem(code, where=where, found=found, needs=needs, do="give one of the two"))
    if run_file is None:
        if sets:
            found, do = "--set without a run file", "leave --set out"
            raise MeshwrightError(problem("E864", where=where, found=found, needs="a run file", do=do))
        if layout is None:
            raise MeshwrightError(problem("E862", where=where, found="--layout is missing"))
        return None, layout
    one_layout("prove", {"--layout": layout}, sets)
    from meshwright.config.load import load_run
    from meshwright.config.resolve import resolve

    # A proof has its own batch, so the run file's batch is not held against the layout here.
    run = resolve(load_run(run_file, sets), layout=layout, check_batch=False)
    if run.layout_text == "auto":
        found = f"layout = auto in {run_file}, and no --layout"
        do = "say which layout to prove with --layout"
        raise MeshwrightError(problem("E862", where=where, found=found, needs="a layout", do=do))
    show_warnings(run.warnings)
    return run, run.layout_text


def verdict_text(result: dict[str, Any]) -> str:
    """Return a proof's verdict for people: the figures, the tolerances and what is wrong."""
    tolerance = result.get("tolerance", {})
    rows = [
        (name, f"{part[key]:.3e}", _figure(tolerance.get(name)), _worst(part.get("worst")))
        for name, key in (
            ("loss", "max_abs_diff"),
            ("gradients", "max_rel_diff"),
            ("grad_norm", "max_rel_diff"),
            ("weights", "max_rel_diff"),
        )
        if isinstance(part := result.get(name), dict) and isinstance(part.get(key), int | float)
    ]
    lines = [table(("compared", "largest difference", "tolerance", "worst tensor"), rows, right=(1, 2))]
    missing = result.get("gradients", {}).get("missing") or []
    if missing:
        lines.append(f"no gradient: {', '.join(missing)}")
    if result.get("sentinel"):
        sentinel = result["sentinel"]
        lines.append(f"all gradients differ by the factor {sentinel['factor']}: {sentinel['cause']}")
    if ledger := result.get("ledger"):  # not where all shards ran in one process
        lines.append(f"collectives as described: {'yes' if ledger.get('matches') else 'NO'}")
        complete = (result.get("placement") or {}).get("complete")
        lines.append(f"every parameter placed exactly once: {'yes' if complete else 'NO'}")
    if result.get("ladder"):
        rungs = [
            (
                rung["adds"],
                f"{rung['max_rel_diff']:.3e}",
                "passed" if rung["passed"] else "FAILED",
                rung["layout"],
            )
            for rung in result["ladder"]
        ]
        lines.insert(0, table(("rung", "gradients", "verdict", "layout"), rungs, right=(1,)) + "\n")
    verdict = "PASSED" if result["passed"] else "FAILED"
    lines.append(f"{verdict}: {result['world_size']} ranks against one device, {result['steps']} steps")
    return "\n".join(lines)


def _figure(value: Any) -> str:
    return f"{value:.0e}" if isinstance(value, int | float) else ""


def _worst(value: Any) -> str:
    """Return the name of the worst tensor, with the step where it is known."""
    if isinstance(value, dict):
        step = f" (step {value['step']})" if "step" in value else ""
        return f"{value.get('tensor') or ''}{step}"
    return str(value or "")
