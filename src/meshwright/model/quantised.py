"""A frozen base in 4 bits: how a matrix is stored, what that takes, and where it may be cut.

The weights of a matrix, row by row as it is stored, are taken in blocks of 64. A weight is one of sixteen levels times
its block's scale, the largest magnitude in the block; two weights share a byte, a scale is a float32 number. With the
scales quantised too ("double") their mean is taken off them and groups of 256 of them are held in 8 bits, again with
one float32 number for each (Dettmers et al. 2023, section 3). Embedding, head, norms, biases and a mixture's experts
stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, prod
from typing import Final

from meshwright.model.sharding import rule, tp_ranges
from meshwright.model.spec import AttentionSpec, ModelSpec, TensorSpec

LEVELS: Final = ("nf4", "fp4")
BLOCK: Final = 64
"""Weights that share a scale."""
GROUP: Final = 256
"""Scales that share a scale of their own."""
ALIGN: Final = 16
"""Bytes whose multiples the parts of a row begin at."""
TABLE_BYTES: Final = 1028
"""Of a matrix whose scales are in 8 bits: the 256 values that one can have, and their mean, all float32."""


def held_bytes(numel: int, double: bool) -> int:
    """Return the bytes of ``numel`` weights of one matrix: 4.5 bits each, or 4.127 with ``double``."""
    blocks = -(-numel // BLOCK)
    scales = blocks + 4 * -(-blocks // GROUP) + TABLE_BYTES if double else 4 * blocks
    return -(-numel // 2) + scales


def row_bytes(numel: int, whole: int, double: bool) -> int:
    """Return the bytes of ``numel`` weights of a matrix of ``whole``, all that belongs to them in one row.

    Sections begin at multiples of 16 bytes: the mean, a factor for each group of the whole matrix and the table of
    scales (with ``double``), the scales, the weights.
    """
    blocks = -(-numel // BLOCK)
    groups = ceil(ceil(whole / BLOCK) / GROUP)
    sections = [4, 4 * groups, 1024, blocks] if double else [4 * blocks]
    return sum(-(-size // ALIGN) * ALIGN for size in (*sections, -(-numel // 2)))


def bits_per_weight(double: bool) -> float:
    """Return the bits of a weight of a large matrix."""
    scale = 8.0 + 32.0 / GROUP if double else 32.0
    return 4.0 + scale / BLOCK


def is_quantised(spec: ModelSpec) -> bool:
    """Return whether the base of ``spec`` is held in 4 bits."""
    return spec.adapter is not None and spec.adapter.kind == "qlora"


def quantised_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Return the tensors of ``spec`` that are held in 4 bits."""
    return tuple(t for b in spec.blocks for t in b.tensors if t.quantised)


def cut_on_blocks(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether the parts (start, size) of ``dim`` begin and end where blocks of the stored matrix do."""
    inner = prod(shape[dim + 1 :])
    rows_whole = dim == 0 or (shape[dim] * inner) % BLOCK == 0
    return rows_whole and all(start * inner % BLOCK == 0 == size * inner % BLOCK for start, size in ranges)


@lru_cache(maxsize=4096)
def tensor_axis_cuts_blocks(tensor: TensorSpec, tp: int, attention: AttentionSpec) -> bool:
    """Return whether some rank of a tensor axis of ``tp`` would hold a part of a block of ``tensor``."""
    dim = rule(tensor).tp_dim
    if tp == 1 or dim is None:
        return False
    ranges = (tp_ranges(tensor, tp, index, attention) for index in range(tp))
    return not all(cut_on_blocks(tensor.shape, dim, held) for held in ranges)
