"""The names of torch that are not promised to stay, with where each is used, and the check that they are there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshwright.base.errors import Problem, problem

MADE_FOR: Final = "2.13"
"""The torch version that these names were read in."""


@dataclass(frozen=True)
class PrivateName:
    """One name: its module, the dotted name in it, and the module of ours that uses it.

    ``Name()`` stands for an instance made without arguments, ``name(x)`` for a function that takes ``x``, ``a|b`` for
    any of several names.
    """

    module: str
    name: str
    used_in: str


NAMES: Final[tuple[PrivateName, ...]] = (
    PrivateName("torch.distributed", "set_debug_level_from_env", "mesh.pool"),
    PrivateName("torch.distributed", "TCPStore", "mesh.rank_process"),
    PrivateName("torch.distributed", "HashStore", "prove.simulate"),
    PrivateName("torch.distributed", "ProcessGroupGloo", "prove.simulate"),
    PrivateName("torch.distributed.pipelining.schedules", "_Action", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining.schedules", "_Action.from_str", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime", "parallel.pipeline"),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._prepare_schedule_with_comms",
        "parallel.pipeline",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._step_microbatches",
        "parallel.pipeline",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._initialize_stages",
        "parallel.pipeline",
    ),
    PrivateName(
        "torch.distributed.pipelining", "PipelineStage.backward_maybe_with_nosync", "parallel.pipeline"
    ),
    PrivateName("torch.distributed.pipelining", "PipelineStage.__init__(input_grads)", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining", "PipelineStage.perform_reduce_grad", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining", "PipelineStage.forward_one_chunk", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining", "PipelineStage.backward_one_chunk", "parallel.pipeline"),
    PrivateName("torch.distributed.pipelining", "PipelineStage.clear_runtime_states", "parallel.pipeline"),
    PrivateName(
        "torch.distributed.pipelining", "PipelineStage.backward_weight_one_chunk", "parallel.pipeline"
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._maybe_compute_loss",
        "parallel.pipeline",
    ),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._maybe_get_loss",
        "parallel.pipeline",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup.post_backward",
        "parallel.zero",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState._root_post_backward_final_callback",
        "parallel.zero",
    ),
    *(
        PrivateName(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group",
            f"FSDPParamGroup.{n}",
            "parallel.away_shards",
        )
        for n in ("unshard", "is_unsharded", "post_backward")
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "FSDPParam.to_sharded_dtensor",
        "parallel.away_shards",
    ),
    PrivateName("torch", "UntypedStorage.resize_", "parallel.away"),
    PrivateName("torch.utils._pytree", "tree_flatten", "parallel.deferred"),
    PrivateName("torch.utils._pytree", "tree_map", "parallel.deferred"),
    PrivateName("torch", "_C._FunctionBase._sequence_nr", "parallel.halves"),
    PrivateName("torch", "_foreach_mul_", "parallel.apply"),
    PrivateName("torch", "_foreach_norm", "parallel.apply"),
    PrivateName("torch", "Tensor._make_wrapper_subclass", "checkpoint.pieces"),
    PrivateName("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", "parallel.attend"),
    PrivateName("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "parallel.attend"),
    PrivateName("torch", "ops.aten._scaled_dot_product_flash_attention", "parallel.attend"),
    PrivateName("torch", "ops.aten._scaled_dot_product_flash_attention_backward", "parallel.attend"),
    PrivateName("torch.autograd", "Variable._execution_engine.queue_callback", "parallel.replicate"),
    PrivateName("torch.distributed", "ProcessGroup.unbox", "parallel.record"),
    PrivateName("torch.distributed.fsdp", "FSDPModule.set_gradient_divide_factor", "parallel.zero"),
    PrivateName("torch.distributed.fsdp", "FSDPModule.set_force_sum_reduction_for_comms", "parallel.zero"),
    PrivateName("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "parallel.zero"),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState()._fsdp_param_groups|_fsdp_param_group",
        "parallel.zero",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "FSDPParam.unsharded_accumulated_grad_data",
        "parallel.zero",
    ),
    PrivateName("torch", "UntypedStorage.resize_", "train.memory"),
    PrivateName("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "checkpoint.metadata"),
    PrivateName("torch.distributed.checkpoint.filesystem", "_StorageInfo", "checkpoint.metadata"),
    PrivateName("torch.serialization", "_get_layout", "checkpoint.metadata"),
    PrivateName("torch._utils", "_rebuild_tensor_v2", "checkpoint.piece_files"),
    PrivateName("torch.utils._python_dispatch", "TorchDispatchMode", "parallel.record"),
    PrivateName("torch.utils._pytree", "tree_leaves", "train.memory"),
)
"""Every private name in use. A name is added here in the same change that begins to use it."""


EXACT_NAMES: Final[tuple[PrivateName, ...]] = (
    PrivateName("torch._subclasses.fake_tensor", "FakeTensor", "exact.values"),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode", "exact.values"),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode.from_tensor", "exact.values"),
    PrivateName("torch._subclasses.fake_tensor", "unset_fake_temporarily", "exact.values"),
    PrivateName("torch.testing._internal.distributed.fake_pg", "FakeStore", "exact.stand_ins"),
    PrivateName("torch.distributed.pipelining._utils", "InferenceMode", "exact.stand_ins"),
    PrivateName("torch.distributed.pipelining.schedules", "_batch_p2p", "exact.stand_ins"),
    PrivateName(
        "torch.distributed.pipelining.schedules",
        "_PipelineScheduleRuntime._warmup_p2p",
        "exact.stand_ins",
    ),
    PrivateName("torch.utils._python_dispatch", "_disable_current_modes", "exact.stand_ins"),
    PrivateName("torch", "ops.c10d._reduce_scatter_base_", "exact.timeline"),
)
"""Private names that only ``estimate --exact`` needs."""

POOL_NAMES: Final[tuple[PrivateName, ...]] = (
    PrivateName("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", "mesh.pool"),
    PrivateName(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator._propagate_tensor_meta_cached",
        "mesh.pool",
    ),
    PrivateName("torch.distributed.tensor", "_redistribute._gen_transform_infos", "mesh.pool"),
)
"""Private names with which a pool of ranks forgets a job's meshes; a torch without one of them keeps those a while."""

