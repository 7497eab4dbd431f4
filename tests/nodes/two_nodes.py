"""Two nodes on one machine: network namespaces with a cable between them that can be made slow, or cut.

``python tests/nodes/two_nodes.py train|cut|slow|probe|gone|elastic FOLDER`` plays one scenario with torchrun's rendezvous
across the cable and prints what it saw as JSON; ``tests/nodes/test_two_nodes.py`` checks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CLONE_NEWNET = 0x40000000
STEPS = 6
LIMIT_S = 240.0
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How soon torchrun notices that a node is gone. Its host is named with is_host: by default it is found by name."""

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 260,
    "max_position_embeddings": 32,
}


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def cannot() -> str:
    """Return why there can be no namespaces here, "" where there can."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not installed"
    name = f"mw-{os.getpid()}-try"
    try:
        _do("ip", "netns", "add", name)
        try:
            _do("ip", "-n", name, "link", "add", "x0", "type", "veth", "peer", "name", "x1")
        finally:
            _do("ip", "netns", "del", name)
    except (subprocess.SubprocessError, OSError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', '') or error}".strip()
    return ""


@dataclass
class Nodes:
    """Two namespaces, and the ends of the cable in them."""

    names: tuple[str, str]
    links: tuple[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, node: int, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a node, in a process group of its own; its output is added to ``log``."""
        with log.open("a") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=os.environ | environment,
            )
        self.started.append(process)
        return process

    def enter(self, node: int) -> None:
        """Move the calling process onto a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(f"/run/netns/{self.names[node]}", os.O_RDONLY)
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)

    def limit(self, rate: str, node: int | None = None) -> None:
        """Let the cable carry so much from ``node`` (from both), with the kind of queue that this kernel has."""
        for n in (0, 1) if node is None else (node,):
            where = ("ip", "netns", "exec", self.names[n], "tc", "qdisc")
            device = ("dev", self.links[n], "root")
            with contextlib.suppress(subprocess.CalledProcessError):
                _do(*where, "del", *device)
            _do(*where, "add", *device, "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")

    def cut(self) -> None:
        """Let every packet vanish on the way, without a word to either end."""
        for n in (0, 1):
            where = ("ip", "netns", "exec", self.names[n], "tc", "qdisc")
            with contextlib.suppress(subprocess.CalledProcessError):
                _do(*where, "del", "dev", self.links[n], "root")
            _do(
                *where, "add", "dev", self.links[n], "root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"
            )

    def vanish(self, node: int) -> None:
        """End everything on a node at once, as a power cut does."""
        self.cut()
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[node]], capture_output=True, text=True, check=True
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def end(self) -> None:
        """End what is still running, and take the namespaces away."""
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
                for pid in pids.stdout.split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _do("ip", "netns", "del", name)


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make two nodes with a cable of 1 Gbit/s, and take them away again."""
    tag = f"{os.getpid()}"
    nodes = Nodes((f"mw-{tag}-a", f"mw-{tag}-b"), (f"mwa{tag}"[:15], f"mwb{tag}"[:15]))
    try:
        for name in nodes.names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", nodes.links[0], "type", "veth", "peer", "name", nodes.links[1])
        for name, link, address in zip(nodes.names, nodes.links, ADDRESSES, strict=True):
            _do("ip", "link", "set", link, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _do("ip", "-n", name, "link", "set", link, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
        nodes.limit("1gbit")
        yield nodes
    finally:
        nodes.end()


def write_inputs(folder: Path, steps: int = STEPS) -> None:
    """Write a model, a text, a cluster and a run file into ``folder``."""
    from kill_runs import CLUSTER

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    (folder / "text.txt").write_text("".join(f"line {i} of {i % 7} words\n" for i in range(400)))
    (folder / "run.yaml").write_text(
        "model: {config: model}\n"
        "data: {path: text.txt, seq_len: 8, eval_fraction: 0}\n"
        "batch: {sequences: 4}\n"
        "optimizer: {lr: 1.0e-3}\n"
        "cluster: cluster.json\n"
        "guards: {silence_s: 4}\n"
        f"run: {{steps: {steps}, checkpoint_every: 2, keep_last: 2}}\n"
    )


def torchrun(
    nodes: Nodes,
    node: int,
    folder: Path,
    words: Sequence[str],
    *,
    nnodes: str = "2",
    nproc: int = 2,
    restarts: int = 0,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start torchrun on a node; its output goes to ``node-N.log``."""
    return nodes.run(
        node,
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nnodes, "--nproc-per-node", str(nproc), "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "two"),
            *("--rdzv-conf", f"is_host={int(node == 0)},{RENDEZVOUS}"),
            *("--local-addr", ADDRESSES[node], "--monitor-interval", "0.2", "-m", "meshwright", *words),
        ],
        folder / f"node-{node}.log",
        OMP_NUM_THREADS="1",
        **environment,
    )


def steps_done(home: Path) -> int:
    """Return the last step that a run wrote down."""
    file = home / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def until(condition: Any, limit_s: float = LIMIT_S) -> float:
    """Wait for a condition; return the seconds that took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > limit_s:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - begin


def ended(processes: Sequence[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> float:
    """Wait until all have ended; return the seconds that took."""
    return until(lambda: all(p.poll() is not None for p in processes), limit_s)


def train_words(folder: Path, name: str, layout: str, *sets: str) -> list[str]:
    """Return meshwright's arguments for a run."""
    words = ["train", str(folder / "run.yaml"), "--layout", layout, "--set", f"run.dir={folder / name}"]
    return words + [word for s in sets for word in ("--set", s)]


def losses(home: Path) -> dict[int, float]:
    """Return the last loss that was written down of each step."""
    found: dict[int, float] = {}
    for line in (home / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            found[record["step"]] = record["loss"]
    return found


def events(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the run's events of one name."""
    file = home / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [e for e in map(json.loads, lines) if e["event"] == name]


def alone(folder: Path, layout: str, *sets: str) -> dict[int, float]:
    """Return the losses of the same run on one node, started by our own launcher."""
    from kill_runs import start, wait

    assert wait(start(folder, "alone", layout, None, *sets)) == 0
    return losses(folder / "alone")


LAYOUT = "dp=2,pp=2,precision=fp64"
LONG = "run.steps=100000"


def _begun(nodes: Nodes, folder: Path, steps: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    home = folder / "out"
    until(lambda: steps_done(home) >= steps or any(p.poll() is not None for p in processes))
    assert all(p.poll() is None for p in processes), (folder / "node-0.log").read_text()
    time.sleep(1.5)  # so that every rank has said where it is


def train(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """Two nodes of two ranks each train; the losses are those of one node."""
    words = train_words(folder, "out", LAYOUT)
    processes = [torchrun(nodes, n, folder, words) for n in (0, 1)]
    seconds = ended(processes)
    return {"status": [p.returncode for p in processes], "seconds": seconds, "losses": losses(folder / "out")}


def cut(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """The cable is cut while two nodes train."""
    processes = [torchrun(nodes, n, folder, train_words(folder, "out", LAYOUT, LONG)) for n in (0, 1)]
    _begun(nodes, folder, 4, processes)
    nodes.cut()
    seconds = ended(processes, 60.0)
    return {
        "status": [p.returncode for p in processes],
        "seconds": seconds,
        "said": events(folder / "out", "silent"),
    }


def slow(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """One direction of the cable becomes slow; then torchrun is told to stop on both nodes."""
    words = train_words(folder, "out", LAYOUT, LONG, "guards.slow_link=4", "run.checkpoint_every=0")
    processes = [torchrun(nodes, n, folder, words) for n in (0, 1)]
    _begun(nodes, folder, 25, processes)
    before = events(folder / "out", "slow link")
    nodes.limit("10mbit", 0)
    until(lambda: len(events(folder / "out", "slow link")) > len(before), 60.0)
    found = events(folder / "out", "slow link")[len(before) :]
    nodes.limit("1gbit")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    seconds = ended(processes, 60.0)
    stopped = json.loads((folder / "out" / "stopped.json").read_text())
    return {
        "slow": found,
        "before": before,
        "seconds": seconds,
        "stopped": stopped,
        "done": steps_done(folder / "out"),
    }


def probe(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """The probe measures a cable of 200 Mbit/s between nodes whose ranks are fast among themselves."""
    nodes.limit("200mbit")
    words = ["probe", "--quick", "--out", str(folder / "probe.json")]
    processes = [torchrun(nodes, n, folder, words) for n in (0, 1)]
    seconds = ended(processes)
    result = json.loads((folder / "probe.json").read_text())
    return {
        "status": [p.returncode for p in processes],
        "seconds": seconds,
        "pairs": result["topology"]["pairs"],
        "advice": result["advice"],
    }


def gone(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """torchrun's agent of the second node is killed: its ranks end by themselves, and the first node ends."""
    processes = [torchrun(nodes, n, folder, train_words(folder, "out", LAYOUT, LONG)) for n in (0, 1)]
    _begun(nodes, folder, 4, processes)
    processes[1].kill()
    seconds = ended(processes, 60.0)
    until(
        lambda: not subprocess.run(["ip", "netns", "pids", nodes.names[1]], capture_output=True).stdout, 20.0
    )
    return {"status": [p.returncode for p in processes], "seconds": seconds}


def elastic(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """The second node vanishes: the first goes on alone, in a layout of the planner's, to the end."""
    sets = ("run.elastic=true", "run.steps=400", "run.grace_s=20")
    words = train_words(folder, "out", "dp=2,zero=1,precision=fp64", *sets)
    processes = [torchrun(nodes, n, folder, words, nnodes="1:2", nproc=1, restarts=3) for n in (0, 1)]
    _begun(nodes, folder, 6, processes)
    done = steps_done(folder / "out")
    nodes.vanish(1)
    ended(processes)
    return {
        "status": processes[0].returncode,
        "done": done,
        "losses": losses(folder / "out"),
        "restarts": events(folder / "out", "restart"),
    }


SCENARIOS = {"train": train, "cut": cut, "slow": slow, "probe": probe, "gone": gone, "elastic": elastic}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    why = cannot()
    if why:
        sys.exit(why)
    place = Path(sys.argv[2]).resolve()
    place.mkdir(parents=True)
    write_inputs(place)
    with two_nodes() as made:
        print(json.dumps(SCENARIOS[sys.argv[1]](made, place), indent=1))
