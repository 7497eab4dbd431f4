"""Start the ranks of one job on this machine, watch them, and say which one failed, where and why.

Under torchrun the ranks are there already: then the worker runs in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.mesh import env, out_of_memory
from meshwright.mesh.env import RankFacts
from meshwright.mesh.imports import load_modules
from meshwright.mesh.join import run_joined
from meshwright.mesh.rank_files import _POSITION_BYTES, Tail, position_file, print_line, read_position
from meshwright.mesh.rank_job import Job, run_rank
from meshwright.mesh.rank_process import (
    RankHandle,
    collect,
    end_processes,
    load_torch,
)
from meshwright.mesh.rank_report import RankReport, as_text
from meshwright.mesh.signals import Forward, Stopped, stop_on_sigterm

GRACE_S = 2.0
"""After the first failure the other ranks have this long to say what they saw."""


TERM_S = 1.0
"""Between SIGTERM and SIGKILL."""


class LostRank(MeshwrightError):
    """A rank was killed, left or did not come: no fault of the program, so that another start may go well.

    Attributes:
        rank: the rank that was lost first.
    """

    def __init__(self, problems: Sequence[Problem], rank: int) -> None:
        super().__init__(problems, ExitCode.ENVIRONMENT)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by parts."""
        return (LostRank, (self.problems, self.rank))


def run_local(
    worker: Callable[[RankFacts, Any], Any],
    nproc: int,
    payload: Any,
    *,
    timeout_s: float | None = None,
    on_line: Callable[[str], None] | None = None,
    log_dir: str | Path | None = None,
    device: str = "cpu",
    collective_timeout_s: float = 1800.0,
    master_port: int = 0,
    preload: Sequence[str] = (),
    threads: int = 1,
    stop_grace_s: float | None = None,
    silence_s: float = 0.0,
) -> list[Any]:
    """Return ``worker(facts, payload)`` of every rank, by rank; under torchrun, of this rank only.

    The worker runs inside an initialised default process group. Rank 0's standard output goes line by line to
    ``on_line`` (default: this process's standard output); everything else that ranks print goes to ``rank-N.log`` in
    ``log_dir``, after what is there (default: a folder that is kept only when the job fails).

    Args:
        worker: a function of a module.
        nproc: number of ranks.
        payload: handed to each rank; results are pickled.
        timeout_s: seconds for the whole job; None is without limit.
        on_line: takes each line that rank 0 prints.
        log_dir: where the log files go.
        device: "cpu" (forked ranks, gloo) or "cuda" (spawned ranks, nccl, one device each).
        collective_timeout_s: a rank that waits longer than this in one collective gives up.
        master_port: 0 lets the system choose a free port.
        preload: modules to import before forking, so that each rank need not (see ``mesh.imports``).
        threads: of torch, in each rank. More than one needs spawned ranks, which start in seconds, not in tenths:
            a forked process waits for ever in its first parallel region if its parent has had one.
        stop_grace_s: hand SIGTERM (SIGHUP too, as SIGTERM) and SIGUSR1 on to the ranks, whose worker takes them; ranks
            that have not returned this long after SIGTERM are ended. None: SIGTERM ends the ranks at once.
        silence_s: a rank whose process answers nothing for so long, though no collective has timed out, is lost (E575);
            0 waits.

    Raises:
        MeshwrightError: a rank's own error with its exit code; E510 for any other exception of a rank; E511-E514
            for ranks that were killed, ran out of memory, hung or left; E515 after SIGTERM; E501-E509 when the world
            does not fit.
    """
    facts = env.torchrun_facts()
    if facts is not None:
        refuse(env.check_world_size(nproc, facts.world_size), ExitCode.ENVIRONMENT)
        return [_join(worker, facts, payload, device, collective_timeout_s)]
    if nproc < 1:
        raise MeshwrightError(
            problem("E501", where="nproc", found=f"{nproc} ranks", needs="at least one rank")
        )
    if device == "cpu":
        refuse(env.check_local_ranks(nproc, os.cpu_count() or 1), ExitCode.ENVIRONMENT)
    load_modules(preload)
    import torch
    import torch.distributed as dist

    backend, devices = _devices(device, nproc, torch, dist)
    # neither CUDA nor a pool of threads survives a fork
    spawn = device != "cpu" or threads > 1 or torch.cuda.is_initialized()
    if not spawn:
        load_torch()
    folder = tempfile.mkdtemp(prefix="meshwright-ranks-")
    logs = Path(log_dir) if log_dir is not None else Path(tempfile.mkdtemp(prefix="meshwright-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(
            worker=worker,
            payload=payload,
            rank=rank,
            world_size=nproc,
            folder=folder,
            log_file=str(logs / f"rank-{rank}.log"),
            device=devices[rank],
            backend=backend,
            collective_timeout_s=collective_timeout_s,
            port=master_port,
            threads=threads,
        )
        for rank in range(nproc)
    ]
    failed = True
    try:
        results = _run_jobs(jobs, spawn, timeout_s, on_line, stop_grace_s, silence_s)
        failed = False
        return results
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if log_dir is None and not failed:
            shutil.rmtree(logs, ignore_errors=True)


