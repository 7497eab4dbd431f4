"""ZeRO stages 1, 2 and 3 by policy on FSDP2 (``fully_shard``).

One mechanism, three policies. Parameters rest sharded on dim 0 over ``dp_shard`` in every stage:

* stage 1: gathered once per step, kept until the last backward; gradients accumulate whole and are
  reduce-scattered once;
* stage 2: the same, but every micro-batch's gradients are reduce-scattered at once, so only shards are kept;
* stage 3: parameters are dropped after each unit's forward and gathered again for its backward; gradients as
  in stage 2.

With experts spread over ranks, each mixture's experts are a unit of their own over the ranks that hold the same
ones (``expert_shard``, ``expert_replicate``), under the same policy.

With ``dp_replicate`` above 1 (HSDP) each rank's gradient shard is also all-reduced over the replicas, once
per step. Gradients are summed, never averaged: the loss is divided by the step's global valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshwright.parallel.away_shards import ShardHomes


class Zero:
    """A stage module sharded by FSDP2, with the switches of one ZeRO stage.

    Attributes:
        homes: where the shards rest when that is not the device, else None.
    """

    def __init__(self, root: nn.Module, stage: int) -> None:
        assert isinstance(root, FSDPModule)
        self.root = root
        self.stage = stage
        self.homes: ShardHomes | None = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.root.parameters():  # pyright: ignore[reportAttributeAccessIssue]
            p.grad = None

    def before_backward(self, *, last: bool) -> None:
        """Set what the coming backward reduces and reshards."""
        root = self.root
        root.set_requires_gradient_sync(last or self.stage >= 2)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or self.stage == 3)
        root.set_is_last_backward(last)

    def before_half(self) -> None:
        """Let a half of a backward only accumulate: FSDP2's hooks run in it before weight gradients are there."""
        root = self.root
        root.set_requires_gradient_sync(False)
        root.set_requires_all_reduce(False)
        root.set_reshard_after_backward(False)
        root.set_is_last_backward(False)

    def after_weights(self, params: Iterable[Tensor], *, last: bool) -> None:
        """Do by hand what FSDP2 does after a backward: accumulate, and reduce as the stage's policy says."""
        self.before_backward(last=last)
        state = self.root._get_fsdp_state()
        for inner in reversed(state._state_ctx.all_states):
            for group in reversed(_param_groups(inner)):
                group.post_backward()
        state._root_post_backward_final_callback()

    def end_of_stage(self) -> None:
        """Nothing is left: the last backward reduced everything."""

    def finish(self) -> None:
        """Nothing is left: the last backward reduced everything."""
        if self.homes is not None:
            self.homes.rest()

    def begin_backward_at(self, block: nn.Module) -> None:
        """Let ``block`` (or the root) be the last that backward gathers for: no gradient flows into those before it.

        FSDP2 prefetches in each unit's backward the unit before it, wanted or not; here it is told to prefetch the
        root unit, which is gathered then anyway or has no parameters.
        """
        assert isinstance(block, FSDPModule)
        block.set_modules_to_backward_prefetch([self.root])

    def param_groups(self) -> list[Any]:
        """Return the groups of parameters that are gathered together, in the order of the modules."""
        modules = self.root.modules()  # pyright: ignore[reportAttributeAccessIssue]
        states = [m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule)]
        return [group for state in states for group in _param_groups(state)]

    def waiting_gradients(self) -> list[Tensor]:
        """Return the gradients that wait for the last backward: whole (stage 1), or shards.

        Shards stand beside parameters that stay gathered (stage 2), or are still to be summed over replicas (HSDP).
        """
        found: list[Tensor] = []
        for module in self.root.modules():  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(module, FSDPModule):
                for group in _param_groups(module._get_fsdp_state()):
                    if group._partial_reduce_output is not None:
                        found.append(group._partial_reduce_output)
                    for param in group.fsdp_params:
                        if group.is_unsharded and param.sharded_param.grad is not None:
                            found.append(param.sharded_param.grad)
                        unsharded = getattr(param, "_unsharded_param", None)
                        grad = param.unsharded_accumulated_grad
                        if grad is None and unsharded is not None:
                            grad = unsharded.grad
                        if grad is not None:
                            found.append(grad)
        return found

    def reshard(self) -> None:
        """Drop gathered parameters (after an evaluation, which gathers them without a backward)."""
        for module in self.root.modules():  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(module, FSDPModule):
                module.reshard()
        if self.homes is not None:
            self.homes.rest()


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    stage: int,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    average: bool = False,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    offload: OffloadPolicy | None = None,
    keep_root: bool = False,
) -> Zero:
    """Shard ``root`` over ``mesh`` (1-D dp_shard, or 2-D dp_replicate x dp_shard): one unit per block, then the rest.

    ``experts`` are modules inside the blocks that are sharded over ``expert_mesh``. ``prepare`` is called with each unit
    before it is cut: a block, then ``root`` for the rest. ``offload`` says where shards rest. ``average`` divides the
    summed gradients by the number of ranks (a user's own loop that takes the mean per rank). ``keep_root`` keeps in stage
    3 too what stands outside the blocks from forward to backward, which begins with it: one gather less, and the same
    peak where one backward follows each forward.

    Communication: none now; see the module for what a step does.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    reshard = stage == 3
    away = offload or OffloadPolicy()
    # The weights of the router keep their own, wider dtype on the way into the experts.
    inner = replace(policy, cast_forward_inputs=False)
    for mixture in experts:
        fully_shard(
            mixture, mesh=expert_mesh, mp_policy=inner, reshard_after_forward=reshard, offload_policy=away
        )
    for block in blocks:
        if prepare is not None:
            prepare(block)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=away)
    if prepare is not None:
        prepare(root)
    again = reshard and not keep_root
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=again, offload_policy=away)
    assert isinstance(root, FSDPModule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(mesh.size()) if average else 1.0)
    zero = Zero(root, stage)
    if blocks and not _param_groups(root._get_fsdp_state()):
        # before its first unit FSDP2 takes the last one of an earlier forward to come next in backward. Where that is the
        # root it is there still; without a root it would be gathered again for nothing
        inside = [m for m in blocks[0].modules() if m is not blocks[0] and isinstance(m, FSDPModule)]
        zero.begin_backward_at(inside[0] if inside else blocks[0])
    return zero


def _param_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that one FSDP2 unit gathers together; before torch 2.12 a unit had one or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
