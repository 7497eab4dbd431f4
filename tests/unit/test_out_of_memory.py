"""Out-of-memory reports: holes, other processes, or a true shortage, each with its own cure."""

from __future__ import annotations

import pytest

from meshwright.base.units import GIB
from meshwright.mesh.env import RankFacts
from meshwright.mesh.join import _told
from meshwright.mesh.out_of_memory import FRAGMENTED, OTHERS, SHORT, MemoryState, diagnose, read_state, told


def text(asked: float, total: float, free: float, used: float, allocated: float, unallocated: float) -> str:
    """Return what torch says of such a device, in GiB."""
    return (
        f"CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of {total:.2f} GiB of which "
        f"{free:.2f} GiB is free. Including non-PyTorch memory, this process has {used:.2f} GiB memory in use. Of the "
        f"allocated memory {allocated:.2f} GiB is allocated by PyTorch, and {unallocated:.2f} GiB is reserved by PyTorch "
        "but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def state(allocated: float, reserved: float, asked: float, total: float, **more: float) -> MemoryState:
    sizes = {"allocated": allocated, "reserved": reserved, "asked": asked, "total": total} | more
    return MemoryState(**{name: int(size * GIB) for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (state(40, 76, 8, 80), FRAGMENTED),
        (state(75, 76, 8, 80), SHORT),
        (state(70, 76, 8, 80), FRAGMENTED),  # 6 in holes and 4 outside: neither is enough, both together are
        (state(73, 76, 8, 80), SHORT),  # 7 of 8
        (state(10, 12, 8, 80, free=2), OTHERS),
        (state(70, 71, 8, 80, free=1, outside=8), SHORT),  # what is missing is the process's own
    ],
)
def test_h166_holes_are_told_from_a_true_shortage(found: MemoryState, kind: str) -> None:
    assert diagnose(found).kind == kind


def test_h166_each_has_its_own_cure_and_its_figures() -> None:
    """H166: the reports of (allocated 40, reserved 76, ask 8, card 80) and of (75, 76, 8, 80) advise different things."""
    pieces = told(text(8, 80, 4, 76, 40, 36))
    short = told(text(8, 80, 4, 76, 75, 1))
    assert "fragmentation" in pieces["why"]
    assert "40.00 GiB are unused" in pieces["why"]
    assert "expandable_segments" in pieces["do"]
    assert "micro-batch" not in pieces["do"]
    assert "true shortage" in short["why"]
    assert "3.00 GiB are missing" in short["why"]
    assert "micro-batch" in short["do"]
    assert "expandable_segments" not in short["do"]


def test_h166_the_text_of_torch_is_read() -> None:
    found = read_state(text(8, 79.15, 1.5, 77.5, 40, 36.5))
    assert found is not None
    assert (found.asked, found.reserved, found.left) == (8 * GIB, int(76.5 * GIB), int(1.5 * GIB))
    assert found.outside == GIB
    assert found.others == pytest.approx(0.15 * GIB, abs=2)
    assert read_state("CUDA out of memory. Tried to allocate 20 bytes.") is None
    assert told("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes.") == {}


def test_h166_the_report_of_a_rank_has_the_diagnosis() -> None:
    class OutOfMemoryError(RuntimeError):  # as torch names it
        pass

    facts = RankFacts(rank=1, world_size=2, local_rank=1, local_world_size=2, position={"step": 4})
    for allocated, word in ((40, "fragmentation"), (75, "true shortage")):
        error = _told(OutOfMemoryError(text(8, 80, 4, 76, allocated, 76 - allocated)), facts)
        assert error is not None
        first = error.problems[0]
        assert (first.code, first.where, int(error.exit_code)) == ("E512", "rank 1 (step 4)", 4)
        assert word in first.why
