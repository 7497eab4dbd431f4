"""The demo's model in twelve layouts: predicted from a probe alone, then run; step time, processor seconds and peak.

    python benchmarks/predictions.py [--store FOLDER] [--rounds 3] [--steps 8] [--quick] [--do N]

Nothing is fitted on these runs. Wall time is judged for up to as many ranks as cores, processor seconds of all ranks
beyond. Every layout runs once in each round, so that the repeat noise (half of the range of the rounds' medians) is
that of minutes, not of neighbouring steps. Probes and runs are kept in the store: ``--do N`` stops after N of them,
and the next call goes on, so that the check can be cut into slices.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.base.records import StepRecord
from meshwright.cluster.load import PROBE_FORMAT, cluster_from_probe
from meshwright.cost.machine_fit import predict_plan
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.orchestrate.told_apart import measured
from meshwright.orchestrate.trying import run_steps
from meshwright.probe.processor import processor_cluster, processor_seconds
from meshwright.probe.run import run_probe
from meshwright.probe.topology import effective_cores
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan

MODEL = "recipes/models/tiny-llama"
SEQ_LEN, SEQUENCES = 128, 16
LAYOUTS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "pp=2",
    "dp=4",
    "dp=4,zero=3",
    "dp=2,tp=2",
    "dp=2,pp=2",
    "tp=2,pp=2",
    "dp=2,zero=2,pp=2",
)
TIME_PCT, PROCESSOR_PCT, MEMORY_PCT = 15.0, 20.0, 5.0


@dataclass(frozen=True)
class Checked:
    """One layout: predicted and measured figures, and the noise of repeats, in per cent."""

    text: str
    ranks: int
    wall: tuple[float, float, float]
    processor: tuple[float, float, float]
    peak: tuple[float, float]
    terms: dict[str, tuple[float, float]]


def plan_of(text: str) -> Plan:
    """Return a layout's plan."""
    return make_plan(read_model(MODEL), parse_layout(f"{text},precision=fp32"), SEQUENCES, SEQ_LEN, MODEL)


def noise_pct(values: list[float]) -> float:
    """Return half of the range over the median, in per cent."""
    return 50.0 * (max(values) - min(values)) / median(values)


def checked(text: str, probe: dict[str, Any], runs: list[dict[str, Any]]) -> Checked:
    """Return what was predicted and measured of one layout."""
    plan = plan_of(text)
    said = predict_plan(plan, cluster_from_probe(probe))
    used = processor_seconds(read_model(MODEL), plan.layout, plan.batch, processor_cluster(probe))
    wall, processor = [r["wall_s"] for r in runs], [r["processor_s"] for r in runs]
    time = said.time
    seen = {name: median(r["time_s"][name] for r in runs) for name in runs[0]["time_s"]}
    links = ("tensor", "sequence", "pipeline", "context", "expert", "data")
    return Checked(
        text=text,
        ranks=plan.world_size,
        wall=(said.step_time_s, median(wall), noise_pct(wall)),
        processor=(used, median(processor), noise_pct(processor)),
        peak=(float(said.peak_memory_bytes), float(max(r["peak_bytes"] for r in runs))),
        terms={
            "compute": (time.compute, seen["compute"]),
            "links": (sum(getattr(time, x) for x in links), seen["data"]),
            "bubble": (time.bubble, seen["bubble"]),
            "update": (time.optimizer, seen["optimizer"]),
        },
    )


def one_run(text: str, probe: dict[str, Any], steps: int) -> dict[str, Any]:
    """Run a layout and return what counts of it."""
    plan = plan_of(text)
    ranks = run_steps(plan, steps)
    now: StepRecord = measured(plan, ranks, cluster_from_probe(probe))
    return {
        "wall_s": now.step_time_s,
        "processor_s": sum(median(r.processor_s) for r in ranks),
        "peak_bytes": now.peak_memory_bytes,
        "time_s": now.time.as_dict(),
    }


def show(rows: list[Checked], cores: float) -> bool:
    """Print the table; return whether every figure is within its target."""
    good = True
    print(f"{'layout':<18} {'step ms: said':>13} {'seen':>7} {'err':>7} {'noise':>6}", end="")
    print(
        f" | {'processor ms':>13} {'seen':>7} {'err':>7} {'noise':>6} | {'MiB':>6} {'seen':>6} {'err':>6} | verdict"
    )
    for row in rows:
        wall, processor, peak = (100 * (x[0] / x[1] - 1) for x in (row.wall, row.processor, row.peak))
        few = row.ranks <= cores
        fine = abs(wall) <= TIME_PCT if few else abs(processor) <= PROCESSOR_PCT
        small = abs(peak) <= MEMORY_PCT
        good = good and fine and small
        print(
            f"{row.text:<18} {1e3 * row.wall[0]:13.1f} {1e3 * row.wall[1]:7.1f} {wall:+6.1f}% {row.wall[2]:5.1f}%",
            end="",
        )
        a, b, c = row.processor
        print(f" | {1e3 * a:13.1f} {1e3 * b:7.1f} {processor:+6.1f}% {c:5.1f}%", end="")
        print(f" | {row.peak[0] / 2**20:6.2f} {row.peak[1] / 2**20:6.2f} {peak:+5.1f}%", end="")
        print(
            f" | {'wall' if few else 'processor'} {'ok' if fine else 'OFF'}, peak {'ok' if small else 'OFF'}"
        )
        terms = [f"{name} {1e3 * a:.0f}/{1e3 * b:.0f}" for name, (a, b) in row.terms.items()]
        print(f"{'':<18} ms said/seen: {', '.join(terms)}")
    return good


def main() -> None:
    """Probe, run and print, as far as ``--do`` allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="predictions-store")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--do", type=int, default=10_000)
    args = parser.parse_args()
    store = Path(args.store)
    store.mkdir(parents=True, exist_ok=True)
    left = args.do
    probes: dict[int, dict[str, Any]] = {}
    for world in sorted({plan_of(t).world_size for t in LAYOUTS}):
        file = store / f"probe-{world}.json"
        if not file.exists() or json.loads(file.read_text()).get("format") != PROBE_FORMAT:
            if not left:
                return
            left -= 1
            file.write_text(json.dumps(run_probe(world, args.quick, lambda line: None)))
        probes[world] = json.loads(file.read_text())
    runs_file = store / "runs.json"
    runs: dict[str, list[dict[str, Any]]] = json.loads(runs_file.read_text()) if runs_file.exists() else {}
    for number in range(args.rounds):
        for text in LAYOUTS:
            done = runs.setdefault(text, [])
            if len(done) > number:
                continue
            if not left:
                print(f"{sum(map(len, runs.values()))} of {args.rounds * len(LAYOUTS)} runs done")
                return
            left -= 1
            done.append(one_run(text, probes[plan_of(text).world_size], args.steps))
            runs_file.write_text(json.dumps(runs))
    rows = [checked(t, probes[plan_of(t).world_size], runs[t]) for t in LAYOUTS]
    for world, probe in probes.items():
        print(f"probe of {world} ranks: they had {100 * probe['quiet_share']:.0f} % of their cores")
    print("every figure within its target" if show(rows, effective_cores()) else "some figures are off")


if __name__ == "__main__":
    main()
