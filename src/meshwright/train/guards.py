"""What is watched while a run goes on: values that are not finite, loss spikes, replicas that drift, slow ranks.

Every verdict is the same on all ranks, because each is made from numbers that all of them exchanged.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.base.axes import WORLD
from meshwright.base.errors import Problem, problem
from meshwright.base.files import write_whole
from meshwright.checkpoint.pieces import Pieces, first_row
from meshwright.checkpoint.state import Place
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.stage import get_module
from meshwright.parallel.tied import local

SPIKE_WINDOW: Final = 20
"""Steps whose median a loss is compared with; until half of them are there, nothing is a spike."""


# -- values that are not finite -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, order=True)
class Found:
    """The first value that is not finite on a rank: where it arose and in which micro-batch.

    ``phase`` is 0 for a parameter, 1 for the forward, 2 for the backward, 3 for a parameter's gradient; ``depth`` counts
    modules in the order in which that phase reaches them, so the smallest of all ranks is the origin.
    """

    phase: int
    depth: int
    rank: int
    micro_batch: int
    name: str

    def text(self) -> str:
        """Return it for people."""
        what = ("parameter", "output of", "gradient of the output of", "gradient of")[self.phase]
        at = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"rank {self.rank}, {what} {self.name}{at}"


def locate(model: ParallelModel, run_again: Callable[[], Any]) -> list[Found]:
    """Return where this step's first value that is not finite arose, by rank, the origin first; the same on all ranks.

    The step's forward and backward run once more with every block watched (a reduced gradient no longer says which rank
    it came from), so this is called only after a bad step. Gradients are left as that makes them.

    Communication: that of a forward and backward, and one all_gather of objects on ``world``.
    """
    watch = _Watch(model)
    held = [n for n, p in model.params.items() if not _finite(local(p.detach()))]
    with watch:
        run_again()
    mine: Found | None = None
    rank = model.view.rank
    if held:
        mine = Found(phase=0, depth=0, rank=rank, micro_batch=-1, name=held[0])
    elif watch.found:
        mine = min(watch.found)
    else:
        bad = [n for n, g in model.gradients().items() if not _finite(local(g))]
        if bad:
            mine = Found(phase=3, depth=0, rank=rank, micro_batch=-1, name=bad[0])
    everyone: list[Any] = [mine]
    if model.view.groups.get(WORLD) is not None:
        everyone = [None] * model.plan.world_size
        dist.all_gather_object(everyone, mine)
    return sorted(f for f in everyone if f is not None)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


class _Watch:
    """Hooks on the blocks of a rank that note outputs, and gradients of outputs, that are not finite."""

    def __init__(self, model: ParallelModel) -> None:
        self.found: list[Found] = []
        self._model = model
        self._handles: list[Any] = []
        self._places: list[tuple[int, str, nn.Module]] = []
        last = model.spec.num_layers + 1
        paths = model.spec.paths
        for stage in model.stages.values():
            if stage.is_first:
                self._places.append((0, paths.embedding, get_module(stage.causal_lm, paths.embedding)))
            for name, block in get_module(stage.causal_lm, paths.blocks).named_children():
                self._places.append((1 + int(name), f"{paths.blocks}.{name}", block))
            if stage.is_last:
                self._places.append((last, paths.final_norm, get_module(stage.causal_lm, paths.final_norm)))
                self._places.append((last + 1, paths.head, get_module(stage.causal_lm, paths.head)))
        self._depth = last + 1

    def __enter__(self) -> None:
        self._handles = [m.register_forward_hook(self._hook(d, n)) for d, n, m in self._places]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, depth: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        counted = [0]

        def forward(_: nn.Module, __: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            micro = counted[0]
            counted[0] += 1
            if not isinstance(tensor, Tensor):
                return
            if not _finite(tensor.detach()):
                self._note(1, depth, micro, name)
            if tensor.requires_grad:
                tensor.register_hook(lambda g: self._backward(g, self._depth - depth, micro, name))

        return forward

    def _backward(self, gradient: Tensor, depth: int, micro: int, name: str) -> None:
        if not _finite(gradient):
            self._note(2, depth, micro, name)

    def _note(self, phase: int, depth: int, micro: int, name: str) -> None:
        rank = self._model.view.rank
        self.found.append(Found(phase=phase, depth=depth, rank=rank, micro_batch=micro, name=name))


def nonfinite_problem(step: int, found: Sequence[Found], value: str) -> Problem:
    """Return E570 with the origin and the other ranks that saw one."""
    origin = (
        found[0].text() if found else "not found again when the step was repeated: a fault of the hardware?"
    )
    return problem("E570", where=f"step {step}", found=f"{value}; first: {origin}")


# -- loss spikes --------------------------------------------------------------------------------------------


class Spikes:
    """Compares each loss with the median of the last ones."""

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def losses(self) -> list[float]:
        """Return the losses that the next one is compared with, oldest first."""
        return list(self._last)

    def remember(self, losses: Sequence[float]) -> None:
        """Compare with ``losses``, those of the steps before a checkpoint."""
        self._last.clear()
        self._last.extend(losses)

    def check(self, loss: float) -> float | None:
        """Return the usual loss that ``loss`` is a spike above, or None; a spike does not count for later ones."""
        if self._factor is None or not math.isfinite(loss):
            return None
        usual = median(self._last) if len(self._last) >= SPIKE_WINDOW // 2 else None
        if usual is not None and loss > self._factor * usual:
            return usual
        self._last.append(loss)
        return None


def spike_problem(step: int, loss: float, usual: float) -> Problem:
    """Return E572 for a loss far above the usual one."""
    return problem("E572", where=f"step {step}", found=f"loss {loss:g}, the median before it {usual:g}")


# -- replicas -----------------------------------------------------------------------------------------------


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the bytes of ``tensor`` in which the place of every four bytes counts."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = data.numel() % 4
    words = data[: data.numel() - rest].view(torch.int32).to(torch.int64)
    places = 2 * torch.arange(words.numel(), device=words.device, dtype=torch.int64) + 1
    total = int((words * places * 0x9E3779B97F4A7C1).sum())
    return (total + sum(int(b) << (8 * i) for i, b in enumerate(data[data.numel() - rest :]))) % 2**63


def drifted(model: ParallelModel, place: Place | None) -> list[tuple[str, list[int]]]:
    """Return (tensor, ranks that differ from most of its replicas) of every parameter whose replicas are not equal.

    Replicas are the ranks of the whole job that hold the same elements of a tensor, whatever the axes; ``place`` says
    where this rank's part lies. Of two replicas that differ, both are named. Every rank calls it.

    Communication: one all_gather of a number and a place per parameter on ``world``.
    """
    mine = {
        n: (_part(p.detach() if place is None else place(n, p.detach())), checksum(local(p.detach())))
        for n, p in model.params.items()
    }
    ranks: list[Any] = [mine]
    if model.view.groups.get(WORLD) is not None:
        ranks = [None] * model.plan.world_size
        dist.all_gather_object(ranks, mine)
    held: dict[tuple[str, Any], list[tuple[int, int]]] = {}
    for rank, sums in enumerate(ranks):
        for name, (part, value) in sums.items():
            held.setdefault((name, part), []).append((rank, value))
    out: dict[str, list[int]] = {}
    for (name, _), values in held.items():
        counts = Counter(v for _, v in values).most_common()
        if len(counts) > 1:
            usual = counts[0][0] if counts[0][1] > counts[1][1] else None
            out.setdefault(name, []).extend(r for r, v in values if v != usual)
    return list(out.items())


def _part(placed: Tensor) -> tuple[Any, ...]:
    """Return which elements of the logical tensor a rank's part is."""
    if isinstance(placed, Pieces):
        return tuple((at, tuple(piece.shape)) for at, piece in placed.pieces)
    return (first_row(placed), placed.to_local().shape[0]) if isinstance(placed, DTensor) else ()


