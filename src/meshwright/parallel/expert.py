"""Expert parallelism: the experts of a mixture spread over ``ep``, on the user's own modules.

Maths: a token's k rows (one per chosen expert) are sorted by expert, each expert multiplies its own rows, and the
results are put back in the tokens' order, weighted and added up. Nothing is dropped and nothing is padded. The
router stays where it is: each rank routes its own tokens, so its gradient is one device's, summed like that of any
other matrix. An expert's gradient is complete over the ranks whose tokens it saw; ranks that hold the same experts
add theirs up.

Communication on ``ep`` (S = tokens x k rows of this rank, D hidden size), per mixture and micro-batch: an all_to_all
of the counts per expert, one of the rows out to the experts and one of the results back; backward the last two
the other way round. The tokens of this rank are S rows in each; what it holds of other ranks' depends on the routing.

A rank whose experts get no row takes part in every exchange with zero rows, and its gradient is zero, not missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.layout.ranks import EP
from meshwright.mesh.device_mesh import MeshView
from meshwright.model.sharding import rule
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.parallel.stage import StageModule, logical_name

ALIGNED_BYTES = 16
"""torch's grouped matmul wants every row of both factors to begin at a multiple of this."""

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What torch's grouped matmul multiplies."""


ADDS_BIAS = "meshwright_adds_bias"
"""Attribute of a module of experts that is False on ranks of the tensor axis that leave out the last bias."""


