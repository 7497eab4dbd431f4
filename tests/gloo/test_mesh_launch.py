"""One-shot jobs: results and output, and what is said when a rank fails, is killed, hangs or is told to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.mesh.env import RankFacts
from meshwright.mesh.launch import run_local
from meshwright.mesh.rank_process import rendezvous
from meshwright.mesh.rank_report import RankFailure, RankReport, cause_of, order_reports, report_error

pytestmark = pytest.mark.gloo


def add_ranks(facts: RankFacts, payload: Any) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(facts.rank)])
    dist.all_reduce(value)
    print(f"rank {facts.rank} of {facts.world_size} got {payload}")
    print(f"aside of rank {facts.rank}", file=sys.stderr)
    return facts.rank, value.item(), facts.master_port


def raise_x(facts: RankFacts, payload: Any) -> None:
    facts.at(coordinates=f"dp_shard={facts.rank}", step=3, action="0B1")
    if facts.rank == 1:
        raise ValueError("x")
    add_ranks(facts, payload)


def refuse_on_one(facts: RankFacts, payload: Any) -> None:
    if facts.rank == 1:
        raise MeshwrightError(problem("E502", where="devices", found="devices 1 < processes 2"), ExitCode.NO)
    add_ranks(facts, payload)


def sleep_before_all_reduce(facts: RankFacts, payload: Any) -> None:
    import torch
    import torch.distributed as dist

    for step in range(3):
        facts.at(step=step, action="all_reduce")
        if facts.rank == 2 and step == 2:
            facts.at(step=step, action="reading data")
            time.sleep(60)
        dist.all_reduce(torch.ones(4, 2))


def differ(facts: RankFacts, payload: Any) -> None:
    import torch
    import torch.distributed as dist

    if facts.rank == 0:
        dist.recv(torch.ones(3), src=1)
    else:
        dist.recv(torch.ones(5), src=0)


def die(facts: RankFacts, payload: Any) -> None:
    facts.at(step=7, action="optimizer")
    if facts.rank == 1:
        if payload == "exit":
            sys.exit(5)
        if payload == "memory":
            import torch

            torch.empty(2**55)
        os.kill(os.getpid(), payload)
        time.sleep(5)
    add_ranks(facts, payload)


def wait_long(facts: RankFacts, payload: Any) -> None:
    Path(payload, f"pid-{facts.rank}").write_text(str(os.getpid()))
    time.sleep(60)


def test_results_by_rank_and_rank_0_speaks(tmp_path: Path) -> None:
    lines: list[str] = []
    results = run_local(add_ranks, 3, "cake", on_line=lines.append, log_dir=tmp_path)
    assert [r[:2] for r in results] == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert lines == ["rank 0 of 3 got cake"]
    assert (tmp_path / "rank-0.log").read_text() == "aside of rank 0\n"
    assert (tmp_path / "rank-2.log").read_text() == "rank 2 of 3 got cake\naside of rank 2\n"


def test_rank_0_is_passed_through(capsys: pytest.CaptureFixture[str]) -> None:
    run_local(add_ranks, 1, 5)
    assert capsys.readouterr().out == "rank 0 of 1 got 5\n"


def test_h161_first_line_names_rank_exception_and_log_file(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(MeshwrightError) as caught:
        run_local(raise_x, 2, None, log_dir=tmp_path)
    assert time.monotonic() - start < 10
    log = tmp_path / "rank-1.log"
    line = str(caught.value).splitlines()[0]
    assert line == f"E510  rank 1 (dp_shard=1, step 3, action 0B1): ValueError: x (log: {log})"
    assert caught.value.exit_code is ExitCode.FAULT
    assert "raise_x" in log.read_text()


def test_a_rank_keeps_its_own_problem_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as caught:
        run_local(refuse_on_one, 2, None, log_dir=tmp_path)
    assert caught.value.exit_code is ExitCode.NO
    first = caught.value.problems[0]
    assert (first.code, first.where, first.found) == ("E502", "rank 1: devices", "devices 1 < processes 2")
    assert str(tmp_path / "rank-1.log") in first.do


@pytest.mark.parametrize("limit", ["collective", "job"])
def test_h160_a_hang_names_the_missing_rank_and_what_the_others_wait_in(tmp_path: Path, limit: str) -> None:
    start = time.monotonic()
    limits = {"collective_timeout_s": 2.0} if limit == "collective" else {"timeout_s": 5.0}
    with pytest.raises(MeshwrightError) as caught:
        run_local(sleep_before_all_reduce, 4, None, log_dir=tmp_path, **limits)
    assert time.monotonic() - start < 12
    first = caught.value.problems[0]
    assert first.code == "E513"
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert first.where == "rank 2 (step 2, action reading data)"
    assert "ranks 0, 1, 3 in all_reduce(tensor [4, 2] float32)" in first.found
    assert "in sleep_before_all_reduce" in first.found
    assert "rank 0: step 2, action all_reduce" in first.needs


def test_when_all_wait_the_report_says_in_what(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as caught:
        run_local(differ, 2, None, log_dir=tmp_path, timeout_s=2.0)
    found = caught.value.problems[0].found
    assert found.startswith("every rank waits: ")
    assert "rank 0 in recv(tensor [3] float32)" in found
    assert "rank 1 in recv(tensor [5] float32)" in found


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [
        (int(signal.SIGKILL), "E511", "SIGKILL"),
        ("exit", "E514", "status 5"),
        ("memory", "E512", "allocate"),
    ],
)
def test_a_lost_rank_is_an_environment_failure(tmp_path: Path, how: Any, code: str, word: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        run_local(die, 2, how, log_dir=tmp_path)
    first = caught.value.problems[0]
    assert (first.code, first.where) == (code, "rank 1 (step 7, action optimizer)")
    assert word in first.found
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def _one_of_two(queue: Any, name: str) -> None:
    queue.put(run_local(add_ranks, 2, name, on_line=lambda _: None))


def test_h162_two_runs_at_once_both_end_well() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    runs = [context.Process(target=_one_of_two, args=(queue, name)) for name in ("a", "b")]
    for run in runs:
        run.start()
    results = [queue.get() for _ in runs]
    for run in runs:
        run.join(10)
    assert [run.exitcode for run in runs] == [0, 0]
    assert all([r[1] for r in result] == [1.0, 1.0] for result in results)
    assert results[0][0][2] != results[1][0][2]  # each had its own port


def test_h162_a_port_that_is_taken_is_refused_clearly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshwrightError) as caught:
            run_local(add_ranks, 1, None, master_port=port)
    assert caught.value.problems[0].code == "E504"
    assert str(port) in caught.value.problems[0].found


def _launch(folder: str, queue: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_local(wait_long, 2, folder)
    except MeshwrightError as error:
        queue.put((error.problems[0].code, int(error.exit_code)))
    except KeyboardInterrupt:
        queue.put(("interrupted", 0))


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGTERM, ("E515", 4)), (signal.SIGINT, ("interrupted", 0)), (signal.SIGKILL, None)],
)
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals, said: Any) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    launcher = context.Process(target=_launch, args=(str(tmp_path), queue))
    launcher.start()
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    until = time.monotonic() + 20
    while not all(p.exists() and p.read_text() for p in pids):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert launcher.pid is not None
    os.kill(launcher.pid, number)
    launcher.join(10)
    assert launcher.exitcode is not None
    if said:
        assert queue.get() == said
    until = time.monotonic() + 5
    for path in pids:
        while _alive(int(path.read_text())):
            assert time.monotonic() < until
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_ranks_at_all_is_refused() -> None:
    with pytest.raises(MeshwrightError) as caught:
        run_local(add_ranks, 0, None)
    assert caught.value.problems[0].code == "E501"


def _as_torchrun(queue: Any, rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    queue.put((rank, run_local(add_ranks, 2, None)))


def test_under_torchrun_this_process_is_the_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=_as_torchrun, args=(queue, rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    results = dict(queue.get() for _ in ranks)
    for rank in ranks:
        rank.join(10)
    assert {r: [x[:2] for x in found] for r, found in results.items()} == {0: [(0, 1.0)], 1: [(1, 1.0)]}


def multiply(facts: RankFacts, payload: Any) -> tuple[float, int]:
    import torch

    x = torch.ones(600, 600)
    return (x @ x)[0, 0].item(), torch.get_num_threads()


def _after_threads(queue: Any) -> None:
    import torch

    torch.set_num_threads(2)
    x = torch.rand(1500, 1500)
    (x @ x + x).sum()
    queue.put(run_local(multiply, 2, None, timeout_s=30.0))


def test_a_parent_that_used_threads_can_still_fork_ranks() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    parent = context.Process(target=_after_threads, args=(queue,))
    parent.start()
    assert queue.get() == [(600.0, 1)] * 2
    parent.join(10)


def test_ranks_with_threads_are_spawned(tmp_path: Path) -> None:
    lines: list[str] = []
    results = run_local(add_ranks, 2, "tea", on_line=lines.append, log_dir=tmp_path, threads=2)
    assert [r[:2] for r in results] == [(0, 1.0), (1, 1.0)]
    assert lines == ["rank 0 of 2 got tea"]


def test_e505_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(MeshwrightError) as caught:
        run_local(add_ranks, 2, None)
    assert caught.value.problems[0].code == "E505"
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def test_e502_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(MeshwrightError) as caught:
        run_local(add_ranks, 4, None, device="cuda")
    assert caught.value.problems[0].found == "devices 2 < processes 4 (2, 3)"


def test_e508_rank_0_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError) as caught:
        rendezvous(str(tmp_path), 1, 2, 0.2)
    assert caught.value.problems[0].code == "E508"
    assert cause_of(caught.value) == "timeout"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"), "peer"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "timeout"),
        (RuntimeError("Ranks 1 failed to pass monitoredBarrier in 2000 ms"), "timeout"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "own"),
        (ValueError("timed out"), "own"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "memory"),
    ],
)
def test_causes(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


@pytest.mark.parametrize(
    ("inner", "cause"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."), "peer"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "timeout"),
        (MemoryError("of a stage"), "memory"),
        (ValueError("x"), "own"),
        (MeshwrightError(problem("E570", where="step 1", found="nan")), "own"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
@pytest.mark.parametrize("text", ["[Stage 0] failed to run forward:", "Failed to run stage backward:"])
def test_what_a_stage_met_is_reported_not_what_torch_wraps_around_it(inner, cause, text) -> None:
    """A rank that lost the one that was killed is not the culprit, in a pipeline neither."""
    try:
        try:
            raise inner
        except Exception as error:
            raise RuntimeError(f"\n            {text}\n            args: ()") from error
    except RuntimeError as error:
        report = report_error(1, error)
    assert (report.cause, report.type_name, report.message) == (
        cause,
        type(inner).__name__,
        str(inner).strip(),
    )
    assert (report.error is inner) == isinstance(inner, MeshwrightError)
    assert text in report.trace
    assert type(inner).__name__ in report.trace
    own = RuntimeError("of the user")
    own.__cause__ = inner
    assert (report_error(1, own).cause, report_error(1, own).message) == ("own", "of the user")


def test_the_culprit_comes_first() -> None:
    def report(rank: int, cause: str, time_s: float, waiting: str = "") -> RankReport:
        return RankReport(rank=rank, cause=cause, type_name="T", message="m", time_s=time_s, waiting=waiting)

    reports = [
        report(0, "peer", 1.0),
        report(1, "timeout", 2.0, "all_reduce"),
        report(2, "own", 3.0),
        report(3, "signal", 2.5),
        report(4, "silent", 4.0),
        report(5, "silent", 4.0, "barrier"),
    ]
    assert [r.rank for r in order_reports(reports)] == [3, 2, 4, 1, 5, 0]
    assert RankFailure(order_reports(reports)).rank == 3
