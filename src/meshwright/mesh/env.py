"""The only place of the torch half that reads (or, in a rank of our own, sets) the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _nowhere(position: Mapping[str, Any]) -> None:
    """Drop a position: nobody watches this rank."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Who this rank is: what torchrun would put into the environment, as values.

    Attributes:
        device: "cpu" or "cuda:N" (N counts the visible devices).
        backend: "gloo" or "nccl".
        log_file: where this rank's output goes ("" when nobody collects it).
        position: what the rank last said of itself through ``at``.
        tell: takes each new position; the launcher's reads it from the other side.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str = "cpu"
    backend: str = "gloo"
    log_file: str = ""
    position: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[Mapping[str, Any]], None] = _nowhere

    def at(self, **position: Any) -> None:
        """Say where this rank is (coordinates="pp=0,dp=1", step=3, action="0F2"); costs microseconds.

        Names that are not given keep their last value. Whoever watches the ranks reports these when one fails or hangs.
        """
        self.position.update(position)
        self.tell(self.position)


def _whole_number(environ: Mapping[str, str], name: str, problems: list[Problem]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        problems.append(
            problem(
                "E507", where=name, found=f"{name} is {environ[name]!r}", needs=f"{name} is a whole number"
            )
        )
        return 0


def torchrun_facts(environ: Mapping[str, str] | None = None) -> RankFacts | None:
    """Return this rank's facts if torchrun (or a launcher that speaks its variables) started it, else None.

    Raises:
        MeshwrightError: E507 when the variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env and "LOCAL_RANK" not in env:
        return None
    problems: list[Problem] = []
    missing = [name for name in _TORCHRUN if name not in env and name != "LOCAL_WORLD_SIZE"]
    if missing:
        problems.append(problem("E507", where="environment", found=f"{', '.join(missing)} not set"))
        raise MeshwrightError(problems, ExitCode.ENVIRONMENT)
    rank = _whole_number(env, "RANK", problems)
    world_size = _whole_number(env, "WORLD_SIZE", problems)
    local_rank = _whole_number(env, "LOCAL_RANK", problems)
    port = _whole_number(env, "MASTER_PORT", problems)
    local_world_size = world_size
    if "LOCAL_WORLD_SIZE" in env:
        local_world_size = _whole_number(env, "LOCAL_WORLD_SIZE", problems)
    if not problems and not 0 <= rank < world_size:
        problems.append(
            problem(
                "E507",
                where="RANK",
                found=f"RANK {rank} with WORLD_SIZE {world_size}",
                needs="0 <= RANK < WORLD_SIZE",
            )
        )
    if not problems and not 0 <= local_rank < local_world_size:
        problems.append(
            problem(
                "E507",
                where="LOCAL_RANK",
                found=f"LOCAL_RANK {local_rank} with LOCAL_WORLD_SIZE {local_world_size}",
                needs="0 <= LOCAL_RANK < LOCAL_WORLD_SIZE",
            )
        )
    if problems:
        raise MeshwrightError(problems, ExitCode.ENVIRONMENT)
    return RankFacts(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
    )


@dataclass(frozen=True, kw_only=True)
class TorchrunJob:
    """What torchrun's agent says of the job.

    Attributes:
        job: the same for every worker group of one job, and for no other: the rendezvous id, else who started this rank.
        restarts: how often this agent has started its workers again after a failure.
        max_restarts: how often it may.
        node: number of this node (0 holds rank 0).
        shutdown_s: seconds between the agent's SIGTERM and its SIGKILL.
    """

    job: str
    restarts: int
    max_restarts: int
    node: int
    shutdown_s: float


def torchrun_job(environ: Mapping[str, str] | None = None) -> TorchrunJob | None:
    """Return what torchrun's agent says of the job; None where no agent started this process."""
    env = os.environ if environ is None else environ
    if not env.get("TORCHELASTIC_RESTART_COUNT", "").isdigit() or torchrun_facts(env) is None:
        return None

    def number(name: str, default: int) -> int:
        return int(env[name]) if env.get(name, "").isdigit() else default

    name = env.get("TORCHELASTIC_RUN_ID", "none")
    return TorchrunJob(
        job=name if name != "none" else _agent(),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=number("TORCHELASTIC_MAX_RESTARTS", 0),
        node=number("GROUP_RANK", 0),
        shutdown_s=float(number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)),
    )


def _agent() -> str:
    """Return a name of the process that started this one, which no other process ever has."""
    parent = psutil.Process(os.getppid())
    return f"agent {socket.gethostname()}/{parent.pid}/{parent.create_time():.2f}"