def _devices(device: str, nproc: int, torch: Any, dist: Any) -> tuple[str, tuple[str, ...]]:
    """Return the backend and each local rank's device; refuse a world that has too few or no backend."""
    backend = "gloo" if device == "cpu" else "nccl"
    if not (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()):
        raise MeshwrightError(
            problem("E505", where=f"torch {torch.__version__}", found=f"it has no {backend}"),
            ExitCode.ENVIRONMENT,
        )
    if device == "cpu":
        return backend, ("cpu",) * nproc
    _, problems = env.device_map(nproc, torch.cuda.device_count(), env.visible_devices())
    refuse(problems, ExitCode.ENVIRONMENT)
    return backend, tuple(f"cuda:{i}" for i in range(nproc))


def _join(
    worker: Callable[[RankFacts, Any], Any],
    facts: RankFacts,
    payload: Any,
    device: str,
    collective_timeout_s: float,
) -> Any:
    import torch
    import torch.distributed as dist

    backend, devices = _devices(device, facts.local_world_size, torch, dist)
    return run_joined(
        worker,
        facts,
        payload,
        backend=backend,
        device=devices[facts.local_rank],
        collective_timeout_s=collective_timeout_s,
    )


def _run_jobs(
    jobs: Sequence[Job],
    spawn: bool,
    timeout_s: float | None,
    on_line: Callable[[str], None] | None,
    stop_grace_s: float | None = None,
    silence_s: float = 0.0,
) -> list[Any]:
    context: Any = multiprocessing.get_context("spawn" if spawn else "fork")
    folder = jobs[0].folder
    for job in jobs:
        with open(position_file(folder, job.rank), "wb") as file:
            file.truncate(_POSITION_BYTES)
    tail = Tail(os.path.join(folder, "stdout"), on_line or print_line)
    handles: list[RankHandle] = []
    clean = False
    forward = Forward(handles, stop_grace_s) if stop_grace_s is not None else None

    def tick() -> None:
        tail.forward()
        if forward is not None:
            forward.check()

    with stop_on_sigterm() if forward is None else forward.signals():
        try:
            for job in jobs:
                ours, theirs = context.Pipe()
                inherited = [] if spawn else [h.connection for h in handles] + [ours]
                process = context.Process(
                    target=run_rank, args=(theirs, inherited, job), name=f"rank-{job.rank}"
                )
                sys.stdout.flush()
                sys.stderr.flush()
                with (
                    warnings.catch_warnings(),
                    forward.held() if forward is not None else contextlib.nullcontext(),
                ):  # Python 3.12 warns of any fork beside a thread; ours are idle
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                handles.append(RankHandle(job.rank, process, ours))
            results, reports = collect(
                handles, timeout_s=timeout_s, grace_s=GRACE_S, tick=tick, silence_s=silence_s
            )
            if not reports:
                for handle in handles:
                    handle.send("finish")
                _, reports = collect(handles, timeout_s=30.0, grace_s=GRACE_S, tick=tail.forward)
            if reports:
                raise _as_error(reports, jobs, timeout_s, finished=sorted(results))
            clean = True
            return [pickle.loads(results[job.rank]) for job in jobs]
        except Stopped as stopped:
            raise MeshwrightError(
                problem("E515", where=f"job of {len(jobs)} ranks", found="SIGTERM; all its ranks were ended"),
                ExitCode.ENVIRONMENT,
            ) from stopped
        finally:
            processes = [h.process for h in handles]
            if clean:
                for process in processes:
                    process.join(5.0)
            end_processes(processes, term_s=0.0 if clean else TERM_S)
            for handle in handles:
                handle.connection.close()
            tail.forward(last=True)


