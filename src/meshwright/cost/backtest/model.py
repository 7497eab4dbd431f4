"""Seconds of a step from terms and coefficients: the closed form that is fitted.

Coefficients are logarithms of factors on a prior; 0 is the prior. Each has a standard deviation, which is how far a
stack may pull it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from meshwright.cost.backtest.terms import Terms
from meshwright.cost.collective import Floats


@dataclass(frozen=True)
class Coefficient:
    """A factor's name, its prior value, and the deviation of its logarithm: over all stacks, and of one stack."""

    name: str
    prior: float
    spread: float
    stack_spread: float
    what: str


COEFFICIENTS: Final[tuple[Coefficient, ...]] = (
    Coefficient("matmul", 1.06, 0.1, 0.1, "matmul seconds over those at the measured ceiling"),
    Coefficient(
        "blackwell", 1.15, 0.1, 0.08, "Blackwell's seconds in long runs over those of short benchmarks"
    ),
    Coefficient("accumulate", 1.2, 0.3, 0.32, "bytes of gradient accumulation over the memory rate"),
    Coefficient("waves", 0.5, 0.5, 0.48, "share of the loss to whole waves of tiles"),
    Coefficient("moved", 0.6, 0.5, 0.48, "matmul operand bytes over the memory rate, added to FLOPs"),
    Coefficient("attention_f", 1.0, 0.25, 0.24, "attention forward seconds over the kernel's benchmark"),
    Coefficient("attention_b", 1.0, 0.25, 0.24, "attention backward seconds over the kernel's benchmark"),
    Coefficient("scores", 1.2, 0.3, 0.32, "bytes of scores in memory over the memory rate"),
    Coefficient("elementwise", 1.5, 0.3, 0.32, "elementwise bytes over the memory rate"),
    Coefficient("loss", 1.3, 0.4, 0.48, "bytes of logits over the memory rate"),
    Coefficient("grouped", 1.5, 0.3, 0.32, "grouped matmul seconds over those at the ceiling"),
    Coefficient("eight", 1.05, 0.2, 0.16, "8-bit matmul seconds over those at the 8-bit ceiling"),
    Coefficient("rowwise", 3.5, 0.4, 0.4, "bytes of row-scaled 8-bit casts over tensor-scaled ones"),
    Coefficient("cast", 1.0, 0.5, 0.48, "bytes of 8-bit casts over the memory rate"),
    Coefficient("launch", 1.2e-5, 0.7, 1.0, "seconds to launch one kernel"),
    Coefficient("gap", 1.2e-6, 0.6, 0.8, "seconds between kernels, ramp and tail included"),
    Coefficient("inner", 1.15, 0.125, 0.16, "seconds on the link inside a node over its rate"),
    Coefficient("outer", 1.0, 0.2, 0.24, "seconds on the network over its rate"),
    Coefficient("call", 2e-4, 0.4, 0.5, "seconds of an all-reduce of 20 MB beside its bytes, over 0.7"),
    Coefficient("hop", 1e-5, 0.7, 1.6, "seconds per hop of a ring over nodes"),
    Coefficient("tensor", 0.95, 0.3, 0.48, "exposed share of overlapped tensor communication"),
    Coefficient("exposed", 0.30, 0.36, 0.48, "exposed share of overlapped communication inside a node"),
    Coefficient("exposed_out", 0.12, 0.18, 0.24, "exposed share of overlapped communication between nodes"),
    Coefficient("optimizer", 1.3, 0.4, 0.48, "optimizer bytes over the memory rate"),
    Coefficient("fixed", 0.010, 0.8, 0.96, "seconds per step outside the model"),
    Coefficient("straggler", 0.004, 0.2, 0.2, "relative growth per doubling of nodes"),
    Coefficient("send", 1.2, 0.6, 0.64, "pipeline messages over their link's rate"),
)
NAMES: Final = tuple(c.name for c in COEFFICIENTS)
PRIORS: Final = np.array([c.prior for c in COEFFICIENTS])
SPREADS: Final = np.array([c.spread for c in COEFFICIENTS])
STACK_SPREADS: Final = np.array([c.stack_spread for c in COEFFICIENTS])


