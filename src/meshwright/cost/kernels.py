"""What kernels reach: shares of matmul and memory rates, per kernel and device generation, and their shape effects.

These are priors from published kernel benchmarks; a calibration multiplies them. ``plan`` and ``backtest`` price
with the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

GENERATIONS: Final[tuple[tuple[str, str], ...]] = (
    ("V100", "volta"),
    ("A100", "ampere"),
    ("A800", "ampere"),
    ("A10G", "ampere"),
    ("A30", "ampere"),
    ("A40", "ampere"),
    ("A6000", "ampere"),
    ("3090", "ampere"),
    ("4090", "ada"),
    ("L40", "ada"),
    ("L20", "ada"),
    ("L4", "ada"),
    ("GB200", "blackwell"),
    ("GB300", "blackwell"),
    ("B200", "blackwell"),
    ("B300", "blackwell"),
    ("H100", "hopper"),
    ("H200", "hopper"),
    ("GH200", "hopper"),
    ("H800", "hopper"),
    ("H20", "hopper"),
    ("MI", "cdna"),
)
"""Part of a device's name, and its generation."""

ATTENTION_SHARE: Final[Mapping[tuple[str, str], tuple[float, float]]] = {
    ("fa1", "ampere"): (0.45, 0.36),
    ("triton", "ampere"): (0.52, 0.42),
    ("fa2", "ampere"): (0.70, 0.60),
    ("cudnn", "ampere"): (0.70, 0.60),
    ("fa1", "hopper"): (0.25, 0.20),
    ("triton", "hopper"): (0.35, 0.25),
    ("fa2", "hopper"): (0.48, 0.40),
    ("fa3", "hopper"): (0.72, 0.58),
    ("cudnn", "hopper"): (0.70, 0.56),
    ("fa2", "blackwell"): (0.24, 0.20),
    ("cudnn", "blackwell"): (0.72, 0.60),
}
"""Shares of the device's measured matmul ceiling that causal attention reaches, forward and backward, at head size 128.
FlashAttention-1, -2, -3 and cuDNN papers and pages: A100 about 190 and 165 TFLOP/s (v2), H100 about 370 and 330 (v2),
570 and 460 (v3), B200 about 1150 and 870 (cuDNN)."""

UNFUSED_SHARE: Final = 0.80
"""Share of the ceiling of the two batched products of attention that keeps its scores in memory."""

MULTIPROCESSORS: Final[Mapping[str, int]] = {
    "volta": 80,
    "ampere": 108,
    "hopper": 132,
    "blackwell": 148,
    "ada": 142,
}
"""Multiprocessors of the largest common device of a generation; tiles of a product are dealt out over them."""
TILES: Final = ((128.0, 256.0, 1.0), (256.0, 128.0, 1.0), (128.0, 128.0, 1.08), (128.0, 64.0, 1.3))
"""Tiles that a library picks from, and how much slower small ones are per FLOP, as they read operands more often (tile
sizes from NVIDIA's matrix multiplication background guide; the factors are assumed)."""


NARROW: Final[Mapping[str, float]] = {"fa1": 0.0, "triton": 0.05, "fa2": 0.17, "fa3": 0.38, "cudnn": 0.45}
"""Power of (head size / 128) with which a kernel's rate falls below 128."""
RAMP: Final[Mapping[str, float]] = {
    "fa1": 300.0,
    "triton": 370.0,
    "fa2": 280.0,
    "fa3": 400.0,
    "cudnn": 1000.0,
}
"""Sequence length at which a causal kernel reaches half of its rate at long ones. Both tables from the
FlashAttention-3 paper's figures (H100, causal, forward, 512 to 16,384 tokens): at 128 FA2 191 to 335 TFLOP/s, Triton 146
to 378, FA3 292 to 616; at 64 and 16,384 tokens 299, 363, 473 and cuDNN 388 of 539. Those of fa1 are assumed. cuDNN's from
cudnn-frontend's training benchmark (one sequence; H200: 484 TFLOP/s forward and 370 backward at 2,048 tokens, 673 and
579 at 16,384)."""
RAMP_BLACKWELL: Final[Mapping[str, float]] = {"fa2": 1300.0, "cudnn": 1500.0}
"""The same on Blackwell, from the same benchmark: on GB200 cuDNN 9.18 1022 TFLOP/s forward and 824 backward at 2,048
tokens, 1646 and 1371 at 16,384 (9.10 on B200 rises later: 856 and 701 at 4,096, 1332 and 1075 at 16,384);
FlashAttention-2 242 and 186, 394 and 320."""
LONG: Final = 16384.0
"""Sequence length at which ``ATTENTION_SHARE`` holds."""


TILE_ROWS: Final = 128.0
"""Queries (in backward, keys) of one tile of a fused attention kernel; cuDNN's forward on Blackwell works on two tiles at
once. SimuMax's kernel table (B200, causal, 4,096 tokens, heads of 128) has 349, 650, 823, 980 and 1121 TFLOP/s forward
over 8, 16, 32, 64 and 128 heads, and 389, 741, 850, 896 and 820 backward over 4, 8, 16, 32 and 64."""


def _fill(rows: float, heads: float, seq: float, generation: str) -> float:
    """Return the factor by which too few tiles lengthen a causal kernel over ``heads`` heads of all sequences.

    The last ``rows`` queries (or keys, in backward) see the whole sequence, twice what the mean tile sees, and one
    multiprocessor walks all of it: a kernel lasts that long however many multiprocessors there are.
    """
    longest = 2.0 * rows * MULTIPROCESSORS.get(generation, 108) / (heads * seq)
    return (1.0 + longest**3) ** (1.0 / 3.0)


def attention_share(
    kernel: str, generation: str, head_dim: float, seq: float, heads: float = math.inf
) -> tuple[float, float]:
    """Return (forward, backward) shares of the matmul ceiling.

    They are less for narrow heads, for short sequences, and where ``heads`` (heads of all sequences of a micro-batch on
    one rank) leave multiprocessors without work.
    """
    known = ATTENTION_SHARE
    pair = known.get((kernel, generation)) or known.get((kernel, "ampere")) or known["fa2", "ampere"]
    ramp = RAMP.get(kernel, RAMP["fa2"])
    ramp = RAMP_BLACKWELL.get(kernel, ramp) if generation == "blackwell" else ramp
    factor = min(1.0, head_dim / 128.0) ** NARROW.get(kernel, NARROW["fa2"])
    factor *= (1.0 + ramp / LONG) / (1.0 + ramp / seq)
    wide = 2.0 * TILE_ROWS if (kernel, generation) == ("cudnn", "blackwell") else TILE_ROWS
    ahead, behind = _fill(wide, heads, seq, generation), _fill(TILE_ROWS, heads, seq, generation)
    return pair[0] * factor / ahead, pair[1] * factor / behind


def wave_factor(m: float, n: float, count: float, generation: str) -> float:
    """Return the factor by which whole waves of tiles lengthen ``count`` products with [m, n] outputs."""
    processors = MULTIPROCESSORS.get(generation, 108)
    best = math.inf
    for rows, columns, slower in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * max(1.0, count)
        exact = m / rows * n / columns * max(1.0, count)
        if exact > 0:
            best = min(best, slower * math.ceil(tiles / processors) * processors / exact)
    return best if best < math.inf else 1.0


def generation(gpu: str) -> str:
    """Return the generation of a device by its name ("ampere", "hopper", ...), or "other"."""
    names = sorted(GENERATIONS, key=lambda pair: -len(pair[0]))
    return next((name for part, name in names if part in gpu), "other")
