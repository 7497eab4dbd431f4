"""The routers' term of the loss in a step: what travels beside hidden states, and what the context axis sums.

The rules are those of ``parallel.router_loss``: per sequence and expert a sum of probabilities and a count of choices.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.layout.batch import Batch
from meshwright.layout.layout import Layout
from meshwright.model.spec import ModelSpec
from meshwright.program.step import Collective

WHAT = "sums of the routers"


def has_router_term(spec: ModelSpec) -> bool:
    """Return whether the loss of a model has the load-balancing term of its routers."""
    return spec.moe is not None and bool(spec.config.get("output_router_logits"))


def noted_bytes(spec: ModelSpec, layout: Layout, batch: Batch) -> int:
    """Return the bytes that go beside each message of hidden states, and beside each of its gradients."""
    if spec.moe is None or not has_router_term(spec):
        return 0
    return 2 * batch.micro_batch * spec.moe.num_experts * _size(layout)


def context_sum(
    spec: ModelSpec, layout: Layout, batch: Batch, stage: int, k: int | None
) -> Iterator[Collective]:
    """Yield the all_reduce on ``cp`` behind the last stage's forward: choices per expert, and valid tokens."""
    if layout.cp == 1 or spec.moe is None or not has_router_term(spec) or stage != layout.num_stages - 1:
        return
    yield Collective(
        kind="all_reduce",
        axis="cp",
        group_size=layout.cp,
        num_bytes=batch.micro_batch * (spec.moe.num_experts + 1) * _size(layout),
        what="choices of the routers and valid tokens",
        stage=stage,
        micro_batch=k,
    )


def _size(layout: Layout) -> int:
    return 8 if layout.precision == "fp64" else 4
