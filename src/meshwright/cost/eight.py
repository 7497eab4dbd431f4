"""Linear layers in 8 bits: what casting their operands costs, and the copies that this makes.

A product reads both operands in 8 bits with the dimension that is summed over innermost, so each of input, weight and
output gradient is wanted in two orientations: one in forward (input, weight), both in backward (output gradient), the
other in backward (input, weight). What a cast moves depends on where its scale comes from:

* ``fp8`` (one factor per tensor): the largest element is looked for first (2 bytes read), then the tensor is cast
  (2 read, 1 written); the other orientation is a transposition (1 read, 1 written);
* ``fp8-rowwise``: each orientation has its own factors, and is cast from bf16 in one pass (2 read, 1 written);
* ``fp8-blockwise``: as by rows, but a weight's blocks are square, so its other orientation is a transposition.

The recipes follow those of float8 training in torchtitan and TransformerEngine; bytes are counted, not measured.
"""

from __future__ import annotations

from typing import Final

from meshwright.cost.rates import DeviceRates

FP8_ROLES: Final = frozenset(
    {"attention_in", "attention_out", "mlp_in", "mlp_out", "shared_in", "shared_out"}
)
"""Matrices that are multiplied in 8 bits: the linear layers of blocks. Routers, experts and the head stay in bf16."""

FIRST: Final = {"fp8": 5.0, "fp8-rowwise": 3.0, "fp8-blockwise": 3.0}
"""Bytes per element of a tensor's first cast."""
SECOND: Final = {"fp8": 2.0, "fp8-rowwise": 3.0, "fp8-blockwise": 3.0}
"""Bytes per element of the other orientation of an activation or its gradient."""
WEIGHT_SECOND: Final = {"fp8": 2.0, "fp8-rowwise": 3.0, "fp8-blockwise": 2.0}
"""The same of a weight."""


def linear_seconds(
    recipe: str, rates: DeviceRates, eight: DeviceRates, sizes: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Return seconds of a linear layer in 8 bits: forward, its input's gradient, its weight's, casts included.

    Args:
        recipe: one of ``layout.precision.FP8``.
        rates: of elementwise operations.
        eight: of products in 8 bits.
        sizes: (rows of the input, its width, width of the output).
    """
    m, k, n = sizes
    first, second = FIRST[recipe], SECOND[recipe]
    forward = eight.matmul_s(m, k, n) + first * (m * k + k * n) / rates.copy_rate
    inputs = eight.matmul_s(m, n, k) + (first * m * n + WEIGHT_SECOND[recipe] * k * n) / rates.copy_rate
    return forward, inputs, eight.matmul_s(n, m, k) + second * (m * n + m * k) / rates.copy_rate


def copies_bytes(sizes: tuple[float, float, float]) -> float:
    """Return the bytes of the 8-bit copies that are alive in a linear layer's backward: of x, w and g twice."""
    m, k, n = sizes
    return m * k + k * n + 2.0 * m * n
