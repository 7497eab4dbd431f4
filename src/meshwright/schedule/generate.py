"""Generators: one function per schedule, from the numbers of ranks and micro-batches to compute rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from meshwright.base.errors import Problem, problem, refuse
from meshwright.schedule.actions import Action, ActionKind, Schedule

Row = tuple[Action, ...]


def gpipe(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return all forwards, then all backwards, on every rank."""
    return tuple(
        tuple(_forward(rank, k) for k in range(num_micro_batches))
        + tuple(_backward(rank, k) for k in range(num_micro_batches))
        for rank in range(num_ranks)
    )


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return warm-up forwards, then forward and backward in turn, then the backwards that are left.

    Rank i warms up with min(m, p - 1 - i) forwards, so it holds at most min(m, p - i) micro-batches.
    """
    rows: list[Row] = []
    for rank in range(num_ranks):
        warm_up = min(num_micro_batches, num_ranks - 1 - rank)
        row = [_forward(rank, k) for k in range(warm_up)]
        for k in range(num_micro_batches):
            if warm_up + k < num_micro_batches:
                row.append(_forward(rank, warm_up + k))
            row.append(_backward(rank, k))
        rows.append(tuple(row))
    return tuple(rows)


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> tuple[Row, ...]:
    """Return interleaved 1F1B: rank r owns stages r, r + p, r + 2p, ...; micro-batches go in rounds of p.

    A round of p micro-batches goes through a rank's first chunk, then through its second, and so on; backwards take
    the chunks from the last to the first. Rank r warms up with 2 (p - 1 - r) + (v - 1) p forwards of chunks. The
    bubble is 1F1B's divided by v: (p - 1)(F + B) with F and B of one chunk.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, section 2.2.
    """
    p, total = num_ranks, num_micro_batches * chunks
    rows: list[Row] = []
    for rank in range(p):

        def place(k: int, rank: int = rank, *, backward: bool) -> Action:
            turn, within = divmod(k, p * chunks)
            chunk, k = within // p, turn * p + within % p
            if backward:
                return _backward((chunks - 1 - chunk) * p + rank, k)
            return _forward(chunk * p + rank, k)

        warm_up = min(total, 2 * (p - 1 - rank) + (chunks - 1) * p)
        row = [place(k, backward=False) for k in range(warm_up)]
        for k in range(total):
            if warm_up + k < total:
                row.append(place(warm_up + k, backward=False))
            row.append(place(k, backward=True))
        rows.append(tuple(row))
    return tuple(rows)


def zb_h1(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return ZB-H1: 1F1B with each backward in two halves, the weight half r micro-batches late on rank r.

    The rank that starts later than the first by r forwards keeps r weight halves for the end, when the others still
    wait for gradients: the bubble is (p - 1)(F + I - W), and no rank holds more than p micro-batches, as in 1F1B.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, section 2.3.
    """
    p, m = num_ranks, num_micro_batches
    rows: list[Row] = []
    for rank in range(p):
        warm_up = min(m, p - 1 - rank)
        row = [_forward(rank, k) for k in range(warm_up)]
        for k in range(m):
            if warm_up + k < m:
                row.append(_forward(rank, warm_up + k))
            row.append(_input(rank, k))
            if k >= rank:
                row.append(_weight(rank, k - rank))
        row += [_weight(rank, k) for k in range(max(0, m - rank), m)]
        rows.append(tuple(row))
    return tuple(rows)


