"""Matrix products, attention and parameters of a case on one rank: what every term of time and memory counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cost.backtest.case import Case


@dataclass(frozen=True)
class Gemm:
    """``count`` products [m, k] x [k, n] of one micro-batch on one rank; ``grouped`` ones belong to routed experts."""

    m: float
    k: float
    n: float
    count: float = 1.0
    grouped: bool = False

    @property
    def flops(self) -> float:
        """Forward FLOPs."""
        return 2.0 * self.m * self.k * self.n * self.count


def attention_gemms(c: Case) -> list[Gemm]:
    """Return the projections of one layer's attention."""
    t, h = c.tokens, float(c.hidden)
    heads = c.heads / c.tp
    if c.kv_lora:
        nope = c.head_dim - c.rope_dim
        query = [Gemm(t, h, c.q_lora), Gemm(t, c.q_lora, heads * c.head_dim)] if c.q_lora else []
        return [
            *query,
            Gemm(t, h, c.kv_lora + c.rope_dim),
            Gemm(t, c.kv_lora, heads * (nope + c.value_dim)),
            Gemm(t, heads * c.value_dim, h),
        ]
    kv = max(1.0, c.kv_heads / c.tp)
    return [Gemm(t, h, (heads + 2 * kv) * c.head_dim), Gemm(t, heads * c.head_dim, h)]


def _mlp(c: Case, ffn: float) -> list[Gemm]:
    t, h = c.tokens, float(c.hidden)
    return [Gemm(t, h, (2 if c.gated else 1) * ffn / c.tp), Gemm(t, ffn / c.tp, h)]


def dense_gemms(c: Case) -> list[Gemm]:
    """Return the products of a layer with a dense MLP."""
    return [*attention_gemms(c), *_mlp(c, float(c.dense_ffn if c.experts else c.ffn))]


def moe_gemms(c: Case) -> list[Gemm]:
    """Return the products of a layer with experts at perfect balance: routed ones, shared ones, router."""
    here = max(1.0, c.experts / c.ep)
    rows = c.tokens * c.topk * c.ep / c.experts
    width = float(c.ffn)
    routed = [
        Gemm(rows, float(c.hidden), (2 if c.gated else 1) * width, here / c.tp, True),
        Gemm(rows, width, float(c.hidden), here / c.tp, True),
    ]
    shared = _mlp(c, float(c.shared_ffn)) if c.shared_ffn else []
    return [*attention_gemms(c), *routed, *shared, Gemm(c.tokens, float(c.hidden), float(c.experts))]


def head_gemm(c: Case) -> Gemm:
    """Return the product with the language-model head, whose columns the tensor axis divides."""
    return Gemm(c.tokens, float(c.hidden), c.vocab / c.tp)


def attention_flops(c: Case) -> float:
    """Return the forward FLOPs of causal scores and values of one layer on one rank."""
    width = (c.head_dim + c.value_dim) / 2.0
    return 2.0 * c.micro_batch * c.heads / c.tp / c.cp * float(c.seq) ** 2 * width


def model_flops_per_token(c: Case) -> float:
    """Return model FLOPs per token, forward and backward, with causal attention and no recompute."""
    dense = sum(g.flops for g in dense_gemms(c))
    if c.experts:
        moe = sum(g.flops for g in moe_gemms(c) if not g.grouped) * c.tp
        routed = 2.0 * c.tokens * c.topk * c.hidden * c.ffn * (3 if c.gated else 2)
        moe = moe + routed
        layers = c.dense_layers * dense * c.tp + (c.layers - c.dense_layers) * moe
    else:
        layers = c.layers * dense * c.tp
    head = 2.0 * c.tokens * c.hidden * c.vocab
    attention = c.layers * attention_flops(c) * c.tp
    return 3.0 * (layers + head + attention) / c.tokens


@dataclass(frozen=True)
class Weights:
    """Parameters on one rank after tensor and expert degrees.

    Of a dense layer, a layer with experts and the routed part of it, the embedding table, learned positions, and the head
    (0 where it is tied and the embedding is on the same rank).
    """

    dense: float
    moe: float
    routed: float
    embedding: float
    positions: float
    head: float


def weights(c: Case) -> Weights:
    """Return the parameters of each part of the model on one rank."""
    h, tp = float(c.hidden), float(c.tp)
    norms = 2.0 * h * (1 if c.gated else 2)
    biases = 0.0 if c.gated else (4.0 * h + (c.ffn + c.hidden)) / tp
    if c.kv_lora:
        nope = c.head_dim - c.rope_dim
        query = (
            h * c.q_lora + c.q_lora * c.heads * c.head_dim / tp if c.q_lora else h * c.heads * c.head_dim / tp
        )
        attention = query + h * (c.kv_lora + c.rope_dim)
        attention += c.kv_lora * c.heads * (nope + c.value_dim) / tp + c.heads * c.value_dim * h / tp
    else:
        kv = max(1.0, c.kv_heads / tp)
        attention = h * (c.heads / tp + 2 * kv) * c.head_dim + c.heads * c.head_dim * h / tp
    gate = 3.0 if c.gated else 2.0
    dense = attention + norms + biases + gate * h * (c.dense_ffn if c.experts else c.ffn) / tp
    routed = c.experts / c.ep * gate * h * c.ffn / tp if c.experts else 0.0
    moe = attention + norms + routed + gate * h * c.shared_ffn / tp + h * c.experts if c.experts else 0.0
    table = c.vocab * h / tp
    positions = c.seq * h if c.ran.learned_positions or not c.gated else 0.0
    head = 0.0 if c.tied and c.pp == 1 else table
    return Weights(dense, moe, routed, table, positions, head)


def stage_layers(c: Case) -> tuple[float, float, float]:
    """Return the layers of the first, a middle and the last stage."""
    if c.pp == 1:
        return float(c.layers), float(c.layers), float(c.layers)
    if c.ran.spare_ends:
        middle = (c.layers + 2) / c.pp
        return middle - 1.0, middle, middle - 1.0
    even = c.layers / c.pp
    if c.layers % c.pp:
        even = float(-(-c.layers // c.pp))
    return even, even, even
