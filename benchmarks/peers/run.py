"""Meshwright beside the peers of a ``bench_peers`` folder: the same tiny Llama, tokens and ranks, interleaved rounds.

    python benchmarks/peers/run.py --bench FOLDER --venvs FOLDER [--rounds 10] [--steps 15] [--groups ddp tp] [--out FILE]

``--bench`` holds run_bench.py, cases.json and the peers; ``--venvs`` their virtual environments; our cases run in this
interpreter's. Printed per group: each case's medians, then ours over the best peer of the group, per round: median and
the middle 80 %. Losses say whether two cases did the same work. RSS counts above the RSS after imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

GROUPS: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "ddp": (("dp=2,zero=0", "loop"), ("torch-ddp", "accelerate-ddp", "deepspeed-z0")),
    "ddp-hf": (("dp=2,zero=0", "engine"), ("accelerate-ddp-hf", "hf-trainer-ddp")),
    "zero1": (("dp=2,zero=1", "loop"), ("deepspeed-z1",)),
    "zero2": (("dp=2,zero=2", "loop"), ("deepspeed-z2",)),
    "zero3": (("dp=2,zero=3", "loop"), ("torch-fsdp2", "deepspeed-z3")),
    "tp": (("tp=2,sp=off", "engine"), ("torch-tp", "megatron-tp")),
    "pp": (("pp=2", "engine"), ("torch-pp",)),
}
"""Our layout and way, and the peers that do the same. accelerate's FSDP2 case is left out: on a CPU it wraps the model in
DDP (``Accelerator(cpu=True)`` has the distributed type MULTI_CPU), so it has nothing sharded."""

METRICS = (("cpu_s", "cpu s/step"), ("step_s", "step s"), ("rss_above_mb", "RSS MB"), ("start_s", "start s"))

IMPORTS = {
    "peers-torch": "torch, torch.distributed.fsdp, torch.distributed.tensor.parallel",
    "peers-hf": "torch, torch.distributed.fsdp, accelerate, transformers.models.llama.modeling_llama",
    "peers-ds": "torch, deepspeed",
    "peers-meg": "torch, megatron.core, megatron.core.tensor_parallel",
}
"""What a peer imports before it builds anything, by environment."""


def our_name(group: str) -> str:
    """Return the name of our case of a group."""
    layout, via = GROUPS[group][0]
    return f"ours {layout} {via}"


def imported_mb(venvs: Path, name: str) -> float:
    """Return the peak RSS of a process that only imports what the peers of an environment import."""
    code = (
        f"import resource, {IMPORTS[name]}; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run(
        [str(venvs / name / "bin" / "python"), "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.strip().splitlines()[-1])


def run_rounds(args: argparse.Namespace, venvs: Path) -> dict[str, list[dict[str, Any]]]:
    """Return every run by case."""
    bench = Path(args.bench).resolve()
    cases = json.loads((bench / "cases.json").read_text(encoding="utf-8"))
    by_name = {c["name"]: c for c in cases}
    chosen: dict[str, dict[str, Any]] = {}
    for group in args.groups:
        for name in GROUPS[group][1]:
            chosen[name] = by_name[name]
        layout, via = GROUPS[group][0]
        command = [
            "{venv}/bin/python",
            str(Path(__file__).with_name("ours.py")),
            "--layout",
            layout,
            "--via",
            via,
            "--matmul",
            args.matmul,
        ]
        chosen[our_name(group)] = {"name": our_name(group), "venv": "ours", "cmd": command}
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "cases.json", Path(folder) / "out.json"
        file.write_text(json.dumps(list(chosen.values())), encoding="utf-8")
        command = [sys.executable, str(bench / "run_bench.py"), "--cases", str(file), "--venvs", str(venvs)]
        command += [
            "--work",
            folder,
            "--repeat",
            str(args.rounds),
            "--steps",
            str(args.steps),
            "--out",
            str(out),
        ]
        command += ["--keep", args.logs] if args.logs else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs: dict[str, list[dict[str, Any]]] = json.loads(out.read_text(encoding="utf-8"))["runs"]
    bases = {c["venv"]: 0.0 for c in chosen.values() if c["venv"] != "ours"}
    bases = {name: imported_mb(venvs, name) for name in bases}
    bases["ours"] = own_imports_mb(args, bench)
    for name, case in chosen.items():
        for run in runs[name]:
            if "error" not in run:
                run["rss_above_mb"] = run["rss_mb"] - bases[case["venv"]]
    return runs


def own_imports_mb(args: argparse.Namespace, bench: Path) -> float:
    """Return the peak RSS of a process that imports what ours imports."""
    code = (
        f"import os, sys, resource; os.environ['BENCH_HERE'] = {str(bench)!r}; "
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "import ours; ours.load_modules(sum(ours.MODULES.values(), ())); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def show(group: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print the cases of a group and our ratios to the best peer, metric by metric."""
    print(f"\n{group}")
    good: dict[str, list[dict[str, Any]]] = {}
    for name in (*GROUPS[group][1], our_name(group)):
        good[name] = [r for r in runs[name] if "error" not in r]
        if not good[name]:
            print(f"  {name:<28} did not run: {runs[name][-1]['error']}")
            continue
        figures = "  ".join(f"{label} {median(r[key] for r in good[name]):8.3f}" for key, label in METRICS)
        print(f"  {name:<28} {figures}  loss 10 {good[name][0]['loss_10']:.4f}")
    mine = our_name(group)
    for key, label in METRICS:
        peers = [n for n in GROUPS[group][1] if good.get(n)]
        if not peers or not good.get(mine):
            continue
        best = min(peers, key=lambda n: median(r[key] for r in good[n]))
        ratios = [a[key] / b[key] for a, b in zip(good[mine], good[best], strict=False)]
        low, high = (min(ratios), max(ratios))
        if len(ratios) > 2:
            low, high = quantiles(ratios, n=10)[0], quantiles(ratios, n=10)[-1]
        print(f"  ours / {best:<21} {label:<12} {median(ratios):.3f}  (80 %: {low:.3f} to {high:.3f})")


def main() -> None:
    """Run the rounds and print the groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", required=True)
    parser.add_argument("--venvs", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument(
        "--matmul",
        choices=("machine", "torch"),
        default="machine",
        help="torch: our cases multiply as the peers do",
    )
    parser.add_argument("--logs", default="", help="folder for the logs of failed runs")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venvs = Path(folder)
        for found in Path(args.venvs).resolve().iterdir():
            (venvs / found.name).symlink_to(found)
        (venvs / "ours").unlink(missing_ok=True)
        (venvs / "ours").symlink_to(Path(sys.prefix))
        runs = run_rounds(args, venvs)
    if args.out:
        Path(args.out).write_text(json.dumps(runs, indent=1), encoding="utf-8")
    for group in args.groups:
        show(group, runs)


if __name__ == "__main__":
    main()
