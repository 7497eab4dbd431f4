"""Model-state arithmetic: bytes per parameter of training schemes, whole and sharded.

These are the textbook forms (parameters replicated below stage 3). What this runtime holds, which shards
parameters at rest from stage 1, is in ``cost.memory``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StateScheme:
    """Bytes per parameter: weights that compute, gradients, and optimizer state (master copy included)."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes per parameter, nothing sharded."""
        return self.weights + self.gradients + self.optimizer


FP32 = StateScheme(weights=4, gradients=4, optimizer=8)
"""fp32 weights and gradients, Adam's two moments: 16."""
MIXED_ZERO_PAPER = StateScheme(weights=2, gradients=2, optimizer=12)
"""16-bit weights and gradients, fp32 master and moments: 16 (ZeRO paper)."""
MEGATRON_BF16 = StateScheme(weights=2, gradients=4, optimizer=12)
"""16-bit weights, fp32 gradients, fp32 master and moments: 18 (Megatron-LM)."""
NO_MASTER = StateScheme(weights=2, gradients=2, optimizer=8)
"""16-bit weights and gradients, fp32 moments, no master copy: 12."""


def textbook_state_bytes(num_parameters: float, ranks: int, stage: int, scheme: StateScheme) -> float:
    """Return the bytes of model state on one rank under ZeRO ``stage`` over ``ranks``, nothing else cut.

    Stage 1 shards the optimizer, stage 2 also gradients, stage 3 also weights. Source: ZeRO paper, section 5.
    """
    share = [1.0, 1.0, 1.0]
    for index in range(stage):
        share[index] = 1.0 / ranks
    return num_parameters * (
        scheme.optimizer * share[0] + scheme.gradients * share[1] + scheme.weights * share[2]
    )


def expert_parallel_parameters(dense: float, expert: float, tp: int, ep: int, expert_tp: int = 1) -> float:
    """Return the parameters on one rank: dense ones over tp, routed experts over ep * expert_tp."""
    return dense / tp + expert / (ep * expert_tp)


def unsynced_gradient_bytes(num_parameters: float, ranks: int, num_bytes: int, *, sharded: bool) -> float:
    """Return gradient bytes on one rank while accumulating: whole when not reduced each micro-batch."""
    return num_parameters * num_bytes / (ranks if sharded else 1)


def logits_bytes(tokens: int, vocab_size: int, num_bytes: int = 4) -> int:
    """Return the bytes of one copy of the logits of ``tokens`` tokens."""
    return tokens * vocab_size * num_bytes


def load_host_bytes(num_parameters: float, procs_per_node: int, num_bytes: int, *, broadcast: bool) -> float:
    """Return host bytes per node while weights are loaded: a copy per process, or one that rank 0 broadcasts."""
    return num_parameters * num_bytes * (1 if broadcast else procs_per_node)
