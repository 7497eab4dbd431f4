"""Head and loss together, a chunk of tokens at a time, so that the logits of a micro-batch never exist at once.

Maths: with logits z = W h + b of a token, the loss is logsumexp(z) - z[label] and its gradient softmax(z) - onehot.
Both are known as soon as the chunk's logits are, so the forward also makes the gradients of the hidden states and of
the head's weight and bias, and the backward only multiplies them by the incoming factor: no product runs twice. What
lives until then is one gradient of the head and one of the hidden states, in place of [T, V] log-probabilities.

Shape suffixes: N tokens of the micro-batch, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.layout.layout import LOSS_CHUNKS

IGNORE = -100
"""Label of a position without loss."""


def chunked_loss_sum(head: nn.Module, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the sum over valid tokens of the cross-entropy of ``head(hidden)``, as ``token_loss_sum`` does.

    ``head`` is the model's own linear head; with FSDP2 call this inside the forward of the unit that holds it, where
    its weight is gathered. Logits are computed in the autocast dtype, else in the weight's, and reduced in at least
    float32. With gradients enabled at most one chunk of logits, their float32 copy and log-probabilities live at once.
    """
    weight = head.get_parameter("weight")
    bias = head.get_parameter("bias") if getattr(head, "bias", None) is not None else None
    device = hidden_BTD.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    with torch.autocast(device, enabled=False):
        out: Any = _ChunkedLoss.apply(
            hidden_ND, weight, bias, labels_BT.reshape(-1), compute, torch.is_grad_enabled()
        )
    return out


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
    ) -> Tensor:
        wants = [train and needed for needed in ctx.needs_input_grad[:3]]
        full = torch.float64 if compute == torch.float64 else torch.float32
        weight, bias = weight_VD.to(compute), None if bias_V is None else bias_V.to(compute)
        tokens = hidden_ND.shape[0]
        rows = -(-tokens // LOSS_CHUNKS)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=full) if wants[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=full) if bias_V is not None and wants[2] else None
        loss = torch.zeros((), dtype=full, device=hidden_ND.device)
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            hidden_CD, labels_C = hidden_ND[part].to(compute), labels_N[part]
            valid_C = labels_C != IGNORE
            target_C1 = labels_C.where(valid_C, 0)[:, None]
            log_p_CV = F.linear(hidden_CD, weight, bias).to(full).log_softmax(-1)
            picked_C = log_p_CV.gather(1, target_C1)[:, 0]
            loss -= picked_C.where(valid_C, 0.0).sum()
            if not any(wants):
                continue
            grad_CV = log_p_CV.exp_()
            grad_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1, dtype=full))
            grad_CV.masked_fill_(~valid_C[:, None], 0.0)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(compute)
            del log_p_CV
            if grad_hidden_ND is not None:
                grad_hidden_ND[part] = grad_CV @ weight
            if grad_weight_VD is not None and compute == full:
                grad_weight_VD.addmm_(grad_CV.t(), hidden_CD)
            elif grad_weight_VD is not None:
                grad_weight_VD += grad_CV.t() @ hidden_CD
            del grad_CV
        ctx.grads = [grad_hidden_ND, grad_weight_VD, grad_bias_V]
        ctx.dtypes = [hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype]
        return loss

    @staticmethod
    def backward(ctx: Any, *factor: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        out: list[Tensor | None] = []
        while grads:
            grad = grads.pop(0)
            out.append(None if grad is None else grad.mul_(factor[0]).to(ctx.dtypes[len(out)]))
        return (*out, None, None, None)
