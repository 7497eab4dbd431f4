"""Both ends of a rank that runs in a child process: what the rank says, and how its parent listens.

A rank has one connection to its parent. A thread of the rank reads it, so that the rank can answer "where are you?"
while its main thread waits in a collective, and ends when its parent is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.mesh.imports import load_modules
from meshwright.mesh.rank_report import RankReport, describe_frames, order_reports


class RankEnd:
    """The rank's end of the connection. Make it in the rank's main thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._main = threading.get_ident()
        threading.Thread(target=self._listen, name="rank-listener", daemon=True).start()

    def send(self, kind: str, value: Any) -> None:
        """Send one message; values are pickled by value (a tensor's bytes travel, not its memory)."""
        data = pickle.dumps((kind, value))
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> tuple[str, Any]:
        """Wait for the parent's next message."""
        return self._inbox.get()

    def _listen(self) -> None:
        while True:
            try:
                kind, value = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)  # the parent is gone: nobody waits for this rank
            if kind == "roll call":
                with contextlib.suppress(OSError):
                    self.send("present", None)
            elif kind == "where":
                frame = sys._current_frames().get(self._main)
                frames: list[FrameType] = []
                while frame is not None:
                    frames.append(frame)
                    frame = frame.f_back
                frames.reverse()
                waiting, place = describe_frames(frames)
                trace = "".join(traceback.format_stack(frames[-1])) if frames else ""
                del frames, frame
                with contextlib.suppress(OSError):
                    self.send("here", (waiting, place, trace))
            else:
                self._inbox.put((kind, value))


@dataclass(frozen=True)
class RankHandle:
    """The parent's end: the process and its connection."""

    rank: int
    process: BaseProcess
    connection: Connection

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message; a rank that is already gone is noticed later, when its answer is missing."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps((kind, value)))


def _ended(handle: RankHandle) -> RankReport:
    """Return the report of a rank whose process ended without an answer."""
    handle.process.join(1.0)
    code = handle.process.exitcode
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        message = f"the process was killed by {name}"
        if name == "SIGKILL":
            message += " (often the system's answer to exhausted memory)"
        return RankReport(
            rank=handle.rank, cause="signal", type_name=name, message=message, time_s=time.monotonic()
        )
    return RankReport(
        rank=handle.rank,
        cause="exit",
        type_name="exit",
        message=f"the process left with status {code} before it returned a result",
        time_s=time.monotonic(),
    )


def collect(
    handles: Sequence[RankHandle],
    *,
    timeout_s: float | None,
    grace_s: float,
    tick: Callable[[], None] | None = None,
    silence_s: float = 0.0,
) -> tuple[dict[int, bytes], list[RankReport]]:
    """Return each rank's pickled result, and the reports of those that gave none, culprit first.

    Waits until every rank answered, until ``grace_s`` after the first failure, or for ``timeout_s`` in all; who has
    not answered by then is asked where it is and reported as "silent". Kills nobody. ``tick`` is called at least
    every 50 ms. With ``silence_s`` each rank is asked where it is a few times in so many seconds; one that answers
    nothing for so long is reported as "stopped".
    """
    start = time.monotonic()
    roll = _RollCall(silence_s, start) if silence_s else None
    deadline = None if timeout_s is None else start + timeout_s
    results: dict[int, bytes] = {}
    reports: dict[int, RankReport] = {}
    open_ = {h.connection: h for h in handles}
    while open_:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            break
        left = 3600.0 if deadline is None else deadline - now
        ready = multiprocessing.connection.wait(list(open_), timeout=min(left, 0.05 if tick else 1.0))
        if tick:
            tick()
        if roll is not None:
            reports |= roll.missing(list(open_.values()), time.monotonic(), {open_[c].rank for c in ready})  # type: ignore[index]
            for rank in reports:
                open_ = {c: h for c, h in open_.items() if h.rank != rank}
            ready = [c for c in ready if c in open_]
        for connection in ready:
            handle = open_[connection]  # type: ignore[index]
            try:
                kind, value = pickle.loads(handle.connection.recv_bytes())
            except (EOFError, OSError):
                reports[handle.rank] = _ended(handle)
                del open_[handle.connection]
            else:
                if kind == "result":
                    results[handle.rank] = value
                    del open_[handle.connection]
                elif kind == "failed":
                    reports[handle.rank] = value
                    del open_[handle.connection]
        if reports:
            first = min(reports.values(), key=lambda r: r.time_s).time_s
            deadline = min(deadline or float("inf"), max(first, start) + grace_s)
    reports.update(_silent(list(open_.values()), now_s=time.monotonic() - start, failed=bool(reports)))
    return results, order_reports(list(reports.values()))


