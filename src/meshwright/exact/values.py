"""Tensors without memory, whose whole numbers are still computed: what control flow asks of them has an answer.

A fake tensor has a shape and no elements. Models and the runtime read a few elements all the same: positions (are
documents packed?), counts of valid tokens, how many rows go to which expert. Those are integers and booleans that
follow from other integers, so they are computed beside their fakes. Floating-point numbers are not: a scalar read from
one is 0.0, which is finite, so a played step updates.

Routers choose experts by floating-point scores, whose order nobody knows. A choice is assumed to be *balanced*: row
after row takes the next k experts in turn, so that every expert gets the same number of rows (up to one).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

LARGEST: Final = 1 << 22
"""Elements of the largest tensor whose values are kept."""

ATTRIBUTE: Final = "meshwright_values"
"""Attribute of a fake tensor that holds its values."""

_SIZE_BY_VALUE: Final = frozenset(
    {"nonzero", "bincount", "repeat_interleave", "masked_select", "_unique2", "unique_dim"}
)
"""Operations of aten whose output's size depends on values."""


def values_of(tensor: Any) -> Tensor | None:
    """Return the values beside a fake tensor, a tensor with memory itself, or None where they are not known."""
    return getattr(tensor, ATTRIBUTE, None) if isinstance(tensor, FakeTensor) else tensor


def faked(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake of a tensor of whole numbers that keeps its values."""
    fake = mode.from_tensor(tensor)
    _keep(fake, tensor)
    return fake


def _keep(fake: Any, value: Any) -> None:
    if isinstance(fake, FakeTensor):
        small = isinstance(value, Tensor) and value.numel() <= LARGEST
        setattr(fake, ATTRIBUTE, value if small else None)


def _is_whole(value: Any) -> bool:
    return not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex())


class WholeNumbers(TorchDispatchMode):
    """Computes integers and booleans beside their fakes; enter it inside the fake mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on fakes, and on values where all of its tensors are whole numbers that are known."""
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            return _communicated(name, func, args, kwargs)
        if name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            return _grouped(func, args, kwargs)
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense":
            return self._scalar(func, args)
        if any(leaf.is_floating_point() or leaf.is_complex() or values_of(leaf) is None for leaf in leaves):
            out = func(*args, **kwargs)
            if name == "topk":
                _assume_balanced(out, args[0].shape[args[2] if len(args) > 2 else kwargs.get("dim", -1)])
            elif func._schema.is_mutable:
                _forget(func, args, kwargs)
            return out
        return self._both(name, func, args, kwargs, bool(leaves))

    def _both(self, name: str, func: Any, args: Any, kwargs: Any, has_tensors: bool) -> Any:
        if not has_tensors:  # a factory: its output says whether it is of whole numbers
            out = func(*args, **kwargs)
            if isinstance(out, FakeTensor) and _is_whole(out) and out.numel() <= LARGEST:
                with unset_fake_temporarily():
                    _keep(out, func(*args, **kwargs))
            return out
        with unset_fake_temporarily():
            real = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if name in _SIZE_BY_VALUE:
            out = tree_map(lambda v: torch.empty_like(v) if isinstance(v, Tensor) else v, real)
        else:
            out = func(*args, **kwargs)
        for fake, value in zip(tree_flatten(out)[0], tree_flatten(real)[0], strict=True):
            if _is_whole(value):
                _keep(fake, value)
        return out

    def _scalar(self, func: Any, args: Any) -> Any:
        if not isinstance(args[0], FakeTensor):
            return func(*args)
        value = values_of(args[0])
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        if args[0].is_floating_point():
            return 0.0
        return func(*args)  # fails, and says that a value is asked for


def _grouped(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the fake output of a grouped matrix product: torch knows its shape for bfloat16 only, its kernels more."""
    low = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device) for x in args[:2]]
    return func(*low, *args[2:], **kwargs).to(args[0].dtype)


def _real(value: Any) -> Any:
    return values_of(value) if isinstance(value, Tensor) else value


def _forget(func: Any, args: Any, kwargs: Any) -> None:
    """Drop the values of whole numbers that were written to from something that is not known."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(written, FakeTensor):
                setattr(written, ATTRIBUTE, None)


def _assume_balanced(out: Any, experts: int) -> None:
    """Give a choice among ``experts`` by unknown scores values: one after the other in turn, row after row."""
    index = out[1]
    if isinstance(index, FakeTensor) and index.numel() <= LARGEST:
        with unset_fake_temporarily():
            _keep(index, torch.arange(index.numel()).remainder_(experts).view(index.shape))


def _communicated(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective. Whole numbers are assumed to be alike on all ranks; a sum of one count is not zero.

    A rank that has no batch of its own (a later stage of a pipeline) counts no valid token, but another one does.
    """
    out = func(*args, **kwargs)
    if name == "allreduce_":
        for value in (values_of(t) for t in args[0]):
            if value is not None and value.ndim == 0 and not value.is_floating_point():
                with unset_fake_temporarily():
                    value.clamp_(min=1)
    elif name == "alltoall_base_" and not args[0].is_floating_point():
        value = values_of(args[1])
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        if value is not None:
            with unset_fake_temporarily():
                mine = value.view(group.size(), -1)[group.rank()]
                _keep(args[0], mine.repeat(group.size()).view(args[0].shape))
    return out
