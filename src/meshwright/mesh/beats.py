"""Signs of life between ranks that no launcher of ours watches: who falls silent is named, and nobody waits for ever.

A thread of each rank sends its neighbours a datagram twice a second, beside and apart from the collectives. A cut
link or a vanished node closes no connection, so a collective over it would wait for its whole time limit; here the
silence itself is what is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.base.errors import ExitCode, Problem, problem
from meshwright.mesh import env
from meshwright.mesh.env import RankFacts
from meshwright.mesh.rank_report import as_text

EVERY_S: Final = 0.5
ALL_PAIRS: Final = 16
"""Up to so many ranks everyone hears everyone; beyond, the two next ranks and the same ranks of the next two nodes."""
_MOST_BYTES: Final = 2048


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank can be reached: its node's number and name, and the address of its socket."""

    rank: int
    node: int
    host: str
    address: str
    port: int


def neighbours(rank: int, world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Return the ranks that ``rank`` sends signs to and listens for; being a neighbour is mutual."""
    if world_size <= ALL_PAIRS:
        near = set(range(world_size))
    else:
        steps = (1, -1, local_world_size, -local_world_size)
        near = {(rank + step) % world_size for step in steps}
    return tuple(sorted(near - {rank}))


class Signs:
    """What a rank has heard of its neighbours. Times are seconds of one monotonic clock.

    Args:
        peers: the ranks that are listened for.
        silence_s: after so long without a sign a rank that was heard before is silent.
    """

    def __init__(self, peers: Sequence[int], silence_s: float, now: float) -> None:
        self.silence_s = silence_s
        self._heard: dict[int, float] = {}
        self._left = set(peers)
        self._looked = now
        self.said: dict[int, dict[str, Any]] = {}

    def hear(self, rank: int, sign: Mapping[str, Any], now: float) -> None:
        """Note a sign; one that says "bye" is the last that is expected."""
        if rank not in self._left:
            return
        self._heard[rank] = now
        self.said[rank] = dict(sign)
        if sign.get("bye"):
            self._left.discard(rank)

    def silent(self, now: float) -> dict[int, float]:
        """Return for how long each rank has been silent, once one of them was for too long; else nothing.

        A rank that was never heard is not counted: its signs may be kept away by a firewall. When this process
        itself was stopped for a while, the others are given new time.
        """
        if now - self._looked > max(4 * EVERY_S, self.silence_s / 2):
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        quiet = {r: now - t for r, t in self._heard.items() if r in self._left}
        if not quiet or max(quiet.values()) < self.silence_s:
            return {}
        least = max(self.silence_s / 2, self.silence_s - 3 * EVERY_S)
        return {r: t for r, t in sorted(quiet.items()) if t >= least}


def silence(
    facts: RankFacts, places: Mapping[int, Place], signs: Signs, quiet: Mapping[int, float]
) -> Problem:
    """Return E575: who is silent, on which node, since when and where it was; and who still answers."""
    mine = places[facts.rank]
    by_node: dict[tuple[int, str, str], list[int]] = {}
    for rank in quiet:
        place = places[rank]
        by_node.setdefault((place.node, place.address, place.host), []).append(rank)
    parts: list[str] = []
    for (node, address, host), ranks in by_node.items():
        whole = {p.rank for p in places.values() if p.node == node}
        link = node != mine.node and whole & set(signs.said) <= set(ranks)
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        what = f"; that node, or the link {mine.address} - {address}" if link else ""
        parts.append(f"{who} (node {node}, {host} {address}) for {max(quiet[r] for r in ranks):.1f} s{what}")
    last = "; ".join(f"rank {r}: {as_text(signs.said[r].get('at', {})) or 'nothing'}" for r in quiet)
    answers = sorted(set(signs.said) - set(quiet))
    rest = f"; these answer: {', '.join(map(str, answers))}" if answers else ""
    at = as_text(facts.position)
    return problem(
        "E575",
        where=f"rank {facts.rank} (node {mine.node}, {mine.host} {mine.address}"
        + (f"; {at})" if at else ")"),
        found=f"no sign from {'; and '.join(parts)}; they said last: {last}{rest}",
    )


@contextlib.contextmanager
def watched(facts: RankFacts, silence_s: float, told: Callable[[Problem], None]) -> Iterator[None]:
    """Exchange signs of life with the neighbours while the context is open. Every rank calls it, or none.

    A silent neighbour, or the end of the process that started this rank, ends this process at once (exit code 4), after
    the Problem was printed and given to ``told``: its main thread may be waiting in a collective for ever.

    Communication: one all_gather of an address on ``world``.
    """
    import torch.distributed as dist

    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setblocking(False)
    address = env.local_address(facts)
    own.bind((address, 0))
    job = env.torchrun_job()
    mine = Place(
        rank=facts.rank,
        node=job.node if job is not None else 0,
        host=socket.gethostname(),
        address=address,
        port=own.getsockname()[1],
    )
    everyone: list[Any] = [None] * facts.world_size
    dist.all_gather_object(everyone, (mine, os.urandom(8).hex()))
    places = {place.rank: place for place, _ in everyone}
    thread = _Thread(facts, own, places, everyone[0][1], silence_s, told)
    thread.start()
    try:
        yield
    finally:
        thread.end()


class _Thread(threading.Thread):
    def __init__(
        self,
        facts: RankFacts,
        own: socket.socket,
        places: Mapping[int, Place],
        token: str,
        silence_s: float,
        told: Callable[[Problem], None],
    ) -> None:
        super().__init__(name="signs of life", daemon=True)
        self._facts = facts
        self._socket = own
        self._places = places
        self._token = token
        self._told = told
        self._peers = neighbours(facts.rank, facts.world_size, facts.local_world_size)
        self._signs = Signs(self._peers, silence_s, time.monotonic())
        self._parent = os.getppid()
        self._over = threading.Event()

    def run(self) -> None:
        """Send, listen, judge, until the end."""
        due = 0.0
        while not self._over.is_set():
            now = time.monotonic()
            if now >= due:
                due = now + EVERY_S
                self._send()
            self._listen(max(0.0, due - time.monotonic()))
            if os.getppid() != self._parent:
                found = "torchrun's agent, which started this rank, is gone"
                self._end_process(problem("E574", where=f"rank {self._facts.rank}", found=found))
            quiet = self._signs.silent(time.monotonic())
            if quiet and not self._over.is_set():
                self._end_process(silence(self._facts, self._places, self._signs, quiet))

    def end(self) -> None:
        """Tell the neighbours that this rank leaves in good order, and stop."""
        self._over.set()
        self.join(5.0)
        for _ in range(2):
            self._send(bye=True)
        self._socket.close()

    def _send(self, *, bye: bool = False) -> None:
        at = {k: str(v)[:200] for k, v in list(self._facts.position.items())}
        data = json.dumps({"token": self._token, "rank": self._facts.rank, "at": at, "bye": bye}).encode()
        for peer in self._peers:
            place = self._places[peer]
            with contextlib.suppress(OSError):  # no route, refused: silence is what is judged
                self._socket.sendto(data, (place.address, place.port))

    def _listen(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while not self._over.is_set():
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return
            with contextlib.suppress(OSError, ValueError):
                sign = json.loads(self._socket.recv(_MOST_BYTES))
                if (
                    isinstance(sign, dict)
                    and sign.get("token") == self._token
                    and isinstance(sign.get("rank"), int)
                ):
                    self._signs.hear(sign["rank"], sign, time.monotonic())

    def _end_process(self, found: Problem) -> None:
        with contextlib.suppress(Exception):
            print(found.text(), file=sys.stderr, flush=True)
            sys.stdout.flush()
            self._told(found)
        os._exit(int(ExitCode.ENVIRONMENT))
