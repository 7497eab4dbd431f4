"""Bytes of a case at its peak, by category, as what ran keeps them: terms before any coefficient.

The first, the second and the last stage are counted apart: the first two have the most micro-batches in flight (and the
second may have more layers), the last has the logits.
Sources: saved tensors of the operations (docs/concepts/cost-model.md), the ZeRO paper for state, Megatron-LM's and
torchtitan's documentation for what their recompute policies keep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.shapes import Weights, attention_gemms, dense_gemms, stage_layers, weights
from meshwright.cost.backtest.terms import FLASH, Terms

GATHERED_BYTES = 8.0
"""Bytes per logit more where every tensor rank gathers all of them: the gathered copy, its gradient, float32."""
LOGITS_BYTES = {"eager": 12.0, "parallel": 6.0, "fused": 6.0, "chunked": 0.5}
"""Bytes per logit alive at the loss: 16-bit logits, float32 copy, log-softmax and gradients, as far as they are kept."""
PARTS = ("state", "activations", "recompute", "logits", "working")


def memory_terms(cases: Sequence[Case]) -> Terms:
    """Return the terms: parts of the first, second and last stage, each [cases]."""
    rows = [_memory(case) for case in cases]
    return Terms({name: np.array([row[name] for row in rows]) for name in rows[0]}) if rows else Terms({})


def layer_bytes(c: Case, moe: bool) -> float:
    """Return the bytes per token that one layer keeps when nothing is recomputed."""
    h, tp = float(c.hidden), float(c.tp)
    across = tp if c.sp else 1.0
    norms = 2.0 * 2.0 * h / across  # inputs of the two norms
    inputs = 2.0 * 2.0 * h / (tp if c.sp and c.ran.name != "torchtitan" else 1.0)  # of the first products
    extra = {"fused": 0.0, "native": 0.0, "upcast": 2.0 * 8.0 * h}[c.ran.norm] / across
    if c.tp > 1 and not c.sp and c.ran.activation != "fused":
        # what the two all-reduces return; fused with dropout and addition it is not kept
        extra += 2.0 * 2.0 * h
    masks = 2.0 * h / across if c.ran.dropout else 0.0
    heads = c.heads / tp
    kv = max(1.0, c.kv_heads / tp)
    if c.kv_lora:
        attention = 2.0 * (2 * c.q_lora + 2 * (c.kv_lora + c.rope_dim))
        attention += 2.0 * heads * (2.0 * c.head_dim + 2.0 * c.value_dim + c.head_dim)
    else:
        attention = 2.0 * c.head_dim * (2.0 * heads + 2.0 * kv)
        attention += 2.0 * c.head_dim * (heads + kv) if c.qk_norm else 0.0
    attention += 4.0 * heads
    if c.ran.attention not in FLASH:
        scores = {"plain": 6.0, "fused_softmax": 2.0}[c.ran.attention]
        scores += 3.0 if c.ran.dropout or c.ran.attention_dropout else 0.0
        attention += scores * heads * c.seq / c.cp
    return norms + inputs + extra + masks + attention + _mlp_bytes(c, moe, tp)


def _mlp_bytes(c: Case, moe: bool, tp: float) -> float:
    wide = (3.0 if c.ran.activation == "fused" else 4.0) if c.gated else 2.0
    if not moe:
        return 2.0 * wide * (c.dense_ffn if c.experts else c.ffn) / tp
    routed = c.topk * (2.0 * wide * c.ffn / (c.ran.expert_tp or tp) + 2.0 * 2.0 * c.hidden / tp)
    return routed + 2.0 * wide * c.shared_ffn / tp + 8.0 * c.experts


def kept_bytes(c: Case, moe: bool) -> tuple[float, float]:
    """Return (bytes per token kept until backward, bytes per token alive while a layer is recomputed)."""
    whole = layer_bytes(c, moe)
    # backward of unfused attention: softmax, mask and what is left of it (kept), and two gradients of scores
    scored = {"fused_softmax": 4.0}.get(c.ran.attention, 0.0) * c.heads / c.tp * c.seq / c.cp
    across = float(c.tp) if c.sp else 1.0
    entry = 2.0 * c.hidden / across
    heads, kv = c.heads / c.tp * c.head_dim, max(1.0, c.kv_heads / c.tp) * c.head_dim
    if c.recompute == "full":
        return (0.1 * entry if c.offload == "activations" else entry), whole + scored
    if c.recompute == "every-second-layer":
        return 0.5 * (entry + whole), whole
    if c.recompute == "per-op":  # the block's input, attention's output, every second product
        kept = entry + 2.0 * heads + 2.0 * (heads + kv + c.ffn / c.tp + c.hidden / across)
        return kept, whole - kept
    if c.recompute == "minimal":
        return entry + 2.0 * (2.0 * heads + 2.0 * kv + 3.0 * c.ffn / c.tp), whole
    if c.recompute == "core" and c.ran.attention not in FLASH:
        scores = 5.0 if c.ran.dropout else 2.0
        return whole - scores * c.heads / c.tp * c.seq / c.cp, scores * c.heads / c.tp * c.seq / c.cp
    return whole, 0.0


def in_flight(c: Case, stage: int) -> float:
    """Return micro-batches whose activations a stage holds at once, in units of its whole depth."""
    m, p, v = float(c.accumulation), float(c.pp), float(c.vpp)
    left = p - stage
    if p == 1:
        return 1.0
    if c.ran.schedule == "zb-2p":
        return min(m, 2.0 * p - 1.0)
    if v > 1:
        return min(m * v, (v - 1.0) * p + 2.0 * (left - 1.0) + 1.0) / v
    return min(m, left)


def _adapters(c: Case, layers: float, moe: float) -> tuple[float, float]:
    """Return the elements of adapters on every matrix of a stage's ``layers``, and of those on routed experts.

    ``moe`` of the layers have experts. None are counted where the rank is not printed: on dense layers they are few.
    """
    found = re.search(r"\blora r(\d+)\b", c.model, re.IGNORECASE) if c.lora else None
    if found is None:
        return 0.0, 0.0
    rank = float(found[1])
    whole = sum(x.k + x.n for x in dense_gemms(c))
    ends = sum(x.k + x.n for x in attention_gemms(c))
    one = 2.0 * c.hidden + (3.0 if c.gated else 2.0) * c.ffn / (c.ran.expert_tp or c.tp)
    routed = c.experts / c.ep * one * moe if c.experts else 0.0
    return rank * (whole * (layers - moe) + ends * moe), rank * routed


def _state(c: Case, dense: float, routed: float, layers: float, moe: float) -> tuple[float, float]:
    """Return (bytes at rest, bytes per parameter that a stage-3 unit adds when it is gathered)."""
    r = c.ran
    ranks = max(1, c.shard // r.optimizer_copies) if c.stage else 1
    experts = max(1, c.dp * c.cp * c.tp // (c.ep * (c.ran.expert_tp or c.tp))) if c.stage else 1
    total = 0.0
    groups = (ranks, min(experts, ranks) if c.stage else 1)
    for size, group in zip(_adapters(c, layers, moe), groups, strict=True):
        w = r.weight_bytes / (group if c.stage >= 3 else 1)
        total += size * (w + r.grad_bytes / (group if c.stage >= 2 else 1) + r.state_bytes / group)
    for size, group in ((dense, ranks), (routed, min(experts, ranks) if c.stage else 1)):
        w = r.weight_bytes / (group if c.stage >= 3 else 1)
        g = (r.kept_grad_bytes or r.grad_bytes) / (group if c.stage >= 2 else 1)
        s = r.state_bytes / group
        if c.offload == "optimizer":
            s = 0.0
        if c.lora:
            g = s = 0.0
        if c.stage == 2 and r.weight_bytes == 4.0:  # weights rest sharded and stay gathered in 16 bit
            w = r.weight_bytes / group + r.gather_bytes
        total += size * (w + g + s)
    return total, 0.0


def _memory(c: Case) -> dict[str, float]:
    w = weights(c)
    first, middle, last = stage_layers(c)
    out: dict[str, float] = {"capacity": c.capacity}
    second = min(1, c.pp - 1)
    for name, stage, layers in (
        ("first", 0, first),
        ("second", second, middle if c.pp > 2 else (last if second else first)),
        ("last", c.pp - 1, last),
    ):
        for part, value in _stage(c, w, layers, stage).items():
            out[f"{name}_{part}"] = value
    out["first_counts"] = float(c.ran.resident != "last_rank")
    out["slack"] = float(c.ran.resident in ("reserved", "device"))
    out["beside"] = 1.0 if c.ran.keeps_logits else 0.5
    out["device"] = float(c.ran.resident == "device")
    return out


def _stage(c: Case, w: Weights, layers: float, stage: int) -> dict[str, float]:
    at_first, at_last = stage == 0, stage == c.pp - 1
    moe = layers - (min(float(c.dense_layers), layers) if at_first else 0.0) if c.experts else 0.0
    dense = w.dense * (layers - moe) + (w.moe - w.routed) * moe
    table = (w.embedding + w.positions) * at_first + (w.head if c.pp == 1 or not at_first else 0.0) * at_last
    routed = w.routed * moe * (c.tp / (c.ran.expert_tp or c.tp))
    state, _ = _state(c, dense + table, routed, layers, moe)
    kept_dense, again_dense = kept_bytes(c, False)
    kept_moe, again_moe = kept_bytes(c, True) if c.experts else (0.0, 0.0)
    held = in_flight(c, stage) * c.tokens
    activations = held * (kept_dense * (layers - moe) + kept_moe * moe)
    again = c.tokens * (again_moe if moe else again_dense)
    tokens = min(c.tokens, c.ran.chunk_tokens) if c.ran.chunk_tokens else c.tokens
    logits = tokens * c.vocab * at_last
    if c.ran.logits_split:
        logits *= LOGITS_BYTES[c.ran.loss] / c.tp
    else:
        logits *= LOGITS_BYTES[c.ran.loss] + (GATHERED_BYTES if c.tp > 1 else 0.0)
    working = 0.0
    if c.stage == 3:
        block = w.moe if moe else w.dense
        working = block * (2.0 * c.ran.gather_bytes + c.ran.reduce_bytes + c.ran.gather_bytes)
        working += table * (c.ran.gather_bytes + (0.0 if c.lora else c.ran.reduce_bytes))
    return {
        "state": state,
        "activations": activations,
        "recompute": again,
        "logits": logits,
        "working": working,
    }
