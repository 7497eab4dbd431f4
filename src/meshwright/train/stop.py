"""Being asked to stop or to save: SIGTERM, SIGUSR1 and the time limit, agreed by all ranks between two steps.

A signal sets a flag of the rank that got it. The flag travels with the next step's count of valid tokens
(``train_step(ask=...)``), so asking costs no message; only when a rank asked do all exchange what they were asked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from meshwright.base.axes import WORLD
from meshwright.mesh.device_mesh import MeshView

STOPPED: Final = "stopped.json"
"""The marker in the run folder of a run that was asked to stop and did so in good order."""

TERM, SAVE, TIME = "SIGTERM", "SIGUSR1", "time limit"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the ranks were asked, the same on all of them: ``stop`` is "" or why."""

    stop: str
    save: bool


class Watch:
    """This rank's flags.

    Args:
        max_minutes: the time limit; rank 0's clock counts.
        started: monotonic time at which the run began.
    """

    def __init__(self, rank: int, max_minutes: float | None, started: float) -> None:
        self.term = False
        self.save = False
        self._ends = None if max_minutes is None or rank != 0 else started + 60 * max_minutes

    @property
    def late(self) -> bool:
        """Whether the time limit is over by this rank's clock."""
        return self._ends is not None and time.monotonic() >= self._ends

    @property
    def asks(self) -> bool:
        """Whether this rank has something to say."""
        return self.term or self.save or self.late

    def agree(self, view: MeshView) -> Asked:
        """Return what any rank was asked, and forget a request to save. Every rank calls it.

        Communication: one all_reduce of three numbers on ``world``.
        """
        flags = torch.tensor([self.term, self.save, self.late], dtype=torch.int32, device=view.device)
        group = view.groups.get(WORLD)
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        term, save, late = flags.tolist()
        self.save = False
        return Asked(stop=TERM if term else TIME if late else "", save=bool(save))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGUSR1 while the context is open; a thread that is not the main one cannot, and does not.

        They may have been held back since the rank was started (``mesh.launch``); then they are again afterwards.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_term(*_: Any) -> None:
            self.term = True

        def on_save(*_: Any) -> None:
            self.save = True

        dumped = faulthandler.unregister(signal.SIGUSR1)
        before = [(n, signal.signal(n, f)) for n, f in ((signal.SIGTERM, on_term), (signal.SIGUSR1, on_save))]
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number, _ in before])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before:
                signal.signal(number, handler)
            if dumped:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