_CODES = {
    "memory": "E512",
    "signal": "E511",
    "exit": "E514",
    "stopped": "E575",
    "timeout": "E513",
    "silent": "E513",
}


def _as_error(
    reports: Sequence[RankReport],
    jobs: Sequence[Job],
    timeout_s: float | None,
    finished: Sequence[int],
) -> MeshwrightError:
    """Return the error that tells of the first report, which is the culprit's."""
    first = reports[0]
    folder = jobs[0].folder
    positions = {job.rank: as_text(read_position(folder, job.rank)) for job in jobs}
    log = jobs[first.rank].log_file
    where = _where(first.rank, positions)
    if first.error is not None and first.cause == "own":
        told = [
            dataclasses.replace(p, where=f"{where}: {p.where}" if p.where else where)
            for p in first.error.problems
        ]
        told[0] = dataclasses.replace(told[0], do=f"{told[0].do} (log of the rank: {log})".strip())
        return MeshwrightError(told, first.error.exit_code)
    if first.cause in ("timeout", "silent"):
        return LostRank([_hang(reports, jobs, timeout_s, finished, positions)], first.rank)
    code = _CODES.get(first.cause, "E510")
    line = first.message.splitlines()[0][:400]
    more = out_of_memory.told(first.message) if first.cause == "memory" else {}
    told = [problem(code, where=where, found=f"{first.type_name}: {line} (log: {log})", **more)]
    if code in ("E511", "E514", "E575"):
        return LostRank(told, first.rank)
    return MeshwrightError(told, ExitCode.FAULT if code == "E510" else ExitCode.ENVIRONMENT)


def _where(rank: int, positions: Mapping[int, str]) -> str:
    return f"rank {rank}" + (f" ({positions[rank]})" if positions[rank] else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in sorted(ranks))


def _hang(
    reports: Sequence[RankReport],
    jobs: Sequence[Job],
    timeout_s: float | None,
    finished: Sequence[int],
    positions: Mapping[int, str],
) -> Problem:
    """Return E513: who waits, in what, and who has not come."""
    waits: dict[str, list[int]] = {}
    for report in reports:
        if report.waiting:
            waits.setdefault(report.waiting, []).append(report.rank)
    missing = [r for r in reports if not r.waiting and r.cause == "silent"]
    limit = (
        f"{timeout_s:g} s for the job"
        if timeout_s is not None and all(r.cause == "silent" for r in reports)
        else f"{jobs[0].collective_timeout_s:g} s for one collective"
    )
    waiting = "; ".join(f"{_ranks(ranks)} in {what}" for what, ranks in waits.items())
    others = ", ".join(f"rank {r}: {positions[r] or 'said nothing'}" for r in sorted(positions))
    if missing:
        first = missing[0]
        where = "; ".join(_where(r.rank, positions) for r in missing)
        come = f"has not reached what others wait for: {waiting}" if waiting else "did not end"
        found = f"{come}; it is at {first.place or 'an unknown place'} (limit: {limit}; log: {jobs[first.rank].log_file})"
        return problem("E513", where=where, found=found, needs=f"last positions: {others}")
    if finished and waiting:
        found = f"{_ranks(finished)} finished while others wait: {waiting}"
    else:
        found = f"every rank waits: {waiting or 'in an unknown place'}"
    log = jobs[reports[0].rank].log_file
    return problem(
        "E513",
        where=_where(reports[0].rank, positions),
        found=f"{found} (limit: {limit}; log: {log})",
        needs=f"the same collectives in the same order on every rank; last positions: {others}",
    )
