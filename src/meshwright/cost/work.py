"""What the price of a part depends on, and what it is made of: keys, seconds and bytes of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import CollectiveTimes, GroupShape, plane_shape, strided_shape
from meshwright.cost.placed import PlaceTimes
from meshwright.cost.rates import DeviceRates
from meshwright.layout.layout import Layout
from meshwright.layout.precision import FP8
from meshwright.layout.ranks import strides
from meshwright.model.spec import BlockSpec, ModelSpec

STATE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, **dict.fromkeys(FP8, 4)}


COMPUTE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, **dict.fromkeys(FP8, 2)}


MATMUL_ROLES = frozenset(
    {"attention_in", "attention_out", "mlp_in", "mlp_out", "router", "expert_in", "expert_out"}
    | {"shared_in", "shared_out"}
)
"""Tensors of a block that tokens are multiplied with, in the order of its forward."""


def sharding_stage(layout: Layout) -> int:
    """Return the ZeRO stage that has something to shard: 0 for a shard group of one rank."""
    return layout.zero if layout.shard > 1 else 0


@dataclass(frozen=True)
class WorkKey:
    """What a block's time and activations depend on beside the block itself."""

    tp: int
    sp: bool
    cp: int
    cp_style: str
    ep: int
    micro_batch: int
    recompute: str
    autocast: bool
    tp_step: int = 1
    cp_step: int = 1
    ep_places: tuple[tuple[int, int], ...] = ((1, 1), (1, 1))
    """Distances in rank numbers between neighbours on tp and cp, 1 where there are none, and (ranks, distance) of the
    expert axis along the outer and the inner of dp and cp, from which it borrows the innermost part."""


def work_key(layout: Layout) -> WorkKey:
    """Return the key of a layout."""
    step = strides(layout)
    return WorkKey(
        layout.tp,
        layout.sp and layout.tp > 1,
        layout.cp,
        layout.cp_style if layout.cp > 1 else "",
        layout.ep,
        layout.micro_batch,
        layout.recompute,
        sharding_stage(layout) == 0 and COMPUTE_BYTES[layout.precision] == 2,
        step["tp"] if layout.tp > 1 else 1,
        step["cp"] if layout.cp > 1 else 1,
        _expert_places(layout, step) if layout.ep > 1 else ((1, 1), (1, 1)),
    )


def _expert_places(layout: Layout, step: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    axes = ((layout.cp, step["cp"]), (layout.dp, step["dp_shard"]))
    (degree, near), (_, far) = sorted(axes, key=lambda axis: axis[1]) if layout.cp > 1 else ((1, 1), axes[1])
    inner = min(layout.ep, degree)
    return (ceil(layout.ep / inner), far), (inner, near)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds and bytes of one micro-batch through one part of the model on one rank.

    ``tensor``, ``context`` and ``expert`` are seconds of communication in forward + backward; ``recompute`` is
    the extra forward. ``kept`` bytes stay until backward, ``again`` are alive while recomputing, ``transient``
    are gradients of activations inside the feed-forward, and ``inside`` those of them that are left when it makes
    weight gradients. ``gone`` bytes of a block are freed when its backward is through the feed-forward, which has then
    made ``grown`` elements of weight gradients, and ``whole`` when it is at its end; ``norm`` are alive inside a norm's
    backward. ``entry`` is the part of ``kept`` that is the block's input itself, ``noise`` the bytes of
    random numbers alive in a dropout. ``final`` is the part of ``kept`` that is gone before a block's backward, and
    ``loss`` what the loss keeps of a micro-batch between its forward and its backward. ``captured`` is what a
    micro-batch keeps beside ``kept`` between the two halves of a split backward, ``edge`` gradients at the end of a
    backward, and ``split`` the seconds by which the two halves are longer than the whole; ``weight`` is the part of
    ``backward`` that the weight half takes. ``each`` are seconds of communication on the tensor axis that every stage
    has, whatever blocks it holds (the embedding's work tells them).
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    kept: float = 0.0
    again: float = 0.0
    transient: float = 0.0
    inside: float = 0.0
    gone: float = 0.0
    whole: float = 0.0
    norm: float = 0.0
    grown: float = 0.0
    entry: float = 0.0
    noise: float = 0.0
    final: float = 0.0
    loss: float = 0.0
    captured: float = 0.0
    edge: float = 0.0
    split: float = 0.0
    weight: float = 0.0
    each: float = 0.0
    flops: float = 0.0


@dataclass
class Facts:
    """What prices of one model on one cluster at one sequence length and precision depend on.

    Attributes:
        kind_of: for each block, which of the distinct ``kinds`` of blocks it is.
        frozen, stopped: the patterns of parameters that do not train, and the names of these parameters.
        eight: rates of products in 8 bits where linear layers run in them, else None.
    """

    spec: ModelSpec
    cluster: ClusterSpec
    seq_len: int
    precision: str
    rates: DeviceRates
    times: CollectiveTimes
    placed: PlaceTimes
    kinds: tuple[BlockSpec, ...]
    kind_of: tuple[int, ...]
    frozen: tuple[str, ...] = ()
    stopped: frozenset[str] = frozenset()
    eight: DeviceRates | None = None

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the compute dtype."""
        return COMPUTE_BYTES[self.precision]

    @property
    def state_bytes(self) -> int:
        """Bytes per element of parameters, gradients and each moment at rest."""
        return STATE_BYTES[self.precision]

    def tp_shape(self, key: WorkKey) -> GroupShape:
        """Return the shape of a tp group."""
        return strided_shape(key.tp, key.tp_step, self.cluster.gpus_per_node)

    def expert_shape(self, key: WorkKey) -> GroupShape:
        """Return the shape of the group that experts are spread over, the innermost part of dp x cp."""
        return plane_shape(key.ep_places, self.cluster.gpus_per_node)

    def residual_bytes(self, key: WorkKey) -> int:
        """Return the bytes per element of the residual stream."""
        return 4 if key.autocast else self.compute_bytes
