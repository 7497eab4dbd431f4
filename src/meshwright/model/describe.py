"""What ``meshwright inspect`` says about a model."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from meshwright.base.units import format_count
from meshwright.model.counts import (
    active_parameters,
    block_forward_flops,
    flops_per_token,
    head_forward_flops,
)
from meshwright.model.spec import BlockSpec, ModelSpec

DEFAULT_SEQ_LEN = 4096


def default_seq_len(spec: ModelSpec) -> int:
    """Return the sequence length that figures are given for when none is named."""
    return min(DEFAULT_SEQ_LEN, spec.max_position_embeddings)


def describe(spec: ModelSpec, seq_len: int | None = None) -> dict[str, Any]:
    """Return the JSON of ``meshwright inspect``; FLOPs are forward plus backward per token at ``seq_len``."""
    length = seq_len or default_seq_len(spec)
    flops = flops_per_token(spec, length)
    sizes = tuple(b.num_parameters for b in spec.blocks)
    attention = spec.attention
    return {
        "name": spec.name,
        "family": spec.family,
        "num_parameters": spec.num_parameters,
        "num_active_parameters": active_parameters(spec),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "tied_embeddings": spec.tied_embeddings,
        "is_moe": spec.moe is not None,
        "max_position_embeddings": spec.max_position_embeddings,
        "flops_per_token": {"causal": flops.causal, "full": flops.full},
        "flags": list(spec.flags),
        "seq_len": length,
        "architecture": spec.architecture,
        "ffn_size": spec.ffn_size,
        "head_dim": attention.head_dim,
        "attention": attention.kind,
        "sliding_window": attention.sliding_window,
        "norm": spec.norm,
        "activation": spec.activation,
        "moe": _mixture(spec),
        "parameters": {
            "embedding": sum(t.numel for t in spec.embedding),
            "blocks": sum(sizes),
            "norms": sum(t.numel for t in spec.tensors() if t.role == "norm"),
            "head": sum(t.numel for t in spec.head if t.tied_to is None),
            "per_block": list(sizes),
        },
        "forward_flops_per_token": {
            "per_block": [block_forward_flops(spec, b, length) for b in spec.blocks],
            "head": head_forward_flops(spec),
            "convention": "causal",
        },
        "source": spec.source,
    }


def _mixture(spec: ModelSpec) -> dict[str, int] | None:
    if spec.moe is None:
        return None
    return {
        "num_experts": spec.moe.num_experts,
        "experts_per_token": spec.moe.experts_per_token,
        "ffn_size": spec.moe.ffn_size,
        "num_shared_experts": spec.moe.num_shared_experts,
        "num_moe_layers": sum(b.kind == "moe" for b in spec.blocks),
    }


def block_lines(spec: ModelSpec) -> list[str]:
    """Return the model's parts as lines of text, runs of equal blocks as one line."""
    lines = [f"{'embedding':<16}{_count(sum(t.numel for t in spec.embedding)):>12}"]
    for key, run in groupby(spec.blocks, key=_looks):
        members = list(run)
        first, last = members[0].index, members[-1].index
        name = f"block {first}" if first == last else f"blocks {first}-{last}"
        each = "" if first == last else f"each {_count(members[0].num_parameters)}, "
        total = _count(sum(b.num_parameters for b in members))
        lines.append(f"{name:<16}{total:>12}   {each}{_block_text(members[0], key)}")
    lines.append(f"{'final norm':<16}{_count(sum(t.numel for t in spec.final)):>12}")
    head = "tied to the embedding" if spec.tied_embeddings else ""
    size = sum(t.numel for t in spec.head if t.tied_to is None)
    lines.append(f"{'head':<16}{_count(size):>12}   {head}".rstrip())
    return lines


def _count(number: int) -> str:
    return format_count(number)


def _looks(block: BlockSpec) -> tuple[str, int, int | None]:
    return block.kind, block.num_parameters, block.sliding_window


def _block_text(block: BlockSpec, key: tuple[str, int, int | None]) -> str:
    parts = [f"{len(block.tensors)} tensors"]
    if block.moe is None:
        parts.append(f"feed-forward {block.ffn_size}")
    else:
        shared = f" + {block.moe.num_shared_experts} shared" if block.moe.num_shared_experts else ""
        parts.append(
            f"{block.moe.num_experts} experts of {block.moe.ffn_size}, "
            f"{block.moe.experts_per_token} per token{shared}"
        )
    if key[2] is not None:
        parts.append(f"window {key[2]}")
    return ", ".join(parts)
