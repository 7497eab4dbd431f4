"""Head and loss together, a chunk of tokens at a time, so that the logits of a micro-batch never exist at once.

Maths: with logits z = W h + b of a token, the loss is logsumexp(z) - z[label] and its gradient softmax(z) - onehot.
Both are known as soon as the chunk's logits are, so the forward also makes the gradients of the hidden states and of
the head's weight and bias, and the backward only multiplies them by the incoming factor: no product runs twice. What
lives until then is one gradient of the head and one of the hidden states, in place of [T, V] log-probabilities.

A model may divide its logits or pass them through a scaled tanh (``model.logits``): z = s tanh(y / (d s)) has the slope
(1 - (z / s)^2) / d, with which the gradient of the chunk's logits is multiplied.

On a tensor axis each rank has some columns of the logits, and cuts the tokens in as many fewer chunks (the bytes are
the same): the largest logit, the sum of exponentials and the target's logit of a chunk are agreed on by two small
all_reduces per chunk (``Columns``).

Shape suffixes: N tokens of the micro-batch, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.layout.layout import loss_chunks
from meshwright.model.logits import AfterHead

IGNORE = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class Columns:
    """The columns of the logits that this rank computes: rows of the vocabulary from ``start`` on, over ``group``."""

    group: dist.ProcessGroup
    start: int


PLAIN = AfterHead()


def chunked_loss_sum(
    head: nn.Module,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    columns: Columns | None = None,
    *,
    halves: bool = False,
    after: AfterHead = PLAIN,
) -> Tensor:
    """Return the sum over valid tokens of the cross-entropy of ``head(hidden)``, as ``token_loss_sum`` does.

    ``head`` is the model's own linear head; with FSDP2 call this inside the forward of the unit that holds it, where
    its weight is gathered. Logits are computed in the autocast dtype, else in the weight's, and reduced in at least
    float32. With gradients enabled at most one chunk of logits, their float32 copy and log-probabilities live at once.
    With ``columns``, the gradient of the hidden states is this rank's share of a sum over the group, and every rank
    returns the same loss. ``halves``: a schedule runs the backward twice, for the hidden states and for the weight, so
    the gradients made in forward stay for the second. ``after``: what the model does to the head's product.

    Communication: with ``columns`` two all_reduces a chunk, of [C] and [2, C].
    """
    weight = head.get_parameter("weight")
    bias = head.get_parameter("bias") if getattr(head, "bias", None) is not None else None
    device = hidden_BTD.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    with torch.autocast(device, enabled=False):
        out: Any = _ChunkedLoss.apply(
            hidden_ND,
            weight,
            bias,
            labels_BT.reshape(-1),
            compute,
            torch.is_grad_enabled(),
            columns,
            halves,
            after,
        )
    return out


REST = (None,) * 6
"""Gradients of the arguments of the chunked loss that are no tensors of the model."""


class _ChunkedLoss(torch.autograd.Function):
    """The loss, with its gradients made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        compute: torch.dtype,
        train: bool,
        columns: Columns | None,
        halves: bool,
        after: AfterHead,
    ) -> Tensor:
        wants = [train and needed for needed in ctx.needs_input_grad[:3]]
        full = torch.float64 if compute == torch.float64 else torch.float32
        weight, bias = weight_VD.to(compute), None if bias_V is None else bias_V.to(compute)
        tokens = hidden_ND.shape[0]
        rows = -(-tokens // loss_chunks(1 if columns is None else columns.group.size()))
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=full) if wants[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=full) if bias_V is not None and wants[2] else None
        loss = torch.zeros((), dtype=full, device=hidden_ND.device)
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            hidden_CD, labels_C = hidden_ND[part].to(compute), labels_N[part]
            valid_C = labels_C != IGNORE
            logits_CV = _changed(F.linear(hidden_CD, weight, bias).to(full), after)
            held_CV = None if after.cap is None else logits_CV if columns is None else logits_CV.clone()
            if columns is None:
                target_C1, mine_C = labels_C.where(valid_C, 0)[:, None], valid_C
                log_p_CV = logits_CV.log_softmax(-1)
                loss -= log_p_CV.gather(1, target_C1)[:, 0].where(valid_C, 0.0).sum()
                share_CV = log_p_CV.exp_() if any(wants) else log_p_CV
                del log_p_CV
            else:
                target_C1, mine_C = _own_targets(labels_C, columns.start, logits_CV.shape[-1])
                share_CV, loss_C = _agreed(logits_CV, target_C1, mine_C, columns.group)
                loss += loss_C.where(valid_C, 0.0).sum()
            del logits_CV
            if not any(wants):
                continue
            grad_CV = share_CV
            grad_CV.scatter_add_(1, target_C1, -mine_C[:, None].to(full))
            grad_CV.masked_fill_(~valid_C[:, None], 0.0)
            if held_CV is not None and after.cap is not None:
                grad_CV.mul_(held_CV.div_(after.cap).square_().neg_().add_(1.0))
                del held_CV
            if after.divisor != 1.0:
                grad_CV.div_(after.divisor)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(compute)
            del share_CV
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = grad_CV @ weight
            if grad_weight_VD is not None and compute == full:
                grad_weight_VD.addmm_(grad_CV.t(), hidden_CD)
            elif grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_CD
            del grad_CV
        ctx.halves, ctx.scaled = halves, False
        ctx.grads = [grad_hidden_ND, grad_weight_VD, grad_bias_V]
        ctx.dtypes = [hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype]
        return loss

    @staticmethod
    def backward(ctx: Any, *factor: Tensor) -> Any:
        grads = ctx.grads
        if not ctx.halves:
            ctx.grads = None
        elif ctx.scaled:
            return (*(None if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)), *REST)
        else:
            ctx.scaled, grads = True, list(grads)
        out: list[Tensor | None] = []
        while grads:
            grad = grads.pop(0)
            out.append(None if grad is None else grad.mul_(factor[0]).to(ctx.dtypes[len(out)]))
        return (*out, *REST)


def _changed(logits_CV: Tensor, after: AfterHead) -> Tensor:
    """Return the logits of the head's product, in place."""
    if after.divisor != 1.0:
        logits_CV.div_(after.divisor)
    return logits_CV if after.cap is None else logits_CV.div_(after.cap).tanh_().mul_(after.cap)


def _own_targets(labels_C: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return each token's target as a local column [C, 1] (0 where it is elsewhere) and whether it is here [C]."""
    mine_C = (labels_C >= start) & (labels_C < start + columns)
    return torch.where(mine_C, labels_C - start, 0)[:, None], mine_C


def _agreed(
    logits_CV: Tensor, target_C1: Tensor, mine_C: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of softmax [C, V] (in place of the logits) and each token's loss [C].

    Communication: all_reduce of the largest logits [C], and of sums of exponentials and target logits [2, C].
    """
    high_C = logits_CV.amax(-1)
    dist.all_reduce(high_C, op=dist.ReduceOp.MAX, group=group)
    logits_CV -= high_C[:, None]
    picked_C = logits_CV.gather(1, target_C1)[:, 0].where(mine_C, 0.0)
    share_CV = logits_CV.exp_()
    sums_2C = torch.stack([share_CV.sum(-1), picked_C])
    dist.all_reduce(sums_2C, group=group)
    return share_CV.div_(sums_2C[0][:, None]), sums_2C[0].log() - sums_2C[1]
