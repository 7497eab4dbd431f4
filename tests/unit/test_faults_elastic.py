"""What ranks hear of each other, which links are slow, what torchrun says of a job, and the layout for fewer ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kill_runs import write_inputs
from meshwright.base.errors import MeshwrightError, problem
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.mesh import env
from meshwright.mesh.beats import Place, Signs, neighbours, silence
from meshwright.mesh.env import RankFacts, TorchrunJob
from meshwright.mesh.launch import LostRank
from meshwright.orchestrate import machine
from meshwright.orchestrate.elastic import restart_notes, smaller_plan
from meshwright.orchestrate.preparing import prepare
from meshwright.orchestrate.run_folder import continues, folder_problems
from meshwright.train.links import LEAST_S, slow_links

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "job-7",
}


# -- signs of life ------------------------------------------------------------------------------------------


def test_a_neighbour_that_fell_silent_is_found_and_the_others_are_not() -> None:
    signs = Signs((1, 2, 3), 4.0, 0.0)
    now = 0.0
    while now < 5.0:
        signs.hear(1, {"at": {"step": 3}}, now)
        if now < 1.2:
            signs.hear(2, {"at": {"step": 3, "action": "0B1"}}, now)
        assert signs.silent(now) == {} or now >= 5.0
        now += 0.5
    signs.hear(1, {}, now)
    assert signs.silent(5.2) == {
        2: pytest.approx(4.2)
    }  # rank 3 was never heard: a firewall is no fault of the rank


def test_a_rank_that_said_goodbye_may_be_silent() -> None:
    signs = Signs((1,), 4.0, 0.0)
    signs.hear(1, {"bye": True}, 0.0)
    assert [signs.silent(t / 2) for t in range(20)] == [{}] * 20


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    signs = Signs((1,), 4.0, 0.0)
    signs.hear(1, {}, 0.5)
    assert signs.silent(0.6) == {}
    assert signs.silent(100.0) == {}  # it did not look for 99 s
    assert signs.silent(101.0) == {}
    assert [bool(signs.silent(100 + t / 2)) for t in range(3, 10)] == [False] * 5 + [True] * 2


def test_ranks_that_are_silent_together_are_told_together() -> None:
    signs = Signs((1, 2), 4.0, 0.0)
    signs.hear(1, {}, 0.0)
    signs.hear(2, {}, 0.9)
    for t in range(1, 8):
        assert signs.silent(t / 2) == {}
    assert sorted(signs.silent(4.1)) == [1, 2]


@pytest.mark.parametrize(("world", "local"), [(4, 2), (16, 4), (64, 8), (17, 17)])
def test_being_a_neighbour_is_mutual_and_reaches_the_next_node(world: int, local: int) -> None:
    for rank in range(world):
        near = neighbours(rank, world, local)
        assert rank not in near
        assert all(rank in neighbours(other, world, local) for other in near)
        if local < world:
            assert any(other // local != rank // local for other in near)


def _places() -> dict[int, Place]:
    return {
        r: Place(rank=r, node=r // 2, host=f"host-{r // 2}", address=f"10.0.0.{1 + r // 2}", port=4000 + r)
        for r in range(4)
    }


def test_e575_names_a_node_or_its_link_when_all_its_ranks_are_silent() -> None:
    facts = RankFacts(
        rank=0, world_size=4, local_rank=0, local_world_size=2, position={"step": 7, "action": "0F1"}
    )
    signs = Signs((1, 2, 3), 4.0, 0.0)
    for rank in (1, 2, 3):
        signs.hear(rank, {"at": {"step": 6 + rank}}, 0.0)
    found = silence(facts, _places(), signs, {2: 4.0, 3: 4.2})
    assert found.code == "E575"
    assert found.where == "rank 0 (node 0, host-0 10.0.0.1; step 7, action 0F1)"
    assert found.found == (
        "no sign from ranks 2, 3 (node 1, host-1 10.0.0.2) for 4.2 s; that node, or the link 10.0.0.1 - 10.0.0.2; "
        "they said last: rank 2: step 8; rank 3: step 9; these answer: 1"
    )
    alone = silence(facts, _places(), signs, {2: 4.0})
    assert "that node" not in alone.found  # rank 3 of the same node answers: it is the process
    assert "these answer: 1, 3" in alone.found


# -- links --------------------------------------------------------------------------------------------------


def test_a_link_is_slow_beside_the_best_of_its_own_kind() -> None:
    where = {r: (r // 2, f"10.0.0.{1 + r // 2}") for r in range(4)}
    best: dict[bool, float] = {}
    even = {
        0: 0.010,
        1: 0.0001,
        2: 0.011,
        3: 0.0001,
    }  # between nodes a hundred times slower than within: no fault
    assert slow_links(even, where, best, 3.0) == []
    (found,) = slow_links(even | {2: 0.050}, where, best, 3.0)
    assert found.ranks == (1, 2)
    assert found.addresses == ("10.0.0.1", "10.0.0.2")
    assert found.times == pytest.approx(5.0)
    assert "W576  link rank 1 (10.0.0.1) -> rank 2 (10.0.0.2)" in found.text()
    assert slow_links(
        {r: 5 * t for r, t in even.items()}, where, best, 3.0
    )  # all at once: beside what they were
    assert slow_links(even | {1: 0.9 * LEAST_S}, where, best, 3.0) == []


# -- torchrun -----------------------------------------------------------------------------------------------


def test_what_torchrun_says_of_the_job() -> None:
    job = env.torchrun_job(TORCHRUN)
    assert job == TorchrunJob(job="job-7", restarts=1, max_restarts=3, node=1, shutdown_s=30.0)
    assert env.torchrun_job({k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RESTART_COUNT"}) is None
    unnamed = env.torchrun_job(
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}
    )
    assert unnamed is not None
    assert unnamed.job.startswith("agent ")
    assert unnamed.job.split("/")[1] == str(psutil.Process().ppid())
    assert unnamed.shutdown_s == 90.0


def test_only_the_job_that_began_a_run_goes_on_with_it(tmp_path: Path) -> None:
    job = env.torchrun_job(TORCHRUN)
    assert job is not None
    assert not continues(tmp_path, job)
    (tmp_path / "run.json").write_text('{"job": "job-7"}')
    assert continues(tmp_path, job)
    (tmp_path / "run.json").write_text('{"job": null}')
    assert not continues(tmp_path, job)
    assert not continues(tmp_path, None)


def _interface(monkeypatch: pytest.MonkeyPatch, *, name: str, own: str, node: int) -> list:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what is set is taken back
    monkeypatch.setattr(env.socket, "gethostbyname", lambda _: name)
    monkeypatch.setattr(env, "local_address", lambda _: own)
    address = SimpleNamespace(address="10.0.0.2")
    monkeypatch.setattr(env.psutil, "net_if_addrs", lambda: {"lo": [], "eth7": [address]})
    facts = env.torchrun_facts(TORCHRUN)
    assert facts is not None
    return env.choose_interface(
        facts, TorchrunJob(job="j", restarts=0, max_restarts=0, node=node, shutdown_s=30.0)
    )


def test_w575_the_interface_towards_rank_0_is_taken_where_the_hosts_name_leads_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (note,) = _interface(monkeypatch, name="127.0.1.1", own="10.0.0.2", node=1)
    assert note.code == "W575"
    assert "interface eth7 (10.0.0.2)" in note.found
    assert env.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_host_whose_name_leads_to_a_network_needs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _interface(monkeypatch, name="10.0.0.2", own="10.0.0.2", node=1) == []
    assert env.os.environ["GLOO_SOCKET_IFNAME"] == ""


@pytest.mark.parametrize(
    ("node", "word"), [(1, "leads to this machine itself on node 1"), (0, "interfaces: eth7")]
)
def test_e579_no_address_that_others_can_reach(monkeypatch: pytest.MonkeyPatch, node: int, word: str) -> None:
    (found,) = _interface(monkeypatch, name="127.0.1.1", own="127.0.0.1", node=node)
    assert found.code == "E579"
    assert word in found.found


def test_ranks_on_several_nodes_all_measure_whatever_one_of_them_has_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    measured: list[int] = []
    monkeypatch.setattr(
        machine, "run_probe", lambda nproc, *_: measured.append(nproc) or {"world_size": nproc}
    )
    for _ in range(2):
        machine.machine_probe(4, lambda _: None)
    assert measured == [4]
    monkeypatch.setattr(machine, "torchrun_facts", lambda: env.torchrun_facts(TORCHRUN))
    for _ in range(2):
        machine.machine_probe(4, lambda _: None)
    assert measured == [4, 4, 4]


def test_a_lost_rank_survives_pickling() -> None:
    lost = pickle.loads(pickle.dumps(LostRank([problem("E511", where="rank 1", found="killed")], 1)))
    assert (type(lost), lost.rank, lost.problems[0].code) == (LostRank, 1, "E511")


# -- fewer ranks --------------------------------------------------------------------------------------------


def _run(folder: Path, *sets: str):
    return resolve(load_run(str(folder / "run.yaml"), [f"run.dir={folder / 'out'}", *sets]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("layout", "ranks"), [("dp=4,zero=3", 2), ("dp=2,pp=2", 3), ("dp=2", 1)])
def test_the_planner_finds_a_layout_for_fewer_ranks_and_keeps_the_rest(
    folder: Path, layout: str, ranks: int
) -> None:
    run = _run(folder)
    ready = prepare(run, plan_path=None, layout=f"{layout},precision=fp64", nproc=None, show=lambda _: None)
    assert ready.cluster is not None
    plan, why = smaller_plan(run, ready.spec, ready.plan, ready.cluster, ranks, exactly=False)
    assert plan.world_size <= ranks
    assert plan.layout.precision == "fp64"
    assert plan.batch.global_batch == ready.plan.batch.global_batch
    assert plan.hash != ready.plan.hash
    assert plan.prediction is not None
    assert why.startswith(f"{ready.plan.world_size} ranks were planned, {ranks} are left")
    assert why.endswith(f"{ready.plan.layout.text()} -> {plan.layout.text()}")


def test_e576_names_the_nearest_number_of_ranks_that_has_a_layout(folder: Path) -> None:
    """Batch 4, 2 layers, 2 heads: nothing divides by 7; under torchrun all ranks must be used."""
    run = _run(folder)
    ready = prepare(run, plan_path=None, layout="dp=4,pp=2", nproc=None, show=lambda _: None)
    assert ready.cluster is not None
    with pytest.raises(MeshwrightError) as caught:
        smaller_plan(run, ready.spec, ready.plan, ready.cluster, 7, exactly=True)
    (found,) = caught.value.problems
    assert found.code == "E576"
    assert "needs 8 ranks; nothing is legal on 7" in found.found
    assert "(--nproc-per-node), or 8" in found.do
    plan, _ = smaller_plan(run, ready.spec, ready.plan, ready.cluster, 7, exactly=False)
    assert f"start {plan.world_size} ranks" in found.do


def test_w574_an_elastic_run_without_checkpoints_and_w579_a_grace_that_torchrun_does_not_give(
    folder: Path,
) -> None:
    run = _run(folder, "run.elastic=true", "run.checkpoint_every=0", "run.grace_s=60")
    job = env.torchrun_job(TORCHRUN)
    assert [p.code for p in restart_notes(run, job)] == ["W574", "W579"]
    assert restart_notes(_run(folder, "run.elastic=true"), job) == []


def test_restarts_without_elastic_have_no_effect_and_that_is_said(folder: Path) -> None:
    assert any("run.max_restarts = 5" in w.found for w in _run(folder, "run.max_restarts=5").warnings)
    assert not _run(folder, "run.max_restarts=5", "run.elastic=true").warnings


# -- the run folder -----------------------------------------------------------------------------------------


def test_a_folder_in_which_nothing_was_trained_may_be_used_again(folder: Path) -> None:
    plan = SimpleNamespace(hash="h")
    home = folder / "out"
    home.mkdir()
    (home / "run.json").write_text('{"plan_hash": "h"}')
    (home / "metrics.jsonl").touch()
    assert folder_problems(home, plan, resume=False) == []  # type: ignore[arg-type]
    (home / "checkpoints" / "step-2").mkdir(parents=True)
    assert [p.code for p in folder_problems(home, plan, resume=False)] == ["E541"]  # type: ignore[arg-type]
    (home / "checkpoints" / "step-2").rmdir()
    (home / "metrics.jsonl").write_text("{}")
    assert [p.code for p in folder_problems(home, plan, resume=False)] == ["E541"]  # type: ignore[arg-type]