PIPELINE: Final = "parallel.pipeline"
"""The module whose names only a layout with pipeline stages needs."""
SAVING: Final = "checkpoint."
"""The package whose names a user's own loop, which saves nothing with us, does not need."""


def missing(
    names: Sequence[PrivateName] = NAMES, *, pipeline: bool = True, saving: bool = True
) -> list[Problem]:
    """Return E506 for each name that the installed torch lacks; empty when it has them all, whatever its version.

    ``pipeline``: look for the names of pipeline stages too. ``saving``: and for those of checkpoints; looking imports
    their modules.
    """
    import torch

    problems: list[Problem] = []
    for entry in names:
        if (entry.used_in == PIPELINE and not pipeline) or (entry.used_in.startswith(SAVING) and not saving):
            continue
        try:
            value: object = importlib.import_module(entry.module)
            for part in entry.name.split("."):
                value = _part(value, part)
        except (ImportError, AttributeError):
            problems.append(
                problem(
                    "E506",
                    where=f"torch {torch.__version__}",
                    found=f"{entry.module} has no {entry.name} (used in meshwright.{entry.used_in})",
                    needs=f"torch {MADE_FOR}, or a version that has this name",
                    do=f"install torch {MADE_FOR}",
                )
            )
    return problems


def _part(value: object, part: str) -> object:
    """Return the attribute that one part of a dotted name means.

    Raises:
        AttributeError: it is not there, or takes no such argument.
    """
    name, called, argument = part.rstrip(")").partition("(")
    found = next((n for n in name.split("|") if hasattr(value, n)), name)
    value = getattr(value, found)
    if not called or not callable(value):
        return value
    if argument and argument not in inspect.signature(value).parameters:
        raise AttributeError(part)
    return value if argument else value()
