"""``make demo``: the whole line on this machine - inspect, probe, plan, train, prove, report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import format_seconds
from meshwright.cluster.load import cluster_from_probe
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.cost.estimate import item
from meshwright.model.describe import block_lines, describe
from meshwright.model.read_hf import read_model
from meshwright.orchestrate.machine import machine_probe
from meshwright.orchestrate.preparing import nothing_fits
from meshwright.orchestrate.proving import prove_command, write_json
from meshwright.orchestrate.training import train_command
from meshwright.program.plan_file import save_plan
from meshwright.report.page import write_report
from meshwright.report.tables import console, final_screen, plan_table
from meshwright.search.search import search

RECIPE = "recipes/demo.yaml"
RANKS = 4
NEXT = (
    'meshwright prove --model recipes/models/tiny-llama --layout "dp=2,zero=3,pp=2,schedule=1f1b" --steps 3',
    "meshwright explain runs/demo/plan.json --rank 3",
    "meshwright plan llama-2-7b --cluster a100-40gb-x8 --seq-len 2048 --global-batch 64",
)


def free_folder(folder: Path) -> Path | None:
    """Move an earlier run folder aside and return where it went; None when there was none."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target


class Steps:
    """Prints the headings of the demo with the time that has passed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0
        self.started = time.monotonic()

    def next(self, title: str) -> None:
        """Begin the next step."""
        self.number += 1
        passed = format_seconds(time.monotonic() - self.started)
        print(f"\n[{self.number}/{self.count}] {title}  ({passed})", flush=True)


def show(line: str) -> None:
    """Print a line of progress."""
    print(f"    {line}", flush=True)


def demo(recipe: str = RECIPE, ranks: int = RANKS) -> dict[str, Any]:
    """Run the demo and return what its last screen shows: {run, prove, page}."""
    run = resolve(load_run(recipe))
    folder = Path(run.run.dir)
    moved = free_folder(folder)
    steps = Steps(6)
    out = console(sys.stdout)
    if moved is not None:
        show(f"an earlier run was moved to {moved}")

    steps.next(f"inspect {run.model.config}")
    spec = read_model(run.model.config)
    about = describe(spec, run.data.seq_len)
    show(
        f"{about['family']}, {about['num_parameters']:,} parameters, {about['num_layers']} layers, "
        f"hidden {about['hidden_size']}, {about['num_attention_heads']} heads, "
        f"{about['num_key_value_heads']} kv heads, vocabulary {about['vocab_size']:,}"
    )
    for line in block_lines(spec)[:4]:
        show(line)

    steps.next(f"probe this machine with {ranks} ranks")
    probe = machine_probe(ranks, show, fresh=True)
    cluster = cluster_from_probe(probe)

    steps.next(
        f"plan: {run.batch.sequences} sequences of {run.data.seq_len} tokens per step on {ranks} ranks"
    )
    found = search(
        spec,
        cluster,
        run.data.seq_len,
        run.batch.sequences,
        fix="precision=fp32",
        top=3,
        model_path=run.model.config,
    )
    if not found.plans:
        raise MeshwrightError(nothing_fits(found, cluster))
    out.print(plan_table([item(p) for p in found.plans]))
    for reason in found.plans[0].why[:3]:
        show(reason)
    folder.mkdir(parents=True, exist_ok=True)
    plan = replace(found.plans[0], model_path=run.model.config)
    save_plan(plan, str(folder / "plan.json"))

    steps.next(f"train {run.run.steps} steps on {run.data.path}: {plan.layout.text()}")
    result = train_command(run, plan_path=str(folder / "plan.json"), show=show)

    steps.next("prove: this layout against one device in float64")
    verdict = prove_command(
        run,
        model=run.model.config,
        layout=plan.layout.text(),
        steps=2,
        out=str(folder / "prove.json"),
        show=show,
    )

    steps.next("report")
    write_json(folder / "probe.json", probe)
    page = write_report(str(folder), None)

    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    out.print(final_screen(record, verdict, page, NEXT))
    passed = format_seconds(time.monotonic() - steps.started)
    print(f"demo: {result['steps']} steps, last loss {result['final_loss']:.4f}, in {passed}")
    return {"run": record, "prove": verdict, "page": page}


def main() -> int:
    """Run the demo; Returns the exit code."""
    try:
        verdict = demo()["prove"]
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
