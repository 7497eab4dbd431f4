"""``compile=blocks``: each block's forward through ``torch.compile``, and nothing around it.

The compiled function stands inside the block's hooks: parameters are gathered before it and let go after it, as without
it, and recompute runs it again as a whole. All blocks share one piece of code, which is compiled once per shape.

What this program put into a block - hooks that communicate, cut matrices, experts, masks that follow from the element,
attention over a context axis - runs as it is, between the compiled parts: it asks for process groups, the step and the
rows of the batch, which a compiled part would keep as they were. Such a block is compiled layer by layer.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

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


PARTS: Final = 8
"""Pieces of code that a block is compiled to at the most, where it calls what runs as it is."""


def compile_blocks(
    blocks: Sequence[nn.Module], backend: str | Callable[..., Any], attentions: Iterable[str] = ()
) -> None:
    """Compile each block's forward with ``backend``, in place. Call it before recompute and sharding.

    ``attentions`` are the names of attention functions in transformers' registry that run as they are.

    Communication: none.
    """
    if backend == "inductor":
        import torch._inductor.config as settings

        settings.compile_threads = 1  # a rank is one process; its compile workers would be more
    parts = [_leave_ours(block) for block in blocks]
    named = [_leave_attention(name) for name in attentions]
    if any(parts) or any(named):
        import torch._dynamo.config as limits

        # torch gives up in silence after as many versions of one piece of code as this; each layer is one
        limits.recompile_limit = max(limits.recompile_limit, PARTS * len(blocks))
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, PARTS * len(blocks))
    for block in blocks:
        block.forward = partial(_forward, torch.compile(block.forward, backend=backend, dynamic=False))


def _leave_ours(block: nn.Module) -> int:
    """Let the hooks and forwards that were put into a block run as they are; return how many there are."""
    import torch._dynamo as dynamo

    found = 0
    for module in block.modules():
        inside: Any = module
        for hooks in (inside._forward_pre_hooks, inside._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = dynamo.disable(hook)
                found += 1
        own = vars(module).get("forward")
        if own is not None:
            inside.forward = dynamo.disable(own)
            found += 1
    return found


def _leave_attention(name: str) -> int:
    """Let the attention function ``name`` of transformers' registry run as it is; return 1 where there is one."""
    import torch._dynamo as dynamo
    from transformers import AttentionInterface

    known: Any = AttentionInterface()
    if name not in known.valid_keys():
        return 0
    AttentionInterface.register(name, dynamo.disable(known[name]))
    return 1


def _forward(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # torch looks at the gradient of what it traces, and warns of that itself
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return compiled(*args, **kwargs)
