"""Recompute under a backward in two halves: a block runs again once, and what the second half reads waits for it.

The input half needs all that a block's forward saved, the weight half some of it: a product's input, a norm's
normalized rows. So a block's saved tensors are places that are empty after its forward. The first backward that looks
into one runs the block again and fills them all; after an input half the places that no weight gradient reads are
emptied, and the rest goes as the weight half goes through its nodes. A whole backward empties each place as it passes.

Memory: from the input half to the weight half of a micro-batch, the tensors from which weight gradients are made.

Communication: none of its own; a block that communicates in its forward does so again, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

OPAQUE: Final = frozenset({"CopySlices", "CppFunction"})
"""Kinds of autograd nodes that do not show what they saved; beside one of them everything is kept."""

Group = Mapping[str, Any]
"""What torch's pipelining hands from an input half to its weight half: ``params`` and ``intermediates``, both nodes.

The weight half starts at the intermediates, whose incoming gradients the input half noted, and ends at the params.
"""


class _Enough(Exception):
    """The block has run as far as anything is needed of it."""


class _Place:
    """Where a tensor that a node saved will be: empty until the block runs again."""

    __slots__ = ("__weakref__", "dropped", "frame", "read", "value")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None
        self.dropped = False
        self.read = False

    def tensor(self) -> Tensor:
        """Return the tensor, after running the block again where that has not been done."""
        self.read = True
        if self.dropped:
            raise RuntimeError("a weight gradient reads a recomputed tensor that was not kept for it")
        if self.value is None:
            self.frame.run_again()
        assert self.value is not None
        return self.value


class _Frame:
    """One forward of one block: how to run it again, and the places of what it saved."""

    def __init__(self, again: Callable[[], Any], filled: list[_Frame]) -> None:
        self._again: Callable[[], Any] | None = again
        self._filled = filled
        self._places: list[weakref.ref[_Place]] = []

    def first(self) -> AbstractContextManager[Any]:
        """Return the context of the first forward, which leaves empty places."""

        def pack(_: Tensor) -> _Place:
            place = _Place(self)
            self._places.append(weakref.ref(place))
            return place

        return saved_tensors_hooks(pack, _Place.tensor)

    def places(self) -> Iterator[_Place]:
        """Yield the places that a node still has."""
        for found in self._places:
            place = found()
            if place is not None:
                yield place

    def run_again(self) -> None:
        """Run the block a second time and fill its places, in the order of the first; let go of its inputs."""
        if self._again is None:
            raise RuntimeError("a block was to be recomputed a second time")
        again, self._again = self._again, None
        count = 0

        def pack(x: Tensor) -> None:
            nonlocal count
            place = self._places[count]() if count < len(self._places) else None
            if place is not None:
                place.value = x.detach() if x.requires_grad else x
            count += 1
            if count == len(self._places):
                raise _Enough

        try:
            with saved_tensors_hooks(pack, _unread), torch.enable_grad():
                again()
        except _Enough:
            pass
        if count != len(self._places):
            raise RuntimeError(f"a block saved {len(self._places)} tensors, and {count} when it ran again")
        self._filled.append(self)


def _unread(_: None) -> Tensor:
    raise RuntimeError("nothing runs backward through a recomputed forward")


@dataclass
class Halves:
    """The recomputed blocks of one stage, between the halves of its backwards.

    Attributes:
        filled: what ran again since the last settling.
    """

    filled: list[_Frame] = field(default_factory=list["_Frame"])
    _names: dict[type, tuple[str, ...]] = field(default_factory=dict[type, tuple[str, ...]])

    def run(
        self,
        forward: Callable[..., Any],
        contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return what a block's ``forward`` makes, keeping its inputs only.

        ``contexts`` returns those of the first forward and of the second.
        """
        first, second = contexts()
        restored = _state(args, kwargs)

        def again() -> None:
            with restored(), second:
                forward(*args, **kwargs)

        frame = _Frame(again, self.filled)
        with frame.first(), first:
            return forward(*args, **kwargs)

    def settle(self, groups: Sequence[Group] | None) -> None:
        """Empty the places that no weight half reads; ``groups`` of an input half, None after any other backward."""
        frames = list(self.filled)
        self.filled.clear()
        if groups is None or not frames:
            return
        nodes = weight_nodes(groups)
        if any(type(node).__name__ in OPAQUE for node in nodes):
            return
        for frame in frames:
            for place in frame.places():
                place.read = False
        for node in nodes:
            for name in self._saved(type(node)):
                getattr(node, name)  # reading what a node saved asks its place
        for frame in frames:
            for place in frame.places():
                if not place.read:
                    place.value, place.dropped = None, True

    def _saved(self, kind: type) -> tuple[str, ...]:
        """Return the attributes under which nodes of a kind show what they saved."""
        if kind not in self._names:
            names = dir(kind)
            own = ("saved_tensors",) if "saved_tensors" in names else ()
            self._names[kind] = (*(n for n in names if n.startswith("_saved_")), *own)
        return self._names[kind]


def weight_nodes(groups: Sequence[Group]) -> list[Node]:
    """Return the nodes that a weight half may run: from the intermediates of each group down to its parameters.

    A few more may be among them where a group has several intermediates, which can follow each other.
    """
    params: set[Node] = set().union(*(set(group["params"]) for group in groups))
    starts = [node for group in groups for node in group["intermediates"]]
    inner = _reaching_inputs(starts, params)
    found: dict[Node, None] = {}
    for group in groups:
        begins: list[Node] = list(group["intermediates"])
        lowest = min(map(_number, begins), default=0) if len(begins) > 1 else None
        seen: set[Node] = set()
        while begins:
            node = begins.pop()
            if node in seen:
                continue
            seen.add(node)
            found[node] = None
            for following in _following(node):
                if following not in inner or (lowest is not None and _number(following) >= lowest):
                    begins.append(following)
    return list(found)


def _number(node: Node) -> int:
    """Return a node's place in the order in which the forward made nodes (leaves come last)."""
    return int(node._sequence_nr())


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _reaching_inputs(starts: Iterable[Node], params: set[Node]) -> set[Node]:
    """Return the nodes below ``starts`` from which a leaf that is no parameter is reached: the stage's input."""
    before: dict[Node, list[Node]] = {}
    leaves: list[Node] = []
    known = set(starts)
    left = list(known)
    while left:
        node = left.pop()
        following = _following(node)
        if not following and node not in params:
            leaves.append(node)
        for other in following:
            before.setdefault(other, []).append(node)
            if other not in known:
                known.add(other)
                left.append(other)
    inner = set(leaves)
    left = leaves
    while left:
        for node in before.get(left.pop(), ()):
            if node not in inner:
                inner.add(node)
                left.append(node)
    return inner


def _state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], AbstractContextManager[None]]:
    """Note random numbers and autocast as they are; return what makes a context that brings them back."""
    tensors = {x.device: x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    kinds = sorted({"cpu", *(device.type for device in tensors)})
    kind = next((k for k in kinds if k != "cpu"), "cpu")
    cached = torch.is_autocast_cache_enabled()
    casts = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
    cpu = torch.get_rng_state()
    devices, states = get_device_states(*tensors.values())

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=kind)
            for name, dtype, enabled in casts:
                stack.enter_context(torch.autocast(name, dtype, enabled, cached))
            yield

    return restored
