"""Recording the collectives of a step: what the ledger compares with the StepProgram."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Recorded:
    """One collective as it ran: kind, axis name and payload bytes (see ``program.step.Collective``)."""

    kind: str
    axis: str
    num_bytes: int


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_size(v) for v in value)
    return 0


_PAYLOAD: dict[str, tuple[str, int]] = {
    # op name -> (our kind, index of the argument that is the payload)
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}


class CollectiveRecorder(TorchDispatchMode):
    """Notes every collective dispatched while it is entered, on this thread.

    Args:
        axes: torch's process-group name mapped to our axis name; another group is recorded by torch's name.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.axes = dict(axes)
        self.records: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record ``func`` if it is a collective, then run it unchanged."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let the shards be handled first: their collectives come back here
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name in _PAYLOAD:
                kind, index = _PAYLOAD[name]
                self.records.append(Recorded(kind, self._axis(args), _size(args[index])))
            elif name not in ("barrier", "monitored_barrier_"):
                self.records.append(Recorded(name, self._axis(args), 0))
        return func(*args, **(kwargs or {}))

    def _axis(self, args: Any) -> str:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    group = dist.ProcessGroup.unbox(arg)
                except (RuntimeError, TypeError):
                    continue
                return self.axes.get(group.group_name, group.group_name)
        return "unknown"
