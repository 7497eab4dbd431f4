"""Rules of thumb as formulas: volumes of the ZeRO stages, bubbles, ring times, what a fine-tuning run must hold.

They are checked in ``docs/concepts/decision-tree.md`` against what the planner counts. Model states are in
``cost.state``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.cost.state import StateScheme, textbook_state_bytes
from meshwright.model.quantised import bits_per_weight


def data_volume(stage: int, ranks: int, accumulation: int = 1, *, textbook: bool = False) -> float:
    """Return what one rank sends in a step for data parallelism, in multiples of the model's bytes.

    Stages 0 and 1 reduce once a step; stage 2 scatters gradients each micro-batch and gathers once; stage 3 gathers
    twice and scatters once each micro-batch. ``textbook`` leaves out the factor (ranks - 1) / ranks: 2, 2, 2, 3.
    Source: ZeRO paper, section 7.
    """
    per_step = {0: 2.0, 1: 2.0, 2: 1.0 + accumulation, 3: 3.0 * accumulation}[stage]
    return per_step if textbook else per_step * (ranks - 1) / ranks


def bubble_of_total(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle share of the whole step of GPipe, 1F1B (one chunk) or interleaved 1F1B, for equal stages."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


def bubble_of_ideal(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle seconds over the seconds of a step without a bubble, for equal stages."""
    return (stages - 1) / (micro_batches * chunks)


def ring_all_reduce_s(num_bytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds of a ring all-reduce: each rank sends 2 (N - 1) / N of the payload in 2 (N - 1) hops."""
    return 2.0 * (ranks - 1) / ranks * num_bytes / bytes_per_s + 2.0 * (ranks - 1) * latency_s


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """One row of a fine-tuning table: parameters, how many train, devices, ZeRO stage, how many are held in 4 bits."""

    name: str
    parameters: float
    trained: float
    devices: int
    stage: int
    packed: float = 0.0


def fine_tuning_bytes(row: FineTuning, base: StateScheme, trained: StateScheme) -> float:
    """Return the bytes of model state on one device: frozen weights, and the state of what trains.

    Frozen weights are cut by stage 3 only; what trains by the row's stage.
    """
    frozen = (row.parameters - row.trained - row.packed) * base.weights
    frozen += row.packed * bits_per_weight(double=True) / 8.0
    own = textbook_state_bytes(row.trained, row.devices, row.stage, trained)
    return frozen / (row.devices if row.stage == 3 else 1) + own


FINE_TUNING: Final = (
    FineTuning(name="7B LoRA", parameters=6.738e9, trained=40e6, devices=1, stage=0),
    FineTuning(name="7B QLoRA", parameters=6.738e9, trained=40e6, devices=1, stage=0, packed=6.476e9),
    FineTuning(name="7B full", parameters=6.738e9, trained=6.738e9, devices=4, stage=2),
    FineTuning(name="70B LoRA", parameters=68.98e9, trained=200e6, devices=4, stage=3),
    FineTuning(name="70B QLoRA", parameters=68.98e9, trained=200e6, devices=2, stage=3, packed=68.45e9),
    FineTuning(name="70B full", parameters=68.98e9, trained=68.98e9, devices=16, stage=3),
)
"""Cases that are often tabled: one device, two to four with stage 2 or 3, sixteen or more. In 4 bits (with scales in 8)
are the matrices of the blocks."""
