"""Tensor and sequence parallelism: matrices cut over ``tp``, on the user's own modules.

Maths: a column-cut matrix gives each rank its own heads (or its own slice of the feed-forward) from the same
input, so the input's gradient is a sum over ranks; the row-cut matrix after it gives partial sums, which are added
up before its bias is. The table of the embedding and the head are cut by vocabulary rows. The loss needs three
numbers per token from each rank: the largest logit, the sum of exponentials and the target's logit.

Communication on ``tp`` (B micro-batch, T tokens, D hidden size), per block and micro-batch: without sequence
parallelism two all_reduces of [B, T, D] forward and two backward; with it (inside the blocks of a stage, hidden
states are [B, T / tp, D]) an all_gather before and a reduce_scatter after each of attention and feed-forward, the
transposed backward, and one all_gather where the tokens are joined again (and one for the gradient where they were
cut). Once per step one all_reduce of the gradients that are partial sums (``model.sharding.gradient_sum``).

Parameters are plain local shards, which data parallelism takes like any others. What communicates are hooks on the
modules and the forwards of single matrices; no class is changed. Positions, rotary tables and masks are made by the
model from the full length, because the hidden states are cut only inside the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.mesh.device_mesh import MeshView
from meshwright.model.sharding import gradient_sum, over_all_heads, rule, tp_ranges
from meshwright.model.spec import ModelSpec, TensorSpec
from meshwright.parallel.adapters import adapter_output, base_layer
from meshwright.parallel.expert import ADDS_BIAS, whole_forward
from meshwright.parallel.loss import Columns
from meshwright.parallel.quantised import packed_matrices, product, stored_shape
from meshwright.parallel.stage import IGNORE, StageModule, get_module, logical_name
from meshwright.parallel.tied import local


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _all_gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' tokens: [B, T / n, D] -> [B, T, D]."""
    if (
        x_BtD.dim() == 2
    ):  # tokens of all sequences in one row: their order is of no matter, as long as it comes back
        return _all_gather(x_BtD[None], group)[0]
    n, (b, t, d) = group.size(), x_BtD.shape
    out = x_BtD.new_empty(b, n * t, d)
    dist.all_gather_into_tensor(out.view(-1), x_BtD.contiguous().view(-1), group=group)
    # Not a view where one sequence needs no reordering: FSDP2 hooks onto outputs of blocks.
    return out if b == 1 else out.view(n, b, t, d).transpose(0, 1).reshape(b, n * t, d)


def _reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add up the ranks' [B, T, D] and keep this rank's tokens: [B, T / n, D]."""
    if x_BTD.dim() == 2:
        return _reduce_scatter(x_BTD[None], group)[0]
    n, (b, t, d) = group.size(), x_BTD.shape
    parts = x_BTD.view(b, n, t // n, d).transpose(0, 1).reshape(n * b, t // n, d)
    out = x_BTD.new_empty(b, t // n, d)
    dist.reduce_scatter_tensor(out, parts.contiguous(), group=group)
    return out


def _own_tokens(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    each = x_BTD.shape[1] // group.size()
    return x_BTD.narrow(1, group.rank() * each, each).clone(memory_format=torch.contiguous_format)


class _Transposed(torch.autograd.Function):
    """A linear communication forward and its transpose backward; each is (tensor, group) -> tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        forward: Callable[..., Tensor],
        backward: Callable[..., Tensor],
    ) -> Tensor:
        ctx.group, ctx.transpose = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transpose(grads[0].contiguous(), ctx.group), None, None, None


