"""A rank of a job, from its start to its end, in its own process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from meshwright.mesh import env
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_files import Position, position_file
from meshwright.mesh.rank_process import (
    RankEnd,
    default_group,
    rendezvous,
    watch_signals,
)
from meshwright.mesh.rank_report import report_error

MEETING_S = 60.0
"""Ranks of one machine must have met after this long."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to know before it can call the worker. Picklable, for ranks that are spawned."""

    worker: Callable[[RankFacts, Any], Any]
    payload: Any
    rank: int
    world_size: int
    folder: str
    log_file: str
    device: str
    backend: str
    collective_timeout_s: float
    port: int
    threads: int


def run_rank(connection: Connection, inherited: list[Connection], job: Job) -> None:
    """Be one rank: set up, meet the others, run the worker, send its result."""
    gc.freeze()  # what was there before the fork is not ours to search
    for other in inherited:  # or the other ends would never see that the parent is gone
        other.close()
    _redirect(job)
    watch_signals()
    env.become_local_rank(debug=env.debug_level())
    end = RankEnd(connection)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(job.threads)
        dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
        if job.device != "cpu":
            torch.cuda.set_device(job.device)
        store = rendezvous(job.folder, job.rank, job.world_size, MEETING_S, job.port)
        facts = RankFacts(
            rank=job.rank,
            world_size=job.world_size,
            local_rank=job.rank,
            local_world_size=job.world_size,
            master_port=store.port,
            device=job.device,
            backend=job.backend,
            log_file=job.log_file,
            tell=Position(position_file(job.folder, job.rank)).write,
        )
        with default_group(
            job.rank, job.world_size, backend=job.backend, store=store, timeout_s=job.collective_timeout_s
        ):
            result = pickle.dumps(job.worker(facts, job.payload))
            sys.stdout.flush()
            end.send("result", result)
            end.receive()  # "finish": no rank leaves a group that another still uses
        end.send("result", b"")
    except BaseException as error:  # whatever it is, the launcher must hear of it
        report = report_error(job.rank, error)
        traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(error, SystemExit):
            os._exit(error.code if isinstance(error.code, int) else 1)
        with contextlib.suppress(OSError):
            end.send("failed", report)
        del error
        signal.pause()  # the launcher ends this process when it has heard the others
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect(job: Job) -> None:
    """Send standard error to the log file; standard output too, but rank 0's goes where the launcher reads it."""
    log = os.open(job.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    out = log
    if job.rank == 0:
        out = os.open(os.path.join(job.folder, "stdout"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    faulthandler.enable(file=2)
