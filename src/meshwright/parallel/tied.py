"""A tied embedding whose two uses lie on two stages.

Maths: the gradient of the one logical weight is the sum of the gradient of its use as embedding (first stage)
and as head (last stage). Each end keeps a copy; both start equal, get the same summed gradient and the same
update, so they stay equal bit by bit. The copy on the last stage is not counted again in norms or exports.

Communication: one all_reduce on ``tied`` (two ranks) of this rank's shard of the gradient, once per step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_local_pair(weight: nn.Parameter, copy: nn.Parameter) -> None:
    """Sum the gradients of a tied embedding's two copies when both are on this rank (a V-shaped pipeline)."""
    assert weight.grad is not None
    assert copy.grad is not None
    local(weight.grad).add_(local(copy.grad))
    local(copy.grad).copy_(local(weight.grad))


def sum_tied_gradient(weight: nn.Parameter, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum the gradient of this end's copy with the other end's; both ranks of ``group`` call it.

    A gradient that rests in host memory travels to ``device`` and back.
    """
    assert weight.grad is not None
    grad = local(weight.grad)
    here = grad.to(device)
    dist.all_reduce(here, group=group)
    if here is not grad:
        grad.copy_(here)
