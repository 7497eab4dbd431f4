"""Signals to a job: handed on to its ranks, or its end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.mesh.rank_process import (
    RankHandle,
)

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that a job may hand on to its ranks."""


class Stopped(Exception):
    """The launching process received SIGTERM."""


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the ranks are ended; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Forward:
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
        """Raise Stopped when the time to stop is over."""
        if self._until is not None and time.monotonic() >= self._until:
            raise Stopped

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
