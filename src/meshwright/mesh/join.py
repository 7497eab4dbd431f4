"""Joining the ranks that torchrun started: the interface, the meeting, and what another rank's end looks like here."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, problem, refuse
from meshwright.mesh import env
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_process import as_text, report_error

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
    try:
        dist.init_process_group(
            backend, init_method="env://", timeout=datetime.timedelta(seconds=collective_timeout_s)
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
    return MeshwrightError(problem(code, where=where, found=f"{waits}{line}"), ExitCode.ENVIRONMENT)
