"""Live bytes by part of the step: the counter of real runs, with the highest moment of each place beside the one peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright.exact.trace import Place, Segment
from meshwright.parallel.apply import ParallelModel, stage_blocks
from meshwright.train.memory import LiveBytes

KINDS: Final = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}


class Timeline(LiveBytes):
    """``LiveBytes`` that also keeps the highest moment of each ``Place``.

    ``copies_input``: reduce-scatters copy what they reduce, as gloo's do; the copy lives until they end.
    """

    def __init__(self, *, copies_input: bool) -> None:
        super().__init__()
        self.copies_input = copies_input
        self.segments: dict[Place, Segment] = {}
        self._place = Place("begin")
        self._highest = -1

    def at(self, place: Place) -> None:
        """Enter ``place``; a place that comes again goes on with its moment."""
        self._place = place
        known = self.segments.get(place)
        self._highest = -1 if known is None else known.total
        self._note()

    def _put(self, key: int, storage: torch.UntypedStorage, category: str) -> None:
        super()._put(key, storage, category)
        self._note()

    def _note(self) -> None:
        if self._total >= self._highest:
            self._highest = self._total
            known = self.segments.get(self._place)
            order = len(self.segments) if known is None else known.order
            self.segments[self._place] = Segment(order, dict(self.current))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count ``func``; after a reduce-scatter also the copy of its input where the backend makes one."""
        if func.namespace == "prim":  # asks a fake tensor for its device, after every operation
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.copies_input and func is torch.ops.c10d._reduce_scatter_base_.default:
            copy = torch.empty_like(args[1]).untyped_storage()
            self._put(copy._cdata, copy, "working")
        return out


def on_action(timeline: Timeline, action: str) -> None:
    """Enter the place that an action of the schedule ("3F0": stage 3, forward, micro-batch 0) begins in."""
    kind = next(k for k in KINDS if k in action)
    stage, _, micro_batch = action.partition(kind)
    part = {"F": "embedding", "B": "head", "I": "head"}.get(kind, "")
    timeline.at(Place(KINDS[kind], int(stage), int(micro_batch), part))


@contextmanager
def placed(timeline: Timeline, model: ParallelModel, blocks: Sequence[Sequence[nn.Module]]) -> Iterator[None]:
    """Tell ``timeline`` where the step is: by the schedule's actions, and by hooks of ``blocks`` (by stage)."""
    handles = [
        handle
        for stage in blocks
        for index, block in enumerate(stage)
        for handle in _hooks(timeline, block, index, len(stage))
    ]
    before, finish = model.on_action, model.finish_gradients

    def action(text: str) -> None:
        on_action(timeline, text)
        before(text)

    def finishing() -> None:
        timeline.at(Place("reduce"))
        finish()

    model.on_action = action
    changed: Any = model
    changed.finish_gradients = finishing
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.on_action = before
        del changed.finish_gradients


def blocks_of(model: ParallelModel) -> list[list[nn.Module]]:
    """Return the blocks of each stage of a played rank, in order."""
    return [stage_blocks(stage, model.spec) for _, stage in sorted(model.stages.items())]


def _hooks(timeline: Timeline, block: nn.Module, index: int, count: int) -> list[Any]:
    def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if timeline._place.phase != "forward":  # run again in a backward
            return
        _here(timeline, "block", index)
        if index == 0:
            _at_gradient(
                args[0] if args else kwargs["hidden_states"], partial(_here, timeline, "embedding", -1)
            )

    def left(_: nn.Module, __: Any, out: Any) -> None:
        if timeline._place.phase != "forward":
            return
        _at_gradient(out[0] if isinstance(out, tuple) else out, partial(_here, timeline, "block", index))
        if index == count - 1:
            _here(timeline, "head", -1)

    return [block.register_forward_pre_hook(entered, with_kwargs=True), block.register_forward_hook(left)]


def _here(timeline: Timeline, part: str, block: int) -> None:
    now = timeline._place
    timeline.at(Place(now.phase, now.stage, now.micro_batch, part, block))


def _at_gradient(tensor: Tensor, tell: Callable[[], None]) -> None:
    """Call ``tell`` when backward has the gradient of ``tensor``."""
    if tensor.requires_grad and tensor.grad_fn is not None:
        tensor.register_hook(lambda _: tell())
