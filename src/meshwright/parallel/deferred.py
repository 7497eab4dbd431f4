"""Building a model without holding it: large parameters are described while it is built and made one unit at a time.

transformers draws a model's first weights in one stream of random numbers, so a rank that only makes its own part would
draw other numbers. Here the whole model is built as always, but a large parameter is a tensor without memory; what is
done to it is noted together with the state of the generator, and the numbers are drawn into scratch memory and dropped.
Later the parameters that a rank needs are made from the notes - the same operations from the same states, so the same
bits as in a whole build - cut, and dropped, block by block. Pretrained weights are read in the same place instead.

Memory: this rank's parts, and the largest unit (a block; or embedding, norm and head) while it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

LARGE: Final = 1 << 12
"""Elements from which a new tensor is not given memory; smaller ones (norms, biases, tables) are made as they are."""


@dataclass(frozen=True)
class _Ref:
    """A tensor without memory, as a view of its storage in the state after ``version`` operations."""

    storage: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Note:
    """One operation on a storage: what to call, with refs for tensors without memory, from which random state."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Tensor | None
    makes: int | None
    """Which output is the storage's first tensor; None for an operation that changes the storage in place."""


@dataclass
class Deferred:
    """The notes of one model.

    Attributes:
        active: False where the model was built whole; then ``real`` and ``fill`` change nothing.
        device: where transformers builds the model.
    """

    active: bool = True
    device: str = "cpu"
    weights: Mapping[str, Tensor] | None = None
    _held: dict[int, torch.UntypedStorage] = field(default_factory=dict[int, torch.UntypedStorage])
    _notes: dict[int, list[_Note]] = field(default_factory=dict[int, list[_Note]])
    _read: dict[int, tuple[str, torch.dtype]] = field(default_factory=dict[int, tuple[str, torch.dtype]])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note also what is done to the tensors inside this context (a copy of one, for instance)."""
        if not self.active:
            yield
            return
        with _Notes(self, begins=False):
            yield

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is one that was built without memory here."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._held

    def read_from(self, named: Iterable[tuple[str, Tensor]], weights: Mapping[str, Tensor]) -> None:
        """Let the parameters ``named`` be read from ``weights`` when they are made; those with memory are read now."""
        self.weights = weights
        for name, p in named:
            if name not in weights:
                continue
            if self.knows(p):
                self._read[p.untyped_storage()._cdata] = (name, p.dtype)
            else:
                with torch.no_grad():
                    p.copy_(weights[name])

    def real(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with memory and values; one that has memory is returned as it is."""
        if not self.knows(tensor):
            return tensor
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                storage = tensor.untyped_storage()._cdata
                made = _view(self._make(storage, len(self._notes[storage])), _ref(tensor, 0))
                return made.clone() if storage in self._read else made
        finally:
            torch.set_rng_state(before)

    def _make(self, storage: int, version: int) -> Tensor:
        """Return a flat tensor over ``storage`` after ``version`` operations."""
        flat: Tensor | None = None
        if storage in self._read:
            name, dtype = self._read[storage]
            assert self.weights is not None
            return self.weights[name].to(dtype).reshape(-1)  # pages of the file where the dtype is the same

        def given(value: Any) -> Any:
            if not isinstance(value, _Ref):
                return value
            if flat is not None and value.storage == storage:
                return _view(flat, value)
            return _view(self._make(value.storage, value.version), value)

        for note in self._notes[storage][:version]:
            if note.state is not None:
                torch.set_rng_state(note.state)
            out = note.func(*tree_map(given, note.args), **tree_map(given, dict(note.kwargs)))
            if note.makes is not None:
                flat = _flat(tree_leaves(out)[note.makes])
        assert flat is not None
        return flat

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Give every parameter of ``module`` memory and values, and put all of it on ``device``.

        A parameter with two names stays one. What data parallelism has cut already is left alone.
        """
        if not self.active:
            module.to(device)
            return
        made: dict[int, Tensor] = {}
        for owner in module.modules():
            for name, p in owner._parameters.items():
                if p is None or isinstance(p, DTensor) or not (self.knows(p) or p.device != device):
                    continue
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(self.real(p.detach()).to(device), p.requires_grad)
                owner._parameters[name] = made[id(p)]  # pyright: ignore[reportArgumentType]
            for name, b in owner._buffers.items():
                if b is not None and b.device != device:
                    owner._buffers[name] = made.setdefault(id(b), b.to(device))


class _Notes(TorchDispatchMode):
    """Gives large new tensors no memory and notes what is done to them."""

    def __init__(self, held: Deferred, begins: bool = True) -> None:
        super().__init__()
        self._to = held
        self._begins = begins
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [t for t in leaves if self._to.knows(t)]
        if not known:
            if self._begins and func is torch.ops.aten.empty.memory_format and _large(args, kwargs):
                made = func(*args, **(kwargs | {"device": torch.device("meta")}))
                self._new(made, _Note(func, tuple(args), kwargs, None, 0))
                return made
            return func(*args, **kwargs)
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        note_args = tree_map(self._refer, tuple(args))
        note_kwargs = tree_map(self._refer, dict(kwargs))
        if state is not None:  # draw as many numbers as the real one would
            scratch = tree_map(lambda v: self._scratch(v) if self._is(v) else v, (args, kwargs))
            func(*scratch[0], **scratch[1])
        kwargs = {k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        changed = {t.untyped_storage()._cdata for t in _written(func, args, kwargs) if self._to.knows(t)}
        for storage in changed:
            self._to._notes[storage].append(_Note(func, note_args, note_kwargs, state, None))
        if not changed:
            for k, tensor in enumerate(tree_leaves(out)):
                if isinstance(tensor, Tensor) and tensor.is_meta and not self._to.knows(tensor):
                    self._new(tensor, _Note(func, note_args, note_kwargs, state, k))
        return out

    def _scratch(self, like: Tensor) -> Tensor:
        """Return memory to draw into, of the shape of ``like``; the same memory every time.

        Memory that is taken and given back between the small states that are kept would leave holes in the heap.
        """
        size = like.numel() * like.element_size()
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(max(size, 1 << 24), dtype=torch.uint8)
        return self._memory[:size].view(like.dtype).view(like.shape)

    def _is(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._to.knows(value)

    def _new(self, tensor: Tensor, note: _Note) -> None:
        storage = tensor.untyped_storage()
        self._to._held[storage._cdata] = storage
        self._to._notes[storage._cdata] = [note]

    def _refer(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not self._to.knows(value):
            return value
        return _ref(value, len(self._to._notes[value.untyped_storage()._cdata]))


def _large(args: Any, kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    here = device is None or torch.device(device).type == "cpu"
    return here and dtype.is_floating_point and torch.Size(args[0]).numel() >= LARGE


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that ``func`` writes to."""
    found: list[Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return found


def _ref(tensor: Tensor, version: int) -> _Ref:
    return _Ref(
        tensor.untyped_storage()._cdata,
        version,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor`` as one row."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor.detach(), (size,), (1,), 0)


def _view(flat: Tensor, ref: _Ref) -> Tensor:
    return torch.as_strided(flat, ref.size, ref.stride, ref.offset)


@contextmanager
def deferring(wanted: bool) -> Iterator[Deferred]:
    """Build what is built inside without memory for its large parameters, if ``wanted``."""
    held = Deferred(active=wanted)
    if not wanted:
        yield held
        return
    with _Notes(held):
        yield held
