"""Saving and loading beside plain torch DCP and safetensors, and what a background save keeps the training waiting.

    python benchmarks/checkpoints.py [--rounds 5] [--layers 12] [--ranks 2] [--dir DIR]

Same model (sharded by FSDP2), same AdamW state, same folder, files brought to the disk by all. The cases take turns in
every round. Printed: seconds and MB/s (10**6 bytes of tensors of all ranks), the median over rounds and the range;
processor seconds of all ranks (user and system, all threads), which other work on the machine changes less; and ratios
of throughput, ours over theirs, per round. DCP's load reads pages that were just written, as ours does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import Settings
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.background import BackgroundWriter, copied, writer_ranks
from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.save import capture, save_checkpoint
from meshwright.checkpoint.state import create_state, rank_state
from meshwright.layout.parse import parse_layout
from meshwright.mesh.device_mesh import build_mesh
from meshwright.mesh.env import RankFacts
from meshwright.mesh.launch import run_local
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.apply import apply_plan
from meshwright.parallel.tied import local
from meshwright.program.make import make_plan
from meshwright.train.optim import build_optimizer


@dataclass(frozen=True)
class Work:
    """What every rank is given."""

    rounds: int
    layers: int
    ranks: int
    folder: Path


def config(layers: int) -> dict[str, Any]:
    """Return a Llama of 3.1 M parameters per layer and 8.4 M outside of them."""
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds from the moment all ranks begin until all have ended, and this rank's processor seconds."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    call()
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - used


def bench(facts: RankFacts, work: Work) -> dict[str, Any]:
    """Run all cases in turn; return seconds by case and the bytes of the state."""
    layout = parse_layout(f"dp={work.ranks},zero=3,precision=fp32")
    spec = spec_from_config(config(work.layers), "bench")
    plan = make_plan(spec, layout, work.ranks, 64, "bench")
    view = build_mesh(plan.layout, facts.rank)
    model = apply_plan(plan, spec, view, seed=0)
    optimizer = build_optimizer(model.trainable(), model.decays, Settings())
    create_state(optimizer)
    state = rank_state(model.params, optimizer, {}, with_copies=False).tensors
    mine = {k: local(t) for k, t in state.items()}
    size = torch.tensor(sum(t.nbytes for t in mine.values()))
    dist.all_reduce(size)
    writer = BackgroundWriter(writer_ranks(facts.rank, work.ranks))
    memory: dict[str, list[torch.Tensor]] = {}
    home = work.folder

    def ours() -> None:
        save_checkpoint(
            folder=home / "ours",
            step=1,
            params=model.params,
            optimizer=optimizer,
            tied={},
            extra={},
            manifest={},
            world_size=work.ranks,
            rank=facts.rank,
        )

    def background() -> None:
        writer.start(
            folder=home / "background",
            step=1,
            captured=capture(model.params, optimizer, {}),
            extra={},
            manifest={},
            after=lambda path: None,
        )

    cases: dict[str, Callable[[], Any]] = {
        "save: torch DCP": lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(home / "dcp")),
        "save: ours": ours,
        "save: safetensors": lambda: _safetensors(mine, home / f"st-{facts.rank}"),
        "load: torch DCP": lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(home / "dcp")),
        "load: ours": lambda: load_checkpoint(
            path=home / "ours" / "step-1", params=model.params, optimizer=optimizer, tied={}
        ),
        "load: ours, unverified": lambda: load_checkpoint(
            path=home / "ours" / "step-1", params=model.params, optimizer=optimizer, tied={}, verify=False
        ),
        "load: safetensors": lambda: [
            mine[k].copy_(t) for k, t in load_file(home / f"st-{facts.rank}").items()
        ],
        "one copy in memory": lambda: copied(capture(model.params, optimizer, {}), memory),
        "stall: ours, background": background,
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    used: dict[str, list[float]] = {name: [] for name in cases}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for k in range(work.rounds + 1):  # the first round warms up
            for name, call in cases.items():
                seconds, processor = timed(call)
                if k:
                    found[name].append(seconds)
                    used[name].append(processor)
            writer.wait()
    return {"bytes": int(size), "seconds": found, "processor": used}


def _safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=None)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoints-", dir=given.dir))
    try:
        work = Work(given.rounds, given.layers, given.ranks, folder)
        results = run_local(bench, given.ranks, work, preload=("transformers",))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size, seconds = results[0]["bytes"], results[0]["seconds"]
    print(f"{size / 1e6:.0f} MB of state on {given.ranks} ranks, {given.rounds} rounds")
    for name, times in seconds.items():
        rate = size / median(times) / 1e6
        used = sum(median(r["processor"][name]) for r in results)
        print(
            f"{name:<26} {median(times):7.3f} s  [{min(times):.3f}, {max(times):.3f}]  {rate:7.0f} MB/s"
            f"  {used:7.3f} s of processors"
        )
    for ours, theirs in (
        ("save: ours", "save: torch DCP"),
        ("save: ours", "save: safetensors"),
        ("load: ours", "load: torch DCP"),
        ("load: ours, unverified", "load: torch DCP"),
        ("stall: ours, background", "one copy in memory"),
    ):
        pairs = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        print(f"{ours} / {theirs}: throughput x {median(pairs):.2f}  [{min(pairs):.2f}, {max(pairs):.2f}]")


if __name__ == "__main__":
    main()
