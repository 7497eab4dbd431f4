"""The pieces that a step is made of: one block's, the embedding's and the head's work, each priced once.

A piece depends on few keys of a layout (tp, cp, ep, micro-batch, recompute), so a search prices each distinct
one once and puts columns together from them; a single prediction uses the same pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import (
    CollectiveTimes,
    GroupShape,
    collective_times,
    plane_shape,
    strided_shape,
)
from meshwright.cost.eight import FP8_ROLES, copies_bytes, linear_seconds
from meshwright.cost.placed import KINDS, PlaceTimes, place_times
from meshwright.cost.rates import DeviceRates, attention_flops, device_rates
from meshwright.layout.context import DRAWN_AT_ONCE, kv_heads_sent
from meshwright.layout.layout import Layout, loss_chunks
from meshwright.layout.precision import FP8, wide_precision
from meshwright.layout.ranks import strides
from meshwright.model.activations import (
    FEED_FORWARD,
    always_unfused,
    caps_scores,
    saved_activations,
    saved_final_bytes,
)
from meshwright.model.logits import after_head
from meshwright.model.randomness import drops_probabilities, drops_residual
from meshwright.model.sharding import rule, shared_norms, tp_local_shape
from meshwright.model.spec import AttentionSpec, BlockSpec, ModelSpec, TensorSpec
from meshwright.program.units import frozen_names

STATE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, **dict.fromkeys(FP8, 4)}
COMPUTE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, **dict.fromkeys(FP8, 2)}

COMPOSED_GELU = ("gelu_new", "gelu_fast")
"""Activations that are written as several elementwise operations."""

SAVED_LOGITS_BYTES = 4.0
"""Bytes per logit that eager cross-entropy keeps until backward: the log-softmax."""

CHUNK_OPS = 14
"""Small operations that the chunked loss runs per chunk."""

MATMUL_ROLES = frozenset(
    {"attention_in", "attention_out", "mlp_in", "mlp_out", "router", "expert_in", "expert_out"}
    | {"shared_in", "shared_out"}
)
"""Tensors of a block that tokens are multiplied with, in the order of its forward."""

SCORE_PASSES = (17.0, 37.0)
"""Reads and writes of each visible fp32 score by the plain attention of ``parallel.attend``, forward and backward,
counted from its operations: product, scale, cap, mask, log-sum-exp, shares; again, with their gradient and the slope."""

FEED_FORWARD_ROLES = frozenset(
    {"mlp_in", "mlp_out", "router", "expert_in", "expert_out", "shared_in", "shared_out"}
)
"""Tensors of a block whose gradients backward makes first."""

NOISE_BYTES = 34.0
"""Bytes an element of a dropout's numbers: four whole ones of 8 bytes, and what is dropped (read off a played step)."""

NORM_COPIES = 5.0
"""Float32 tensors of a token's width that are alive at once in a composed norm's backward (read off a played step)."""

SPLIT_OPS, SPLIT_PASSES = 2.2, 8.0
"""On a CPU a split backward costs this many small operations more for each node: torch's pipelining walks the graph in
Python to find what belongs to which half. And the gradients in between, kept apart from one half to the other, cost this
many copies of theirs. tiny-llama, CPU time of both halves less that of the whole: 0.57 ms a block at 8 tokens, 1.3 to
1.8 ms at 1,024 (2.2 and 1.14 times the whole), where a probe's operation took 4.8 us and its copies 55 GB/s."""

DROPPED = {"gpu": (354.0, 402.0), "cpu": (750.0, 850.0)}
"""Bytes that attention over a context axis moves, forward and backward, for a pair of positions and head whose share may
be dropped, beside the fused kernel's work. On a GPU counted, operation by operation, in ``parallel.dropout`` and
``parallel.attend``: 281 for the mask, which is made in both, the rest for scores in float32. On a CPU measured, because
64-bit products are no copies there: 460 to 1,040 and 505 to 965 in tiles of 256 to 1,024 positions."""

DRAWN_BYTES = 36.0
"""Bytes for each of these pairs while a stretch's mask is made: four 64-bit numbers beside a score."""

PASSES = {"gpu": (2.0, 4.0), "cpu": (5.0, 6.0)}
"""Bytes that elementwise operations move, in multiples of the bytes kept for backward, forward and backward. On a
GPU a kept tensor is written and about once read in forward, read and its gradient written in backward (assumed); on
a CPU the slope over tokens of the same measurement."""

SHARD_OPS_PER_UNIT = 16
SHARD_OPS_PER_TENSOR = 4
"""Small operations that FSDP2 runs per gather or scatter of a unit, and per tensor in it."""


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


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """Elements of one unit on one rank after tp and ep, padded to equal rows of its shard group.

    ``resting`` and ``trainable_resting`` are what one rank of that group holds of them.
    """

    full: float
    trainable: float
    resting: float
    trainable_resting: float
    largest: float
    tensors: int
    trainable_tensors: int
    matmul: float


