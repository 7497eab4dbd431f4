"""``meshwright probe``: measure this machine (or, under torchrun, this cluster)."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshwright.cli.options import Json, Nproc
from meshwright.cli.output import check_writable, finite, show_json, show_line, table, write_new_text


def probe(
    nproc: Nproc = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the result to a JSON file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes; some seconds.")] = False,
    as_json: Json = False,
) -> None:
    """Measure matmul, memory and every collective on this machine.

    Without --nproc: the ranks of torchrun, or else one rank for each core, at most 4.
    The file written with --out is a CLUSTER for plan and estimate.
    """
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