def drift_problem(step: int, found: Sequence[tuple[str, list[int]]]) -> Problem:
    """Return E571 for replicas that are not equal."""
    ranks = sorted({r for _, rs in found for r in rs})
    names = ", ".join(n for n, _ in found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return problem("E571", where=f"step {step}, {who}", found=f"{len(found)} tensors differ: {names}")


# -- slow ranks ---------------------------------------------------------------------------------------------


class Stragglers:
    """Compares the ranks' own times of a step: reading data, and forward and backward up to the first wait."""

    def __init__(self, factor: float | None) -> None:
        self._factor = factor
        self._own: list[float] = []

    def note(self, own_s: float) -> None:
        """Add one step's own seconds of this rank."""
        if self._factor is not None:
            self._own.append(own_s)

    def check(self, model: ParallelModel) -> list[tuple[int, float]]:
        """Return (rank, times slower than the median rank) of slow ranks over ``SPIKE_WINDOW`` steps; else [].

        Communication: every ``SPIKE_WINDOW`` steps, one all_gather of a number on ``world``.
        """
        if self._factor is None or len(self._own) < SPIKE_WINDOW or model.plan.world_size == 1:
            return []
        mine, self._own = median(self._own), []
        values: list[Any] = [None] * model.plan.world_size
        dist.all_gather_object(values, mine)
        usual = median(values)
        return [(r, v / usual) for r, v in enumerate(values) if usual and v > self._factor * usual]


class Heartbeat:
    """A rank's sign of life in the run folder: ``heartbeat/rank-N.json`` with step, action and time of day.

    A file system that refuses it is no reason to stop: the training goes on without.
    """

    def __init__(self, folder: Path, rank: int, every_s: float) -> None:
        self._file = folder / "heartbeat" / f"rank-{rank}.json"
        self._every_s = every_s
        self._next = 0.0

    def beat(self, step: int, action: str) -> None:
        """Write it, if ``every_s`` seconds have gone by since the last one."""
        now = time.monotonic()
        if not self._every_s or now < self._next:
            return
        self._next = now + self._every_s
        try:
            self._file.parent.mkdir(exist_ok=True)
            beat = {"step": step, "action": action, "time": time.time()}
            write_whole(self._file, json.dumps(beat), synced=False)
        except OSError:
            self._every_s = 0.0
