"""What ran, as an input: kernels, loss, overlap and dtypes of a framework and version, from the table of presets.

A preset is chosen by the framework's name; what a row's notes print (a kernel, a recipe, a schedule) overrides it.
Every preset names its source. Nothing here is fitted to a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

from meshwright.cost.kernels import generation


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What ran: the switches that a layout does not tell.

    Attributes:
        attention: plain, fused_softmax, triton, fa1, fa2, fa3 or cudnn.
        norm: fused (one kernel), native (the framework's, one kernel) or upcast (several operations in fp32).
        activation, rope: fused or unfused.
        loss: eager, fused, parallel (over the tensor axis, in place) or chunked.
        logits_split: logits are divided by the tensor degree.
        overlap_*: communication that is started beside compute.
        weight_bytes, grad_bytes, state_bytes: bytes per parameter at rest; state holds master copy and moments.
        keeps_logits: the logits are still there while the last layer is computed again.
        kept_grad_bytes: bytes per parameter of gradients at rest where they are not ``grad_bytes`` (0: they are).
        optimizer_copies: groups of ranks that each hold the whole optimizer's state.
        expert_tp: tensor degree of the routed experts; 0 where it is that of the other layers.
        gather_bytes, reduce_bytes: bytes per parameter on the wire.
        reduce_every: gradients are reduced each micro-batch under FSDP.
        launch: factor on the seconds that launching a kernel takes (graphs below 1).
        recompute: what "selective" means: core attention ("core") or every second matmul ("per-op").
        unprinted_recompute: the policy of rows that print none, where the framework's recipes say it.
        tp_copies: gathers and scatters of the tensor axis are along a dim that is not the first, and copy.
        keeps_gathered: layers of the tensor axis keep what they gathered for backward.
        early_stop: a recomputed forward stops when the last tensor that backward needs is there.
        holds_stage: with a pipeline, FSDP gathers parameters and reduces gradients once a step.
        sends_cut: tensor ranks send a part each over a pipeline edge and gather the parts behind it.
        resident: how the peak was read: allocated, reserved, device or last_rank.
    """

    name: str = "unknown"
    attention: str = "fa2"
    norm: str = "native"
    activation: str = "unfused"
    rope: str = "fused"
    loss: str = "eager"
    logits_split: bool = True
    overlap_grad: bool = False
    overlap_gather: bool = False
    overlap_tp: bool = False
    overlap_p2p: bool = False
    overlap_cp: bool = False
    overlap_ep: bool = False
    weight_bytes: float = 2.0
    grad_bytes: float = 4.0
    state_bytes: float = 12.0
    gather_bytes: float = 2.0
    reduce_bytes: float = 4.0
    reduce_every: bool = False
    launch: float = 1.0
    recompute: str = "core"
    unprinted_recompute: str = ""
    resident: str = "allocated"
    keeps_logits: bool = False
    kept_grad_bytes: float = 0.0
    expert_tp: int = 0
    optimizer_copies: int = 1
    dropout: bool = False
    attention_dropout: bool = False
    learned_positions: bool = False
    spare_ends: bool = False
    sequence_parallel: bool = False
    compiled: bool = False
    tp_copies: bool = False
    keeps_gathered: bool = False
    early_stop: bool = False
    holds_stage: bool = False
    sends_cut: bool = False
    loss_again: bool = False
    chunk_tokens: int = 0
    gather_fp8: bool = False
    changes_model: bool = False
    moe_drop: bool = False
    fp8: str = ""
    schedule: str = "1f1b"
    cp_style: str = "ring"


@cache
def _table() -> Mapping[str, Any]:
    text = (files("meshwright.cost") / "data" / "stacks.json").read_text(encoding="utf-8")
    return json.loads(text)


def ran(framework: str, gpu: str, notes: str, compiled: bool) -> Ran:
    """Return what ran for a framework on a device, with what the notes print on top."""
    out = Ran()
    kind = generation(gpu)
    for stack in _table()["stacks"]:
        if stack["framework"].lower() in framework.lower():
            out = _set(replace(out, name=stack["name"]), stack["set"], kind)
            break
    for note in _table()["notes"]:
        if note["contains"] in notes and "compiled" in note["set"]:
            compiled = True
    if compiled:  # one kernel per chain of elementwise operations
        out = replace(
            out, norm="fused", activation="fused", rope="fused", launch=0.6 * out.launch, compiled=True
        )
    for note in _table()["notes"]:
        if note["contains"] in notes:
            out = _set(out, note["set"], kind)
    return out


def _set(value: Ran, settings: Mapping[str, Any], kind: str) -> Ran:
    known = {f.name for f in fields(Ran)}
    chosen: dict[str, Any] = {}
    for name, held in settings.items():
        if isinstance(held, dict):
            by_generation = cast("dict[str, Any]", held)
            held = by_generation.get(kind, by_generation.get("default"))
        chosen[name] = held
    assert set(chosen) <= known, sorted(set(chosen) - known)
    return replace(value, **chosen)


def stack_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(dict.fromkeys(stack["name"] for stack in _table()["stacks"]))


def known_vocabulary(model_name: str) -> int:
    """Return the vocabulary of a known family, or 0."""
    for row in _table()["vocabulary"]:
        if row["model"] in model_name.lower():
            return int(row["size"])
    return 0


def known_architecture(model_name: str) -> Mapping[str, Any]:
    """Return what a model's public config says beyond the columns (latent ranks, shared experts, head size)."""
    name = model_name.lower().replace(" ", "-")
    for row in _table()["architecture"]:
        if row["model"] in name:
            return row["set"]
    return {}