def sort_by_expert(index_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that brings the (token, choice) pairs together by expert, and the rows of each expert.

    Returns (order [N * K] of flat pairs, counts [num_experts]); pairs of one expert stay in the tokens' order.
    """
    flat = index_NK.reshape(-1)
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts)


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes ``order``."""
    out = torch.empty_like(order)
    out[order] = torch.arange(order.numel(), device=order.device)
    return out


def can_group(x_SD: Tensor, weight_EFD: Tensor) -> bool:
    """Return whether torch's grouped matmul takes these factors (dtype, rows of a multiple of 16 bytes)."""
    size = weight_EFD.element_size()
    return (
        x_SD.dtype == weight_EFD.dtype
        and x_SD.dtype in GROUPED_DTYPES
        and all(n * size % ALIGNED_BYTES == 0 for n in weight_EFD.shape[1:])
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that matrix products of ``x`` run in: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def grouped_linear(x_SD: Tensor, weight_EFD: Tensor, counts: Sequence[int]) -> Tensor:
    """Return each row times the transposed matrix of its expert, [S, F]; rows come by expert, ``counts`` each.

    One grouped matmul where torch has it, else a loop over the experts. Every expert has a gradient, zero where it
    has no row.
    """
    dtype = compute_dtype(x_SD)
    x_SD, weight_EFD = x_SD.to(dtype), weight_EFD.to(dtype)
    if can_group(x_SD, weight_EFD):
        ends = torch.tensor(counts, device=x_SD.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(x_SD.contiguous(), weight_EFD.transpose(1, 2), offs=ends)
    parts = zip(x_SD.split(list(counts)), weight_EFD.unbind(0), strict=True)
    return torch.cat([F.linear(x, weight) for x, weight in parts])


def expert_rows(experts: Any, x_SD: Tensor, counts: Sequence[int]) -> Tensor:
    """Return what the experts of transformers' module make of rows sorted by expert, [S, D]."""
    up_S2F = _product(experts, "gate_up_proj", x_SD, counts)
    return _product(experts, "down_proj", experts._apply_gate(up_S2F), counts)


def _product(experts: Any, name: str, x_SD: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows times the experts' matrices called ``name``, with their biases, and what an adapter adds.

    The bias behind the second product is added on one rank of a tensor axis, whose results are partial sums.
    """
    weight_EFD = getattr(experts, name)
    y_SF = grouped_linear(x_SD, weight_EFD.transpose(1, 2) if is_transposed(experts) else weight_EFD, counts)
    bias_EF = getattr(experts, f"{name}_bias", None)
    if bias_EF is not None:
        if name == "down_proj" and not getattr(experts, ADDS_BIAS, True):
            bias_EF = bias_EF * 0.0
        of_rows = torch.tensor(counts, device=y_SF.device)
        y_SF = y_SF + bias_EF.to(y_SF.dtype).repeat_interleave(of_rows, 0, output_size=y_SF.shape[0])
    first_ERD = getattr(experts, f"{name}_lora_A", None)
    if first_ERD is None:
        return y_SF
    x_SR = grouped_linear(x_SD, first_ERD, counts)
    return y_SF + grouped_linear(x_SR, getattr(experts, f"{name}_lora_B"), counts) * experts.lora_scaling


def is_transposed(experts: Any) -> bool:
    """Return whether transformers' module stores its experts' matrices as [E, in, out]."""
    return bool(getattr(experts, "is_transposed", False))


def combine(rows_SD: Tensor, order: Tensor, weights_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N, D]: the rows put back in the tokens' order, weighted and added up over the choices.

    ``rows_SD`` are in ``order`` (see ``sort_by_expert``). The sum is taken in the wider dtype of rows and weights.
    """
    n, k = weights_NK.shape
    rows_NKD = rows_SD[inverse(order)].view(n, k, -1)
    return (rows_NKD * weights_NK.unsqueeze(-1)).sum(1).to(dtype)


def by_expert(counts_PE: Tensor) -> Tensor:
    """Return the order that brings rows that came rank by rank, and by expert within a rank, together by expert.

    ``counts_PE``: rows from each rank for each expert of this rank.
    """
    experts = torch.arange(counts_PE.shape[1], device=counts_PE.device).repeat(counts_PE.shape[0])
    return experts.repeat_interleave(counts_PE.reshape(-1)).argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """Rows to and from the ranks of a group; backward sends their gradients the other way.

    Communication: one all_to_all of [sum(send), D] to [sum(receive), D].
    """

    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x_SD, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(x_SD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x_SD.new_empty(sum(receive), *x_SD.shape[1:])
    dist.all_to_all_single(out, x_SD.contiguous(), receive, send, group=group)
    return out


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return how many rows each rank has for each expert of this rank, [ranks, E / ranks].

    Communication: one all_to_all of [E] int64.
    """
    out = torch.empty_like(counts_E)
    dist.all_to_all_single(out, counts_E, group=group)
    return out.view(group.size(), -1)


def dispatch_combine(
    experts: Any,
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return what a mixture whose experts are spread over ``group`` makes of this rank's tokens, [N, D].

    Args:
        experts: transformers' module with this rank's experts only (``num_experts / group.size()`` of them).
        hidden_ND: this rank's tokens.
        index_NK: the experts that the router chose, counted over the whole mixture.
        weights_NK: their weights.
        num_experts: experts of the whole mixture.
        group: ranks over which they are spread, in order.

    Communication: see the module.
    """
    order, counts_E = sort_by_expert(index_NK, num_experts)
    counts_PE = exchange_counts(counts_E, group)
    send = counts_E.view(group.size(), -1).sum(1).tolist()
    receive = counts_PE.sum(1).tolist()
    sent_ND = hidden_ND.to(compute_dtype(hidden_ND))
    out_SD: Any = _Exchange.apply(sent_ND[order // index_NK.shape[1]], send, receive, group)
    together = by_expert(counts_PE)
    rows_RD = expert_rows(experts, out_SD[together], counts_PE.sum(0).tolist())
    back_SD: Any = _Exchange.apply(rows_RD[inverse(together)], receive, send, group)
    return combine(back_SD, order, weights_NK, hidden_ND.dtype)


def whole_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, num_experts: int
) -> Tensor:
    """Stand in for the forward of transformers' experts where all are on this rank: as ``dispatch_combine``, alone."""
    order, counts_E = sort_by_expert(top_k_index, num_experts)
    sent_ND = hidden_states.to(compute_dtype(hidden_states))
    rows_SD = expert_rows(experts, sent_ND[order // top_k_index.shape[1]], counts_E.tolist())
    return combine(rows_SD, order, top_k_weights, hidden_states.dtype)


@dataclass(frozen=True)
class ExpertAxis:
    """This rank's place on the expert axis: which part of each mixture's experts it holds.

    Attributes:
        tensors: the stacked tensors of the experts by name, [E, ...] each.
    """

    group: dist.ProcessGroup
    degree: int
    index: int
    tensors: Mapping[str, TensorSpec]

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of the logical tensor ``name`` (a copy where it is cut)."""
        where = self.place_of(name)
        if where is None:
            return full
        _, dim, ((start, size),) = where
        return full.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)

    def place_of(self, name: str) -> tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]] | None:
        """Return (logical shape, dim that is cut, (start, size) of what is held here), or None for a copy."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        each = tensor.shape[0] // self.degree
        return tensor.shape, 0, ((self.index * each, each),)


def expert_axis(spec: ModelSpec, view: MeshView) -> ExpertAxis:
    """Return this rank's place on the expert axis of ``spec``."""
    tensors = {t.name: t for t in spec.tensors() if rule(t).ep_dim is not None}
    return ExpertAxis(view.groups[EP], view.layout.ep, view.ep_rank, tensors)


def shard_experts(module: StageModule, axis: ExpertAxis) -> None:
    """Keep this rank's experts of a whole stage, in place, and make its mixtures exchange their tokens' rows.

    Communication: none now; see the module.
    """
    for path, experts in stage_experts(module, axis).items():
        for name, p in list(experts.named_parameters(recurse=False)):
            mine = axis.part(logical_name(f"{path}.{name}"), p.detach())
            setattr(experts, name, nn.Parameter(mine, p.requires_grad))
        whole: Any = experts
        whole.forward = partial(_forward, experts, num_experts=int(whole.num_experts), group=axis.group)
        whole.num_experts = int(whole.num_experts) // axis.degree


def stage_experts(module: nn.Module, axis: ExpertAxis) -> dict[str, nn.Module]:
    """Return the modules of a stage that hold experts, by their path in it."""
    paths = {
        name.rpartition(".")[0] for name, _ in module.named_parameters() if logical_name(name) in axis.tensors
    }
    return {path: module.get_submodule(path) for path in sorted(paths)}


def _forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Stand in for the forward of transformers' experts, under its names of the arguments."""
    return dispatch_combine(
        experts, hidden_states, top_k_index, top_k_weights, num_experts=num_experts, group=group
    )
