"""Replicas whose parameters rest in host memory or in files: a block's come before it runs and are let go after it.

Maths: that of ``replicate``, in the same order of sums, so every bit is the same. What is trained is the copy at home
(the *master*), which the update changes there; what the module computes with is a *visitor* without memory of its own
between its uses.

Movement, per micro-batch and block: parameters in before its forward and again before its backward, while the one before
it still computes; its gradients out when its backward has made them, and in again before the next micro-batch adds to
them. The root unit (embedding, last norm, head) comes once a step and stays until the end of the last backward.

Communication: after the last micro-batch one all_reduce of each unit's gradients on ``dp_replicate``, as in
``replicate``; at most two units' gradients are on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.offload import HostStore, Seals, Store
from meshwright.parallel.replicate import FlatUnit, Replicate

ALIGN: Final = 64
"""Elements to whose multiples a parameter's place in its unit is rounded: kernels see it as in memory of its own."""


def _resize(flat: Tensor, numel: int) -> None:
    """Give the storage of a flat tensor room for ``numel`` elements (0: none)."""
    flat.untyped_storage().resize_(numel * flat.element_size())


class AwayUnit(FlatUnit):
    """The parameters of one unit: masters at home, visitors on the device, and their gradients in both places.

    Attributes:
        masters: what is trained, by name; gradients are views of ``sums``.
        here: whether the visitors have their values.
        held: whether the gradients' buffer is on the device.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        store: Store,
        index: int,
        device: torch.device,
    ) -> None:
        self.name, self.group, self.index = name, group, index
        self.params = tuple(p for p in params.values() if p.requires_grad)
        dtype = next(iter(params.values())).dtype
        starts: list[int] = []
        end = 0
        for p in params.values():
            starts.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN
        self.numel = end
        self.home = store.make(index, end, dtype)
        self.visit = torch.empty(end, dtype=dtype, device=device)
        places = dict(zip(params, starts, strict=True))
        self.seals = Seals(store, index, {n: (s, params[n].numel()) for n, s in places.items()}, self.home)
        self.masters: dict[str, nn.Parameter] = {}
        for n, p in params.items():
            part = slice(places[n], places[n] + p.numel())
            with torch.no_grad():
                self.home[part].copy_(p.detach().reshape(-1))
            self.masters[n] = nn.Parameter(self.home[part].view(p.shape), p.requires_grad)
            p.data = self.visit[part].view(p.shape)
        _resize(self.visit, 0)
        self.seals.seal()
        trained = sum(p.numel() for p in self.params)
        self.sums = HostStore(device.type == "cuda").make(0, trained, dtype)
        self.buffer = torch.empty(trained, dtype=dtype, device=device)
        self.views: list[Tensor] = []
        offset = 0
        for p, master in zip(self.params, self._trained(), strict=True):
            self.views.append(self.buffer[offset : offset + p.numel()].view_as(p))
            master.grad = self.sums[offset : offset + p.numel()].view_as(p)
            p.grad = self.views[-1]
            offset += p.numel()
        _resize(self.buffer, 0)
        self.pending = len(self.params)
        self.here = self.held = self.summed = False

    def _trained(self) -> list[nn.Parameter]:
        return [m for m in self.masters.values() if m.requires_grad]

    def attach(self) -> None:
        """Bring the sums of earlier micro-batches to the device, or zeros, unless they are there."""
        if self.held:
            return
        self.held = True
        _resize(self.buffer, self.buffer.numel())
        with torch.no_grad():
            if self.summed:
                self.buffer.copy_(self.sums, non_blocking=True)
            else:
                self.buffer.zero_()
        for p, view in zip(self.params, self.views, strict=True):
            p.grad = view

    def send_gradients(self) -> None:
        """Write the gradients home and give their memory on the device back."""
        if not self.held:
            return
        with torch.no_grad():
            self.sums.copy_(self.buffer, non_blocking=True)
        self.held, self.summed = False, True
        _resize(self.buffer, 0)

    def zero(self) -> None:
        """Forget the gradients."""
        if self.held:
            _resize(self.buffer, 0)
        self.held = self.summed = False

    def let_go(self) -> None:
        """Give the visitors' memory on the device back."""
        self.here = False
        _resize(self.visit, 0)


