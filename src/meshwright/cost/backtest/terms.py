"""Terms of a case: seconds at the ceilings of its device and links, and counts, before any coefficient.

``Terms`` is a table: one float per case and name. ``seconds`` in ``model`` multiplies them with coefficients, so a
fit never prices a shape twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.backtest.again import again_shares
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.exchange_terms import layer_exchanges, ring
from meshwright.cost.backtest.shapes import (
    Gemm,
    attention_flops,
    attention_gemms,
    dense_gemms,
    head_gemm,
    moe_gemms,
    stage_layers,
    weights,
)
from meshwright.cost.collective import Floats
from meshwright.cost.kernels import UNFUSED_SHARE, attention_share, wave_factor

ADAM_EXTRA_BYTES = 10.0
"""Bytes per local parameter beside the optimizer's own passes: gradient norm, clip, zeroing."""
HOST_RATE = 12e9
"""Bytes per second of an optimizer step in host memory per device, copies over PCIe included."""
BUCKET_BYTES = 100e6
"""Bytes of one bucket of a data-parallel collective."""
FLASH = ("fa1", "fa2", "fa3", "cudnn", "triton")


@dataclass(frozen=True)
class Terms:
    """Columns by name, each [cases]."""

    columns: dict[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        """Return a column."""
        return self.columns[name]

    def take(self, index: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> Terms:
        """Return the rows at ``index``."""
        return Terms({name: column[index] for name, column in self.columns.items()})


def terms(cases: Sequence[Case]) -> Terms:
    """Return the terms of cases."""
    rows = [_terms(case) for case in cases]
    return Terms({name: np.array([row[name] for row in rows]) for name in rows[0]}) if rows else Terms({})


POWER_W = {
    "H100-SXM-96GB-HBM2e": (500.0, 700.0),
    "GB200-186GB": (1200.0, 1000.0),
    "GB300-288GB": (1400.0, 1000.0),
}
"""Power limit of a device, and that of the part on which its generation's long-run rate rests (H100 at 700 W, B200 at
1000 W): the torchtitan page prints 500 W, the others are the parts' limits (product knowledge)."""


def power_share(c: Case) -> float:
    """Return the factor on the matmul ceiling of a device with another power limit: rates go with the square root."""
    limit, usual = POWER_W.get(c.gpu, (1.0, 1.0))
    return math.sqrt(limit / usual)


def _terms(c: Case) -> dict[str, float]:
    out = _compute(c)
    out |= layer_exchanges(c)
    out |= _data(c)
    out |= _pipeline(c)
    out |= _other(c)
    return out


def _gemms(c: Case, gemms: Sequence[Gemm], layers: float, out: dict[str, float], prefix: str = "") -> None:
    share = power_share(c)
    half = c.device.matmul_flops.get("bf16") or c.device.matmul_flops["fp16"]
    ceiling = half.value * share
    fast = ceiling
    if c.fp8 and not prefix:
        eight = c.device.matmul_flops.get("fp8")
        fast = (eight.value if eight else 2 * half.value) * share * (2.0 if c.fp4 else 1.0)
    for g in gemms:
        seconds = g.flops / (fast if g.n != c.experts else ceiling) * layers
        name = "grouped" if g.grouped else f"{prefix}matmul"
        out[name] = out.get(name, 0.0) + seconds
        waves = wave_factor(g.m, g.n, g.count if g.grouped else 1.0, c.generation) - 1.0
        out[f"{prefix}waves"] = out.get(f"{prefix}waves", 0.0) + seconds * min(waves, 4.0)
        moved = 2.0 * (g.m * g.k + g.k * g.n + g.m * g.n) * g.count / c.device.memory_rate.value * layers
        out[f"{prefix}moved"] = out.get(f"{prefix}moved", 0.0) + moved
        if c.fp8 and not prefix:
            for name, num_bytes in _casts(g).items():
                out[name] = out.get(name, 0.0) + num_bytes / c.device.memory_rate.value * layers


def _casts(g: Gemm) -> dict[str, float]:
    """Return the bytes that 8-bit casts around a product move: both operands in forward, the gradient in backward.

    A tensor is read for its largest value, read again and written in one byte. The products of both gradients take
    operands whose inner dim is contiguous, so that each tensor is also transposed in one byte (cuBLAS).
    """
    operands, result = (g.m * g.k + g.k * g.n) * g.count, g.m * g.n * g.count
    return {"cast": 5.0 * operands, "cast_b": 2.0 * operands + 7.0 * result}


def _compute(c: Case) -> dict[str, float]:
    """Return forward seconds of one micro-batch through all layers, and through the head."""
    names = (
        "matmul",
        "grouped",
        "waves",
        "moved",
        "cast",
        "cast_b",
        "head_matmul",
        "head_waves",
        "head_moved",
    )
    out: dict[str, float] = dict.fromkeys(names, 0.0)
    moe_layers = float(c.layers - c.dense_layers) if c.experts else 0.0
    dense = c.layers - moe_layers
    if dense:
        _gemms(c, dense_gemms(c), dense, out)
    if moe_layers:
        _gemms(c, moe_gemms(c), moe_layers, out)
    _gemms(c, [head_gemm(c)], 1.0, out, "head_")
    rate = c.device.memory_rate.value
    half = c.device.matmul_flops.get("bf16") or c.device.matmul_flops["fp16"]
    ceiling = half.value * power_share(c)
    flops = attention_flops(c) * c.layers
    scores = 0.0
    if c.ran.attention in FLASH:
        heads = c.micro_batch * c.heads / c.tp / c.cp
        ahead, behind = attention_share(c.ran.attention, c.generation, c.head_dim, c.seq, heads)
        out["attention_f"] = flops / ceiling / ahead
        out["attention_b"] = 2.5 * flops / ceiling / behind
    else:  # the whole square, and the scores through memory
        out["attention_f"] = 2.0 * flops / ceiling / UNFUSED_SHARE
        out["attention_b"] = 4.0 * flops / ceiling / UNFUSED_SHARE
        square = c.micro_batch * c.heads / c.tp * float(c.seq) ** 2 * c.layers
        scores = (
            square
            * (
                (26.0 if c.ran.attention == "plain" else 7.0)
                + (5.0 if c.ran.dropout or c.ran.attention_dropout else 0.0)
            )
            / rate
        )
    out["scores"] = scores
    out["elementwise"] = _elementwise(c, moe_layers) / rate
    kernels = (
        20.0 + {"fused": 2, "native": 2, "upcast": 12}[c.ran.norm] + (4 if c.ran.rope == "unfused" else 1)
    )
    kernels += (
        (2 if c.ran.activation == "unfused" else 1) + (0 if c.ran.attention in FLASH else 5) + (c.tp > 1) * 4
    )
    kernels = kernels * dense + (kernels + 25.0) * moe_layers
    out["kernels"] = kernels * c.ran.launch
    logits = c.tokens * c.vocab / (c.tp if c.ran.logits_split else 1)
    passes = {"eager": 34.0, "parallel": 46.0, "fused": 10.0, "chunked": 20.0}[c.ran.loss]
    out["loss"] = logits * passes / rate
    out["embedding"] = 4.0 * c.tokens * c.hidden * 2.0 / rate / (c.tp if c.sp else 1)
    out["head_again"] = float(c.ran.loss_again)
    out["lora"] = float(c.lora)
    out |= again_shares(c)
    return out


def _elementwise(c: Case, moe_layers: float) -> float:
    """Return the bytes that a forward's elementwise operations move over all layers."""
    t, h = c.tokens, float(c.hidden)
    norm = {"fused": 4.0, "native": 6.0, "upcast": 36.0}[c.ran.norm]
    stream = (2.0 * norm + 12.0 + (4.0 if c.ran.dropout else 0.0) + (4.0 if not c.gated else 0.0)) * h
    if c.ran.activation == "unfused":  # copies around attention, biases and casts are operations of their own
        stream += 20.0 * h
    stream /= c.tp if c.sp else 1
    heads = (c.heads + c.kv_heads) / c.tp * c.head_dim
    rope = 0.0 if c.ran.learned_positions or not c.gated else heads * (4.0 if c.ran.rope == "fused" else 20.0)
    rope += heads * 4.0 * (2.0 if c.qk_norm else 0.0)
    rope += 8.0 * c.heads / c.tp * c.head_dim if c.kv_lora else 0.0
    ffn = c.dense_ffn if c.experts else c.ffn
    gate = (6.0 if c.ran.activation == "fused" else 10.0) if c.gated else 4.0
    dense = gate * ffn / c.tp
    total = (stream + rope) * c.layers + dense * (c.layers - moe_layers)
    if moe_layers:
        routed = c.topk * (gate * c.ffn / c.tp + 16.0 * h) + gate * c.shared_ffn / c.tp + 12.0 * c.experts
        total += routed * moe_layers
    return total * t


def _data(c: Case) -> dict[str, float]:
    """Return data-parallel communication: once a step, and per micro-batch (stage 3) of the busiest stage."""
    w = weights(c)
    layers = stage_layers(c)[1]
    share = layers / c.layers
    moe_layers = (c.layers - c.dense_layers) * share if c.experts else 0.0
    dense = w.dense * (layers - moe_layers) + (w.moe - w.routed) * moe_layers + w.embedding + w.positions
    dense += w.head if c.pp == 1 else 0.0
    routed = w.routed * moe_layers
    if c.lora:
        dense, routed = dense * 0.005, routed * 0.0
    ranks = c.dp * c.cp
    expert_ranks = max(1, ranks // c.ep)
    out: dict[str, float] = {}
    stride = c.tp

    def put(name: str, width: float, both: bool = False) -> None:
        total = [0.0, 0.0, 0.0]
        for size, group, step in ((dense, ranks, stride), (routed, expert_ranks, stride * c.ep)):
            calls = max(1.0, size * width / BUCKET_BYTES) if size else 0.0
            if c.stage == 3:
                calls = max(calls, layers)
            legs = ring(c, size * width, c.shard if c.stage and size == dense else group, step, calls, both)
            total = [a + b for a, b in zip(total, legs, strict=True)]
        for part, value in zip(("in", "out", "hops"), total, strict=True):
            out[f"{name}_{part}"] = value

    put("gather", 1.0 if c.fp8 and c.ran.gather_fp8 else c.ran.gather_bytes)
    put("reduce", c.ran.reduce_bytes, both=c.stage == 0)
    replicas = ranks // c.shard if c.stage else 1
    part = dense * c.ran.reduce_bytes / max(1, c.shard)
    legs = ring(c, part, replicas, stride * c.shard, max(1.0, part / BUCKET_BYTES), both=True)
    for part, value in zip(("in", "out", "hops"), legs, strict=True):
        out[f"reduce_{part}"] += value if replicas > 1 else 0.0
    # with a pipeline torch's FSDP keeps a stage's parameters and gradients whole until the last micro-batch
    held_whole = c.stage == 3 and c.pp > 1 and c.ran.holds_stage
    each = float(c.stage == 3 and not held_whole)
    out["gathers_forward"] = out["gathers_backward"] = each
    out["gathers_once"] = float(c.stage in (1, 2) or held_whole)
    out["reduces_each"] = float(c.stage >= 2 and c.ran.reduce_every and not held_whole)
    # gradients are added to whole buffers each micro-batch; stage 3 copies what it gathers and scatters
    passes = (
        2.0 * c.ran.grad_bytes + 2.0 if c.stage < 3 else 3.0 * c.ran.gather_bytes + 2.0 * c.ran.reduce_bytes
    )
    trained = 0.0 if c.lora else dense - (w.embedding + w.positions) + routed
    out["accumulate"] = trained * passes / c.device.memory_rate.value
    held = dense / (c.shard if c.stage else 1) + routed / (expert_ranks if c.stage else 1)
    moved = c.ran.state_bytes * 2.0 + 4.0 + c.ran.weight_bytes + ADAM_EXTRA_BYTES
    out["optimizer"] = held * moved / c.device.memory_rate.value if c.offload != "optimizer" else 0.0
    out["host"] = held * 36.0 / HOST_RATE if c.offload == "optimizer" else 0.0
    return out


def _pipeline(c: Case) -> dict[str, float]:
    first, middle, last = stage_layers(c)
    whole = c.tokens * c.hidden * 2.0
    cut = c.sp or c.ran.sends_cut
    message = whole / (c.tp if cut else 1)
    stride = c.n_gpus // c.pp
    near = stride < c.node
    send = message / (c.intra if near else c.inter) if c.pp > 1 else 0.0
    joined = 0.0 if c.sp or not cut or c.pp == 1 or c.tp == 1 else whole * (c.tp - 1) / c.tp / c.intra
    return {
        "first": first / c.layers,
        "middle": middle / c.layers,
        "last": last / c.layers,
        "stages": float(c.pp),
        "chunks": float(c.vpp),
        "micro_batches": float(c.accumulation),
        "send_in": (send if near else 0.0) + joined,
        "send_out": 0.0 if near else send,
        "bubble": {"zb-1p": 1.0 / 3.0, "zb-2p": 0.0}.get(c.ran.schedule, 1.0),
    }


def _other(c: Case) -> dict[str, float]:
    return {
        "overlap_grad": float(c.ran.overlap_grad),
        "overlap_gather": float(c.ran.overlap_gather),
        "overlap_tp": float(c.ran.overlap_tp),
        "overlap_p2p": float(c.ran.overlap_p2p),
        "overlap_cp": float(c.ran.overlap_cp),
        "overlap_ep": float(c.ran.overlap_ep),
        "nodes": max(1.0, c.n_gpus / c.node),
        "blackwell": float(c.generation == "blackwell"),
        "rowwise": float(c.ran.fp8 == "rowwise"),
        "qkv": sum(g.flops for g in attention_gemms(c)),
    }