class _RollCall:
    """Asks ranks where they are, so that one whose process is stopped is found although nothing has failed."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[int, float] = {}
        self._due = self._looked = now

    def missing(self, open_: Sequence[RankHandle], now: float, answered: set[int]) -> dict[int, RankReport]:
        """Ask, if it is time; return the ranks of ``open_`` that answered once, and nothing for too long since.

        ``answered`` are those of which a message waits to be read. When this process itself stood still, all get new
        time.
        """
        stood = now - self._looked > self._silence_s / 2
        self._looked = now
        for handle in open_:
            if handle.rank in answered or (stood and handle.rank in self._heard):
                self._heard[handle.rank] = now
        if now >= self._due:
            self._due = now + self._silence_s / 4
            for handle in open_:
                # a pipe that nobody reads fills up
                if now - self._heard.get(handle.rank, now) < self._silence_s / 2:
                    handle.send("roll call")
        return {
            h.rank: RankReport(
                rank=h.rank,
                cause="stopped",
                type_name="no answer",
                message=f"no answer for {now - self._heard[h.rank]:.1f} s: its process is stopped or stuck",
                time_s=now,
            )
            for h in open_
            if now - self._heard.get(h.rank, now) >= self._silence_s
        }


def _silent(handles: Sequence[RankHandle], *, now_s: float, failed: bool) -> dict[int, RankReport]:
    """Ask the ranks that have not answered where they are; wait half a second for the answers."""
    for handle in handles:
        handle.send("where")
    waited = "when the job was ended" if failed else f"after {now_s:.1f} s"
    found: dict[int, RankReport] = {}
    until = time.monotonic() + 0.5
    for handle in handles:
        waiting = place = trace = ""
        with contextlib.suppress(EOFError, OSError):
            while handle.connection.poll(max(0.0, until - time.monotonic())):
                kind, value = pickle.loads(handle.connection.recv_bytes())
                if kind == "here":
                    waiting, place, trace = value
                    break
        found[handle.rank] = RankReport(
            rank=handle.rank,
            cause="silent",
            type_name="no answer",
            message=f"no result {waited}; "
            + (f"waits in {waiting}" if waiting else f"at {place or 'an unknown place'}"),
            time_s=time.monotonic(),
            trace=trace,
            waiting=waiting,
            place=place,
        )
    return found


def end_processes(processes: Sequence[BaseProcess], *, term_s: float = 0.0) -> None:
    """End the processes: SIGTERM, up to ``term_s`` seconds to leave, then SIGKILL; leaves no zombie."""
    if term_s > 0:
        for process in processes:
            if process.is_alive():
                process.terminate()
        until = time.monotonic() + term_s
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(10.0)


def rendezvous(folder: str, rank: int, world_size: int, timeout_s: float, port: int = 0) -> Any:
    """Return a TCPStore on ``port``, or (0) on one that the system chooses; rank 0 writes it down in ``folder``.

    A chosen port is free by construction, so two jobs on one machine cannot meet.

    Raises:
        MeshwrightError: E504 when the port is in use, E508 when rank 0 does not appear.
    """
    import datetime

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    limit = datetime.timedelta(seconds=timeout_s)
    path = os.path.join(folder, "port")
    if rank == 0:
        try:
            store = TCPStore("127.0.0.1", port, world_size, True, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            if "address already in use" not in str(error).lower() and "EADDRINUSE" not in str(error):
                raise
            raise MeshwrightError(
                problem("E504", where="master_port", found=f"port {port} is in use on this machine"),
                ExitCode.ENVIRONMENT,
            ) from error
        with open(f"{path}.part", "w") as file:
            file.write(str(store.port))
        os.rename(f"{path}.part", path)
        return store
    until = time.monotonic() + timeout_s
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise MeshwrightError(
                problem("E508", where=f"rank {rank}", found=f"rank 0 opened no port within {timeout_s:g} s"),
                ExitCode.ENVIRONMENT,
            )
        time.sleep(0.002)
    with open(path) as file:
        found = int(file.read())
    return TCPStore("127.0.0.1", found, world_size, False, timeout=limit, wait_for_workers=False)


@contextlib.contextmanager
def default_group(
    rank: int, world_size: int, *, backend: str, store: Any, timeout_s: float
) -> Iterator[None]:
    """Run the body with torch's default process group; destroyed at the end, unless the body raised.

    After an error the process is about to end, and destroying a group whose peers are gone may wait for them.
    """
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def load_torch() -> None:
    """Import, before ranks are forked, what each of them would import by itself (the first optimizer needs dynamo)."""
    load_modules(("torch.distributed", "torch._dynamo"))
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def watch_signals() -> None:
    """Give a rank its own signal habits: Ctrl-C and a closed terminal are its parent's, SIGTERM ends, SIGUSR1 tells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, ValueError, OSError):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
