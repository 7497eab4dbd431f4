"""Bytes of a block: what autograd keeps of it, what a split backward captures, what a dropout is made in."""

from __future__ import annotations

from math import prod

from meshwright.cost.eight import FP8_ROLES, copies_bytes
from meshwright.cost.units import unit_tensor_shape
from meshwright.cost.work import MATMUL_ROLES, Facts, WorkKey
from meshwright.layout.context import DRAWN_AT_ONCE
from meshwright.model.activations import FEED_FORWARD, always_unfused, saved_activations
from meshwright.model.randomness import drops_probabilities, drops_residual
from meshwright.model.spec import BlockSpec

FEED_FORWARD_ROLES = frozenset(
    {"mlp_in", "mlp_out", "router", "expert_in", "expert_out", "shared_in", "shared_out"}
)
"""Tensors of a block whose gradients backward makes first."""


NOISE_BYTES = 34.0
"""Bytes an element of a dropout's numbers: four whole ones of 8 bytes, and what is dropped (read off a played step)."""


def selective_bytes(facts: Facts, block: BlockSpec, tokens: float, key: WorkKey) -> tuple[float, float]:
    """Return bytes that selective recompute keeps beside a block's input, and those of them that autograd saves too.

    Kept are the fused attention's output with its log-sum-exp, and the output of every second matrix product.
    """
    a, c = facts.spec.attention, facts.compute_bytes
    both = 0.0
    if not always_unfused(facts.spec):
        both = tokens * a.num_heads * (a.value_head_dim * c + max(4, facts.state_bytes)) / key.tp
    kept = both
    matrices = [t for t in block.tensors if t.role in MATMUL_ROLES and not t.is_bias]
    for tensor in matrices[1::2]:
        copies = 1
        if block.moe is not None and tensor.role in ("expert_in", "expert_out"):
            copies = block.moe.experts_per_token
        columns = unit_tensor_shape(tensor, a, key.tp, 1)[-1 if tensor.transposed else -2]
        size = tokens * copies * columns * c
        kept += size
        # the feed-forward's products are saved by its elementwise operations, the others are not
        both += size if tensor.role in ("mlp_in", "expert_in", "shared_in") else 0.0
    return kept, both


def captured_bytes(facts: Facts, block: BlockSpec, tokens: float, key: WorkKey) -> float:
    """Return the bytes of a block's gradients that a split backward keeps from its input half to its weight half.

    Those are the gradients of the outputs of trainable matrices and norms (measured on torch's pipelining).
    """
    a, c, wide = facts.spec.attention, facts.compute_bytes, facts.residual_bytes(key)
    total = 0.0
    for tensor in block.tensors:
        if tensor.is_bias or tensor.name in facts.stopped or tensor.role in ("position", "embedding"):
            continue
        if tensor.role == "norm":
            ends = {".q_norm.weight": a.num_heads, ".k_norm.weight": a.num_kv_heads}
            ends |= {".q_layernorm.weight": a.num_heads, ".k_layernorm.weight": a.num_kv_heads}
            times = next((n for end, n in ends.items() if tensor.name.endswith(end)), 0)
            across = key.tp if key.sp or times else 1
            total += tokens * (a.head_dim * c * times if times else tensor.shape[0] * wide) / across
            continue
        columns = unit_tensor_shape(tensor, a, key.tp, 1)[-1 if tensor.transposed else -2]
        size = c
        if tensor.of_experts:
            assert block.moe is not None
            columns, size = columns * block.moe.experts_per_token, wide
        total += tokens * columns * size
    return total


def noise_bytes(facts: Facts, tokens: float, key: WorkKey) -> float:
    """Return the bytes that one dropout's numbers are made in: of attention's probabilities, or a block's output.

    Over a context axis attention makes them part by part.
    """
    if drops_probabilities(facts.spec) and key.cp == 1:
        return NOISE_BYTES * tokens * facts.seq_len * facts.spec.num_heads / key.tp
    if drops_residual(facts.spec):
        return NOISE_BYTES * tokens * facts.spec.hidden_size / (key.tp if key.sp else 1)
    return 0.0


def read_bytes(facts: Facts, widest: int, tokens: float, key: WorkKey) -> float:
    """Return the bytes that a block's weight gradients read: the inputs of its matrices, and normed values.

    Under autocast each matrix has a cast of its own. The feed-forward is ``widest`` across.
    """
    a, c, h = facts.spec.attention, facts.compute_bytes, facts.spec.hidden_size
    inputs = 5.0 if key.autocast else 2.0  # queries, keys, values; gate, up
    across = (widest + a.num_heads * a.value_head_dim) / key.tp
    return tokens * (c * (across + inputs * h) + 2.0 * h * facts.residual_bytes(key))


def grown_elements(facts: Facts, block: BlockSpec, key: WorkKey) -> float:
    """Return the elements of a block's trainable feed-forward on one rank of the tensor and expert axes."""
    return float(
        sum(
            prod(unit_tensor_shape(t, facts.spec.attention, key.tp, key.ep))
            for t in block.tensors
            if t.role in FEED_FORWARD_ROLES and t.name not in facts.stopped
        )
    )


def saved_bytes(facts: Facts, block: BlockSpec, key: WorkKey) -> tuple[float, float]:
    """Return the bytes that a block keeps on one rank when nothing is recomputed, and those of its feed-forward."""
    across = key.tp if key.sp else 1
    # sequence-sharded tokens are gathered for column-cut matrices, which keep what was gathered
    share = {"tp": key.tp, "sequence": across, "column_input": 1}
    saved = saved_activations(
        facts.spec,
        block,
        facts.seq_len,
        key.micro_batch,
        facts.compute_bytes,
        "flash" if key.cp == 1 else "heads" if key.cp_style == "ulysses" else "parts",
        facts.residual_bytes(key),
    )
    sizes = [(s.op in FEED_FORWARD, s.num_bytes / share[s.along] / key.cp) for s in saved]
    return sum(size for _, size in sizes), sum(size for first, size in sizes if first)


def copied_8_bit(facts: Facts, block: BlockSpec, tokens: float, key: WorkKey) -> float:
    """Return the bytes of the 8-bit copies that the largest linear layer of a block makes (0 without fp8)."""
    if facts.eight is None:
        return 0.0
    shapes = [
        unit_tensor_shape(t, facts.spec.attention, key.tp, key.ep)[-2:]
        for t in block.tensors
        if len(t.shape) >= 2 and t.role in FP8_ROLES
    ]
    return max((copies_bytes((tokens, float(k), float(n))) for n, k in shapes), default=0.0)


def dropped_pairs(facts: Facts, key: WorkKey, heads: float, window: float) -> tuple[float, float]:
    """Return how many pairs and heads of a block attention over ``cp`` drops on a rank, and of how many at once.

    Both 0 without a context axis or attention dropout. The ring skips what no query sees but for its own stretches'
    upper halves, and beyond a window of this share of the sequence; Ulysses takes the whole square of its heads.
    """
    if key.cp < 2 or not drops_probabilities(facts.spec):
        return 0.0, 0.0
    square = key.micro_batch * heads * float(facts.seq_len) ** 2
    if key.cp_style == "ulysses":
        return square / key.cp, min(square / key.cp, DRAWN_AT_ONCE)
    seen = (2.0 * key.cp + 1.0) / (4.0 * key.cp**2) * window * (2.0 - window)
    return square * seen, min(square / key.cp**2, DRAWN_AT_ONCE)
