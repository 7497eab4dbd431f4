"""ZeRO's shards at home: FSDP2's own offload to host memory, and shards in files.

On a GPU FSDP2's ``CPUOffloadPolicy`` does the work: shards rest in pinned memory, a unit's are copied to the device when
it is gathered, and its reduced gradients are copied back. On a CPU the policy moves nothing, as both are one memory;
there a unit's reduced gradients are copied to a home of their own, so that what the device holds can be counted.

With files, a unit's shards lie one after the other in one mapped file: FSDP2 reads them from there. They are held against
their checksums when they are read; a thread checks the next unit's (in the order in which they were gathered last time),
which brings its pages; pages are let go once the unit is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.offload import FileStore, HostStore, Seals
from meshwright.parallel.stage import logical_name


@dataclass
class _Unit:
    """One FSDP2 unit: its homes, and the checksums of its file."""

    group: Any
    gradients: list[Tensor] = field(default_factory=list[Tensor])
    seals: Seals | None = None


class ShardHomes:
    """The homes of all shards below ``root``, which FSDP2 has cut with its offload policy.

    Args:
        root: a module that ``fully_shard`` was called on, with ``CPUOffloadPolicy``.
        groups: FSDP2's groups of parameters in it that are gathered together.
        store: where shards go; a host store leaves them where FSDP2 put them.
        device: where the module computes.
    """

    def __init__(
        self, root: nn.Module, groups: Sequence[Any], store: HostStore | FileStore, device: torch.device
    ) -> None:
        names = {id(p): logical_name(n) for n, p in root.named_parameters()}
        self._store = store
        self._thread = ThreadPoolExecutor(1, "parameters") if isinstance(store, FileStore) else None
        self._after: dict[tuple[int, int], int] = {}
        self._last = (-1, -1)
        self._coming: dict[int, Future[None]] = {}
        self._units: list[_Unit] = []
        for group in groups:
            self._take(group, device, names)

    def _take(self, group: Any, device: torch.device, names: Mapping[int, str]) -> None:
        index = len(self._units)
        unit = _Unit(group)
        self._units.append(unit)
        if isinstance(self._store, FileStore):
            self._to_file(unit, index, self._store, names)
            inner_unshard = group.unshard

            def unshard(*args: Any, **kwargs: Any) -> None:
                if group._all_gather_result is None and not group.is_unsharded:
                    self._ready(index)
                    inner_unshard(*args, **kwargs)
                    assert unit.seals is not None
                    unit.seals.settle()

            group.unshard = unshard
        if device.type == "cpu":
            inner = group.post_backward

            def post_backward(*args: Any, **kwargs: Any) -> None:
                inner(*args, **kwargs)
                _send_gradients(unit)

            group.post_backward = post_backward

    def _to_file(self, unit: _Unit, index: int, store: FileStore, names: Mapping[int, str]) -> None:
        params: list[Any] = unit.group.fsdp_params
        if not params:
            return
        dtype = params[0]._sharded_param_data.dtype
        home = store.make(index, sum(p._sharded_param_data.numel() for p in params), dtype)
        places: dict[str, tuple[int, int]] = {}
        start = 0
        for p in params:
            held = p._sharded_param_data
            mine = home[start : start + held.numel()]
            mine.copy_(held)
            p._sharded_param_data = mine
            cut = p.sharded_param._local_tensor
            p.sharded_param._local_tensor = mine[: cut.numel()].view(cut.shape)
            places[names[id(p.sharded_param)]] = (start, held.numel())
            start += held.numel()
        unit.seals = Seals(store, index, places, home)
        unit.seals.seal()

    def _ready(self, index: int) -> None:
        """Return when a unit's bytes were held against their checksums; begin with the one that comes after it."""
        assert self._thread is not None
        coming = self._coming.pop(index, None)
        if coming is None:
            coming = self._begin(index)
        coming.result()
        before, last = self._last
        if last >= 0:
            self._after[before, last] = index
        self._last = (last, index)
        then = self._after.get(self._last)
        if then is not None and then not in self._coming:
            self._coming[then] = self._begin(then)

    def rest(self) -> None:
        """Wait for what a thread still reads (before an update). Raises MeshwrightError E277."""
        self._last = (-1, -1)
        while self._coming:
            self._coming.popitem()[1].result()

    def _begin(self, index: int) -> Future[None]:
        assert self._thread is not None
        seals = self._units[index].seals
        assert seals is not None
        return self._thread.submit(seals.check)

    def homes(self) -> list[Tensor]:
        """Return the tensors that rest away from the device: shards, and their gradients."""
        out: list[Tensor] = []
        for unit in self._units:
            out += [p._sharded_param_data for p in unit.group.fsdp_params]
            out += unit.gradients
        return out

    def seal(self, names: Sequence[str] | None = None) -> None:
        """Take what is at home now as right (of ``names``; by default all), after an update or a load."""
        for unit in self._units:
            if unit.seals is not None:
                unit.seals.seal(names)

    def verify(self) -> None:
        """Hold everything at home against its checksum. Raises MeshwrightError E277."""
        for unit in self._units:
            if unit.seals is not None:
                unit.seals.check()
                unit.seals.settle()

    def close(self) -> None:
        """End the thread and give the homes back; no step can follow."""
        if self._thread is not None:
            self._thread.shutdown()
        self._store.close()


def _send_gradients(unit: _Unit) -> None:
    """Copy the gradients that a unit's reduction left to their homes, where later ones are added."""
    fresh = [p for p in unit.group.fsdp_params if p.sharded_param.grad is not None]
    if not fresh:
        return
    if not unit.gradients:
        like = [p.sharded_param.grad._local_tensor for p in fresh]
        unit.gradients = [HostStore(False).make(0, sum(g.numel() for g in like), like[0].dtype)]
    start = 0
    for p in fresh:
        grad = p.sharded_param.grad._local_tensor
        home = unit.gradients[0][start : start + grad.numel()].view(grad.shape)
        start += grad.numel()
        if grad.data_ptr() != home.data_ptr():
            home.copy_(grad)
            p.sharded_param.grad = p.to_sharded_dtensor(home)
