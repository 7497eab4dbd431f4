"""Start the ranks of one job on this machine, watch them, and say which one failed, where and why.

Under torchrun the ranks are there already: then the worker runs in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.mesh import env, out_of_memory
from meshwright.mesh.env import RankFacts
from meshwright.mesh.imports import load_modules
from meshwright.mesh.join import run_joined
from meshwright.mesh.rank_process import (
    RankEnd,
    RankHandle,
    RankReport,
    as_text,
    collect,
    default_group,
    end_processes,
    load_torch,
    rendezvous,
    report_error,
    watch_signals,
)

GRACE_S = 2.0
"""After the first failure the other ranks have this long to say what they saw."""
TERM_S = 1.0
"""Between SIGTERM and SIGKILL."""
MEETING_S = 60.0
"""Ranks of one machine must have met after this long."""
_POSITION_BYTES = 4096
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that a job may hand on to its ranks."""


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


class _Stopped(Exception):
    """The launching process received SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class _Job:
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
        _Job(
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
    jobs: Sequence[_Job],
    spawn: bool,
    timeout_s: float | None,
    on_line: Callable[[str], None] | None,
    stop_grace_s: float | None = None,
    silence_s: float = 0.0,
) -> list[Any]:
    context: Any = multiprocessing.get_context("spawn" if spawn else "fork")
    folder = jobs[0].folder
    for job in jobs:
        with open(_position_file(folder, job.rank), "wb") as file:
            file.truncate(_POSITION_BYTES)
    tail = _Tail(os.path.join(folder, "stdout"), on_line or _print_line)
    handles: list[RankHandle] = []
    clean = False
    forward = _Forward(handles, stop_grace_s) if stop_grace_s is not None else None

    def tick() -> None:
        tail.forward()
        if forward is not None:
            forward.check()

    with _stop_on_sigterm() if forward is None else forward.signals():
        try:
            for job in jobs:
                ours, theirs = context.Pipe()
                inherited = [] if spawn else [h.connection for h in handles] + [ours]
                process = context.Process(
                    target=_rank, args=(theirs, inherited, job), name=f"rank-{job.rank}"
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
        except _Stopped as stopped:
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


@contextlib.contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the ranks are ended; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Forward:
    """Hands SIGTERM and SIGUSR1 on to the ranks, and counts the time that they have to stop.

    A terminal that closes (SIGHUP) is SIGTERM to the job, unless it was started to outlive it (nohup ignores SIGHUP).
    """

    def __init__(self, handles: Sequence[RankHandle], grace_s: float) -> None:
        self._handles = handles
        self._grace_s = grace_s
        self._until: float | None = None
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise _Stopped when the time to stop is over."""
        if self._until is not None and time.monotonic() >= self._until:
            raise _Stopped

    def _hand_on(self, number: int, frame: object) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        caller = self._before.get(number)
        if callable(caller) and os.getpid() == self._owner:  # whoever runs the job wants to know, too
            caller(number, frame)
        if number == signal.SIGTERM:
            self._until = min(self._until or float("inf"), time.monotonic() + self._grace_s)
        for handle in list(self._handles):
            if handle.process.pid is not None and os.getpid() == self._owner:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(handle.process.pid, number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the two signals back, also in what is started meanwhile: a rank takes them when its worker is ready."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the two signals while the context is open; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outlives = signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
        taken = FORWARDED if outlives else (*FORWARDED, signal.SIGHUP)
        self._before = {n: signal.signal(n, self._hand_on) for n in taken}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)


def _rank(connection: Connection, inherited: list[Connection], job: _Job) -> None:
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
            tell=_Position(_position_file(job.folder, job.rank)).write,
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


def _redirect(job: _Job) -> None:
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


def _print_line(line: str) -> None:
    print(line, flush=True)


class _Tail:
    """Reads the lines that rank 0 prints, while it prints them."""

    def __init__(self, path: str, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._read = 0
        self._rest = b""

    def forward(self, last: bool = False) -> None:
        """Hand over every whole line that is new; with ``last``, an unfinished one too."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))


# Where ranks are. A rank writes its position into a shared page (microseconds, never blocks); the launcher reads it
# only when something went wrong, also from a rank that hangs or is dead.


def _position_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"position-{rank}")


class _Position:
    """One rank's page: a counter that is odd while it is being written, a length and JSON text."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _POSITION_BYTES)
        self._count = 0

    def write(self, position: Mapping[str, Any]) -> None:
        """Store the position; what does not fit on the page is cut to its step and action."""
        data = json.dumps(position, default=str).encode()
        if len(data) > _POSITION_BYTES - 16:
            short = {k: str(v)[:500] for k, v in position.items() if k in ("step", "action")}
            data = json.dumps(short).encode()
        struct.pack_into("<QQ", self._page, 0, self._count + 1, len(data))
        self._page[16 : 16 + len(data)] = data
        self._count += 2
        struct.pack_into("<Q", self._page, 0, self._count)


def _read_position(folder: str, rank: int) -> dict[str, Any]:
    """Return what the rank last said; empty when it said nothing, or was killed while it wrote."""
    try:
        page = Path(_position_file(folder, rank)).read_bytes()
        count, length = struct.unpack_from("<QQ", page, 0)
        if count == 0 or count % 2:
            return {}
        position = json.loads(page[16 : 16 + length])
    except (OSError, ValueError, struct.error):
        return {}
    return position if isinstance(position, dict) else {}


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
    jobs: Sequence[_Job],
    timeout_s: float | None,
    finished: Sequence[int],
) -> MeshwrightError:
    """Return the error that tells of the first report, which is the culprit's."""
    first = reports[0]
    folder = jobs[0].folder
    positions = {job.rank: as_text(_read_position(folder, job.rank)) for job in jobs}
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
    jobs: Sequence[_Job],
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
