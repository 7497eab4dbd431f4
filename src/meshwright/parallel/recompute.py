"""Recompute: a block's forward runs again in its backward, in place of keeping its activations.

``full`` keeps a block's inputs only. ``selective`` also keeps the output of the attention kernel and of every second
matrix product, so that about half of the products and no attention run again.

The wrapper goes around a block's ``forward``, inside the block's hooks: parameter names stay, and with FSDP2 the
recomputed forward runs between the unit's gather for backward and its release, so that recompute adds no collective.
The states of random numbers and autocast are restored for the second forward; without gradients nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from meshwright.parallel.halves import Halves

REENTRANT: Final = False
"""torch's older form of checkpointing is never used: a block whose input needs no gradient, as behind a frozen
embedding, would get none there. ``run.json`` says so of a run that recomputes."""

ATTENTION_OPS = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
}
"""Fused attention kernels of torch's aten (CPU, then CUDA), with the place of ``dropout_p`` among their arguments."""

MATMUL_OPS = ("mm", "addmm", "_grouped_mm")
"""Matrix products with a weight. Batched products are left out: those are scores of unfused attention."""


def _drops(op: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention kernel draws random numbers: kept, it would not draw them a second time."""
    given = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
    return bool(given)


def selective_policy() -> Callable[..., CheckpointPolicy]:
    """Return the policy of one block's pass: it counts products, alike in forward and in the recomputed forward."""
    seen = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name().removeprefix("aten::").split(".")[0]
        keep = False
        if name in ATTENTION_OPS:
            keep = not _drops(op, ATTENTION_OPS[name], args, kwargs)
        elif name in MATMUL_OPS:
            seen[ctx.is_recompute] += 1
            keep = seen[ctx.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(selective_policy())


Context = Callable[[], AbstractContextManager[Any]]


def recompute_blocks(
    blocks: Iterable[nn.Module], mode: str, held: Context = nullcontext, halves: Halves | None = None
) -> None:
    """Make each block recompute its forward in backward, by ``mode`` "none", "selective" or "full".

    Call it before the blocks are sharded or their hooks are set. No parameter name changes. ``held`` makes a context
    that the recomputed forward needs beside autocast, because the first forward ran in it; it is made then. With
    ``halves`` a backward may come in two halves: the block still runs again once (torch's own checkpoint would do it
    in each half).

    Communication: none of its own; a block that communicates in its forward does so again.
    """
    if mode == "none":
        return
    contexts = {"full": noop_context_fn, "selective": _selective_contexts}[mode]
    for block in blocks:
        inner = partial(_forward, block.forward, partial(_with, contexts, held), halves)
        block.forward = inner


def _with(contexts: Callable[[], Any], held: Context) -> tuple[Any, Any]:
    """Return the contexts of the first forward and of the recomputed one, the latter inside ``held``."""
    first, again = contexts()
    return first, nested(held(), again)


@contextmanager
def nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Return one context of several, entered in order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _forward(
    forward: Callable[..., Any], contexts: Callable[[], Any], halves: Halves | None, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if halves is not None:
        return halves.run(forward, contexts, args, kwargs)
    return checkpoint(forward, *args, use_reentrant=REENTRANT, context_fn=contexts, **kwargs)
