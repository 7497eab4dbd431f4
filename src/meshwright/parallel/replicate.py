"""Data parallelism with replicated parameters (ZeRO stage 0): one all-reduce per unit and step.

Maths: the step's gradient is the sum over replicas of each replica's gradient (the loss is already divided by
the global number of valid tokens). Gradients live in one flat buffer per unit; ``param.grad`` is a view of it,
so accumulation happens in place and a unit is one collective without any copy.

Communication: after the last micro-batch, one all_reduce of each unit's buffer on ``dp_replicate``, launched
from the last unit to the first (the order in which backward finishes them) and in that fixed order on every
rank, whatever parameters a rank's data happened to use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended (a private hook of autograd, as in FSDP2)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


class FlatUnit:
    """The trainable parameters of one unit and the flat buffer that holds their gradients."""

    def __init__(
        self, name: str, params: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.name = name
        self.group = group
        self.params = tuple(params)
        first = self.params[0]
        self.buffer = first.detach().new_zeros(sum(p.numel() for p in params))
        self.views: list[Tensor] = []
        offset = 0
        for p in self.params:
            self.views.append(self.buffer[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        self.pending = len(self.params)
        self.attach()

    def attach(self) -> None:
        """Make every ``param.grad`` the view of the buffer, keeping a gradient that stands elsewhere."""
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is None:
                view.zero_()
                p.grad = view
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
                p.grad = view

    def zero(self) -> None:
        """Set the gradients to zero in place."""
        self.buffer.zero_()
        self.attach()


class Replicate:
    """Keeps replicas of the parameters in step by summing their gradients.

    Args:
        units: (name, trainable parameters) from first to last, in the order of the model.
        group: the data-parallel group, or None for one replica (then there is nothing to reduce).
        own_groups: units, by name, that are reduced over another group (None: over none), such as experts.
        average: divide the sum by the number of replicas (a user's own loop that takes the mean per rank).

    Attributes:
        reached: ids of the parameters that a backward gave a gradient since ``zero_grad``.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, Sequence[nn.Parameter]]],
        group: dist.ProcessGroup | None,
        *,
        own_groups: Mapping[str, dist.ProcessGroup | None] | None = None,
        average: bool = False,
    ) -> None:
        own = own_groups or {}
        self.average = average
        self.units = [FlatUnit(name, params, own.get(name, group)) for name, params in units if params]
        self.reduces = any(unit.group is not None for unit in self.units)
        self.reached: set[int] = set()
        self.sync = False
        self._next = len(self.units) - 1
        self._works: list[dist.Work] = []
        self._finish_with_backward = False
        self._queued = False
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(unit, id(p)))
            for unit in self.units
            for p in unit.params
        ]

    def _hook(self, unit: FlatUnit, key: int) -> Callable[[Tensor], None]:
        """Return the hook of one parameter. It holds nothing: torch keeps a tensor's hooks where no collector looks.

        A hook that held this object would hold the parameters too, and with them the process groups and their threads,
        for as long as the process lives.
        """
        owner, its_unit = weakref.ref(self), weakref.ref(unit)

        def on_gradient(_: Tensor) -> None:
            engine, unit = owner(), its_unit()
            if engine is None or unit is None:
                raise RuntimeError(
                    "backward of a model whose data parallelism is gone: keep the model it was made for"
                )
            engine._on_gradient(unit, key)

        return on_gradient

    def _on_gradient(self, unit: FlatUnit, key: int) -> None:
        """Note that a backward has completed the gradient of one parameter of ``unit``."""
        self.reached.add(key)
        if self.sync and self.reduces:
            if self._finish_with_backward and self._next == len(self.units) - 1 and not self._queued:
                self._queued = True
                queue_after_backward(self._end_of_backward)
            unit.pending -= 1
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next >= 0 and self.units[self._next].pending <= 0:
            self._launch(self.units[self._next])

    def _launch(self, unit: FlatUnit) -> None:
        unit.attach()
        self._next -= 1
        if unit.group is None:
            return
        work = dist.all_reduce(unit.buffer, group=unit.group, async_op=True)
        assert work is not None
        self._works.append(work)

    def finish_with_backward(self) -> None:
        """Finish by itself at the end of every synchronising backward (a user's own loop calls no ``finish``)."""
        self._finish_with_backward = True

    def _end_of_backward(self) -> None:
        self._queued = False
        self.finish()
        self.before_backward(last=True)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self.reached.clear()
        for unit in self.units:
            unit.zero()

    def before_backward(self, *, last: bool) -> None:
        """Say whether the coming backward is the last of the step; only then are gradients reduced."""
        self.sync = last
        if last:
            self._next = len(self.units) - 1
            for unit in self.units:
                unit.pending = len(unit.params)

    def before_half(self) -> None:
        """Let a half of a backward only accumulate."""
        self.sync = False

    def after_weights(self, params: Iterable[Tensor], *, last: bool) -> None:
        """Note ``params``, whose gradients a weight half added outside autograd's hooks; ``last`` of the step."""
        self.reached.update(id(p) for p in params)
        if last:
            self.before_backward(last=True)

    def end_of_stage(self) -> None:
        """Launch the units that the last backward has not (parameters it did not use), in the fixed order."""
        if self.reduces:
            while self._next >= 0:
                self._launch(self.units[self._next])
        self.sync = False

    def finish(self) -> None:
        """Reduce what backward has not and wait for all of it."""
        self.end_of_stage()
        if self.reduces:
            for work in self._works:
                work.wait()
            if self.average:
                for unit in self.units:
                    unit.buffer.div_(unit.group.size() if unit.group is not None else 1)
        self._works.clear()
        self._next = len(self.units) - 1
        self.sync = False

    def flat_gradients(self) -> list[Tensor]:
        """Return the gradient buffers, one per unit: every trainable element once."""
        return [unit.buffer for unit in self.units]