def _same(x: Tensor, _: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


class _VocabLoss(torch.autograd.Function):
    """Summed cross-entropy of logits whose columns are spread over a group.

    Communication: all_reduce of the largest logit [N], and of the sum of exponentials and target logit [2, N].
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup, start: int
    ) -> Tensor:
        valid_N = labels_N != IGNORE
        high_N = logits_NV.amax(-1)
        dist.all_reduce(high_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NV = logits_NV - high_N[:, None]
        mine_N = valid_N & (labels_N >= start) & (labels_N < start + logits_NV.shape[-1])
        at_N = torch.where(mine_N, labels_N - start, 0)
        target_N = torch.where(mine_N, shifted_NV.gather(1, at_N[:, None]).squeeze(1), 0.0)
        share_NV = shifted_NV.exp_()
        sums_2N = torch.stack([share_NV.sum(-1), target_N])
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(share_NV.div_(sums_2N[0][:, None]), at_N, mine_N, valid_N)
        return torch.where(valid_N, sums_2N[0].log() - sums_2N[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        share_NV, at_N, mine_N, valid_N = ctx.saved_tensors
        grad_NV = share_NV * valid_N[:, None]
        grad_NV.scatter_add_(1, at_N[:, None], -mine_N[:, None].to(grad_NV.dtype))
        return grad_NV.mul_(grads[0]), None, None, None


def vocab_loss_sum(logits_BTV: Tensor, labels_BT: Tensor, *, group: dist.ProcessGroup, start: int) -> Tensor:
    """Return the sum over valid tokens of the cross-entropy, the same on every rank of ``group``.

    ``logits_BTV`` are this rank's columns, from vocabulary row ``start`` on; labels as in ``token_loss_sum``.
    """
    logits = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    out: Any = _VocabLoss.apply(logits.reshape(-1, logits.shape[-1]), labels_BT.reshape(-1), group, start)
    return out


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place on the tensor axis of a model, and what it owes at the end of a step.

    Attributes:
        sums: (name, over which ranks) of the stage's tensors whose gradient is a partial sum.
        device: where the group communicates; gradients may rest elsewhere.
    """

    group: dist.ProcessGroup
    degree: int
    index: int
    spec: ModelSpec
    tensors: Mapping[str, TensorSpec]
    sums: tuple[tuple[str, str], ...]
    device: torch.device

    def part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of the logical tensor ``name`` (a copy where it is cut)."""
        where = self.place_of(name)
        if where is None:
            return full
        _, dim, ranges = where
        return torch.cat([full.narrow(dim, start, size) for start, size in ranges], dim).contiguous()

    def place_of(self, name: str) -> tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]] | None:
        """Return (logical shape, dim that is cut, (start, size) of each part held here), or None for a copy."""
        tensor = self.tensors[name]
        dim = rule(tensor).tp_dim
        if dim is None:
            return None
        return tensor.shape, dim, tp_ranges(tensor, self.degree, self.index, self.spec.attention)

    def sum_gradients(self, params: Mapping[str, nn.Parameter]) -> None:
        """Complete the gradients that are partial sums, in place.

        A key/value head's copies are added up in the head's own slot of the buffer, so one collective does all.

        Communication: one all_reduce on ``tp`` of all of them, none where there are none.
        """
        found = [(local(g), where) for name, where in self.sums if (g := params[name].grad) is not None]
        if not found:
            return
        slots = self.spec.attention.num_kv_heads
        mine = self.index * slots // self.degree
        counts = [g.numel() * (slots if where == "heads" else 1) for g, where in found]
        flat = torch.zeros(sum(counts), dtype=found[0][0].dtype, device=self.device)
        views: list[tuple[Tensor, Tensor]] = []
        for (grad, where), piece in zip(found, flat.split(counts), strict=True):
            view = piece if where == "all" else piece.view(slots, grad.numel())[mine]
            view.copy_(grad.reshape(-1))
            views.append((grad, view))
        dist.all_reduce(flat, group=self.group)
        for grad, view in views:
            grad.copy_(view.view_as(grad))


def joined(axes: Sequence[TensorAxis]) -> TensorAxis:
    """Return one axis for all stages of a rank: their partial sums go in one collective."""
    return replace(axes[0], sums=tuple(s for axis in axes for s in axis.sums))


def shard_tensors(module: StageModule, spec: ModelSpec, view: MeshView) -> TensorAxis:
    """Cut a whole stage in place to this rank's part on the tensor axis, and make its modules communicate.

    Communication: none now; see the module.
    """
    layout, group = view.layout, view.groups["tp"]
    held = [logical_name(n) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    sums = [
        (t.name, where)
        for block in spec.blocks
        for t in block.tensors
        if t.name in held and (where := gradient_sum(t, layout.tp, layout.sp, spec.attention))
    ]
    tensors = {t.name: t for t in spec.tensors()}
    axis = TensorAxis(group, layout.tp, view.coords["tp"], spec, tensors, tuple(sums), view.device)
    _narrow(module, axis)
    root = module.causal_lm
    if module.is_first:
        _cut_embedding(
            get_module(root, spec.paths.embedding), axis, tensors[f"{spec.paths.embedding}.weight"]
        )
    if module.is_last:
        head = tensors[f"{spec.paths.head}.weight"]
        start = tp_ranges(head, axis.degree, axis.index, spec.attention)[0][0]
        _before(get_module(root, spec.paths.head), group, _same, _all_reduce)
        module.loss_sum = lambda logits, labels: vocab_loss_sum(logits, labels, group=group, start=start)
        if module.chunked_loss is not None:
            module.chunked_loss = partial(
                _chunked_loss, loss_sum=module.chunked_loss, columns=Columns(group, start)
            )
    blocks = list(get_module(root, spec.paths.blocks).named_children())
    for name, block in blocks:
        _cut_block(block, f"{spec.paths.blocks}.{name}.", axis, layout.sp)
    if layout.sp:
        _before(blocks[0][1], group, _own_tokens, _all_gather)
        _after(blocks[-1][1], group, _all_gather, _own_tokens)
    return axis


def _chunked_loss(
    head: nn.Module,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    *,
    loss_sum: Callable[..., Tensor],
    columns: Columns,
) -> Tensor:
    """Head and loss by chunks of tokens, on this rank's columns; the hidden states' gradient is added up once."""
    hidden: Any = _Transposed.apply(hidden_BTD, columns.group, _same, _all_reduce)
    return loss_sum(head, hidden, labels_BT, columns)


def _narrow(module: nn.Module, axis: TensorAxis) -> None:
    """Replace every parameter by this rank's part; a parameter with two names stays one."""
    new: dict[int, nn.Parameter] = {}
    for name, p in module.named_parameters():
        if rule(axis.tensors[logical_name(name)]).tp_dim is not None:
            new[id(p)] = nn.Parameter(axis.part(logical_name(name), p.detach()), p.requires_grad)
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and id(p) in new:
                owner._parameters[name] = new[id(p)]
    for name, packed in packed_matrices(module).items():
        where = axis.place_of(name)
        if where is not None:
            packed.cut(*where[1:])


def _before(
    module: nn.Module,
    group: dist.ProcessGroup,
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
) -> None:
    """Communicate the hidden states that ``module`` is called with."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_Transposed.apply(args[0], group, forward, backward), *args[1:]), kwargs
        x = _Transposed.apply(kwargs["hidden_states"], group, forward, backward)
        return args, {**kwargs, "hidden_states": x}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(
    module: nn.Module,
    group: dist.ProcessGroup,
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
) -> None:
    """Communicate the hidden states that ``module`` returns (alone or first of a tuple)."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (_Transposed.apply(out[0], group, forward, backward), *out[1:])
        return _Transposed.apply(out, group, forward, backward)

    module.register_forward_hook(hook)


def _cut_embedding(embedding: Any, axis: TensorAxis, tensor: TensorSpec) -> None:
    """Look up this rank's rows only, and add the ranks up: every token is found on one of them."""
    start, rows = tp_ranges(tensor, axis.degree, axis.index, axis.spec.attention)[0]
    padding = embedding.padding_idx
    embedding.padding_idx = (
        padding - start if padding is not None and start <= padding < start + rows else None
    )
    embedding.num_embeddings = rows
    look_up = embedding.forward  # the model's own: some scale what they find

    def forward(ids_BT: Tensor) -> Tensor:
        elsewhere_BT = (ids_BT < start) | (ids_BT >= start + rows)
        at_BT = (ids_BT - start).masked_fill(elsewhere_BT, 0)
        x_BTD = look_up(at_BT).masked_fill(elsewhere_BT[..., None], 0.0)
        out: Any = _Transposed.apply(x_BTD, axis.group, _all_reduce, _same)
        return out

    embedding.forward = forward


def _cut_block(block: nn.Module, prefix: str, axis: TensorAxis, sp: bool) -> None:
    """Make a block's attention and feed-forward communicate, and tell their modules the local sizes."""
    entry = (_all_gather, _reduce_scatter) if sp else (_same, _all_reduce)
    entered: set[str] = set()
    for tensor in axis.tensors.values():
        if not tensor.name.startswith(prefix) or not tensor.name.endswith(".weight"):
            continue
        path = tensor.name.removeprefix(prefix).removesuffix(".weight")
        if tensor.role == "norm" and over_all_heads(tensor):
            _share_norm(block.get_submodule(path), axis)
            continue
        if tensor.role == "router" and not tensor.is_bias:
            _cut_experts(block.get_submodule(path.rpartition(".")[0]), axis, sp)
            continue
        parent = path.rpartition(".")[0]
        if tensor.role in ("attention_in", "mlp_in"):
            if parent not in entered:
                entered.add(parent)
                # OPT's feed-forward has no module of its own: its first matrix is where hidden states come in
                _before(block.get_submodule(parent or path), axis.group, *entry)
            _tell_width(base_layer(block.get_submodule(path)))
            if tensor.role == "attention_in":
                _tell_heads(block.get_submodule(parent), axis)
                if axis.spec.family == "bloom" and tensor.name.endswith("query_key_value.weight"):
                    _own_biases(block.get_submodule(parent), axis)
        elif tensor.role in ("attention_out", "mlp_out"):
            _cut_rows(block.get_submodule(path), axis, sp)


def _cut_experts(mixture: nn.Module, axis: TensorAxis, sp: bool) -> None:
    """Make a mixture of experts communicate as a whole: each rank routes all tokens through its slice of every expert.

    Router and routing are the same on all ranks; the outputs of the experts, weighted, are partial sums.
    """
    experts: Any = mixture.get_submodule("experts")
    if getattr(experts, "has_bias", False):
        setattr(experts, ADDS_BIAS, axis.index == 0)
        experts.forward = partial(whole_forward, experts, num_experts=int(experts.num_experts))
    _before(mixture, axis.group, *((_all_gather, _reduce_scatter) if sp else (_same, _all_reduce)))
    _after(mixture, axis.group, *((_reduce_scatter, _all_gather) if sp else (_all_reduce, _same)))


def _tell_width(matrix: Any) -> None:
    if isinstance(matrix, nn.Linear):
        matrix.out_features = stored_shape(matrix)[0]
    else:  # transformers' Conv1D stores [in, out] and shapes its output by ``nf``
        matrix.nf = stored_shape(matrix)[1]


def _tell_heads(attention: Any, axis: TensorAxis) -> None:
    spec = axis.spec.attention
    heads, kv = spec.num_heads // axis.degree, max(1, spec.num_kv_heads // axis.degree)
    for name, here in (
        ("num_heads", heads),
        ("num_key_value_heads", kv),
        ("num_kv_heads", kv),
        ("num_key_value_groups", heads // kv),
    ):
        if hasattr(attention, name):
            setattr(attention, name, here)
    if hasattr(attention, "num_key_value_heads"):  # Phi-3 splits its fused product by the heads of its config
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = heads
    if hasattr(attention, "split_size"):
        attention.split_size = heads * spec.head_dim


def _share_norm(norm: Any, axis: TensorAxis) -> None:
    """Take the mean square of an RMS norm over the heads of all ranks; each normalizes and weighs its own.

    Maths: with copies of key/value heads every head is counted as often, so the mean is the same, and a copy's gradient
    is its share of the head's.

    Communication: one all_reduce of [B, T, 1] forward, one backward.
    """
    width = norm.weight.numel() * axis.degree

    def forward(x_BTn: Tensor) -> Tensor:
        wide_BTn = x_BTn.to(torch.promote_types(x_BTn.dtype, torch.float32))
        squares_BT1 = wide_BTn.pow(2).sum(-1, keepdim=True)
        total_BT1: Any = _Transposed.apply(squares_BT1, axis.group, _all_reduce, _all_reduce)
        normed_BTn = wide_BTn * torch.rsqrt(total_BT1 / width + norm.variance_epsilon)
        return (norm.weight * normed_BTn).to(x_BTn.dtype)

    norm.forward = forward


def _own_biases(attention: nn.Module, axis: TensorAxis) -> None:
    """Give attention its own heads' rows of BLOOM's biases by position, which the model makes of all: [B x H, 1, T]."""
    heads = axis.spec.attention.num_heads
    each = heads // axis.degree

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        alibi = kwargs["alibi"]
        of_heads = alibi.view(-1, heads, *alibi.shape[1:]).narrow(1, axis.index * each, each)
        return args, {**kwargs, "alibi": of_heads.flatten(0, 1)}

    attention.register_forward_pre_hook(hook, with_kwargs=True)


def _cut_rows(matrix: Any, axis: TensorAxis, sp: bool) -> None:
    """Add up the partial sums of a row-cut matrix (to this rank's tokens with ``sp``), then add its bias once.

    An adapter's product is a partial sum too, of this rank's columns of A, and is added up in the same collective.
    """
    exit_ = (_reduce_scatter, _all_gather) if sp else (_all_reduce, _same)
    layer, matrix = matrix, base_layer(matrix)

    def forward(x: Tensor) -> Tensor:
        y: Any = product(matrix, x, bias=False)
        y = _Transposed.apply(y if layer is matrix else y + adapter_output(layer, x), axis.group, *exit_)
        return y if matrix.bias is None else y + matrix.bias.to(y.dtype)

    layer.forward = forward
    if isinstance(matrix, nn.Linear):
        matrix.in_features = stored_shape(matrix)[1]
