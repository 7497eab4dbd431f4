"""The pieces that a step is made of: one block's, the embedding's and the head's work, each priced once.

A piece depends on few keys of a layout (tp, cp, ep, micro-batch, recompute), so a search prices each distinct
one once and puts columns together from them; a single prediction uses the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from meshwright.cluster.spec import ClusterSpec
from meshwright.cost.collective import collective_times
from meshwright.cost.eight import FP8_ROLES, linear_seconds
from meshwright.cost.exchanges import (
    context_s,
    expert_s,
    squares_s,
    tensor_again_s,
    tensor_end_s,
    tensor_pairs_s,
    tensor_stage_s,
)
from meshwright.cost.kept import (
    captured_bytes,
    copied_8_bit,
    dropped_pairs,
    grown_elements,
    noise_bytes,
    read_bytes,
    saved_bytes,
    selective_bytes,
)
from meshwright.cost.placed import place_times
from meshwright.cost.rates import attention_flops, device_rates
from meshwright.cost.units import unit_tensor_shape
from meshwright.cost.work import MATMUL_ROLES, Facts, Work, WorkKey
from meshwright.layout.layout import loss_chunks
from meshwright.layout.precision import FP8, wide_precision
from meshwright.model.activations import caps_scores, saved_final_bytes, writes_layer_norm
from meshwright.model.logits import after_head
from meshwright.model.randomness import drops_residual
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec
from meshwright.program.units import frozen_names

COMPOSED_GELU = ("gelu_new", "gelu_fast")
"""Activations that are written as several elementwise operations."""


SAVED_LOGITS_BYTES = 4.0
"""Bytes per logit that eager cross-entropy keeps until backward: the log-softmax."""


CHUNK_OPS = 14
"""Small operations that the chunked loss runs per chunk."""


SCORE_PASSES = (17.0, 37.0)
"""Reads and writes of each visible fp32 score by the plain attention of ``parallel.attend``, forward and backward,
counted from its operations: product, scale, cap, mask, log-sum-exp, shares; again, with their gradient and the slope."""


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


UNPACK_OPS = 12.0
"""Small operations of unpacking a matrix in 4 bits: 52 us (68 us with scales in 8 bits) for one of 384 x 128 on a CPU
where a small operation takes 4.8 us (bitsandbytes 0.50.2)."""

UNPACK_PASSES = {"gpu": 1.0, "cpu": 3.0}
"""Copies that unpacking takes as long as, of the packed and the unpacked bytes together. On a CPU measured: a matrix of
1024 x 1024 in 0.22 ms in float32, 0.15 ms in bfloat16, where a copy of it takes 0.13 ms; on a GPU assumed."""

SHARD_OPS_PER_UNIT = 16


SHARD_OPS_PER_TENSOR = 4
"""Small operations that FSDP2 runs per gather or scatter of a unit, and per tensor in it."""


def _signature(block: BlockSpec, stopped: frozenset[str]) -> tuple[object, ...]:
    tensors = tuple((t.shape, t.role, t.is_bias, t.name in stopped, t.quantised) for t in block.tensors)
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
class Pricer(Facts):
    """Prices pieces of one model on one cluster at one sequence length and precision, each distinct one once."""

    _blocks: dict[tuple[int, WorkKey], Work] = field(default_factory=dict[tuple[int, WorkKey], Work])
    _products: dict[tuple[int, float, int, int], Products] = field(
        default_factory=dict[tuple[int, float, int, int], Products]
    )
    _parts: dict[tuple[int, WorkKey], Parts] = field(default_factory=dict[tuple[int, WorkKey], Parts])
    _product: dict[tuple[float, float, float], float] = field(
        default_factory=dict[tuple[float, float, float], float]
    )
    _ends: dict[tuple[str, WorkKey, str], Work] = field(default_factory=dict[tuple[str, WorkKey, str], Work])

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
            wide = self.residual_bytes(key)
            read = 2.0 * tokens * self.spec.hidden_size * wide
            table = float(self.spec.vocab_size * self.spec.hidden_size) / key.tp
            r = self.rates
            # a dense gradient of the table is zeroed, scattered into and added
            backward = (read + 3.0 * table * wide) / r.copy_rate + 6 * r.backward_op_s + r.accumulate_s
            self._ends[slot] = Work(
                forward=read / r.copy_rate + 8 * r.op_s,
                backward=backward,
                tensor=tensor_end_s(self, key, 0.0, 0, 0.0),
                each=tensor_stage_s(self, key),
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
            forward = self._product_s(tokens, h, v) + (norm + logits * (copy + 16.0)) / r.copy_rate
            trained = not all((t.tied_to or t.name) in self.stopped for t in self.spec.head)
            backward = self._product_s(tokens, v, h) + (self._product_s(v, tokens, h) if trained else 0.0)
            backward += (2.0 * norm + logits * (copy + 20.0)) / r.copy_rate
            forward += 14 * r.op_s
            backward += 14 * r.backward_op_s
            capped = after_head(self.spec).cap is not None
            kept_loss = (
                SAVED_LOGITS_BYTES + (c if capped else 0.0)
            ) * logits  # a scaled tanh keeps its output
            # between the halves of a backward: the gradients of the logits and of the final norm
            wide = self.residual_bytes(key)
            captured = (logits * c if trained else 0.0) + tokens * h * wide
            if (
                loss == "chunked"
            ):  # all of it happens in forward; backward multiplies two gradients by a factor
                full = self.state_bytes
                captured = kept_loss = tokens * h * wide + (full * v * h if trained else 0.0)
                chunks = loss_chunks(key.tp)
                rows = tokens / chunks
                forward = self._product_s(rows, h, v) + self._product_s(rows, v, h)
                if trained:
                    forward += self._product_s(v, rows, h) + 2.0 * full * v * h / r.copy_rate
                forward = chunks * (forward + CHUNK_OPS * r.op_s)
                forward += (norm + logits * (copy + 24.0)) / r.copy_rate + 10 * r.op_s
                backward = (2.0 * norm + 2.0 * kept_loss) / r.copy_rate + 10 * r.backward_op_s
            if trained:
                backward += accumulate_s(self, v * h, 1)
            backward += accumulate_s(self, h, 1)
            forward, backward = forward * r.head_scale[0], backward * r.head_scale[1]
            final = saved_final_bytes(self.spec, self.seq_len, key.micro_batch, c, self.residual_bytes(key))
            final /= key.cp  # with sequence-sharded norms too: the last block's output is gathered before it
            self._ends[slot] = Work(
                forward=forward,
                backward=backward,
                tensor=tensor_end_s(
                    self, key, tokens, loss_chunks(key.tp) if loss == "chunked" else 1, forward + backward
                ),
                kept=final,
                final=final,
                loss=kept_loss,
                captured=captured,
                split=0.0 if r.overlaps else split_s(self, 21, 0.0 if loss == "chunked" else captured),
                weight=self._product_s(v, tokens, h) * r.head_scale[1]
                if trained and loss != "chunked"
                else 0.0,
                flops=(6.0 if trained else 4.0) * tokens * h * v,
            )
        return self._ends[slot]

    def _product_s(self, m: float, k: float, n: float) -> float:
        """Return the seconds of a matrix product; many layouts have the same one in the head."""
        if (m, k, n) not in self._product:
            self._product[m, k, n] = self.rates.matmul_s(m, k, n)
        return self._product[m, k, n]

    def _price_block(self, kind: int, key: WorkKey) -> Work:
        same = replace(key, recompute="none")
        if (kind, same) not in self._parts:
            self._parts[kind, same] = self._price_parts(kind, same)
        x = self._parts[kind, same]
        block, whole, entry = self.kinds[kind], x.work.kept, x.entry
        tokens = key.micro_batch * self.seq_len / key.cp
        # torch's checkpoint stops when the last tensor that backward needs is there: before the block's last product
        stops = not drops_residual(self.spec) and not self.spec.adapter and not block.ends_in_norm
        spared, scale = x.products.last if stops else 0.0, self.rates.forward_scale
        left_out = x.products.forward + x.ahead - x.products.redone
        left_out += spared if x.products.last_redone else 0.0
        again_s = {"none": 0.0, "full": x.work.forward - scale * spared}.get(
            key.recompute, x.work.forward - scale * left_out
        )
        again_s += self.rates.checkpoint_s if again_s else 0.0
        work_s = x.work.forward + x.work.backward
        # what a recomputed forward makes beside what was kept
        again = {"none": 0.0, "full": whole - entry}.get(key.recompute, whole - entry - x.also_saved)
        return replace(
            x.work,
            recompute=again_s,
            tensor=x.tensor
            + (
                0.0
                if key.recompute == "none"
                else tensor_again_s(self, block, key) + squares_s(self, block, key, work_s) / 2.0
            ),
            # a backward in two halves runs the whole block again
            split=x.work.split + (spared if key.recompute == "full" else 0.0),
            context=context_s(self, key, x.ahead, x.behind, work_s),
            expert=expert_s(self, block, key, tokens, work_s),
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
        ahead, behind = r.attention_s(key.micro_batch, heads, float(self.seq_len), width, key.cp)
        share = (seen / self.seq_len) * (2.0 - seen / self.seq_len) / key.cp
        forward = products.forward + ahead * share
        backward = products.backward + behind * share
        flops = products.flops
        flops += 3.0 * attention_flops(key.micro_batch, heads, float(self.seq_len), width) * share
        whole, gone = saved_bytes(self, block, key)
        passes = PASSES["gpu" if r.overlaps else "cpu"]
        forward += passes[0] * whole / r.copy_rate
        backward += passes[1] * whole / r.copy_rate
        if key.cp > 1 and caps_scores(
            spec
        ):  # the ring takes the plain kernel, which holds scores for a moment
            scores = 4.0 * key.micro_batch * heads * self.seq_len**2 / 2.0 * share
            forward += SCORE_PASSES[0] * scores / r.copy_rate
            backward += SCORE_PASSES[1] * scores / r.copy_rate
        dropped, drawn = dropped_pairs(self, key, heads, seen / self.seq_len)
        each = DROPPED["gpu" if r.overlaps else "cpu"]
        forward += dropped * each[0] / r.copy_rate
        backward += dropped * each[1] / r.copy_rate
        ops, nodes = block_operations(spec, block, products.linears, autocast=key.autocast)
        unpacking, unpacked = self._unpacking(block, key)
        forward, backward = forward + unpacked, backward + unpacked
        ops, nodes = ops + unpacking, nodes + unpacking
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
            backward += accumulate_s(self, float(sum(map(prod, shapes))), len(shapes))
            forward, backward = forward * r.forward_scale, backward * r.backward_scale
        captured = captured_bytes(self, block, tokens, key)
        entry = tokens * spec.hidden_size * self.residual_bytes(key) / (key.tp if key.sp else 1)
        extra, also_saved = selective_bytes(self, block, tokens, key)
        # gradients of the feed-forward's width, when the saved input of its last product is gone already
        wide_ones = 2.0 if block.moe is None else 3.0
        around = 2.0 if spec.norm == "rmsnorm" else 4.0
        widest = max(block.ffn_size, block.moe.ffn_size * block.moe.experts_per_token if block.moe else 0)
        copies = copied_8_bit(self, block, tokens, key)
        work = Work(
            forward=forward,
            backward=backward,
            kept=whole,
            captured=captured,
            # a GPU's host walks the graph while earlier kernels run
            split=0.0 if r.overlaps else split_s(self, nodes, captured),
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
            grown=grown_elements(self, block, key),
            noise=max(noise_bytes(self, tokens, key), drawn * DRAWN_BYTES),
            # a norm keeps its input but where it computes on a float32 copy
            entry=0.0 if key.sp or (spec.norm == "rmsnorm" and self.residual_bytes(key) < 4) else entry,
            flops=flops,
        )
        return Parts(
            work=work,
            products=products,
            ahead=ahead * share,
            behind=behind * share,
            entry=entry,
            reads=read_bytes(self, widest, tokens, key),
            extra=extra,
            also_saved=also_saved,
            tensor=tensor_pairs_s(self, key, 2, forward + backward)
            + squares_s(self, block, key, forward + backward),
        )

    def _unpacking(self, block: BlockSpec, key: WorkKey) -> tuple[float, float]:
        """Return the small operations and the seconds of unpacking all matrices of a block in 4 bits once."""
        shapes = [
            unit_tensor_shape(t, self.spec.attention, key.tp, key.ep) for t in block.tensors if t.quantised
        ]
        weights = float(sum(map(prod, shapes)))
        passes = UNPACK_PASSES["gpu" if self.rates.overlaps else "cpu"]
        seconds = passes * weights * (0.5 + self.compute_bytes) / self.rates.copy_rate
        return UNPACK_OPS * len(shapes), seconds

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


def accumulate_s(facts: Facts, numel: float, tensors: int) -> float:
    """Return the seconds of adding gradients to those that are there, where a probe has measured it."""
    if not facts.rates.accumulate_s:
        return 0.0
    return tensors * facts.rates.accumulate_s + 3.0 * numel * facts.state_bytes / facts.rates.copy_rate


def split_s(facts: Facts, nodes: float, captured: float) -> float:
    """Return the seconds by which two halves of a backward of ``nodes`` are longer than the whole, on a CPU."""
    return SPLIT_OPS * nodes * facts.rates.backward_op_s + SPLIT_PASSES * captured / facts.rates.copy_rate


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
    composed = spec.norm == "rmsnorm" or writes_layer_norm(spec)
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
