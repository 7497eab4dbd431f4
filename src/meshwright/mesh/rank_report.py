"""What a rank says of an error: its cause, where it was and what its tensors were, in the order of blame."""

from __future__ import annotations

import linecache
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from meshwright.base.errors import MeshwrightError

_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was (likely )?closed|recvvalue failed|socket closed"
    r"|application timeout caused pair closure|connection refused|failed to recv, got 0 bytes|remote process exited",
    re.IGNORECASE,
)


_TIMEOUT = re.compile(
    r"timed out|time[- ]?out|deadline exceeded|failed to pass monitoredbarrier", re.IGNORECASE
)


_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)


_WRAPPED = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""How torch's pipelining begins the RuntimeError that it raises from what a stage met."""


_COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend_irecv",
        "barrier",
        "monitored_barrier",
        "new_group",
        "init_process_group",
        "wait_tensor",
        "destroy_process_group",
    ]
)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Why a rank did not return a result.

    Attributes:
        cause: "own" (an error of its own), "peer" (it only lost the connection to another rank), "timeout" (it waited
            in vain), "memory", "signal" (killed), "exit" (it left without a result), "stopped" (its process answered
            nothing for too long), "silent" (it had not answered when the job ended).
        type_name: type of the exception, or name of the signal.
        time_s: monotonic time at which it happened (noticed, for a signal).
        error: the MeshwrightError, when it was one.
        waiting: the collective and shapes it waited in, "" when it did not.
        place: its innermost frame outside torch.
    """

    rank: int
    cause: str
    type_name: str
    message: str
    time_s: float
    trace: str = ""
    error: MeshwrightError | None = None
    waiting: str = ""
    place: str = ""


class RankFailure(Exception):
    """A rank failed: the earliest error that is a rank's own, with its traceback.

    Attributes:
        rank, cause, type_name, trace, error: those of the first report (see RankReport).
        reports: every rank that did not return, culprit first.
    """

    def __init__(self, reports: Sequence[RankReport]) -> None:
        self.reports = tuple(reports)
        first = self.reports[0]
        self.rank = first.rank
        self.cause = first.cause
        self.type_name = first.type_name
        self.message = first.message
        self.trace = first.trace
        self.error = first.error
        lines = [f"rank {first.rank}: {first.type_name}: {first.message}"]
        lines += [
            f"  rank {r.rank}: {r.cause}: {r.type_name}"
            + (f", waits in {r.waiting}" if r.waiting else f", at {r.place}" if r.place else "")
            for r in self.reports
        ]
        super().__init__("\n".join(lines) + (f"\n{first.trace}" if first.trace else ""))

    def __reduce__(self) -> tuple[type[RankFailure], tuple[tuple[RankReport, ...]]]:
        """Pickle by parts."""
        return (RankFailure, (self.reports,))


def order_reports(reports: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports, culprit first: own errors by time; then who kept others waiting; then the rest by time."""
    hang = any(r.cause in ("timeout", "silent") for r in reports)

    def key(report: RankReport) -> tuple[int, float]:
        if report.cause in ("own", "memory", "signal", "exit", "stopped"):
            return (0, report.time_s)
        if report.cause == "silent" and hang and not report.waiting:
            return (1, report.time_s)
        return ({"timeout": 2, "silent": 3, "peer": 4}[report.cause], report.time_s)

    return sorted(reports, key=key)


def root_of(error: BaseException) -> BaseException:
    """Return the exception that a stage met, which torch's pipelining wraps in a RuntimeError; any other as it is."""
    while type(error) is RuntimeError and error.__cause__ is not None and _WRAPPED.search(str(error)):
        error = error.__cause__
    return error


def cause_of(error: BaseException) -> str:
    """Return "memory", "peer", "timeout" or "own" for an exception raised in a rank."""
    error = root_of(error)
    if isinstance(error, MeshwrightError):
        return "timeout" if error.problems[0].code == "E508" else "own"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or _MEMORY.search(text):
        return "memory"
    if isinstance(error, (RuntimeError, ConnectionError)):  # what torch.distributed raises
        if _PEER.search(text):
            return "peer"
        if _TIMEOUT.search(text):
            return "timeout"
    return "own"


def _shape(value: Any) -> str | None:
    """Return "[4, 8] float32" for a tensor (or the first of a list of them), None for anything else."""
    if isinstance(value, (list, tuple)) and value:
        inner = _shape(value[0])
        return None if inner is None else f"{len(value)} x {inner}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return None
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _from_torch(frame: FrameType) -> bool:
    return f"{os.sep}torch{os.sep}" in frame.f_code.co_filename


def describe_frames(frames: Sequence[FrameType | tuple[FrameType, int]]) -> tuple[str, str]:
    """Return (the collective and shapes that these frames, innermost last, wait in or "", the place outside torch)."""
    waiting, place = "", ""
    for entry in reversed(frames):
        frame, line = entry if isinstance(entry, tuple) else (entry, entry.f_lineno)
        code = frame.f_code
        if not waiting and _from_torch(frame) and code.co_name in _COLLECTIVES:
            local = frame.f_locals
            given = code.co_varnames[: code.co_argcount]
            tensors = [f"{name} {text}" for name in given if (text := _shape(local.get(name)))]
            group = getattr(local.get("group"), "group_desc", "") or ""
            over = f" over group {group}" if group and group != "undefined" else ""
            waiting = f"{code.co_name}({', '.join(tensors[:2])}){over}"
        if not _from_torch(frame) and not code.co_filename.startswith("<"):
            place = f"{code.co_filename}:{line} in {code.co_name}"
            source = linecache.getline(code.co_filename, line)
            if not waiting and re.search(r"\.(wait|synchronize)\(\)", source):
                waiting = source.strip()
            break
    return waiting, place


def _trace_frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    frames: list[tuple[FrameType, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def report_error(rank: int, error: BaseException) -> RankReport:
    """Return the report of an exception that ``rank`` raised just now; its trace has what torch wrapped around it too."""
    root = root_of(error)
    waiting, place = describe_frames(_trace_frames(root.__traceback__))
    return RankReport(
        rank=rank,
        cause=cause_of(error),
        type_name=type(root).__name__,
        message=str(root).strip() or "(no message)",
        time_s=time.monotonic(),
        trace="".join(traceback.format_exception(error)),
        error=root if isinstance(root, MeshwrightError) else None,
        waiting=waiting,
        place=place,
    )


def as_text(position: Mapping[str, Any]) -> str:
    """Return a position for people: "pp=0 dp=1, step 3, action 0F2"."""
    parts: list[str] = []
    for name, value in position.items():
        parts.append(str(value) if name == "coordinates" else f"{name} {value}")
    return ", ".join(parts)
