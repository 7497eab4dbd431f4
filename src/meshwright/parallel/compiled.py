"""``compile=blocks``: each block's forward through ``torch.compile``, and nothing around it.

The compiled function stands inside the block's hooks: parameters are gathered before it and let go after it, as without
it, and recompute runs it again as a whole. All blocks share one piece of code, which is compiled once per shape.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import Problem, problem

PROOF_BACKEND = "aot_eager"
"""Traces forward and backward ahead as every backend does, and runs torch's own kernels: for proofs."""

COMPILERS = ("g++", "clang++", "cl")


def missing_compiler(device_type: str) -> list[Problem]:
    """Return E279 when the default backend has no compiler for kernels of ``device_type``."""
    if device_type != "cpu" or any(shutil.which(name) for name in COMPILERS):
        return []
    return [problem("E279", where="layout.compile", found=f"none of {', '.join(COMPILERS)} is here")]


def compile_blocks(blocks: Iterable[nn.Module], backend: str | Callable[..., Any]) -> None:
    """Compile each block's forward with ``backend``, in place. Call it before recompute and sharding.

    Communication: none.
    """
    if backend == "inductor":
        import torch._inductor.config as settings

        settings.compile_threads = 1  # a rank is one process; its compile workers would be more
    for block in blocks:
        block.forward = partial(_forward, torch.compile(block.forward, backend=backend, dynamic=False))


def _forward(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # torch looks at the gradient of what it traces, and warns of that itself
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return compiled(*args, **kwargs)
