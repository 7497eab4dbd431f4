"""What an operation costs beside its arithmetic, measured in place: inside a decoder block of transformers.

A chain of one operation in a tight loop finds everything in the caches and no Python around it. A block's own
forward and backward at a width where the arithmetic is nothing says what launching its operations takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from meshwright.cost.pieces import block_operations
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.build import build_model

Timing: TypeAlias = tuple[float, float]
"""Wall and processor seconds of one call on this rank."""

TINY: Final[dict[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TOKENS: Final = 8
FEW: Final = 1
MANY: Final = 5
"""Blocks of the two models whose difference is what one block takes."""


def scaled(timing: Timing, factor: float) -> Timing:
    """Return both seconds times ``factor``."""
    return timing[0] * factor, timing[1] * factor


def launches(
    paired_rate: Callable[[Callable[[], Any], Callable[[Any], Any]], tuple[Timing, Timing]],
    device: torch.device,
) -> tuple[Timing, Timing]:
    """Return seconds of one small operation in a block's forward, and of one node in its backward.

    ``paired_rate(first, second)`` times ``first()`` and ``second(its result)`` in turn.
    """
    few, many = (_block_pass(paired_rate, device, count) for count in (FEW, MANY))
    spec = spec_from_config(TINY, "tiny", "")
    operations = block_operations(spec, spec.blocks[0])
    found: list[Timing] = []
    for less, more, count in zip(few, many, operations, strict=True):
        one = [max(b - a, 1e-8) / (MANY - FEW) / count for a, b in zip(less, more, strict=True)]
        found.append((one[0], one[1]))
    return found[0], found[1]


def _block_pass(
    paired_rate: Callable[[Callable[[], Any], Callable[[Any], Any]], tuple[Timing, Timing]],
    device: torch.device,
    blocks: int,
) -> tuple[Timing, Timing]:
    model: nn.Module = build_model(TINY | {"num_hidden_layers": blocks}, seed=0).to(device)
    base: Any = model.model
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device=device)
    params = [p for p in base.parameters() if p.requires_grad]

    def forward() -> Tensor:
        return base(input_ids=ids, use_cache=False)[0].sum()

    return paired_rate(forward, lambda loss: torch.autograd.grad(loss, params))
