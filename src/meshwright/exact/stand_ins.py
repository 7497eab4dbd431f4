"""What a played rank has in place of its peers and of values: everything that differs from a real rank is in this file.

A rank is played in a process of its own, which ends afterwards: torch keeps what it found out about a mesh, and with it
the coordinate of the rank that asked. So the functions that are replaced here need not be put back.

* Process groups: torch's fake ones, whose collectives do nothing.
* Parameters: fake tensors (a shape, no memory) where a real rank makes and cuts values.
* Pipelines: peers agree on static shapes without messages; what is sent is held until the step ends, as the handles of
  real sends hold it.
* Offloaded state: the thread that moves it moves it at once.
* transformers takes other ways when it meets fake tensors, meant for compilers; it is told that they are ordinary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.model.spec import TensorSpec
from meshwright.parallel import adapters
from meshwright.parallel.deferred import Deferred
from meshwright.train import offload


class Shapes(Deferred):
    """Parameters without memory: built by transformers as shapes, cut as shapes, then made fake tensors of ``mode``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(active=False, device="meta")
        self.mode = mode

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Make every parameter and buffer of ``module`` a fake tensor on ``device``; one with two names stays one."""
        made: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that no address is used twice
        with self.mode:
            for owner in module.modules():
                for register in (owner._parameters, owner._buffers):
                    for name, tensor in register.items():
                        if tensor is None or not tensor.is_meta:
                            continue
                        if id(tensor) not in made:
                            made[id(tensor)] = (tensor, _fake(tensor, device))
                        register[name] = made[id(tensor)][1]  # pyright: ignore[reportArgumentType]


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class AtOnce:
    """Stands in for a pool of threads: fake tensors may be used by one thread at a time."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``call`` now, unseen by the modes of this thread, as it would be in another one."""
        done: Future[Any] = Future()
        with _disable_current_modes():
            done.set_result(call(*args))
        return done

    def shutdown(self) -> None:
        """Nothing waits."""


@contextmanager
def job_of(world_size: int, rank: int) -> Iterator[None]:
    """Be ``rank`` of a job of ``world_size`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def replace_peers(mode: FakeTensorMode) -> None:
    """Replace, for the rest of this process, what would ask other ranks or values; see the module."""
    import transformers.utils.import_utils

    runtime: Any = schedules._PipelineScheduleRuntime
    initialize, run = runtime._initialize_stages, runtime._step_microbatches
    held: list[Tensor] = []

    def agree(_: Any, stages: list[Any], *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def initialize_stages(self: Any, *args: Any) -> Any:
        with mode:
            return initialize(self, *args)

    def step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        finally:
            held.clear()

    exchange = schedules._batch_p2p

    def batch_p2p(ops: list[dist.P2POp], *args: Any) -> Any:
        held.extend(op.tensor for op in ops if op.op is dist.isend)
        return exchange(ops, *args)

    def factor(tensor: TensorSpec, seed: int) -> Tensor:
        return torch.empty(tensor.shape, device="meta")

    changed: Any = offload
    changed.ThreadPoolExecutor = AtOnce
    runtime._warmup_p2p, runtime._initialize_stages = agree, initialize_stages
    runtime._step_microbatches = step_microbatches
    schedules._batch_p2p = batch_p2p
    adapters.initial_factor = factor
    transformers.utils.import_utils.is_fake_tensor = lambda x: False
    warnings.filterwarnings(
        "ignore"
    )  # torch warns of its own use of fake tensors and of names that it renames