@lru_cache(maxsize=8192)
def unit_tensor_shape(tensor: TensorSpec, attention: AttentionSpec, tp: int, ep: int) -> tuple[int, ...]:
    """Return the sizes of a tensor on one rank of the tensor and expert axes."""
    if tp == 1 and ep == 1:
        return tensor.shape
    shape = tp_local_shape(tensor, tp, attention, "replicate", ep)
    if ep > 1 and tensor.of_experts and rule(tensor).ep_dim is None:
        return (max(1, shape[0] // ep), *shape[1:])
    return shape


def unit_size(
    tensors: Sequence[TensorSpec],
    trainable: Sequence[bool],
    attention: AttentionSpec,
    tp: int,
    ep: int,
    shards: int,
) -> UnitSize:
    """Return the elements of a unit: each tensor is padded on dim 0 to a multiple of its shard group.

    That is ``shards`` ranks, and the shards / ep of them that hold the same experts for an expert's tensor.
    """
    full = trained = resting = trained_resting = largest = matmul = 0.0
    count = trained_count = 0
    for tensor, trains in zip(tensors, trainable, strict=True):
        shape = unit_tensor_shape(tensor, attention, tp, ep)
        numel = float(prod(shape))
        parts = max(1, shards // ep) if tensor.of_experts else shards
        if parts > 1:
            numel = ceil(shape[0] / parts) * parts * prod(shape[1:])
        full += numel
        resting += numel / parts
        count += 1
        if trains:
            trained += numel
            trained_resting += numel / parts
            trained_count += 1
            largest = max(largest, numel)
        if len(shape) >= 2 and tensor.role not in ("embedding", "position") and not tensor.of_experts:
            matmul += prod(shape)
    return UnitSize(
        full=full,
        trainable=trained,
        resting=resting,
        trainable_resting=trained_resting,
        largest=largest,
        tensors=count,
        trainable_tensors=trained_count,
        matmul=matmul,
    )


def _signature(block: BlockSpec, stopped: frozenset[str]) -> tuple[object, ...]:
    tensors = tuple((t.shape, t.role, t.is_bias, t.name in stopped) for t in block.tensors)
    return (block.kind, block.ffn_size, block.sliding_window, tensors)


@dataclass(frozen=True, kw_only=True)
class Products:
    """Seconds of a block's matrix products: forward, of both gradients and of the weights' alone, and its model FLOPs.

    ``redone`` are the seconds forward of every other one, ``last`` those of a dense feed-forward's last, which is
    ``last_redone`` if it is among them; ``linears`` are the calls.
    """

    forward: float
    backward: float
    weight: float
    flops: float
    redone: float
    last: float
    last_redone: bool
    linears: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What of a block's work is the same whatever is recomputed.

    ``work`` is that of a block that keeps everything, but for its communication; ``ahead`` and ``behind`` are seconds of
    attention, ``entry`` the bytes of the block's input,
    ``reads`` those that its weight gradients read, ``extra`` and ``also_saved`` those of ``_selective_bytes``, and
    ``tensor`` seconds of the tensor axis.
    """

    work: Work
    products: Products
    ahead: float
    behind: float
    entry: float
    reads: float
    extra: float
    also_saved: float
    tensor: float


@dataclass
class Pricer:
    """Prices pieces of one model on one cluster at one sequence length and precision, each distinct one once.

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
    _blocks: dict[tuple[int, WorkKey], Work] = field(default_factory=dict[tuple[int, WorkKey], Work])
    _products: dict[tuple[int, float, int, int], Products] = field(
        default_factory=dict[tuple[int, float, int, int], Products]
    )
    _parts: dict[tuple[int, WorkKey], Parts] = field(default_factory=dict[tuple[int, WorkKey], Parts])
    _ends: dict[tuple[str, WorkKey, str], Work] = field(default_factory=dict[tuple[str, WorkKey, str], Work])

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

    def block(self, kind: int, key: WorkKey) -> Work:
        """Return the work of one micro-batch through a block of this kind."""
        if (kind, key) not in self._blocks:
            self._blocks[kind, key] = self._price_block(kind, key)
        return self._blocks[kind, key]

    def embedding(self, key: WorkKey) -> Work:
        """Return the work of one micro-batch through the embedding."""
        slot = ("embedding", key, "")
        if slot not in self._ends:
            tokens = key.micro_batch * self.seq_len / key.cp
            wide = self._residual_bytes(key)
            read = 2.0 * tokens * self.spec.hidden_size * wide
            table = float(self.spec.vocab_size * self.spec.hidden_size) / key.tp
            r = self.rates
            # a dense gradient of the table is zeroed, scattered into and added
            backward = (read + 3.0 * table * wide) / r.copy_rate + 6 * r.backward_op_s + r.accumulate_s
            self._ends[slot] = Work(
                forward=read / r.copy_rate + 8 * r.op_s,
                backward=backward,
                tensor=self._tp_end(key, 0.0, 0),
                each=self._tp_stage(key),
            )
        return self._ends[slot]

    def head(self, key: WorkKey, loss: str = "eager") -> Work:
        """Return the work of one micro-batch through final norm, head and loss."""
        slot = ("head", key, loss)
        if slot not in self._ends:
            tokens = key.micro_batch * self.seq_len / key.cp
            h, v = float(self.spec.hidden_size), float(self.spec.vocab_size) / key.tp
            c = self.compute_bytes
            r = self.rates
            logits = tokens * v
            norm = 6.0 * tokens * h * max(4, c)
            copy = (c + 4.0) if c < 4 else 0.0  # a float32 copy of 16-bit logits
            forward = r.matmul_s(tokens, h, v) + (norm + logits * (copy + 16.0)) / r.copy_rate
            trained = not all((t.tied_to or t.name) in self.stopped for t in self.spec.head)
            backward = r.matmul_s(tokens, v, h) + (r.matmul_s(v, tokens, h) if trained else 0.0)
            backward += (2.0 * norm + logits * (copy + 20.0)) / r.copy_rate
            forward += 14 * r.op_s
            backward += 14 * r.backward_op_s
            capped = after_head(self.spec).cap is not None
            kept_loss = (
                SAVED_LOGITS_BYTES + (c if capped else 0.0)
            ) * logits  # a scaled tanh keeps its output
            # between the halves of a backward: the gradients of the logits and of the final norm
            wide = self._residual_bytes(key)
            captured = (logits * c if trained else 0.0) + tokens * h * wide
            if (
                loss == "chunked"
            ):  # all of it happens in forward; backward multiplies two gradients by a factor
                full = self.state_bytes
                captured = kept_loss = tokens * h * wide + (full * v * h if trained else 0.0)
                chunks = loss_chunks(key.tp)
                rows = tokens / chunks
                forward = r.matmul_s(rows, h, v) + r.matmul_s(rows, v, h)
                if trained:
                    forward += r.matmul_s(v, rows, h) + 2.0 * full * v * h / r.copy_rate
                forward = chunks * (forward + CHUNK_OPS * r.op_s)
                forward += (norm + logits * (copy + 24.0)) / r.copy_rate + 10 * r.op_s
                backward = (2.0 * norm + 2.0 * kept_loss) / r.copy_rate + 10 * r.backward_op_s
            if trained:
                backward += self._accumulate_s(v * h, 1)
            backward += self._accumulate_s(h, 1)
            forward, backward = forward * r.head_scale[0], backward * r.head_scale[1]
            final = saved_final_bytes(self.spec, self.seq_len, key.micro_batch, c, self._residual_bytes(key))
            final /= key.cp  # with sequence-sharded norms too: the last block's output is gathered before it
            self._ends[slot] = Work(
                forward=forward,
                backward=backward,
                tensor=self._tp_end(key, tokens, loss_chunks(key.tp) if loss == "chunked" else 1),
                kept=final,
                final=final,
                loss=kept_loss,
                captured=captured,
                split=0.0 if r.overlaps else self._split_s(21, 0.0 if loss == "chunked" else captured),
                weight=r.matmul_s(v, tokens, h) * r.head_scale[1] if trained and loss != "chunked" else 0.0,
                flops=(6.0 if trained else 4.0) * tokens * h * v,
            )
        return self._ends[slot]

    def _tp_pair(self, key: WorkKey, per_block: int) -> float:
        """Return seconds of tp communication, forward + backward, of ``per_block`` column-row pairs."""
        if key.tp < 2:
            return 0.0
        shape = self.tp_shape(key)
        num_bytes = key.micro_batch * self.seq_len / key.cp * self.spec.hidden_size * self.compute_bytes
        if key.sp:
            return per_block * 2.0 * (self._tp_s("pair", num_bytes, shape) + self.rates.region_s)
        reduce = self._tp_s("reduce", num_bytes, shape)
        return per_block * 2.0 * (reduce + self.rates.region_s + self._copied_s(num_bytes))

    def _tp_s(self, part: str, num_bytes: float, shape: GroupShape) -> float:
        """Return seconds of a sum, or of a gather with its scatter, on the tensor axis: in its place if measured."""
        if self.placed.has(part):
            return float(self.placed.seconds(part, num_bytes, shape))
        return sum(float(self.times.seconds(kind, num_bytes, shape)) for kind in KINDS[part])

    def _copied_s(self, num_bytes: float) -> float:
        """Return the seconds of the copy that is summed in place of a message, where regions are priced."""
        return 2.0 * num_bytes / self.rates.copy_rate if self.rates.region_s else 0.0

    def _tp_end(self, key: WorkKey, tokens: float, chunks: int) -> float:
        """Return seconds of tp communication, forward + backward, at an end of the model.

        Where regions are measured, as the engine runs them: one all-reduce, and for each of ``chunks`` of the loss the
        sums over ``tokens``. Else as a block's half.
        """
        if not self.rates.region_s or key.tp < 2:
            return self._tp_pair(key, 1)
        shape = self.tp_shape(key)
        num_bytes = key.micro_batch * self.seq_len / key.cp * self.spec.hidden_size * self.compute_bytes
        total = self._tp_s("reduce", num_bytes, shape) + self._copied_s(num_bytes) + self.rates.region_s
        for wide in (4.0, 8.0) if chunks else ():
            total += chunks * self._tp_s("reduce", wide * tokens / chunks, shape)
        return total

    def _tp_stage(self, key: WorkKey) -> float:
        """Return seconds of a stage's two gathers with sp, of tokens behind its blocks and of their gradient before them.

        0 where regions are not measured: ``_tp_end`` has them then.
        """
        if not self.rates.region_s or key.tp < 2 or not key.sp:
            return 0.0
        num_bytes = key.micro_batch * self.seq_len / key.cp * self.spec.hidden_size * self.compute_bytes
        # a gather is taken for half of the pair
        return self._tp_s("pair", num_bytes, self.tp_shape(key)) + 2.0 * self.rates.region_s

    def _accumulate_s(self, numel: float, tensors: int) -> float:
        """Return the seconds of adding gradients to those that are there, where a probe has measured it."""
        if not self.rates.accumulate_s:
            return 0.0
        return tensors * self.rates.accumulate_s + 3.0 * numel * self.state_bytes / self.rates.copy_rate

    def _tp_again(self, block: BlockSpec, key: WorkKey) -> float:
        """Return seconds of tp communication of a block's second forward: all but the sum at its end."""
        if key.tp < 2:
            return 0.0
        shape = self.tp_shape(key)
        num_bytes = key.micro_batch * self.seq_len / key.cp * self.spec.hidden_size * self.compute_bytes
        ends = 2.0 if drops_residual(self.spec) or block.norms != "before" else 1.0  # what reads the last sum
        around = 2.0 * self.rates.region_s  # of four regions, forward only
        if not key.sp:
            return around + ends * (self._tp_s("reduce", num_bytes, shape) + self._copied_s(num_bytes))
        if self.placed.has("pair"):
            return around + (1.0 + 0.5 * ends) * self._tp_s("pair", num_bytes, shape)
        gathers = 2.0 * float(self.times.seconds("all_gather", num_bytes, shape))
        return gathers + ends * float(self.times.seconds("reduce_scatter", num_bytes, shape))

    def _squares(self, block: BlockSpec, key: WorkKey) -> float:
        """Return seconds of the sums of squares of norms over all heads, forward and backward."""
        norms = len(shared_norms(block)) if key.tp > 1 else 0
        if not norms:
            return 0.0
        num_bytes = key.micro_batch * self.seq_len / key.cp * max(4, self.compute_bytes)
        return 2.0 * norms * float(self.times.seconds("all_reduce", num_bytes, self.tp_shape(key)))

    def _price_block(self, kind: int, key: WorkKey) -> Work:
        same = replace(key, recompute="none")
        if (kind, same) not in self._parts:
            self._parts[kind, same] = self._price_parts(kind, same)
        x = self._parts[kind, same]
        block, whole, entry = self.kinds[kind], x.work.kept, x.entry
        tokens = key.micro_batch * self.seq_len / key.cp
        # torch's checkpoint stops when the last tensor that backward needs is there: before the block's last product
        stops = not drops_residual(self.spec) and not self.spec.adapter and block.norms == "before"
        spared, scale = x.products.last if stops else 0.0, self.rates.forward_scale
        left_out = x.products.forward + x.ahead - x.products.redone
        left_out += spared if x.products.last_redone else 0.0
        again_s = {"none": 0.0, "full": x.work.forward - scale * spared}.get(
            key.recompute, x.work.forward - scale * left_out
        )
        again_s += self.rates.checkpoint_s if again_s else 0.0
        # what a recomputed forward makes beside what was kept
        again = {"none": 0.0, "full": whole - entry}.get(key.recompute, whole - entry - x.also_saved)
        return replace(
            x.work,
            recompute=again_s,
            tensor=x.tensor
            + (
                0.0
                if key.recompute == "none"
                else self._tp_again(block, key) + self._squares(block, key) / 2.0
            ),
            # a backward in two halves runs the whole block again
            split=x.work.split + (spared if key.recompute == "full" else 0.0),
            context=self._context(key, x.ahead, x.behind),
            expert=self._expert(block, key, tokens),
            kept={"none": whole, "full": entry}.get(key.recompute, entry + x.extra),
            again=again,
            entry=entry if key.recompute != "none" and not key.sp else x.work.entry,
            # after its input half a block that ran again keeps what weight gradients read
            captured=x.work.captured + {"none": 0.0, "full": x.reads}.get(key.recompute, x.reads - x.extra),
        )

    def _price_parts(self, kind: int, key: WorkKey) -> Parts:
        spec, r, c = self.spec, self.rates, self.compute_bytes
        block = self.kinds[kind]
        tokens = key.micro_batch * self.seq_len / key.cp
        products = self._block_products(kind, tokens, key)
        heads = spec.num_heads / key.tp
        width = (spec.attention.head_dim + (spec.attention.value_head_dim or spec.attention.head_dim)) / 2
        seen = min(self.seq_len, block.sliding_window or self.seq_len)
        # with cp each rank has 1/cp of the queries against all keys
        ahead, behind = r.attention_s(key.micro_batch, heads, float(self.seq_len), width)
        share = (seen / self.seq_len) * (2.0 - seen / self.seq_len) / key.cp
        forward = products.forward + ahead * share
        backward = products.backward + behind * share
        flops = products.flops
        flops += 3.0 * attention_flops(key.micro_batch, heads, float(self.seq_len), width) * share
        whole, gone = self._saved(block, key)
        passes = PASSES["gpu" if r.overlaps else "cpu"]
        forward += passes[0] * whole / r.copy_rate
        backward += passes[1] * whole / r.copy_rate
        if key.cp > 1 and caps_scores(
            spec
        ):  # the ring takes the plain kernel, which holds scores for a moment
            scores = 4.0 * key.micro_batch * heads * self.seq_len**2 / 2.0 * share
            forward += SCORE_PASSES[0] * scores / r.copy_rate
            backward += SCORE_PASSES[1] * scores / r.copy_rate
        dropped, drawn = self._dropped_pairs(key, heads, seen / self.seq_len)
        each = DROPPED["gpu" if r.overlaps else "cpu"]
        forward += dropped * each[0] / r.copy_rate
        backward += dropped * each[1] / r.copy_rate
        ops, nodes = block_operations(spec, block, products.linears, autocast=key.autocast)
        if r.overlaps:  # a GPU runs kernels while the host launches the next ones
            forward, backward = max(forward, ops * r.op_s), max(backward, nodes * r.backward_op_s)
        else:
            forward += ops * r.op_s
            backward += nodes * r.backward_op_s
            shapes = [
                unit_tensor_shape(t, spec.attention, key.tp, key.ep)
                for t in block.tensors
                if t.name not in self.stopped
            ]
            backward += self._accumulate_s(float(sum(map(prod, shapes))), len(shapes))
            forward, backward = forward * r.forward_scale, backward * r.backward_scale
        captured = self._captured(block, tokens, key)
        entry = tokens * spec.hidden_size * self._residual_bytes(key) / (key.tp if key.sp else 1)
        extra, also_saved = self._selective_bytes(block, tokens, key)
        # gradients of the feed-forward's width, when the saved input of its last product is gone already
        wide_ones = 2.0 if block.moe is None else 3.0
        around = 2.0 if spec.norm == "rmsnorm" else 4.0
        widest = max(block.ffn_size, block.moe.ffn_size * block.moe.experts_per_token if block.moe else 0)
        copies = self._copies(block, tokens, key)
        work = Work(
            forward=forward,
            backward=backward,
            kept=whole,
            captured=captured,
            # a GPU's host walks the graph while earlier kernels run
            split=0.0 if r.overlaps else self._split_s(nodes, captured),
            weight=products.weight * r.backward_scale,
            edge=(4.0 if spec.norm == "rmsnorm" else 2.0) * entry,
            transient=max(
                tokens * c * (wide_ones * widest / key.tp + around * spec.hidden_size) + copies,
                drawn * DRAWN_BYTES,
            ),
            inside=tokens * c * ((wide_ones - 2.0) * widest / key.tp + 2.0 * spec.hidden_size) + copies,
            gone=gone,
            whole=whole,
            norm=tokens * spec.hidden_size / (key.tp if key.sp else 1) * (NORM_COPIES * max(4, c))
            if spec.norm == "rmsnorm"
            else 2.0 * entry,
            grown=self._grown(block, key),
            noise=max(self._noise(tokens, key), drawn * DRAWN_BYTES),
            # a norm keeps its input but where it computes on a float32 copy
            entry=0.0 if key.sp or (spec.norm == "rmsnorm" and self._residual_bytes(key) < 4) else entry,
            flops=flops,
        )
        return Parts(
            work=work,
            products=products,
            ahead=ahead * share,
            behind=behind * share,
            entry=entry,
            reads=self._reads(widest, tokens, key),
            extra=extra,
            also_saved=also_saved,
            tensor=self._tp_pair(key, 2) + self._squares(block, key),
        )

    def _dropped_pairs(self, key: WorkKey, heads: float, window: float) -> tuple[float, float]:
        """Return how many pairs and heads of a block attention over ``cp`` drops on a rank, and of how many at once.

        Both 0 without a context axis or attention dropout. The ring skips what no query sees but for its own stretches'
        upper halves, and beyond a window of this share of the sequence; Ulysses takes the whole square of its heads.
        """
        if key.cp < 2 or not drops_probabilities(self.spec):
            return 0.0, 0.0
        square = key.micro_batch * heads * float(self.seq_len) ** 2
        if key.cp_style == "ulysses":
            return square / key.cp, min(square / key.cp, DRAWN_AT_ONCE)
        seen = (2.0 * key.cp + 1.0) / (4.0 * key.cp**2) * window * (2.0 - window)
        return square * seen, min(square / key.cp**2, DRAWN_AT_ONCE)

    def _block_products(self, kind: int, tokens: float, key: WorkKey) -> Products:
        """Return what the matrix products of a block take, which depends on its tokens and on how it is cut."""
        slot = (kind, tokens, key.tp, key.ep)
        if slot not in self._products:
            block = self.kinds[kind]
            forward = backward = weight = flops = redone = last = 0.0
            linears = products = 0
            for tensor in block.tensors:
                if len(tensor.shape) < 2 or tensor.role in ("norm", "position"):
                    continue
                ahead, behind, mine, work, calls = self._matmul(tensor, block, tokens, key)
                forward += ahead
                backward += behind + mine
                weight += mine
                flops += work
                linears += calls
                last = ahead if tensor.role == "mlp_out" and block.moe is None else last
                if tensor.role in MATMUL_ROLES:
                    products += 1
                    redone += ahead if products % 2 else 0.0
            self._products[slot] = Products(
                forward=forward,
                backward=backward,
                weight=weight,
                flops=flops,
                redone=redone,
                last=last,
                last_redone=products % 2 > 0,
                linears=linears,
            )
        return self._products[slot]

    def _copies(self, block: BlockSpec, tokens: float, key: WorkKey) -> float:
        """Return the bytes of the 8-bit copies that the largest linear layer of a block makes (0 without fp8)."""
        if self.eight is None:
            return 0.0
        shapes = [
            unit_tensor_shape(t, self.spec.attention, key.tp, key.ep)[-2:]
            for t in block.tensors
            if len(t.shape) >= 2 and t.role in FP8_ROLES
        ]
        return max((copies_bytes((tokens, float(k), float(n))) for n, k in shapes), default=0.0)

    def _matmul(
        self, tensor: TensorSpec, block: BlockSpec, tokens: float, key: WorkKey
    ) -> tuple[float, float, float, float, int]:
        """Return seconds forward, of both gradients, model FLOPs forward + backward, and matmul calls of one matrix."""
        r = self.rates
        m, calls = tokens, 1.0
        if tensor.of_experts:
            assert block.moe is not None
            # each expert gets its share of the routed tokens of all ranks that own a copy of it
            m = tokens * block.moe.experts_per_token * key.ep / block.moe.num_experts
            n, k = unit_tensor_shape(tensor, self.spec.attention, key.tp, 1)[-2:]
            calls = (tensor.shape[0] if len(tensor.shape) == 3 else 1) / key.ep
        else:
            n, k = unit_tensor_shape(tensor, self.spec.attention, key.tp, key.ep)[-2:]
        trained = tensor.name not in self.stopped
        flops = 6.0 if trained else 4.0
        if self.eight is not None and tensor.role in FP8_ROLES:
            ahead, behind, weight = linear_seconds(self.precision, r, self.eight, (m, k, n))
            weight = calls * weight if trained else 0.0
            return calls * ahead, calls * behind, weight, calls * flops * m * k * n, max(1, round(calls))
        forward = calls * r.matmul_s(m, k, n)
        backward = calls * r.matmul_s(m, n, k)
        weight = calls * r.matmul_s(n, m, k) if trained else 0.0
        return forward, backward, weight, calls * flops * m * k * n, max(1, round(calls))

    def _selective_bytes(self, block: BlockSpec, tokens: float, key: WorkKey) -> tuple[float, float]:
        """Return bytes that selective recompute keeps beside a block's input, and those of them that autograd saves too.

        Kept are the fused attention's output with its log-sum-exp, and the output of every second matrix product.
        """
        a, c = self.spec.attention, self.compute_bytes
        both = 0.0
        if not always_unfused(self.spec):
            both = tokens * a.num_heads * (a.value_head_dim * c + max(4, self.state_bytes)) / key.tp
        kept = both
        matrices = [t for t in block.tensors if t.role in MATMUL_ROLES and not t.is_bias]
        for tensor in matrices[1::2]:
            copies = 1
            if block.moe is not None and tensor.role in ("expert_in", "expert_out"):
                copies = block.moe.experts_per_token
            columns = unit_tensor_shape(tensor, a, key.tp, 1)[-1 if self.spec.family == "gpt2" else -2]
            size = tokens * copies * columns * c  # GPT-2 stores its matrices as [input, output]
            kept += size
            # the feed-forward's products are saved by its elementwise operations, the others are not
            both += size if tensor.role in ("mlp_in", "expert_in", "shared_in") else 0.0
        return kept, both

    def _split_s(self, nodes: float, captured: float) -> float:
        """Return the seconds by which two halves of a backward of ``nodes`` are longer than the whole, on a CPU."""
        return SPLIT_OPS * nodes * self.rates.backward_op_s + SPLIT_PASSES * captured / self.rates.copy_rate

    def _captured(self, block: BlockSpec, tokens: float, key: WorkKey) -> float:
        """Return the bytes of a block's gradients that a split backward keeps from its input half to its weight half.

        Those are the gradients of the outputs of trainable matrices and norms (measured on torch's pipelining).
        """
        a, c, wide = self.spec.attention, self.compute_bytes, self._residual_bytes(key)
        total = 0.0
        for tensor in block.tensors:
            if tensor.is_bias or tensor.name in self.stopped or tensor.role in ("position", "embedding"):
                continue
            if tensor.role == "norm":
                heads = {"q_norm": a.num_heads, "k_norm": a.num_kv_heads}
                times = next((n for name, n in heads.items() if f".{name}." in tensor.name), 0)
                across = key.tp if key.sp or times else 1
                total += tokens * tensor.shape[0] * (c * times if times else wide) / across
                continue
            columns = unit_tensor_shape(tensor, a, key.tp, 1)[-1 if self.spec.family == "gpt2" else -2]
            size = c
            if tensor.of_experts:
                assert block.moe is not None
                columns, size = columns * block.moe.experts_per_token, wide
            total += tokens * columns * size
        return total

    def _residual_bytes(self, key: WorkKey) -> int:
        return 4 if key.autocast else self.compute_bytes

    def _noise(self, tokens: float, key: WorkKey) -> float:
        """Return the bytes that one dropout's numbers are made in: of attention's probabilities, or a block's output.

        Over a context axis attention makes them part by part.
        """
        if drops_probabilities(self.spec) and key.cp == 1:
            return NOISE_BYTES * tokens * self.seq_len * self.spec.num_heads / key.tp
        if drops_residual(self.spec):
            return NOISE_BYTES * tokens * self.spec.hidden_size / (key.tp if key.sp else 1)
        return 0.0

    def _reads(self, widest: int, tokens: float, key: WorkKey) -> float:
        """Return the bytes that a block's weight gradients read: the inputs of its matrices, and normed values.

        Under autocast each matrix has a cast of its own. The feed-forward is ``widest`` across.
        """
        a, c, h = self.spec.attention, self.compute_bytes, self.spec.hidden_size
        inputs = 5.0 if key.autocast else 2.0  # queries, keys, values; gate, up
        across = (widest + a.num_heads * a.value_head_dim) / key.tp
        return tokens * (c * (across + inputs * h) + 2.0 * h * self._residual_bytes(key))

    def _grown(self, block: BlockSpec, key: WorkKey) -> float:
        """Return the elements of a block's trainable feed-forward on one rank of the tensor and expert axes."""
        return float(
            sum(
                prod(unit_tensor_shape(t, self.spec.attention, key.tp, key.ep))
                for t in block.tensors
                if t.role in FEED_FORWARD_ROLES and t.name not in self.stopped
            )
        )

    def _saved(self, block: BlockSpec, key: WorkKey) -> tuple[float, float]:
        """Return the bytes that a block keeps on one rank when nothing is recomputed, and those of its feed-forward."""
        across = key.tp if key.sp else 1
        # sequence-sharded tokens are gathered for column-cut matrices, which keep what was gathered
        share = {"tp": key.tp, "sequence": across, "column_input": 1}
        saved = saved_activations(
            self.spec,
            block,
            self.seq_len,
            key.micro_batch,
            self.compute_bytes,
            "flash" if key.cp == 1 else "heads" if key.cp_style == "ulysses" else "parts",
            self._residual_bytes(key),
        )
        sizes = [(s.op in FEED_FORWARD, s.num_bytes / share[s.along] / key.cp) for s in saved]
        return sum(size for _, size in sizes), sum(size for first, size in sizes if first)

    def _context(self, key: WorkKey, forward: float, backward: float) -> float:
        """Return exposed seconds of attention's exchange.

        Ring: keys and values forward and backward, their gradients backward, each hop hidden behind one part's
        compute. Ulysses: two all-to-alls forward and two backward, nothing to hide them behind. A recomputed block
        exchanges once more forward.
        """
        if key.cp < 2:
            return 0.0
        shape = strided_shape(key.cp, key.cp_step, self.cluster.gpus_per_node)
        tokens = key.micro_batch * self.seq_len / key.cp
        kv_heads, size = max(1, self.spec.num_kv_heads // key.tp), self.spec.attention.head_dim
        forwards = 1.0 if key.recompute == "none" else 2.0
        if key.cp_style == "ulysses":
            heads = self.spec.num_heads // key.tp
            sent = 2 * len(kv_heads_sent(heads, kv_heads, key.cp))
            swaps = (tokens * (heads + sent) * size, tokens * heads * size)
            once = sum(float(self.times.seconds("all_to_all", n * self.compute_bytes, shape)) for n in swaps)
            return (forwards + 1.0) * once
        numel = 2.0 * tokens * kv_heads * size
        hop = float(self.times.seconds("send", numel * self.compute_bytes, shape))
        gradients = float(self.times.seconds("send", numel * max(4, self.compute_bytes), shape))
        hops = key.cp - 1
        if not self.rates.overlaps:
            return hops * ((forwards + 1.0) * hop + gradients)
        ahead = max(0.0, hop - forward / key.cp)
        return hops * (forwards * ahead + max(0.0, hop + gradients - backward / key.cp))

    def _expert(self, block: BlockSpec, key: WorkKey, tokens: float) -> float:
        """Return seconds of the all-to-alls: counts, dispatch and combine, back, and again where it is recomputed."""
        if block.moe is None or key.ep < 2:
            return 0.0
        shape = self.expert_shape(key)
        num_bytes = tokens * block.moe.experts_per_token * self.spec.hidden_size * self.compute_bytes
        rows = float(self.times.seconds("all_to_all", num_bytes, shape))
        counts = float(self.times.seconds("all_to_all", 8.0 * block.moe.num_experts, shape))
        forwards = 1.0 if key.recompute == "none" else 2.0
        return forwards * counts + (2.0 + 2.0 * forwards) * rows


def block_operations(
    spec: ModelSpec, block: BlockSpec, linears: int | None = None, *, autocast: bool = False
) -> tuple[float, float]:
    """Return the small operations of a block's forward, and the autograd nodes of its backward.

    ``linears`` are its matrix products; by default one for each of its matrices. A probe measures the seconds of one
    of each by a block of its own.
    """
    if linears is None:
        linears = sum(1 for t in block.tensors if t.role in MATMUL_ROLES and not t.is_bias)
    norms = sum(1 for t in block.tensors if t.role == "norm" and not t.is_bias)
    composed = spec.norm == "rmsnorm"
    forward = norms * (7 if composed else 1) + linears + 12
    backward = norms * (7 if composed else 1) + 2 * linears + 10
    if spec.attention.rope:
        forward += 16
        backward += 14
    extra = 8 if spec.activation in COMPOSED_GELU else (2 if spec.gated_mlp else 1)
    forward += extra
    backward += extra
    if autocast:
        forward += 2 * linears
        backward += 2 * linears
    return float(forward), float(backward)


def make_pricer(
    spec: ModelSpec, cluster: ClusterSpec, seq_len: int, precision: str, frozen: Sequence[str] = ()
) -> Pricer:
    """Return the pricer of a model on a cluster.

    Raises:
        MeshwrightError: E405 when a rate that time needs is not known.
    """
    stopped = frozen_names(spec, frozen)
    times = collective_times(cluster)
    found: dict[tuple[object, ...], int] = {}
    kinds: list[BlockSpec] = []
    kind_of: list[int] = []
    for block in spec.blocks:
        signature = _signature(block, stopped)
        if signature not in found:
            found[signature] = len(kinds)
            kinds.append(block)
        kind_of.append(found[signature])
    return Pricer(
        spec=spec,
        cluster=cluster,
        seq_len=seq_len,
        precision=precision,
        rates=device_rates(cluster, wide_precision(precision)),
        eight=device_rates(cluster, "fp8") if precision in FP8 else None,
        times=times,
        placed=place_times(cluster, times),
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        frozen=tuple(frozen),
        stopped=stopped,
    )
