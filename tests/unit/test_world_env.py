"""What the environment says of a rank, and the checks of the world that need no torch."""

from __future__ import annotations

import pytest

from meshwright.base.codes.world import CODES
from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.mesh import env

GOOD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}


def test_torchrun_facts_are_typed() -> None:
    facts = env.torchrun_facts(GOOD)
    assert facts is not None
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (5, 8, 1, 4)
    assert (facts.master_addr, facts.master_port) == ("node0", 29501)


def test_no_launcher_no_facts() -> None:
    assert env.torchrun_facts({"WORLD_SIZE": "8"}) is None


def test_one_node_may_leave_the_local_world_size_out() -> None:
    facts = env.torchrun_facts({k: v for k, v in GOOD.items() if k != "LOCAL_WORLD_SIZE"})
    assert facts is not None
    assert facts.local_world_size == 8


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"MASTER_PORT": None, "WORLD_SIZE": None}, "WORLD_SIZE, MASTER_PORT not set"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": "8"}, "RANK 8 with WORLD_SIZE 8"),
        ({"RANK": "-1"}, "RANK -1 with WORLD_SIZE 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK 4 with LOCAL_WORLD_SIZE 4"),
    ],
)
def test_e507_contradictions_are_named(change: dict[str, str | None], found: str) -> None:
    environ = {k: v for k, v in (GOOD | change).items() if v is not None}
    with pytest.raises(MeshwrightError) as caught:
        env.torchrun_facts(environ)
    assert caught.value.problems[0].code == "E507"
    assert caught.value.problems[0].found == found
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def test_e501_world_size_against_plan() -> None:
    assert env.check_world_size(4, 4) == []
    (one,) = env.check_world_size(8, 4)
    assert (one.code, one.found) == ("E501", "4 ranks started, the plan needs 8")
    assert "--nproc 8" in one.do


@pytest.mark.parametrize(
    ("text", "names"),
    [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("0,-1,2", ("0",)), (" GPU-ab , 1", ("GPU-ab", "1"))],
)
def test_visible_devices(text: str, names: tuple[str, ...]) -> None:
    assert env.visible_devices({"CUDA_VISIBLE_DEVICES": text}) == names
    assert env.visible_devices({}) is None


def test_h163_devices_2_and_3_for_four_processes_are_refused_and_for_two_are_mapped() -> None:
    visible = env.visible_devices({"CUDA_VISIBLE_DEVICES": "2,3"})
    devices, problems = env.device_map(4, 8, visible)
    assert devices == ()
    assert problems[0].code == "E502"
    assert problems[0].found == "devices 2 < processes 4 (2, 3)"
    assert "start 2 processes" in problems[0].do
    assert env.device_map(2, 8, visible) == (("2", "3"), [])


def test_h163_without_a_list_the_driver_counts() -> None:
    assert env.device_map(2, 3) == (("0", "1"), [])
    assert [p.code for p in env.device_map(2, 0)[1]] == ["E502"]


def test_e503_a_device_listed_twice() -> None:
    _, problems = env.device_map(2, 8, ("1", "1"))
    assert [(p.code, p.found) for p in problems] == [("E503", "device 1 is listed more than once")]


def test_threads_and_debug_level() -> None:
    assert env.threads_per_rank({}) == 1
    assert env.threads_per_rank({"OMP_NUM_THREADS": "4"}) == 4
    assert env.threads_per_rank({"OMP_NUM_THREADS": "0"}) == 1
    assert env.threads_per_rank({"OMP_NUM_THREADS": "many"}) == 1
    assert env.debug_level({}) == "OFF"
    assert env.debug_level({"TORCH_DISTRIBUTED_DEBUG": "detail"}) == "DETAIL"


def test_at_keeps_what_is_not_said_again() -> None:
    told: list[dict[str, object]] = []
    facts = env.RankFacts(
        rank=0, world_size=1, local_rank=0, local_world_size=1, tell=lambda p: told.append(dict(p))
    )
    facts.at(coordinates="pp=0", step=1, action="0F0")
    facts.at(action="0F1")
    assert told[-1] == {"coordinates": "pp=0", "step": 1, "action": "0F1"}


def test_every_page_is_written() -> None:
    for info in CODES:
        assert info.code.startswith("E5")
        assert 3 <= len(info.page.splitlines()) <= 8 or len(info.page) > 120, info.code
        assert info.why
        assert info.do
