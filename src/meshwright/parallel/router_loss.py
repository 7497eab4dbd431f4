"""The load-balancing term that a mixture's config asks for (``output_router_logits``), the same for every layout.

Maths: the term of one sequence is transformers' own, from the router logits of all its layers. A step's loss is the
token losses plus, for each sequence, coefficient x term x its valid tokens, all divided by the step's valid tokens:
with full sequences that is the mean of the terms. So it does not depend on how many ranks, micro-batches or sequences
per micro-batch there are; it is what transformers computes with one sequence per micro-batch. A term over several
sequences at once is another number, because it multiplies two averages over its tokens.

Communication: none; each rank has whole sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.spec import ModelSpec
from meshwright.parallel.loss import IGNORE
from meshwright.parallel.stage import get_module


class RouterLoss:
    """Notes the logits of a model's routers during a forward, and makes the term of them."""

    def __init__(self, causal_lm: nn.Module, spec: ModelSpec) -> None:
        assert spec.moe is not None
        lm: Any = causal_lm
        self._coefficient = float(lm.router_aux_loss_coef)
        self._balance: Any = sys.modules[type(causal_lm).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
        self._experts, self._top_k = spec.moe.num_experts, spec.moe.experts_per_token
        self._logits: list[Tensor] = []
        self._open = False
        for tensor in spec.tensors():
            if tensor.role == "router":
                router = get_module(causal_lm, tensor.name.rpartition(".")[0])
                router.register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, out: Any) -> None:
        if self._open:  # not in the second forward of a recomputed block
            self._logits.append(out[0])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the routers' logits of the forward inside."""
        self._logits, self._open = [], True
        try:
            yield
        finally:
            self._open = False

    def take(self, labels_BT: Tensor) -> Tensor:
        """Return the sum over sequences of coefficient x term x valid tokens, and forget the logits."""
        batch, noted = labels_BT.shape[0], self._logits
        self._logits = []
        layers_BTE = [logits.view(batch, -1, self._experts) for logits in noted]
        valid_B = (labels_BT != IGNORE).sum(1)
        terms = [
            self._balance(tuple(layer[row] for layer in layers_BTE), self._experts, self._top_k, None)
            for row in range(batch)
        ]
        return self._coefficient * (torch.stack(terms) * valid_B).sum()
