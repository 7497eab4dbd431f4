"""The pool itself: results, errors with their own rank first, signals, hangs, and no state between jobs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest
from proofs import SMALL, prove

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.mesh.pool import RankPool
from meshwright.mesh.rank_report import RankFailure

pytestmark = pytest.mark.gloo


def sum_of_ranks(rank: int, world_size: int, add: float = 0.0) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank) + add])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return value.item()


def raise_on(rank: int, world_size: int, guilty: int) -> float:
    if rank == guilty:
        raise ValueError("x marks the spot")
    return sum_of_ranks(rank, world_size)


def refuse_on(rank: int, world_size: int, guilty: int) -> float:
    if rank == guilty:
        raise MeshwrightError(problem("E501", found="3 ranks"), ExitCode.ENVIRONMENT)
    return sum_of_ranks(rank, world_size)


def die_on(rank: int, world_size: int, guilty: int, number: int) -> float:
    if rank == guilty:
        faulthandler.disable()  # its stack is not news here
        os.kill(os.getpid(), number)
        time.sleep(5)
    return sum_of_ranks(rank, world_size)


def sleep_on(rank: int, world_size: int, guilty: int) -> float:
    if rank == guilty:
        time.sleep(60)
    return sum_of_ranks(rank, world_size)


def mismatch(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), src=0)


def leave_state(rank: int, world_size: int) -> int:
    import torch
    import torch.distributed as dist

    dist.new_group([0])
    torch.manual_seed(99 + rank)
    torch.set_default_dtype(torch.float64)
    return os.getpid()


def look_at_state(rank: int, world_size: int) -> tuple[int, float, str, int]:
    import torch

    return (
        os.getpid(),
        torch.rand(1).item(),
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
    )


def what_is_held(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many groups' event loops (threads that have run, so that they have their name) and parameters live."""
    import gc

    import torch

    tasks = Path("/proc/self/task")
    names = (folder.joinpath("comm").read_text().strip() for folder in tasks.iterdir())
    held = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Parameter)]
    return sum(name == "gloo_tcp_loop" for name in names), len(held)


def tensor_result(rank: int, world_size: int) -> object:
    import torch

    return torch.full((3,), float(rank))


@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_results_come_back_by_rank(pool: RankPool, nproc: int) -> None:
    total = nproc * (nproc - 1) / 2
    assert pool.run(sum_of_ranks, nproc) == [total] * nproc
    assert pool.run(sum_of_ranks, nproc, add=1.0) == [total + nproc] * nproc
    assert [t.tolist() for t in pool.run(tensor_result, nproc)] == [[float(r)] * 3 for r in range(nproc)]


def test_a_job_leaves_no_state_to_the_next(pool: RankPool) -> None:
    first = pool.run(leave_state, 2)
    pids = pool.run(look_at_state, 2)
    assert [p[0] for p in pids] == first  # the same processes
    assert pids[0][1:] == pids[1][1:]
    assert pids[0][2:] == ("torch.float32", 1)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "dp=2,offload=parameters"])
def test_a_model_that_is_gone_leaves_no_group_and_no_thread(pool: RankPool, layout: str) -> None:
    """Hooks on parameters and caches of meshes hold nothing: each group kept is seven threads that wake up all day."""
    before = pool.run(what_is_held, 2)
    assert prove(pool, layout, config=SMALL | {"num_hidden_layers": 1}, steps=1, seq_len=8)["passed"]
    assert pool.run(what_is_held, 2) == before


def test_an_exception_names_its_own_rank_first_and_the_pool_lives_on(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        pool.run(raise_on, 3, 1)
    assert time.monotonic() - start < 10
    failure = caught.value
    assert (failure.rank, failure.type_name, failure.message) == (1, "ValueError", "x marks the spot")
    assert "raise_on" in failure.trace
    assert str(failure).startswith("rank 1: ValueError: x marks the spot")
    assert pool.run(sum_of_ranks, 3) == [3.0] * 3


def test_a_meshwright_error_comes_back_whole(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(refuse_on, 2, 1)
    error = caught.value.error
    assert error is not None
    assert error.problems[0].code == "E501"
    assert error.exit_code is ExitCode.ENVIRONMENT


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_killed_rank_is_reported_by_the_name_of_the_signal(pool: RankPool, number: signal.Signals) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(die_on, 2, 1, int(number))
    assert (caught.value.rank, caught.value.cause, caught.value.type_name) == (1, "signal", number.name)
    assert pool.run(sum_of_ranks, 2) == [1.0] * 2


def test_a_hang_ends_at_the_limit_and_names_who_is_missing(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        pool.run(sleep_on, 3, 2, timeout_s=2.0)
    assert time.monotonic() - start < 8
    failure = caught.value
    assert failure.rank == 2
    assert "sleep_on" in failure.reports[0].place
    waiting = [r for r in failure.reports if r.rank != 2]
    assert len(waiting) == 2
    assert all("all_reduce" in r.waiting and "[1] float32" in r.waiting for r in waiting)
    assert pool.run(sum_of_ranks, 3) == [3.0] * 3


def test_a_mismatch_of_collectives_is_an_error_and_not_a_hang(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="mismatch"):
        pool.run(mismatch, 2, timeout_s=20)


def test_no_worker_outlives_the_pool() -> None:
    with RankPool(max_workers=2) as ranks:
        pids = ranks.run(leave_state, 2)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_more_ranks_than_the_pool_holds_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="9 ranks"):
        pool.run(sum_of_ranks, 9)