def local_address(facts: RankFacts) -> str:
    """Return this machine's address on the way to rank 0's, "127.0.0.1" where there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((facts.master_addr, facts.master_port or 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def choose_interface(facts: RankFacts, job: TorchrunJob | None) -> list[Problem]:
    """Set ``GLOO_SOCKET_IFNAME`` where gloo by itself would take an address that other nodes cannot reach.

    gloo takes the address of the host's name, which often leads to the machine itself. Returns W575 when the
    interface towards rank 0 was set instead, E579 where there is none.
    """
    if facts.world_size == facts.local_world_size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return []
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "nothing"
    own = local_address(facts)
    first = job is None or job.node == 0
    if own.startswith("127.") and not first:
        found = f"MASTER_ADDR is {facts.master_addr}, which leads to this machine itself on node {job.node if job else 0}"
        return [problem("E579", where=f"rank {facts.rank}", found=found)]
    if not named.startswith("127.") and named != "nothing":
        return []
    at = [name for name, found in psutil.net_if_addrs().items() if any(a.address == own for a in found)]
    if own.startswith("127.") or not at:
        there = ", ".join(sorted(name for name in psutil.net_if_addrs() if name != "lo")) or "none"
        found = f"the host's name leads to {named}, and so does MASTER_ADDR {facts.master_addr}; interfaces: {there}"
        return [problem("E579", where=f"rank {facts.rank}", found=found)]
    os.environ["GLOO_SOCKET_IFNAME"] = at[0]
    found = (
        f"the host's name leads to {named}; interface {at[0]} ({own}) is on the way to {facts.master_addr}"
    )
    return [problem("W575", where="GLOO_SOCKET_IFNAME", found=found)]


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the device names of ``CUDA_VISIBLE_DEVICES`` in order, or None when it is not set."""
    env = os.environ if environ is None else environ
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names: list[str] = []
    for name in text.split(","):
        if name.strip() in ("", "-1"):  # as CUDA does: what follows is not visible
            break
        names.append(name.strip())
    return tuple(names)


def threads_per_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return ``OMP_NUM_THREADS`` if it is a positive number, else 1: for ranks that torchrun started."""
    env = os.environ if environ is None else environ
    text = env.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def debug_level(environ: Mapping[str, str] | None = None) -> str:
    """Return ``TORCH_DISTRIBUTED_DEBUG``: "OFF", "INFO" or "DETAIL"."""
    env = os.environ if environ is None else environ
    return env.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()


def become_local_rank(*, debug: str) -> None:
    """Set, in a process that was started as a local rank, what the communication libraries read for themselves.

    ``debug`` is torch's debug level; gloo is told to use the loop-back interface, so that no name look-up is needed.
    """
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def deterministic_environment(*, set_it: bool = False) -> dict[str, str]:
    """Return (and, if asked, set) what cuBLAS and NCCL read for themselves so that their results repeat bit for bit."""
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    if set_it:
        for name, value in wanted.items():
            os.environ.setdefault(name, value)
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def check_world_size(planned: int, found: int) -> list[Problem]:
    """Return E501 unless as many ranks run as the plan needs."""
    if planned == found:
        return []
    return [
        problem(
            "E501",
            where="world size",
            found=f"{found} {'rank' if found == 1 else 'ranks'} started, the plan needs {planned}",
            needs=f"world size = {planned}",
            do=f"start {planned} ranks (--nproc {planned}), or plan again for {found}",
        )
    ]


MOST_RANKS_PER_CORE: Final = 16
MOST_RANKS_ANYWHERE: Final = 64
"""Ranks on CPUs share cores; beyond the larger of the two limits a slip would only fill the memory."""


def check_local_ranks(num_ranks: int, num_cores: int) -> list[Problem]:
    """Return E509 when more ranks on CPUs are asked for than a machine of ``num_cores`` can carry."""
    most = max(MOST_RANKS_ANYWHERE, MOST_RANKS_PER_CORE * num_cores)
    if num_ranks <= most:
        return []
    return [
        problem(
            "E509",
            where="world size",
            found=f"{num_ranks} ranks on a machine with {num_cores} cores",
            needs=f"at most {most} ranks on this machine",
            do=f"a layout of at most {most} ranks here, or torchrun over more machines",
        )
    ]


def device_map(
    num_ranks: int, num_devices: int, visible: tuple[str, ...] | None = None
) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the device name of each local rank, in order, and E502/E503 when the devices do not suffice.

    ``num_devices`` is what the driver reports; ``visible`` is ``visible_devices()``. Local rank 0 takes the first
    visible device, whatever its number is.
    """
    names = visible if visible is not None else tuple(str(i) for i in range(num_devices))
    problems: list[Problem] = []
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        problems.append(
            problem(
                "E503",
                where="CUDA_VISIBLE_DEVICES",
                found=f"device {', '.join(twice)} is listed more than once",
            )
        )
    if len(names) < num_ranks:
        listed = f" ({', '.join(names)})" if names else ""
        problems.append(
            problem(
                "E502",
                where="devices",
                found=f"devices {len(names)} < processes {num_ranks}{listed}",
                needs="one device for each process of this node",
                do=f"start {len(names)} processes on this node, or make {num_ranks} devices visible",
            )
        )
    return (() if problems else tuple(names[:num_ranks])), problems


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache folder for Meshwright: ``MESHWRIGHT_CACHE``, or below the system's usual place."""
    env = os.environ if environ is None else environ
    if env.get("MESHWRIGHT_CACHE"):
        return Path(env["MESHWRIGHT_CACHE"]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"
