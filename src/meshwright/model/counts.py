"""Counts: parameters, active parameters, FLOPs per token and bytes saved for backward.

Conventions. One multiply-add is 2 FLOPs; backward is twice forward, so training is three times forward:
6 FLOPs per matmul parameter and token. The head counts, also when tied; the embedding gather does not.
Attention "full" counts all ``seq_len`` keys per query, "causal" half of them (seq_len / 2); a sliding
window counts the keys inside it. Recompute is never counted: these are model FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from meshwright.model.activations import (
    SavedTensor,
    saved_activation_bytes,
    saved_activations,
    saved_final_bytes,
)
from meshwright.model.spec import BlockSpec, ModelSpec, TensorSpec

Convention: TypeAlias = Literal["causal", "full"]

TRAINING = 3.0
"""Forward plus backward, in units of forward."""

_MATMUL_ROLES = frozenset(
    {
        "attention_in",
        "attention_out",
        "mlp_in",
        "mlp_out",
        "router",
        "expert_in",
        "expert_out",
        "shared_in",
        "shared_out",
        "head",
        "adapter",
    }
)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token under the two conventions for the attention scores."""

    causal: float
    full: float


def _active_numel(tensor: TensorSpec, block: BlockSpec) -> int:
    if block.moe is not None and tensor.of_experts:
        return tensor.numel // block.moe.num_experts * block.moe.experts_per_token
    return tensor.numel


def active_parameters(spec: ModelSpec) -> int:
    """Return the parameters one token passes through: k routed and all shared experts, all else once."""
    outside = sum(t.numel for t in (*spec.embedding, *spec.final, *spec.head) if t.tied_to is None)
    return outside + sum(_active_numel(t, b) for b in spec.blocks for t in b.tensors)


def block_matmul_parameters(block: BlockSpec) -> int:
    """Return the matrix elements one token is multiplied with in a block (k routed experts, no biases)."""
    return sum(_active_numel(t, block) for t in block.tensors if t.role in _MATMUL_ROLES and not t.is_bias)


def matmul_parameters(spec: ModelSpec) -> int:
    """Return the matrix elements one token is multiplied with in the model: blocks and head."""
    head = sum(t.numel for t in spec.head if not t.is_bias)
    return sum(block_matmul_parameters(b) for b in spec.blocks) + head


def attended_keys(block: BlockSpec, seq_len: int, convention: Convention) -> float:
    """Return the mean number of keys that a query's scores count, inside the block's sliding window."""
    window = min(block.sliding_window or seq_len, seq_len)
    if convention == "full":
        return float(window)
    return window - window * window / (2.0 * seq_len)


def block_forward_flops(
    spec: ModelSpec, block: BlockSpec, seq_len: int, convention: Convention = "causal"
) -> float:
    """Return the forward FLOPs of one block per token.

    Scores take 2 * heads * qk head_dim and values 2 * heads * value head_dim FLOPs per key and query.
    """
    attention = spec.attention
    per_key = 2.0 * attention.num_heads * (attention.head_dim + attention.value_head_dim)
    return 2.0 * block_matmul_parameters(block) + per_key * attended_keys(block, seq_len, convention)


def attention_forward_flops(
    spec: ModelSpec, block: BlockSpec, seq_len: int, convention: Convention = "causal"
) -> float:
    """Return the part of ``block_forward_flops`` that scores and values take, per token."""
    return block_forward_flops(spec, block, seq_len, convention) - 2.0 * block_matmul_parameters(block)


def head_forward_flops(spec: ModelSpec) -> float:
    """Return the forward FLOPs of the language-model head per token (2 * vocab * hidden)."""
    return 2.0 * sum(t.numel for t in spec.head if not t.is_bias)


def block_weight_flops(spec: ModelSpec, block: BlockSpec) -> float:
    """Return the FLOPs per token of weight gradients that a block saves because an adapter trains in its place."""
    if spec.adapter is None:
        return 0.0
    base = tuple(
        t for t in block.tensors if t.role in _MATMUL_ROLES and t.role != "adapter" and not t.is_bias
    )
    return 2.0 * sum(_active_numel(t, block) for t in base)


def head_weight_flops(spec: ModelSpec) -> float:
    """Return the FLOPs per token of the head's weight gradient, where an adapter trains in its place; else 0."""
    return head_forward_flops(spec) if spec.adapter is not None else 0.0


def flops_per_token(spec: ModelSpec, seq_len: int) -> Flops:
    """Return forward plus backward FLOPs per token at ``seq_len``.

    Source: 6 * P_matmul + 12 * layers * heads * head_dim * seq_len (full) or half the last term (causal),
    as torchtitan and PaLM count the first and current Megatron the second. With an adapter the base has no weight
    gradients, so 4 in place of 6 for its matrices.
    """
    without = head_weight_flops(spec) + sum(block_weight_flops(spec, b) for b in spec.blocks)

    def total(convention: Convention) -> float:
        blocks = sum(block_forward_flops(spec, b, seq_len, convention) for b in spec.blocks)
        return TRAINING * (blocks + head_forward_flops(spec)) - without

    return Flops(causal=total("causal"), full=total("full"))


def routed_tokens_per_rank(spec: ModelSpec, local_tokens: int) -> int:
    """Return the expert inputs a rank holds at perfect balance: local tokens * top-k, whatever ``ep`` is.

    The expert axis moves the copies, it does not thin them out: each rank sends local * k and receives
    as many. 0 for a model without experts.
    """
    return 0 if spec.moe is None else local_tokens * spec.moe.experts_per_token


__all__ = [
    "Convention",
    "Flops",
    "SavedTensor",
    "active_parameters",
    "attended_keys",
    "attention_forward_flops",
    "block_forward_flops",
    "block_matmul_parameters",
    "block_weight_flops",
    "flops_per_token",
    "head_forward_flops",
    "head_weight_flops",
    "matmul_parameters",
    "routed_tokens_per_rank",
    "saved_activation_bytes",
    "saved_activations",
    "saved_final_bytes",
]
