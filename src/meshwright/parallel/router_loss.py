"""The load-balancing term that a mixture's config asks for (``output_router_logits``), the same for every layout.

Maths: for one sequence, P_e is the sum of the probabilities that all routers gave expert e for all its tokens, F_e how
often they chose it, and the term is E / (layers x tokens)^2 x sum over e of F_e P_e: transformers' own number for a batch
of one sequence. A step's loss is the token losses plus, for each sequence, coefficient x term x its valid tokens, all
divided by the step's valid tokens: with full sequences that is the mean of the terms. So it does not depend on how many
ranks, micro-batches or sequences per micro-batch there are. A term over several sequences at once is another number,
because it multiplies two averages over its tokens.

F has no gradient, so the term is linear in P, and parts of P may come from anywhere as long as F is whole:

* stages: P and F travel with the hidden states, each stage adds its layers' own, and the last one makes the term. The
  gradient of P that it sends back is that of every stage's part.
* the context axis: each rank has P of its tokens, and takes its share of the term with the F of all tokens.
* the tensor axis: every rank's routers see all tokens, so one rank's P has the gradient; the others' have none.

Communication: between stages [2, B, E] beside each message of hidden states, forward and back; on ``cp`` one all_reduce
of [B, E + 1] per micro-batch on the last stage. Shape suffixes: B sequences, T tokens held here, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.model.spec import ModelSpec
from meshwright.parallel.context import ContextAxis
from meshwright.parallel.loss import IGNORE
from meshwright.parallel.stage import get_module


class _Counted(torch.autograd.Function):
    """The same tensor, with its gradient on one rank of the tensor axis and zero on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: bool) -> Tensor:
        ctx.here = here
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.here else torch.zeros_like(grads[0]), None


class RouterLoss:
    """Notes the logits of a stage's routers during a forward, and makes the term of them.

    Args:
        causal_lm: the stage's model, or the whole one.
        spec: of the whole model.
        seq_len: tokens of a whole sequence.
        dtype: of the sums, float32 or float64.
        counted: whether the term's gradient flows on this rank (one of a tensor axis).
        context: this rank's place on the context axis, None where it has whole sequences.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        spec: ModelSpec,
        *,
        seq_len: int,
        dtype: torch.dtype,
        counted: bool = True,
        context: ContextAxis | None = None,
    ) -> None:
        assert spec.moe is not None
        lm: Any = causal_lm
        self._experts, self._top_k = spec.moe.num_experts, spec.moe.experts_per_token
        self._dtype, self._counted, self._context = dtype, counted, context
        self._logits: list[Tensor] = []
        self._open = False
        paths = list(dict.fromkeys(t.name.rpartition(".")[0] for t in spec.tensors() if t.role == "router"))
        self._rows = len(paths) * seq_len
        self._factor = float(lm.router_aux_loss_coef) * self._experts / self._rows
        blocks = dict(get_module(causal_lm, spec.paths.blocks).named_children())
        for path in paths:
            index, _, inside = path.removeprefix(f"{spec.paths.blocks}.").partition(".")
            if index in blocks:  # else another stage's
                get_module(blocks[index], inside).register_forward_hook(self._note)

    def shape(self, batch: int) -> tuple[int, int, int]:
        """Return the shape of what travels between stages for ``batch`` sequences."""
        return (2, batch, self._experts)

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

    def noted(self, like: Tensor) -> Tensor:
        """Return P and F of this stage's routers for this rank's tokens, [2, B, E], and forget the logits.

        ``like`` has the B sequences as its first dim. Only P has a gradient.
        """
        batch, noted = like.shape[0], self._logits
        self._logits = []
        zeros_BE = torch.zeros(batch, self._experts, dtype=self._dtype, device=like.device)
        sums_BE, chosen_BE = zeros_BE, zeros_BE.clone()
        real_T = self._real(like.device)
        for logits in noted:
            share_BTE = torch.softmax(logits, -1, dtype=self._dtype).view(batch, -1, self._experts)
            chosen_BTK = share_BTE.detach().topk(self._top_k, -1).indices
            ones_BTK = torch.ones(chosen_BTK.shape, dtype=self._dtype, device=like.device)
            if real_T is not None:
                share_BTE, ones_BTK = share_BTE * real_T[:, None], ones_BTK * real_T[:, None]
            sums_BE = sums_BE + share_BTE.sum(1)
            chosen_BE.scatter_add_(1, chosen_BTK.flatten(1), ones_BTK.flatten(1))
        counted: Any = _Counted.apply(sums_BE, self._counted)
        return torch.stack([counted, chosen_BE])

    def _real(self, device: torch.device) -> Tensor | None:
        """Return 1 for each token of this rank and 0 for padding, [T]; None where there is none."""
        axis = self._context
        if axis is None or axis.padded == axis.seq_len:
            return None
        return (axis.positions < axis.seq_len).to(device, self._dtype)

    def loss(self, noted_2BE: Tensor, labels_BT: Tensor) -> Tensor:
        """Return this rank's share of the sum over sequences of coefficient x term x valid tokens.

        Args:
            noted_2BE: P and F of all layers, for this rank's tokens.
            labels_BT: of this rank's tokens.

        Communication: on ``cp`` one all_reduce of [B, E + 1].
        """
        sums_BE, chosen_BE = noted_2BE.unbind(0)
        valid_B = (labels_BT != IGNORE).sum(1).to(self._dtype)
        whole = torch.cat([chosen_BE.detach(), valid_B[:, None]], 1)
        if self._context is not None:
            dist.all_reduce(whole, group=self._context.group)
        share_BE = (whole[:, :-1].float() / self._rows).to(self._dtype)  # float32, as transformers has it
        return self._factor * (whole[:, -1:] * share_BE * sums_BE).sum()
