"""A frozen base in 4 bits: matrices that are packed once, whole, and unpacked each time they are multiplied with.

Maths: ``y = x W^T`` and, for the input's gradient, ``g W``, with W unpacked for the one product and dropped; nothing
else of W is needed, because it does not train. bitsandbytes packs and unpacks (``kind``, blocks of 64); W is unpacked
to the dtype that computes, or to float32 and on to float64, so that every layout multiplies with the same numbers.
A matrix is packed before the tensor axis cuts it, and cut on borders of its blocks (``model.quantised``).

Packed matrices are buffers, no parameters: data parallelism, the optimizer and checkpoints do not see them. Under ZeRO-3
all that belongs to one is a row of bytes that FSDP2 shards, gathers with its block and drops like a frozen parameter
(it leaves integers as they are, whatever the block's other parameters are cast to); checkpoints do not see it either.

Communication: none here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.model.quantised import ALIGN, BLOCK, GROUP, is_quantised, quantised_tensors
from meshwright.model.spec import AdapterSpec, ModelSpec
from meshwright.parallel.expert import compute_dtype
from meshwright.parallel.stage import get_module, logical_name

PACKED = "packed"
"""The name of a layer's submodule with its packed matrix, which stands in the place of ``weight``."""

SECTIONS = ("mean", "groups", "table", "scales", "codes")
"""Of a packed matrix, in the order that they have in one row."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What bitsandbytes packs from and unpacks to."""


def bitsandbytes() -> Any:
    """Return bitsandbytes' functions. Its note that a faster kernel for inference is not there is left out."""
    notes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = notes.level
    notes.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functions  # pyright: ignore[reportMissingImports]
    finally:
        notes.setLevel(before)
    return functions


def missing_bitsandbytes(spec: ModelSpec | None, device_type: str) -> list[Problem]:
    """Return E272 where ``spec`` needs bitsandbytes and it does not pack and unpack on ``device_type``."""
    if spec is None or spec.adapter is None or not is_quantised(spec):
        return []
    if importlib.util.find_spec("bitsandbytes") is None:
        return [problem("E272", where="adapter.kind", found="the module bitsandbytes is not installed")]
    try:
        tried = torch.linspace(-1.0, 1.0, 2 * BLOCK).view(2, BLOCK)
        packed = Packed(tried, spec.adapter)
        if device_type != "meta":
            packed = packed.to(device_type)
        near = packed.weight(torch.float32).cpu()
    except Exception as error:  # a library that is not built for a device fails in its own ways
        said = " ".join(str(error).split())[:200]
        found = f"bitsandbytes does not run on this machine's {device_type}: {type(error).__name__}: {said}"
        return [problem("E272", where="adapter.kind", found=found)]
    if not (near - tried).abs().max() < 0.25:
        found = f"bitsandbytes unpacks other numbers than it packed on this machine's {device_type}"
        return [problem("E272", where="adapter.kind", found=found)]
    return []


