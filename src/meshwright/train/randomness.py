"""Torch's own random numbers in a step as a function of seed, step, micro-batch and layer; nothing to store.

Dropout by modules and in attention has masks of its own (``parallel.dropout``). What a family draws by calling a function
(OPT's dropout, a router's jitter) comes from torch's generator. Before a micro-batch enters a block of such a model, the
generator is seeded from (run seed, step, micro-batch of the global batch, layer): a resumed run draws what the unbroken
one would have drawn, and replicas of the data draw different numbers. A block that is recomputed in backward gets the
state of its forward back from torch's checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from meshwright.model.randomness import layout_dependent
from meshwright.parallel.apply import ParallelModel
from meshwright.parallel.stage import get_module

SCHEME: Final = "seed, step, row or micro-batch, place (2)"
"""How random numbers are drawn, as a checkpoint keeps it; changed when the same seed would give other ones."""

_FORWARD = re.compile(r"^\d+F(\d+)$")


def seed_for(*place: int | str) -> int:
    """Return a seed below 2**63 that depends on all of ``place`` and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class StepRandom:
    """Seeds torch's generators for one rank: once per step, and by block where the model draws from them.

    Args:
        seed: the run's seed.
        dp: data-parallel degree.
        dp_rank: this rank's replica of the data.
        apart: coordinates whose ranks hold different parts of one sequence, so that their masks differ too.
    """

    def __init__(self, seed: int, dp: int, dp_rank: int, apart: tuple[int, ...] = ()) -> None:
        self._seed = seed
        self._dp = dp
        self._dp_rank = dp_rank
        self._apart = apart
        self._step = 0
        self._micro = dp_rank

    def begin(self, step: int) -> None:
        """Start ``step``."""
        self._step, self._micro = step, self._dp_rank
        self._draw("step")

    def at(self, action: str) -> None:
        """Note an action of the schedule; "0F2" is the forward of this rank's micro-batch 2 through stage 0."""
        found = _FORWARD.match(action)
        if found:
            self._micro = int(found.group(1)) * self._dp + self._dp_rank

    def attach(self, model: ParallelModel) -> None:
        """Seed before every block, and the dropout of the embedding, of a model that uses torch's own generator."""
        if not layout_dependent(model.spec):
            return
        paths = model.spec.paths
        for stage in model.stages.values():
            for name, block in get_module(stage.causal_lm, paths.blocks).named_children():
                block.register_forward_pre_hook(self._hook(f"layer {name}"))
            if stage.is_first:
                for path in paths.embedding_extras:
                    get_module(stage.causal_lm, path).register_forward_pre_hook(self._hook(path))

    def _hook(self, place: str) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, _: Any) -> None:
            if module.training:
                self._draw(place)

        return before

    def _draw(self, place: str) -> None:
        torch.manual_seed(seed_for(self._seed, self._step, self._micro, *self._apart, place))
