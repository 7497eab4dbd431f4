"""A terminal that closes is SIGTERM to a job, for whoever runs it and for every rank; nohup's jobs outlive it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.mesh import signals

RANKS = (101, 102)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Give what would be sent to the ranks; this process's own handlers are put back."""
    found: list[tuple[int, int]] = []
    real = os.kill
    monkeypatch.setattr(
        signals.os, "kill", lambda pid, n: found.append((pid, n)) if pid in RANKS else real(pid, n)
    )
    before = {n: signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM)}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def forward(grace_s: float) -> Any:
    handles: Any = [SimpleNamespace(process=SimpleNamespace(pid=pid)) for pid in RANKS]
    return signals.Forward(handles, grace_s)


def test_a_closed_terminal_is_sigterm(sent: list[tuple[int, int]]) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))  # as an elastic job notes it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    job = forward(0.0)
    with job.signals():
        job.check()
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(signals.Stopped):  # the time to save is counted
            job.check()
    assert sent == [(pid, signal.SIGTERM) for pid in RANKS]
    assert told == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_job_that_is_to_outlive_its_terminal_does(sent: list[tuple[int, int]]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = forward(0.0)
    with job.signals():
        signal.raise_signal(signal.SIGHUP)
        job.check()
    assert sent == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ranks_leave_it_to_their_parent(sent: list[tuple[int, int]]) -> None:
    pid = os.fork()
    if not pid:
        from meshwright.mesh.rank_process import watch_signals

        watch_signals()
        os._exit(7 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