def _limit(seconds: Floats, floor: Floats) -> Floats:
    """Return the larger of two, rounded at the corner."""
    return (seconds**3 + floor**3) ** (1.0 / 3.0)


def _network(t: Terms, k: dict[str, Floats], name: str) -> tuple[Floats, Floats]:
    """Return (seconds inside nodes, seconds between nodes) of a data-parallel collective."""
    outer = t[f"{name}_out"] * k["outer"] + t[f"{name}_hops"] * k["hop"]
    return t[f"{name}_in"] * k["inner"], outer


def _scaled(legs: tuple[Floats, Floats], factor: Floats) -> tuple[Floats, Floats]:
    return legs[0] * factor, legs[1] * factor


def _added(a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    return a[0] + b[0], a[1] + b[1]


def _exposed(k: dict[str, Floats], legs: tuple[Floats, Floats], window: Floats, overlapped: Floats) -> Floats:
    """Return what of a collective is not hidden: what the window leaves, and how much the hidden part slows compute."""
    total = legs[0] + legs[1]
    safe = np.maximum(total, 1e-9)
    hidden = (
        safe * window / np.sqrt(safe**2 + window**2 + 1e-18)
    )  # the smaller of both, rounded at the corner
    share = (legs[0] * np.minimum(k["exposed"], 1.0) + legs[1] * np.minimum(k["exposed_out"], 1.0)) / safe
    return total - np.where(overlapped > 0, (1.0 - share) * np.minimum(hidden, total), 0.0)


def seconds(t: Terms, theta: Floats) -> Floats:
    """Return [cases] seconds of a step. ``theta`` is [coefficients] or [cases, coefficients], logarithms."""
    x = PRIORS * np.exp(np.clip(theta, -6.0, 6.0))
    k = {name: x[..., i] for i, name in enumerate(NAMES)}
    return _step(t, k)["step"]


def _step(t: Terms, k: dict[str, Floats]) -> dict[str, Floats]:
    sustained = np.where(t["blackwell"] > 0, k["blackwell"], 1.0)
    k = {
        **k,
        **{
            name: k[name] * sustained for name in ("matmul", "eight", "grouped", "attention_f", "attention_b")
        },
    }
    mm = t["matmul"] * np.where(t["cast"] > 0, k["eight"], k["matmul"])
    mm = mm + t["grouped"] * k["grouped"] + t["waves"] * k["waves"] + t["moved"] * k["moved"]
    cast = k["cast"] * np.where(t["rowwise"] > 0, k["rowwise"], 1.0)
    around = t["elementwise"] * k["elementwise"] + t["cast"] * cast
    scores = t["scores"] * k["scores"]
    core = t["attention_f"] * k["attention_f"] + scores
    forward = mm + core + around
    trained = 2.0 - t["lora"]
    backward = trained * mm + t["attention_b"] * k["attention_b"] + 2.0 * scores
    backward = backward + 2.0 * t["elementwise"] * k["elementwise"] + t["cast_b"] * cast
    again = t["again_matmul"] * mm + t["again_attention"] * core + t["again"] * around
    launch = t["kernels"] * k["launch"]
    full = (t["again_attention"] * t["again"] > 0.9) * 1.0
    gaps = t["kernels"] * k["gap"]
    forward = _limit(forward + gaps, launch)
    backward = _limit(backward + again + (2.0 + full) * gaps, (2.0 + full) * launch)
    # tensor, context and expert communication inside the layers
    tp = t["tp_in"] * k["inner"] + t["tp_out"] * k["outer"] + t["tp_calls"] * k["call"]
    tp = tp + t["tp_copies"] * k["elementwise"]
    tp = tp * np.where(t["overlap_tp"] > 0, 0.5 * k["tensor"], 1.0)
    cp = t["cp_in"] * k["inner"] + t["cp_out"] * k["outer"] + t["cp_calls"] * k["call"]
    cp = cp + t["cp_copies"] * k["elementwise"]
    attention = t["attention_f"] * k["attention_f"]
    cp_f = np.where(t["overlap_cp"] > 0, np.maximum(0.2 * cp, cp - attention), cp)
    ep = t["ep_in"] * k["inner"] + t["ep_out"] * k["outer"] + t["ep_calls"] * k["call"]
    ep = ep * np.where(t["overlap_ep"] > 0, 0.5, 1.0)
    forward = forward + tp + cp_f + ep
    again_all = t["again_attention"] * t["again"]
    backward = backward + tp * (1.0 + t["tp_again"]) + t["cp_behind"] * cp_f + ep * (1.0 + again_all)
    head_mm = t["head_matmul"] * k["matmul"] + t["head_waves"] * k["waves"] + t["head_moved"] * k["moved"]
    head_f = head_mm + 0.5 * t["loss"] * k["loss"]
    head_b = (2.0 + t["head_again"]) * head_mm + 0.5 * t["loss"] * k["loss"]
    lone = t["stages"] == 1
    first_f, first_b = t["first"] * forward, t["first"] * backward
    last_f, last_b = t["last"] * forward + head_f, t["last"] * backward + head_b
    embed = t["embedding"] * k["elementwise"]
    adding = t["accumulate"] * k["accumulate"]
    first_f, first_b = first_f + embed + tp * t["tp_end"], first_b + embed + adding
    last_b = last_b + adding + tp * t["tp_end"]
    first_f = np.where(lone, first_f + head_f, first_f)
    first_b = np.where(lone, first_b + head_b + tp * t["tp_end"], first_b)
    middle_f, middle_b = t["middle"] * forward, t["middle"] * backward + adding
    # FSDP and ZeRO around each micro-batch
    gather = _network(t, k, "gather")
    reduce = _network(t, k, "reduce")
    f_wait = _exposed(k, _scaled(gather, t["gathers_forward"]), first_f, t["overlap_gather"])
    behind = _added(_scaled(gather, t["gathers_backward"]), _scaled(reduce, t["reduces_each"]))
    b_wait = _exposed(k, behind, first_b, t["overlap_grad"])
    once = _scaled(reduce, 1.0 - t["reduces_each"])
    once_wait = _exposed(k, once, first_b, t["overlap_grad"])
    once_wait = once_wait + _exposed(k, _scaled(gather, t["gathers_once"]), first_f, t["overlap_gather"])
    m, p, v = t["micro_batches"], t["stages"], t["chunks"]
    firsts = first_f + first_b + f_wait + b_wait
    lasts = np.where(lone, firsts, last_f + last_b)
    middles = np.where(p > 2, middle_f + middle_b, 0.0)
    slowest = np.maximum(np.maximum(firsts, lasts), middles)
    others = np.where(lone, 0.0, firsts + lasts + np.maximum(p - 2.0, 0.0) * middles - slowest)
    send = (t["send_in"] * k["inner"] + t["send_out"] * k["outer"]) * k["send"] + np.where(
        lone, 0.0, 0.2 * k["call"]
    )
    fill = others / v * t["bubble"] + np.where(lone, 0.0, 2.0 * send * (p - 1.0))
    steady = np.where(lone, 0.0, 2.0 * send * v * (p - 1.0) / p)
    steady = steady * np.where(t["overlap_p2p"] > 0, 0.1, 1.0)
    pipe = m * (slowest + steady) + fill
    # an optimizer kept on the host; the same on the device
    update = t["optimizer"] * k["optimizer"] + t["host"]
    total = pipe + once_wait + update + k["fixed"]
    total = total * (1.0 + k["straggler"] * np.log2(t["nodes"]))
    return {
        "step": total,
        "pipe": pipe,
        "once": once_wait,
        "update": update,
        "slowest": slowest,
        "fill": fill,
    }
