"""AdamW whose moments rest in host memory or in files and visit the device piece by piece.

An update walks the pieces in order: while one is updated, a thread brings the next and writes the last one back
(two buffers, one thread, so reads and writes are sequential). The update is torch's own on whole tensors, so its bits
are those of an optimizer whose state never left. Between updates the device holds nothing of it but the step counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.parallel.offload import FileStore, HostStore, Piece, Slot, Store, checksum, cut_pieces
from meshwright.parallel.tied import local
from meshwright.train.optim import build_optimizer

ENTRIES: Final = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every element."""


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW over ``params`` (by logical name) with its moments in ``store``; ``state`` holds the tensors at home.

    ``on_updated`` is called with the names of each piece's parameters when they are updated. ``at_home``: parameters
    rest away too, so the update runs where they are, with two buffers that are kept.

    Attributes:
        moved_bytes: bytes that the last update read from home and wrote back, together.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        params: Mapping[str, nn.Parameter],
        store: Store,
        *,
        on_updated: Callable[[Sequence[str]], None] | None = None,
        at_home: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(list(groups), **options)
        self.store = store
        self._on_updated = on_updated
        self.moved_bytes = 0
        self._params = dict(params)
        self._pieces = cut_pieces([(n, local(p.detach()).numel()) for n, p in params.items()], len(ENTRIES))
        first = next(iter(params.values()))
        self._device, self._dtype = local(first.detach()).device, first.dtype
        self._homes = [store.make(piece.index, piece.numel, self._dtype) for piece in self._pieces]
        largest = max((piece.numel for piece in self._pieces), default=0)
        self._buffers = [torch.empty(largest, dtype=self._dtype) for _ in range(2)] if at_home else None
        self._sums: dict[tuple[str, str], int] = {}
        self._thread: ThreadPoolExecutor | None = None
        fused = bool(self.param_groups[0].get("fused"))
        for piece, home in zip(self._pieces, self._homes, strict=True):
            for slot in piece.slots:
                step = torch.zeros((), dtype=torch.float32, device=self._device if fused else "cpu")
                self.state[self._params[slot.name]] = {"step": step, **self._entries(slot, home)}

    def _entries(self, slot: Slot, flat: Tensor) -> dict[str, Tensor]:
        """Return a tensor's moments as views of ``flat``, shaped (and cut) like the parameter."""
        p = self._params[slot.name]
        out: dict[str, Tensor] = {}
        for k, entry in enumerate(ENTRIES):
            part = flat[slot.start + k * slot.numel : slot.start + (k + 1) * slot.numel]
            part = part.view(local(p.detach()).shape)
            if isinstance(p, DTensor):
                part = DTensor.from_local(
                    part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
            out[entry] = part
        return out

    @property
    def homes(self) -> list[Tensor]:
        """The flat tensors in which the moments rest, away from the device, with what an update at home needs."""
        return [*self._homes, *(self._buffers or ())]

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; see the module.

        Raises:
            MeshwrightError: E277 when what a file gave back is not what was written.
        """
        assert closure is None
        thread = self._thread = self._thread or ThreadPoolExecutor(1, "offload")
        groups = [group["params"] for group in self.param_groups]
        buffers = self._buffers
        if buffers is None:
            largest = max((piece.numel for piece in self._pieces), default=0)
            buffers = [torch.empty(largest, dtype=self._dtype, device=self._device) for _ in range(2)]
        self.moved_bytes = 0
        written: list[Future[None]] = []
        try:
            coming = thread.submit(self._read, self._pieces[0], buffers[0]) if self._pieces else None
            for k, piece in enumerate(self._pieces):
                assert coming is not None
                coming.result()
                if k + 1 < len(self._pieces):
                    coming = thread.submit(self._read, self._pieces[k + 1], buffers[(k + 1) % 2])
                self._update(piece, buffers[k % 2], groups)
                if self._on_updated is not None:
                    self._on_updated([slot.name for slot in piece.slots])
                written.append(thread.submit(self._write, piece, buffers[k % 2]))
            for future in written:
                future.result()
        finally:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = params
        return None

    def _update(self, piece: Piece, buffer: Tensor, groups: list[list[Tensor]]) -> None:
        """Run torch's update on the piece's parameters with their moments in ``buffer``."""
        at_home: dict[Tensor, dict[str, Any]] = {}
        for slot in piece.slots:
            p = self._params[slot.name]
            at_home[p] = self.state[p]
            self.state[p] = {"step": at_home[p]["step"], **self._entries(slot, buffer)}
        here = {id(p) for p in at_home}
        for group, params in zip(self.param_groups, groups, strict=True):
            group["params"] = [p for p in params if id(p) in here]
        try:
            super().step()
        finally:
            self.state.update(at_home)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _read(self, piece: Piece, buffer: Tensor) -> None:
        home = self._homes[piece.index]
        if self.store.checks:
            self._verify(piece, home)
        with torch.no_grad():
            buffer[: piece.numel].copy_(home)
        self.store.settle(piece.index)
        self.moved_bytes += home.nbytes

    def _write(self, piece: Piece, buffer: Tensor) -> None:
        home = self._homes[piece.index]
        with torch.no_grad():
            home.copy_(buffer[: piece.numel])
        if self.store.checks:
            self._note(piece, home)
        self.store.settle(piece.index)
        self.moved_bytes += home.nbytes

    def _parts(self, piece: Piece, home: Tensor) -> Iterable[tuple[tuple[str, str], Tensor]]:
        for slot in piece.slots:
            for k, entry in enumerate(ENTRIES):
                start = slot.start + k * slot.numel
                yield (slot.name, entry), home[start : start + slot.numel]

    def _note(self, piece: Piece, home: Tensor) -> None:
        self._sums |= {key: checksum(part) for key, part in self._parts(piece, home)}

    def _verify(self, piece: Piece, home: Tensor) -> None:
        for key, part in self._parts(piece, home):
            if key in self._sums and checksum(part) != self._sums[key]:
                raise MeshwrightError(
                    problem("E277", where=" of ".join(reversed(key)), found="its checksum is another one"),
                    ExitCode.ENVIRONMENT,
                )

    def seal(self) -> None:
        """Take what is at home now as right (after a checkpoint was read into it)."""
        for piece, home in zip(self._pieces, self._homes, strict=True):
            if self.store.checks:
                self._note(piece, home)
            self.store.settle(piece.index)

    def verify(self) -> None:
        """Hold everything at home against its checksum (before a checkpoint takes it). Raises MeshwrightError E277."""
        for piece, home in zip(self._pieces, self._homes, strict=True):
            if self.store.checks:
                self._verify(piece, home)

    def close(self) -> None:
        """End the thread and give the homes back; no update can follow."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.state.clear()
        self._homes, self._buffers = [], None
        self.store.close()


def make_optimizer(
    params: Mapping[str, nn.Parameter],
    decays: Iterable[str],
    settings: Any,
    *,
    offload: str,
    folder: Path | None,
    rank: int,
    on_updated: Callable[[Sequence[str]], None] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of ``build_optimizer``, its state where ``offload`` says; files go to ``folder``.

    With parameters in host memory the state is there too, as it lies beside them. ``on_updated`` is called with the
    names of parameters that rest in files, when they are updated.

    Raises:
        MeshwrightError: E276 for an optimizer whose state cannot be offloaded, E278 for a folder without room.
    """
    optimizer = build_optimizer(params, decays, settings)
    if offload == "none" or not params:
        return optimizer
    if not isinstance(optimizer, torch.optim.AdamW):
        raise MeshwrightError(
            problem("E276", where="optimizer.name", found=f"{settings.name}, offload={offload}")
        )
    if offload == "parameters":
        return optimizer
    device = local(next(iter(params.values())).detach()).device
    if offload == "optimizer":
        store: Store = HostStore(pinned=device.type == "cuda")
    else:
        assert folder is not None
        store = FileStore(folder, rank)
    groups = [{k: g[k] for k in ("params", "weight_decay")} for g in optimizer.param_groups]
    held = optimizer.param_groups[0]
    options: dict[str, Any] = {k: held[k] for k in ("lr", "betas", "eps", "fused")}
    if offload == "parameters-nvme":
        options |= {"at_home": True, "on_updated": on_updated}
    return OffloadedAdamW(groups, params, store, **options)


def close_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Remove what an optimizer keeps in files."""
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.close()