class _End(torch.autograd.Function):
    """Passes a tensor on; in backward, when its gradient is complete, calls ``then`` before it is passed on."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], x: Tensor) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.then()
        return None, *grads


def _call(method: weakref.WeakMethod[Callable[[], None]], _: Tensor) -> None:
    """Call a method of a unit that lives; its parameters' hooks must not keep it alive (see ``Replicate``)."""
    found = method()
    if found is not None:
        found()


class Away(Replicate):
    """``Replicate`` with parameters that rest away from the device; see the module.

    Args:
        root: the stage's module.
        blocks: its repeated blocks.
        names: every parameter of ``root`` by the name that its master is to have.
        group: the data-parallel group, or None for one replica.
        store: where masters rest.
        device: where the module computes.
        spread: modules inside the blocks that hold experts spread over ranks, a unit each.
        spread_group: the ranks that hold the same experts, or None for one.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        names: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        store: Store,
        device: torch.device,
        spread: Sequence[nn.Module] = (),
        spread_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._store, self._device = store, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "parameters")
        self._coming: dict[int, Future[None] | Any] = {}
        self._launched: list[tuple[dist.Work, AwayUnit]] = []
        self._flows = [False] * len(blocks)
        for owner in root.modules():
            for name, b in owner._buffers.items():
                owner._buffers[name] = None if b is None else b.to(device)
        named = {id(p): n for n, p in names.items()}
        in_blocks = {id(p) for b in blocks for p in b.parameters()}
        rest = {n: p for n, p in names.items() if id(p) not in in_blocks}
        self.away: list[AwayUnit] = []
        self._root = self._unit("root", rest, group) if rest else None
        experts = {id(p) for module in spread for p in module.parameters()}
        self._blocks: list[list[AwayUnit]] = []
        for i, b in enumerate(blocks):
            held = {named[id(p)]: p for p in b.parameters()}
            own = {n: p for n, p in held.items() if id(p) in experts}
            shared = {n: p for n, p in held.items() if id(p) not in experts}
            parts = [(f"block {i}", shared, group), (f"experts of block {i}", own, spread_group)]
            self._blocks.append([self._unit(*part) for part in parts if part[1]])
        super().__init__([], None)
        self.units = [u for u in self.away if u.params]
        self._next = len(self.units) - 1
        for unit in self.units:
            for p, master in zip(unit.params, unit._trained(), strict=True):
                p.register_hook(partial(_call, weakref.WeakMethod(unit.attach)))
                self._handles.append(p.register_post_accumulate_grad_hook(self._hook(unit, id(master))))
        root.register_forward_pre_hook(self._before_root)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before_block(i), with_kwargs=True)
            block.register_forward_hook(self._after_block(i))

    def _unit(
        self, name: str, params: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
    ) -> AwayUnit:
        unit = AwayUnit(name, params, group, self._store, len(self.away), self._device)
        self.away.append(unit)
        return unit

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return {n: m for unit in self.away for n, m in unit.masters.items()}

    def homes(self) -> list[Tensor]:
        """Return the tensors that rest away from the device: values and gradients."""
        return [t for u in self.away for t in (u.home, u.sums)]

    def visits(self) -> list[Tensor]:
        """Return the tensors that hold parameters on the device while they are used."""
        return [u.visit for u in self.away]

    # --- parameters -----------------------------------------------------------------------------------------------

    def _start(self, unit: AwayUnit) -> None:
        """Begin to bring a unit's parameters."""
        if unit.here or unit.index in self._coming:
            return
        _resize(unit.visit, unit.numel)
        if self._side is None:
            self._coming[unit.index] = self._thread.submit(self._copy, unit)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._copy(unit)
            self._coming[unit.index] = self._side.record_event()

    def _copy(self, unit: AwayUnit) -> None:
        unit.seals.check()
        with torch.no_grad():
            unit.visit.copy_(unit.home, non_blocking=True)
        unit.seals.settle()

    def _arrive(self, unit: AwayUnit) -> None:
        """Return when a unit's parameters can be used."""
        self._start(unit)
        coming = self._coming.pop(unit.index, None)
        if isinstance(coming, Future):
            coming.result()
        elif coming is not None:
            torch.cuda.current_stream(self._device).wait_event(coming)
        unit.here = True

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self._root is not None:
            self._arrive(self._root)

    def _bring(self, i: int, then: int | None) -> None:
        """Return when a block's parameters can be used; begin to bring those of block ``then``."""
        for unit in self._blocks[i]:
            self._arrive(unit)
        for unit in self._blocks[then] if then is not None else ():
            self._start(unit)

    def _let_go(self, i: int) -> None:
        for unit in self._blocks[i]:
            unit.let_go()

    def _before_block(self, i: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._bring(i, i + 1 if i + 1 < len(self._blocks) else None)
            x = args[0]
            self._flows[i] = torch.is_grad_enabled() and x.requires_grad
            if self._flows[i]:
                args = (_End.apply(partial(self._let_go, i), x), *args[1:])
            return args, kwargs

        return before

    def _after_block(self, i: int) -> Callable[..., Any]:
        def before_backward(_: Tensor) -> None:
            self._bring(i, i - 1 if i > 0 and self._flows[i] else None)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._let_go(i)
            first = out if isinstance(out, Tensor) else out[0]
            if first.requires_grad:
                first.register_hook(before_backward)

        return after

    def rest(self) -> None:
        """Let every parameter go that is on the device (after an evaluation, or at the end of a step)."""
        for unit in self.away:
            if unit.index in self._coming:
                self._arrive(unit)
            if unit.here:
                unit.let_go()

    # --- gradients ------------------------------------------------------------------------------------------------

    def _on_gradient(self, unit: FlatUnit, key: int) -> None:
        assert isinstance(unit, AwayUnit)
        self.reached.add(key)
        unit.pending -= 1
        if unit.pending > 0:
            return
        if self.sync:
            self._launch_ready()
        else:
            unit.send_gradients()

    def _launch(self, unit: FlatUnit) -> None:
        assert isinstance(unit, AwayUnit)
        self._next -= 1
        unit.attach()
        if unit.group is None:
            unit.send_gradients()
            return
        work = dist.all_reduce(unit.buffer, group=unit.group, async_op=True)
        assert work is not None
        self._launched.append((work, unit))
        self._wait(left=1)

    def _wait(self, left: int) -> None:
        while len(self._launched) > left:
            work, unit = self._launched.pop(0)
            work.wait()
            unit.send_gradients()

    def before_backward(self, *, last: bool) -> None:
        """Say whether the coming backward is the last of the step; only then are gradients reduced."""
        self.sync = last
        self._next = len(self.units) - 1
        for unit in self.units:
            unit.pending = len(unit.params)

    def end_of_stage(self) -> None:
        """Launch the units that the last backward has not (parameters it did not use), in the fixed order."""
        while self._next >= 0:
            self._launch(self.units[self._next])
        self._wait(left=0)
        self.sync = False

    def finish(self) -> None:
        """Reduce what backward has not, wait for all of it, and let every parameter go."""
        self.end_of_stage()
        self.rest()
        if self._side is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def flat_gradients(self) -> list[Tensor]:
        """Return the gradients at home, one tensor per unit: every trainable element once."""
        return [unit.sums for unit in self.units if isinstance(unit, AwayUnit)]

    # --- at home --------------------------------------------------------------------------------------------------

    def seal(self, names: Sequence[str] | None = None) -> None:
        """Take what is at home now as right (of ``names``; by default all), after an update or a load."""
        for unit in self.away:
            unit.seals.seal(names)

    def verify(self) -> None:
        """Hold everything at home against its checksum. Raises MeshwrightError E277."""
        for unit in self.away:
            unit.seals.check()
            unit.seals.settle()

    def close(self) -> None:
        """End the thread and give the homes back; no step can follow."""
        self._thread.shutdown()
        self._store.close()