def zbv(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return ZB-V: rank r owns stages r and 2p - 1 - r, backwards are in two halves, at most 2p chunks are held.

    Built by playing time slots in which F, I and W take one each: a rank takes the input half that is ready, else a
    forward (of its second stage before its first), else a weight half. A micro-batch enters a rank only when both of
    its chunks have room there, so no rank can fill up with work that waits for others.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, section 3.1 (the order F, then I, W into gaps and at the
    memory limit), and Pipeline Parallelism with Controllable Memory (the V shape).
    """
    return _Slots(num_ranks, num_micro_batches).rows()


class _Slots:
    """A V-shaped pipeline played in slots of one action per rank; a stage takes its micro-batches in order."""

    def __init__(self, num_ranks: int, num_micro_batches: int) -> None:
        self.p, self.m = num_ranks, num_micro_batches
        self.last = 2 * num_ranks - 1
        self.out: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.forwards = [0] * (2 * num_ranks)
        self.inputs = [0] * (2 * num_ranks)
        self.weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        self.freed = [0] * num_ranks

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of the whole step."""
        while any(len(row) < 6 * self.m for row in self.out):
            chosen = [self._choose(rank) for rank in range(self.p)]
            for rank, action in enumerate(chosen):
                if action is not None:
                    self._do(rank, action)
        return tuple(tuple(row) for row in self.out)

    def _choose(self, rank: int) -> Action | None:
        near, far = rank, self.last - rank
        for stage in (near, far):  # the gradient that has less way to go frees its micro-batch first
            k = self.inputs[stage]
            behind = self.inputs[stage + 1] if stage < self.last else self.m
            if k < min(self.m, behind, self.forwards[stage]):
                return _input(stage, k)
        for stage in (far, near):
            k = self.forwards[stage]
            if k < (self.forwards[stage - 1] if stage else self.m):
                if stage == near and 2 * (k + 1) - self.freed[rank] > 2 * self.p:
                    continue
                return _forward(stage, k)
        return self.weights[rank][0] if self.weights[rank] else None

    def _do(self, rank: int, action: Action) -> None:
        self.out[rank].append(action)
        if action.kind is ActionKind.FORWARD:
            self.forwards[action.stage] += 1
        elif action.kind is ActionKind.INPUT_GRAD:
            self.inputs[action.stage] += 1
            assert action.micro_batch is not None
            self.weights[rank].append(_weight(action.stage, action.micro_batch))
        else:
            self.weights[rank].popleft()
            self.freed[rank] += 1


def dualpipev(num_ranks: int, num_micro_batches: int) -> tuple[Row, ...]:
    """Return DualPipeV: rank r owns stages r and 2p - 1 - r; forwards of one alternate with backwards of the other.

    Backwards are whole in the middle and in two halves where a rank would wait. It needs m >= 2p; no rank holds
    more than 2p + 1 chunks.
    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.2.1, and the cut of DualPipe in half that DualPipeV
    is: warm-up, both directions alternating, drain, each with the lengths below.
    """
    p, m = num_ranks, num_micro_batches
    rows: list[Row] = []
    for rank in range(p):
        row = _DualRow(near=rank, far=2 * p - 1 - rank)
        left, passed = p - 1 - rank, rank + 1
        for _ in range(2 * left):
            row.forward(row.near)
        for _ in range(passed):
            row.forward(row.near)
            row.forward(row.far)
        for _ in range(left):
            row.backward(row.far, split=True)
            row.weight()
            row.forward(row.far)
        for _ in range(m - 2 * p + passed):
            row.forward(row.near)
            row.backward(row.far)
            row.forward(row.far)
            row.backward(row.near)
        for _ in range(left):
            row.backward(row.far)
            row.forward(row.far)
            row.backward(row.near)
        for k in range(passed):
            row.backward(row.far, split=2 * k >= passed)
            row.backward(row.near, split=2 * k + 1 >= passed)
        for _ in range(left):
            row.weight()
            row.backward(row.near, split=True)
        for _ in range(passed):
            row.weight()
        rows.append(tuple(row.actions))
    return tuple(rows)


class _DualRow:
    """One rank's row while it is written: the next micro-batch of each stage, and weight halves that wait."""

    def __init__(self, *, near: int, far: int) -> None:
        self.near, self.far = near, far
        self.actions: list[Action] = []
        self._forwards = {near: 0, far: 0}
        self._backwards = {near: 0, far: 0}
        self._waiting: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """Add the next forward of ``stage``."""
        self.actions.append(_forward(stage, self._forwards[stage]))
        self._forwards[stage] += 1

    def backward(self, stage: int, *, split: bool = False) -> None:
        """Add the next backward of ``stage``; with ``split`` its input half, and the weight half waits."""
        k = self._backwards[stage]
        self._backwards[stage] += 1
        self.actions.append(_input(stage, k) if split else _backward(stage, k))
        if split:
            self._waiting.append(_weight(stage, k))

    def weight(self) -> None:
        """Add the weight half that waits longest."""
        self.actions.append(self._waiting.popleft())


GENERATORS: Final[Mapping[str, Callable[[int, int, int], tuple[Row, ...]]]] = MappingProxyType(
    {
        "gpipe": lambda p, m, _: gpipe(p, m),
        "1f1b": lambda p, m, _: one_f_one_b(p, m),
        "interleaved": interleaved,
        "zb-h1": lambda p, m, _: zb_h1(p, m),
        "zbv": lambda p, m, _: zbv(p, m),
        "dualpipev": lambda p, m, _: dualpipev(p, m),
    }
)
"""Rows by name, from ranks, micro-batches and stages per rank."""

SPLIT: Final = ("zb-h1", "zbv", "dualpipev")
"""Schedules that run a backward in two halves."""

V_SHAPED: Final = ("zbv", "dualpipev")
"""Schedules whose rank r owns stages r and 2p - 1 - r."""


def placement(name: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage under a named schedule: a V, or round after round."""
    if name in V_SHAPED:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(stage % num_ranks for stage in range(num_ranks * chunks))


def fewest_micro_batches(name: str, num_ranks: int) -> tuple[int, int]:
    """Return (smallest number, step) of the micro-batches that a named schedule can run."""
    if name == "interleaved":
        return num_ranks, num_ranks
    return (2 * num_ranks, 1) if name == "dualpipev" else (1, 1)


@lru_cache(maxsize=8)
def generate(name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule ``name`` for ``num_ranks`` pipeline ranks with ``chunks`` stages each.

    Fewer micro-batches than ranks run too, except where a schedule goes in rounds. The last few are kept: a plan, its
    neighbours and their prices ask for the same ones.

    Raises:
        MeshwrightError: E301 for a schedule without a generator, E306 for a number below 1, E223 for stages per rank
            that it does not have, E218 or E308 for micro-batches that it cannot run.
    """
    problems: list[Problem] = []
    if name not in GENERATORS:
        works = " | ".join(f"schedule={n}" for n in GENERATORS)
        problems.append(
            problem("E301", where="layout.schedule", found=f"schedule={name} has no generator", do=works)
        )
    if num_ranks < 1 or num_micro_batches < 1 or chunks < 1:
        problems.append(
            problem(
                "E306",
                where="schedule",
                found=f"{num_ranks} ranks with {chunks} stages each and {num_micro_batches} micro-batches",
            )
        )
    refuse(problems)
    refuse(check_chunks(name, chunks))
    refuse(check_micro_batches(name, num_ranks, num_micro_batches))
    return Schedule(
        name=name,
        rows=GENERATORS[name](num_ranks, num_micro_batches, chunks),
        stage_ranks=placement(name, num_ranks, chunks),
        num_micro_batches=num_micro_batches,
    )


def check_chunks(name: str, chunks: int) -> list[Problem]:
    """Return E223 when a named schedule does not have ``chunks`` stages per rank."""
    single = name in ("gpipe", "1f1b", "zb-h1")
    wrong = (
        (single and chunks != 1)
        or (name in V_SHAPED and chunks != 2)
        or (name == "interleaved" and chunks < 2)
    )
    if not wrong:
        return []
    do = "chunks = 1, or schedule=interleaved" if single else "chunks = 2"
    return [problem("E223", where="layout.chunks", found=f"chunks = {chunks} with schedule={name}", do=do)]


def check_micro_batches(
    name: str, num_ranks: int, num_micro_batches: int, per_count: int = 0
) -> list[Problem]:
    """Return E218 or E308 when a named schedule cannot run this number of micro-batches.

    ``per_count`` are the sequences of one micro-batch over all replicas, to name global batches that can (0: none).
    """
    least, step = fewest_micro_batches(name, num_ranks)
    m = num_micro_batches
    if m >= least and m % step == 0:
        return []
    legal = sorted({max(least, m // step * step), max(least, -(-m // step) * step)})
    do = f"accumulation = {' | '.join(str(n) for n in legal)}"
    if per_count:
        do += f": global batch = {' | '.join(str(n * per_count) for n in legal)}"
    if name == "interleaved":
        found = f"accumulation = {m} is not a multiple of pp = {num_ranks}"
        return [problem("E218", where="batch", found=found, do=do)]
    found = f"accumulation = {m} with schedule={name} and pp = {num_ranks}, which needs {least}"
    return [problem("E308", where="batch", found=found, do=do)]


def _forward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.FORWARD, micro_batch)


def _backward(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.BACKWARD, micro_batch)


def _input(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.INPUT_GRAD, micro_batch)


def _weight(stage: int, micro_batch: int) -> Action:
    return Action(stage, ActionKind.WEIGHT_GRAD, micro_batch)
