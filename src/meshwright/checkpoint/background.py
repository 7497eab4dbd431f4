"""Writing a checkpoint beside the training: the step waits for a copy of the state, a thread writes the copy.

The copy lies in host memory that is kept for the next one. The thread talks to the other ranks' threads over a
group of its own, so that its messages and the training's never meet. One checkpoint is written at a time: the next
one, and the end of the run, wait for it; an error of the thread is raised there, on all ranks alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.agree import Ranks
from meshwright.checkpoint.pieces import Pieces, first_row
from meshwright.checkpoint.save import Captured, write_checkpoint


def writer_ranks(rank: int, world_size: int) -> Ranks:
    """Return the ranks with a gloo group of their own. Every rank calls it once.

    Communication: creates a process group (no payload).
    """
    made = dist.new_group(backend="gloo", group_desc="checkpoints") if world_size > 1 else None
    return Ranks(rank, world_size, made if isinstance(made, dist.ProcessGroup) else None)


def copied(captured: Captured, memory: dict[str, list[Tensor]]) -> Captured:
    """Return ``captured`` with its tensors copied to the CPU, into ``memory`` where it fits, else into new memory there.

    A shard becomes its rows at their place in the logical tensor, so that the copy needs no device mesh.
    """
    out = {key: _copy(key, tensor, memory) for key, tensor in captured.tensors.items()}
    for key in memory.keys() - captured.tensors.keys():
        del memory[key]
    return Captured(tensors=out, optimizer=captured.optimizer, tied=captured.tied)


def _copy(key: str, tensor: Tensor, memory: dict[str, list[Tensor]]) -> Tensor:
    if isinstance(tensor, Pieces):
        places = [at for at, _ in tensor.pieces]
        kept = _fill(key, [piece for _, piece in tensor.pieces], memory)
        return Pieces(tensor.shape, torch.empty(0, dtype=tensor.dtype), list(zip(places, kept, strict=True)))
    if isinstance(tensor, DTensor):
        rows = tensor.to_local()
        places = [(first_row(tensor), *[0] * (rows.ndim - 1))] if rows.numel() else []
        kept = _fill(key, [rows] if rows.numel() else [], memory)
        return Pieces(tensor.shape, torch.empty(0, dtype=tensor.dtype), list(zip(places, kept, strict=True)))
    return _fill(key, [tensor], memory)[0]


def _fill(key: str, tensors: list[Tensor], memory: dict[str, list[Tensor]]) -> list[Tensor]:
    there = memory.get(key, [])
    if [(t.shape, t.dtype) for t in there] != [(t.shape, t.dtype) for t in tensors]:
        there = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        memory[key] = there
    for kept, tensor in zip(there, tensors, strict=True):
        kept.copy_(tensor)
    return there


class BackgroundWriter:
    """Writes checkpoints of one rank in a thread.

    Attributes:
        stall_s: how long the last ``start`` kept the training, waiting for an earlier write included.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._memory: dict[str, list[Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.stall_s = 0.0

    def start(
        self,
        *,
        folder: Path,
        step: int,
        captured: Captured,
        extra: dict[str, Any],
        manifest: Mapping[str, Any],
        after: Callable[[Path], None],
    ) -> None:
        """Copy the state and begin to write it; ``after`` is called in the thread with the path of the checkpoint.

        Raises:
            MeshwrightError: what an earlier write ended with.
        """
        begin = time.perf_counter()
        self.wait()
        held = copied(captured, self._memory)

        def write() -> None:
            try:
                path = write_checkpoint(
                    self._ranks, folder=folder, step=step, captured=held, extra=extra, manifest=dict(manifest)
                )
                after(path)
            except BaseException as error:  # raised where the training waits for it
                self._error = error

        self._thread = threading.Thread(target=write, name=f"checkpoint {step}", daemon=True)
        self._thread.start()
        self.stall_s = time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until the write that is going on is over.

        Raises:
            MeshwrightError: what it ended with, on all ranks alike.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