class Packed(nn.Module):
    """One matrix in 4 bits, whole or the part of it that a rank of the tensor axis holds.

    Attributes:
        shape: of the weight that is held, as the layer stores it.
        codes: two weights a byte, [numel / 2] uint8.
        scales: one for each block, [blocks] float32; with ``table`` it is uint8.
        table, groups, mean: the 256 values of a scale, one factor for each 256 of the whole matrix's scales, and what
            was taken off all of them; None where scales are float32.
        row: all of these in one row of bytes, a frozen parameter, once data parallelism shares them; they are None then.
        digest: a sum over the bytes of the whole matrix, int64, which tells whether two runs have the same base.
    """

    codes: Tensor | None
    scales: Tensor | None
    row: Tensor | None
    table: Tensor | None
    groups: Tensor | None
    mean: Tensor | None

    def __init__(self, weight: Tensor, adapter: AdapterSpec) -> None:
        super().__init__()
        self.shape = self.whole = tuple(weight.shape)
        self.levels = adapter.levels
        self.cuts: tuple[int, tuple[tuple[int, int], ...]] | None = None
        codes, state = bitsandbytes().quantize_4bit(
            weight.detach().reshape(-1).to(torch.float32),
            blocksize=BLOCK,
            compress_statistics=adapter.double,
            quant_type=adapter.levels,
        )
        second = state.state2
        self._hold("codes", codes.reshape(-1))
        self._hold("scales", state.absmax)
        self._hold("table", second.code if adapter.double else None)
        self._hold("groups", second.absmax if adapter.double else None)
        self._hold("mean", state.offset if adapter.double else None)
        self.register_parameter("row", None)
        self.digest = torch.stack([_digest(b) for b in self.buffers()]).sum()

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def cut(self, dim: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep the parts (start, size) of ``dim`` of a whole matrix; they begin and end on borders of blocks."""
        assert self.cuts is None
        assert self.codes is not None
        assert self.scales is not None
        self.cuts = dim, tuple(ranges)
        self.codes, self.scales = self._part(self.codes, 2), self._part(self.scales, BLOCK)
        shape = list(self.shape)
        shape[dim] = sum(size for _, size in ranges)
        self.shape = tuple(shape)

    def _part(self, flat: Tensor, weights: int) -> Tensor:
        """Return what is held of a row of numbers that stand for so many neighbouring ``weights`` of the whole each."""
        if self.cuts is None:
            return flat
        dim, ranges = self.cuts
        rows, columns = self.whole
        if dim == 0:
            parts = [flat[a * columns // weights : (a + n) * columns // weights] for a, n in ranges]
            return torch.cat(parts).contiguous()
        table = flat.view(rows, columns // weights)
        parts = [table[:, a // weights : (a + n) // weights] for a, n in ranges]
        return torch.cat(parts, 1).reshape(-1).contiguous()

    def share(self) -> None:
        """Put all that is held in one row of bytes, a frozen parameter that FSDP2 can cut anywhere."""
        held = {n: b for n in SECTIONS if (b := getattr(self, n)) is not None}
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        pieces: list[Tensor] = []
        end = 0
        for name, tensor in held.items():
            data = tensor.detach().reshape(-1).view(torch.uint8)
            self._places[name] = end, data.numel(), tensor.dtype
            length = -(-data.numel() // ALIGN) * ALIGN
            pieces.append(F.pad(data, (0, length - data.numel())))
            end += length
            setattr(self, name, None)
        self.row = nn.Parameter(torch.cat(pieces), requires_grad=False)

    def _section(self, name: str) -> Tensor | None:
        """Return one of ``SECTIONS`` as it is, or out of the row, which is whole while its block computes.

        Communication: none; between steps an all_gather of the row.
        """
        if self.row is None:
            return getattr(self, name)
        if name not in self._places:
            return None
        start, size, dtype = self._places[name]
        row = self.row.detach()
        row = row.full_tensor() if isinstance(row, DTensor) else row
        return row[start : start + size].view(dtype)

    @property
    def held(self) -> Tensor:
        """What is held of the matrix here: its codes, or its row of bytes (a shard)."""
        found = self.codes if self.row is None else self.row
        assert found is not None
        return found

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight unpacked, a new tensor of ``shape``."""
        codes, scales, table, groups, mean = (self._section(name) for name in reversed(SECTIONS))
        assert codes is not None
        assert scales is not None
        if table is not None and groups is not None and mean is not None:
            blocks = -(-(self.whole[0] * self.whole[1]) // BLOCK)
            group = self._part(torch.arange(blocks, device=scales.device, dtype=torch.int32), BLOCK) // GROUP
            of_group = groups.index_select(0, group)
            scales = table.index_select(0, scales.to(torch.int32)).mul_(of_group).add_(mean)
        functions = bitsandbytes()
        made = dtype if dtype in DTYPES else torch.float32
        numel = self.shape[0] * self.shape[1]
        state = functions.QuantState(
            absmax=scales, shape=torch.Size((numel,)), blocksize=BLOCK, quant_type=self.levels, dtype=made
        )
        flat: Tensor = functions.dequantize_4bit(codes.view(-1, 1), state)
        return flat.view(self.shape).to(dtype)


class _Product(torch.autograd.Function):
    """x W^T + b of a packed W, and g W for the gradient of x; W and b do not train, so x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed, in_out: bool, bias: Tensor | None) -> Tensor:
        ctx.packed, ctx.in_out, ctx.dtype = packed, in_out, x.dtype
        weight = packed.weight(x.dtype)
        return F.linear(x, weight.t() if in_out else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight = ctx.packed.weight(ctx.dtype)
        return grads[0].to(ctx.dtype) @ (weight.t() if ctx.in_out else weight), None, None, None


def product(layer: Any, x: Tensor, *, bias: bool) -> Tensor:
    """Return a linear layer's product with ``x``, [..., out], with or without its bias; its matrix may be packed.

    The layer is torch's, which stores [out, in], or transformers' Conv1D, which stores [in, out].
    """
    in_out = not isinstance(layer, nn.Linear)
    added = layer.bias if bias else None
    packed = packed_of(layer)
    if packed is None:
        return F.linear(x, layer.weight.t() if in_out else layer.weight, added)
    x = x.to(compute_dtype(x))
    out: Any = _Product.apply(x, packed, in_out, None if added is None else added.to(x.dtype))
    return out


def packed_of(layer: nn.Module) -> Packed | None:
    """Return the packed matrix of a layer, None where it has a plain one."""
    held = layer._modules.get(PACKED)
    return held if isinstance(held, Packed) else None


def stored_shape(layer: Any) -> tuple[int, ...]:
    """Return the shape of a linear layer's matrix as it is stored here, packed or plain."""
    packed = packed_of(layer)
    return tuple(layer.weight.shape) if packed is None else packed.shape


def pack(module: nn.Module, spec: ModelSpec) -> None:
    """Pack every matrix of ``module`` that ``spec`` holds in 4 bits, in place, one after the other.

    Raises:
        MeshwrightError: E275 when a matrix is not where ``spec`` has it.
    """
    wanted = {t.name: t.shape for t in quantised_tensors(spec)}
    if not wanted:
        return
    assert spec.adapter is not None
    for name, p in list(module.named_parameters()):
        shape = wanted.get(logical_name(name))
        if shape is None:
            continue
        path, _, own = name.rpartition(".")
        layer: Any = get_module(module, path)
        if own != "weight" or tuple(p.shape) != shape:
            found = f"{name} is {list(p.shape)}, described as {list(shape)}"
            raise MeshwrightError(problem("E275", where="adapter", found=found))
        del layer._parameters["weight"]
        setattr(layer, PACKED, Packed(p, spec.adapter))
        layer.forward = partial(product, layer, bias=True)


def packed_matrices(module: nn.Module) -> dict[str, Packed]:
    """Return the packed matrices of ``module`` by the logical names of the weights that they stand for."""
    found = ((n, m) for n, m in module.named_modules() if isinstance(m, Packed))
    return {logical_name(f"{n.removesuffix(PACKED)}weight"): m for n, m in found}


def base_digest(packed: Mapping[str, Packed], world_size: int) -> str:
    """Return 16 hex digits that tell the base of all stages from another, the same on every rank and layout.

    Communication: one all_gather of names and sums on ``world``.
    """
    mine = {name: int(held.digest) for name, held in packed.items()}
    ranks: list[Any] = [mine]
    if world_size > 1:
        ranks = [None] * world_size
        dist.all_gather_object(ranks, mine)
    whole = {name: digest for rank in ranks for name, digest in rank.items()}
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()[:16]


def _digest(tensor: Tensor) -> Tensor:
    """Return a sum over the bytes of ``tensor`` in which the place of each counts."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(data.numel(), device=data.device, dtype=torch.int64) % 8191 + 1
    return (data * places).sum()
