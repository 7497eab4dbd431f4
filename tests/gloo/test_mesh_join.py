"""Ranks that torchrun starts again find each other, not the addresses of those that are gone."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.base.errors import MeshwrightError, problem
from meshwright.mesh.env import RankFacts
from meshwright.mesh.join import _told, meet

pytestmark = pytest.mark.gloo


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5), wait_for_workers=False)


def start(store: Any, ranks: list[int], world: int) -> dict[int, str]:
    """Let some ranks of a start meet, each in a thread with a connection of its own; return the names they agreed on."""
    names: dict[int, str] = {}

    def be(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, 1, False, timeout=timedelta(seconds=5))
        try:
            names[rank] = meet(own, rank, world, 1.0)
        except RuntimeError as error:
            names[rank] = str(error)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_each_start_has_a_name_of_its_own(store: Any) -> None:
    seen: list[str] = []
    for world in (3, 3, 2, 4):
        names = start(store, list(range(world)), world)
        assert len(set(names.values())) == 1
        assert len(names) == world
        assert names[0] not in seen
        seen.append(names[0])


def test_a_start_that_a_rank_missed_leaves_nothing_that_the_next_one_takes(store: Any) -> None:
    missed = start(store, [0, 2], 3)
    assert missed[0] == "timed out: rank 0 waits for 1 of 3 ranks: [1]"
    alone = start(store, [1, 2], 3)  # rank 0 is not there yet: what it said before is no answer
    assert set(alone.values()) == {"timed out: rank 1 waits for rank 0", "timed out: rank 2 waits for rank 0"}
    names = start(store, [0, 1, 2], 3)
    assert len(set(names.values())) == 1
    assert names[0].startswith("meshwright/")
    assert names[0] != missed[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"
            ),
            "E574",
        ),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), "E513"),
        (MemoryError("no memory"), "E512"),
        (ValueError("x"), None),
        (MeshwrightError(problem("E570", where="step 1", found="NaN")), None),
    ],
)
def test_an_error_that_comes_from_another_rank_is_told_as_such(error: Exception, code: str | None) -> None:
    facts = RankFacts(
        rank=1, world_size=2, local_rank=1, local_world_size=2, position={"step": 4, "action": "0F1"}
    )
    told = _told(error, facts)
    assert (told.problems[0].code if told else None) == code
    if told:
        assert told.problems[0].where == "rank 1 (step 4, action 0F1)"
        assert int(told.exit_code) == 4
