"""Live tensor bytes of one rank over one step, by category: the CPU's counterpart of allocated bytes.

Every storage that an operation makes is counted from its creation to its release, views once, resized storages
(FSDP2 frees and refills gathered parameters in place) at their present size. Memory that kernels use inside is
not seen. On a GPU the caching allocator's own peak is used for the total.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.base.records import MemoryBytes
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.away import Away
from meshwright.parallel.offload import parameters_away
from meshwright.parallel.replicate import Replicate
from meshwright.parallel.tied import local
from meshwright.train.offload import ENTRIES, OffloadedAdamW

AWAY: Final = "offloaded"
"""The category of what rests away from the device: it is known, and counted in no total."""


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct storages behind ``tensors`` by their address of record."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        found[storage._cdata] = storage
    return found


def gradients(model: ParallelModel) -> list[Tensor]:
    """Return the gradients on this rank's device now: buffers, shards, and whole ones that still accumulate."""
    found: list[Tensor] = []
    for engine in model.engines.values():
        if isinstance(engine, Away):
            found += [unit.buffer for unit in engine.away]
        elif isinstance(engine, Replicate):
            found += engine.flat_gradients()
        else:
            grads = [p.grad for p in engine.root.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
            grads = [g for g in grads if g is not None] + engine.waiting_gradients()
            homes = storages(engine.homes.homes()) if engine.homes is not None else {}
            found += [g for g in grads if local(g).untyped_storage()._cdata not in homes]
    return found


def state_tensors(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors that rest between steps: parameters (with buffers), gradients, optimizer state.

    State that rests away from the device (host memory, files) is "offloaded". Where parameters do, "parameters" are
    the places in which they visit, which have no memory between their uses.
    """
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    away: list[Tensor] = []
    if isinstance(optimizer, OffloadedAdamW):
        away = optimizer.homes
        state = [t for s in optimizer.state.values() for k, t in s.items() if k not in ENTRIES]
    rows = (packed.row for packed in model.packed.values())
    values: list[Tensor] = [*model.params.values(), *(row for row in rows if row is not None)]
    if parameters_away(model.plan.layout):
        away, state = [*model.away(), *away, *state], []
        values = [t for e in model.engines.values() if isinstance(e, Away) for t in e.visits()]
    return {
        AWAY: away,
        "parameters": [*values, *model.module.buffers()],
        "gradients": gradients(model),
        "optimizer": state,
    }


def resting_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return bytes at rest by category (distinct storages)."""
    return {
        name: sum(s.nbytes() for s in storages(tensors).values())
        for name, tensors in state_tensors(model, optimizer).items()
    }


class LiveBytes(TorchDispatchMode):
    """Counts live storage bytes while it is entered.

    Attributes:
        current: live bytes by category now.
        peak: live bytes by category at the moment of the highest total.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.peak_total = 0
        self._total = 0
        self._known: dict[int, tuple[str, int]] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []

    def add(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count ``tensors`` (or move them, when they are known) under ``category``."""
        for key, storage in storages(tensors).items():
            self._put(key, storage, category)

    def _put(self, key: int, storage: torch.UntypedStorage, category: str) -> None:
        size = storage.nbytes()
        if key in self._known:
            old, old_size = self._known[key]
            self.current[old] -= old_size
            self._total -= old_size if old != AWAY else 0
        else:
            self._finalizers.append(weakref.finalize(storage, self._gone, key))
        self._known[key] = (category, size)
        self.current[category] = self.current.get(category, 0) + size
        self._total += size if category != AWAY else 0
        if self._total >= self.peak_total:  # at equal bytes the later names are the better ones
            self.peak_total = self._total
            self.peak = dict(self.current)

    def _gone(self, key: int) -> None:
        category, size = self._known.pop(key)
        self.current[category] -= size
        self._total -= size if category != AWAY else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the storages of what it returns."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known[1] != storage.nbytes():
                    self._put(storage._cdata, storage, known[0] if known else "working")
        return out

    def _saved(self, tensor: Tensor) -> Tensor:
        """Tag what autograd keeps for backward as activations; parameters and received inputs are leaves."""
        if isinstance(tensor, DTensor):
            return tensor
        base = tensor._base if tensor._base is not None else tensor
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if not (base.is_leaf and base.requires_grad) and (known is None or known[0] == "working"):
            self._put(storage._cdata, storage, "activations")
        # kept as it is, an operation's own output would hold the node that keeps it: what a split backward has not
        # visited twice would then live until the next garbage collection
        return tensor if tensor.grad_fn is None else tensor.detach()

    @contextmanager
    def watch(self) -> Iterator[LiveBytes]:
        """Enter the counter together with autograd's and storage resizing's hooks."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._known.get(storage._cdata)
            self._put(storage._cdata, storage, known[0] if known else "working")
            return result

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._saved, lambda t: t):
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize
            for finalizer in self._finalizers:
                finalizer.detach()

    def memory(self) -> MemoryBytes:
        """Return the peak by category."""
        at = self.peak
        return MemoryBytes(
            parameters=at.get("parameters", 0),
            gradients=at.get("gradients", 0),
            optimizer=at.get("optimizer", 0),
            activations=at.get("activations", 0),
            working=at.get("working", 0) + at.get("batch", 0),
        )


def begin_peak(device: torch.device) -> None:
    """Let the caching allocator of a GPU begin a new peak; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def with_allocator(memory: MemoryBytes, device: torch.device) -> MemoryBytes:
    """Return ``memory`` up to the peak of the caching allocator since ``begin_peak``; the same on a CPU.

    What the allocator gave beyond the counted tensors (blocks rounded up, memory that kernels use inside) is "working";
    what the device holds beside the allocator's reserved memory (context, communicators, other processes) is outside.
    """
    if device.type != "cuda":
        return memory
    beyond = torch.cuda.max_memory_allocated(device) - memory.total
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return replace(memory, working=max(0, memory.working + beyond), outside_allocator=max(0, outside))


@contextmanager
def watch_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Iterable[Tensor],
    counter: LiveBytes | None = None,
) -> Iterator[LiveBytes]:
    """Count the live bytes of a step that starts now with what rests on this rank and its ``batch``.

    ``counter``: a fresh one that also notes something else.
    """
    counter = counter or LiveBytes()
    for category, tensors in state_tensors(model, optimizer).items():
        counter.add(tensors, category)
    counter.add(batch, "batch")
    if model.pipeline is not None:
        counter.add(model.pipeline.buffers(), "working")
    before = model.on_action

    def on_action(action: str) -> None:
        counter.add(gradients(model), "gradients")
        before(action)

    model.on_action = on_action
    try:
        with counter.watch():
            yield counter
    finally:
        model.on_action = before
