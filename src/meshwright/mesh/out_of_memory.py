"""What an allocator's last message says: memory in pieces, memory that others hold, or too little of it.

A device can be full though much of it is unused: torch reserves segments, and a hole in one serves no larger request.
More memory, or a smaller job, is the wrong cure for that; the text of torch's error has the figures that tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from meshwright.base.units import format_bytes, parse_bytes

_SIZE: Final = r"([0-9]+(?:\.[0-9]+)? (?:bytes|[KMGT]iB))"
_PATTERNS: Final = {
    "asked": re.compile(rf"[Tt]ried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "process": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
FRAGMENTED: Final = "fragmented"
OTHERS: Final = "others"
SHORT: Final = "short"


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """A device at the moment that a request failed; all in bytes.

    Attributes:
        allocated: held by tensors of this process.
        reserved: taken from the device by this process's allocator, ``allocated`` included.
        asked: the request.
        total: of the device.
        free: unreserved by anyone; by default what ``reserved`` leaves.
        outside: taken by this process beside its allocator (the driver's context, communication buffers).
    """

    allocated: int
    reserved: int
    asked: int
    total: int
    free: int | None = None
    outside: int = 0

    @property
    def left(self) -> int:
        """Bytes of the device that nobody has reserved."""
        return max(0, self.total - self.reserved - self.outside) if self.free is None else self.free

    @property
    def holes(self) -> int:
        """Bytes reserved and unused."""
        return max(0, self.reserved - self.allocated)

    @property
    def others(self) -> int:
        """Bytes that other processes hold."""
        return max(0, self.total - self.left - self.reserved - self.outside)


@dataclass(frozen=True)
class Diagnosis:
    """Why there was no memory: ``kind`` (FRAGMENTED, OTHERS or SHORT), the figures as ``why``, and the cure."""

    kind: str
    why: str
    do: str


def read_state(message: str) -> MemoryState | None:
    """Return the figures in the text of torch's out-of-memory error of a GPU; None where it does not give them all."""
    found: dict[str, int] = {}
    for name, pattern in _PATTERNS.items():
        match = pattern.search(message)
        if match is not None:
            found[name] = parse_bytes(match.group(1).replace("bytes", "B"))
    if not {"asked", "total", "allocated", "unallocated"} <= set(found):
        return None
    reserved = found["allocated"] + found["unallocated"]
    return MemoryState(
        allocated=found["allocated"],
        reserved=reserved,
        asked=found["asked"],
        total=found["total"],
        free=found.get("free"),
        outside=max(0, found.get("process", reserved) - reserved),
    )


def diagnose(state: MemoryState) -> Diagnosis:
    """Return whether the request failed for holes, for other processes, or for want of memory.

    With as many bytes unused as were asked for, in the allocator's holes and outside it together, the memory is there
    and lies in pieces. Otherwise, where others hold what is missing, they are the reason; else the job is too large.
    """
    unused = state.holes + state.left
    figures = (
        f"{format_bytes(state.asked)} asked, {format_bytes(state.allocated)} allocated, "
        f"{format_bytes(state.reserved)} reserved by torch, {format_bytes(state.left)} free "
        f"of {format_bytes(state.total)}"
    )
    if unused >= state.asked:
        return Diagnosis(
            FRAGMENTED,
            f"fragmentation: {figures}: {format_bytes(unused)} are unused, but no piece of them is large enough",
            "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment of the job and start it again; "
            "a smaller job is not needed for that",
        )
    missing = format_bytes(state.asked - unused)
    if state.others >= state.asked - unused:
        return Diagnosis(
            OTHERS,
            f"other processes hold {format_bytes(state.others)} of the device: {figures}: {missing} are missing",
            "end the other processes on this device (nvidia-smi lists them), or take another one",
        )
    return Diagnosis(
        SHORT,
        f"a true shortage: {figures}: {missing} are missing even if every unused byte lay in one piece",
        "lower the micro-batch, recompute, shard more (zero, tp, pp), or use meshwright plan to see what fits; "
        "settings of the allocator cannot help",
    )


def told(message: str) -> dict[str, str]:
    """Return ``why`` and ``do`` of E512 for the text of an error; empty where it has no figures to judge by."""
    state = read_state(message)
    if state is None:
        return {}
    found = diagnose(state)
    return {"why": found.why, "do": found.do}
