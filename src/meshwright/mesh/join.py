"""Joining the ranks that torchrun started: the interface, the meeting, and what another rank's end looks like here."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.mesh import env, out_of_memory
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_report import as_text, report_error

_CODES = {"peer": "E574", "timeout": "E513", "memory": "E512"}


def run_joined(
    worker: Callable[[RankFacts, Any], Any],
    facts: RankFacts,
    payload: Any,
    *,
    backend: str,
    device: str,
    collective_timeout_s: float,
) -> Any:
    """Run the worker as the rank that torchrun made of this process.

    Raises:
        MeshwrightError: E504, E508 the ranks do not meet, E579 an address that other nodes cannot reach; E574, E513,
            E512 in place of torch's error when a rank was lost, did not come, or memory ran out.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    if device != "cpu":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(env.threads_per_rank())
    facts = dataclasses.replace(facts, device=device, backend=backend)
    if backend == "gloo":
        notes = env.choose_interface(facts, env.torchrun_job())
        refuse(notes, ExitCode.ENVIRONMENT)
        if facts.local_rank == 0:
            for note in notes:
                print(note.text(), file=sys.stderr, flush=True)
    limit = datetime.timedelta(seconds=collective_timeout_s)
    try:
        store, *_ = next(iter(rendezvous("env://", timeout=limit)))
        store = PrefixStore(meet(store, facts.rank, facts.world_size, collective_timeout_s), store)
        dist.init_process_group(
            backend, store=store, rank=facts.rank, world_size=facts.world_size, timeout=limit
        )
    except RuntimeError as error:
        text = str(error)
        code = "E504" if "EADDRINUSE" in text or "address already in use" in text.lower() else "E508"
        raise MeshwrightError(
            problem(
                code,
                where=f"rank {facts.rank} of {facts.world_size}, {facts.master_addr}:{facts.master_port}",
                found=text.splitlines()[0],
            ),
            ExitCode.ENVIRONMENT,
        ) from error
    try:
        result = worker(facts, payload)
    except Exception as error:
        told = _told(error, facts)
        if told is None:
            raise
        raise told from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def meet(store: Any, rank: int, world_size: int, limit_s: float) -> str:
    """Return a name that the ranks of this start share, and that no earlier start of theirs had.

    torchrun keeps one store for all starts of a job, so the addresses of ranks that are gone are still in it; nothing
    else that all nodes know tells one start from the next. Each rank asks under a number drawn for the purpose, and only
    rank 0 of this start answers it. Every rank calls it.

    Args:
        store: what the ranks share.
        rank: this rank.
        world_size: ranks that call it.
        limit_s: seconds for all of them to come.

    Raises:
        RuntimeError: a rank did not come.
    """
    until = time.monotonic() + limit_s
    mine = uuid.uuid4().hex
    if rank == 0:
        name = f"meshwright/{mine}"
        left = set(range(1, world_size))
        answered: set[str] = set()
        while left:
            for other in sorted(left):
                if store.check([f"meet/{other}"]):
                    asked = store.get(f"meet/{other}").decode()
                    if asked not in answered:
                        answered.add(asked)
                        store.set(f"meet/{other}/{asked}", name)
            left = {other for other in left if not store.check([f"{name}/{other}"])}
            _wait(until, f"rank 0 waits for {len(left)} of {world_size} ranks: {sorted(left)[:8]}")
        return name
    store.set(f"meet/{rank}", mine)
    while not store.check([f"meet/{rank}/{mine}"]):
        _wait(until, f"rank {rank} waits for rank 0")
    name = store.get(f"meet/{rank}/{mine}").decode()
    store.set(f"{name}/{rank}", "here")
    return name


def _wait(until: float, what: str) -> None:
    if time.monotonic() >= until:
        raise RuntimeError(f"timed out: {what}")
    time.sleep(0.01)


def _told(error: Exception, facts: RankFacts) -> MeshwrightError | None:
    """Return what is said of an error that comes from another rank, or from the machine; None for any other."""
    report = report_error(facts.rank, error)
    code = _CODES.get(report.cause)
    if code is None or isinstance(error, MeshwrightError):
        return None
    at = as_text(facts.position)
    where = f"rank {facts.rank}" + (f" ({at})" if at else "")
    waits = f"in {report.waiting}: " if report.waiting else ""
    line = report.message.splitlines()[0][:300]
    more = out_of_memory.told(report.message) if report.cause == "memory" else {}
    return MeshwrightError(problem(code, where=where, found=f"{waits}{line}", **more), ExitCode.ENVIRONMENT)
