"""``meshwright probe``: measure this machine (or, under torchrun, this cluster)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import MeshwrightError, problem
from meshwright.base.units import format_seconds
from meshwright.cli.options import Json, Nproc
from meshwright.cli.output import check_writable, finite, show_json, show_line, table, write_new_text


def probe(
    nproc: Nproc = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the result to a JSON file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes; some seconds.")] = False,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from-run",
            metavar="RUN_DIR",
            help="Measure nothing; learn from a finished run on this machine.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure matmul, memory and every collective on this machine.

    Without --nproc: the ranks of torchrun, or else one rank for each core, at most 4.
    The file written with --out is a CLUSTER for plan and estimate.
    With --from-run a run's measured step joins this machine's ledger, on which later plans are fitted.
    """
    if from_run is not None:
        given = {"--nproc": nproc is not None, "--out": out is not None, "--quick": quick}
        _from_run(from_run, [name for name, there in given.items() if there], as_json)
        return
    from meshwright.mesh.env import torchrun_facts
    from meshwright.probe.run import run_probe
    from meshwright.probe.topology import effective_cores

    if out is not None:
        check_writable(out)
    facts = torchrun_facts()
    ranks = nproc or (facts.world_size if facts else max(1, min(4, int(effective_cores()))))
    result = run_probe(ranks, quick, show_line)
    if facts is not None and facts.rank != 0:
        return
    if out is not None:
        write_new_text(out, json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
    if as_json:
        show_json(result)
        return
    rows = [
        (
            link["collective"],
            "-".join(str(r) for r in link["ranks"]),
            f"{link['latency_s'] * 1e6:.0f}",
            f"{link['peak_busbw_bytes_per_s'] / 1e9:.2f}",
        )
        for link in result["links"]
    ]
    print(table(("collective", "ranks", "latency us", "bus GB/s"), rows, right=(2, 3)))
    matmul = [
        (m["precision"], f"{m['m']}x{m['k']}x{m['n']}", f"{m['flops_per_s'] / 1e9:.1f}")
        for m in result["matmul"]
    ]
    print()
    print(table(("precision", "matmul", "GFLOP/s a rank"), matmul, right=(2,)))
    for line in result["advice"]:
        print(line)
    if out is not None:
        print(f"written to {out}")


def _from_run(folder: str, also: list[str], as_json: bool) -> None:
    """Feed a run back and say what it changed.

    Raises:
        MeshwrightError: E479 beside another option, and what ``feed_back`` raises.
    """
    if also:
        found = f"--from-run and {' and '.join(also)}"
        raise MeshwrightError(problem("E479", where="meshwright probe", found=found))
    from meshwright.mesh.env import cache_folder
    from meshwright.orchestrate.feedback import feed_back

    found = feed_back(Path(folder), cache_folder())
    shown = found.as_dict()
    if as_json:
        show_json(shown)
        return
    errors = shown["errors_pct"]
    measured, spread = format_seconds(shown["measured_step_time_s"]), format_seconds(shown["spread_s"])
    print(f"{shown['layout_text']}: step {measured} measured, middle 80 % of steps within {spread}")
    told = [
        f"{name} {format_seconds(s)} ({errors[name]:+.1f} %)"
        for name, s in shown["predicted_step_time_s"].items()
    ]
    print("predicted: " + ", ".join(told))
    if found.profile is not None:
        print(found.profile.sentence())
    print(("added to " if found.added else "already in ") + str(found.ledger))
