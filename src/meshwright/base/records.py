"""Prediction and Measurement: the same fields with the same units, so that they subtract.

All bytes are bytes of one rank; all times are seconds of one optimizer step; "exposed" means not hidden
behind compute.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Bytes that one rank holds at its peak, by category; the categories sum to the peak.

    On a GPU these are *allocated* bytes of the caching allocator; on a CPU, live tensor bytes.
    ``outside_allocator`` is what the device holds beside it (context, communicators): 0 on a CPU.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    working: int = 0
    outside_allocator: int = 0

    @property
    def total(self) -> int:
        """The peak: the sum of all categories."""
        return sum(getattr(self, f.name) for f in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Return the categories by name, in bytes."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TimeSeconds:
    """Exposed seconds of one step by cause; the causes sum to the step time."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The step time: the sum of all causes."""
        return sum(getattr(self, f.name) for f in fields(self))

    def as_dict(self) -> dict[str, float]:
        """Return the causes by name, in seconds."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's memory. ``stage`` is its (first) pipeline stage."""

    rank: int
    stage: int
    memory: MemoryBytes

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes at this rank's peak."""
        return self.memory.total

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_bytes": self.memory.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step costs. ``memory`` is that of the rank with the highest peak.

    ``model_tflops_per_gpu`` and ``mfu_pct`` count attention by ``flops_convention`` ("causal" halves the
    scores) and no recompute; ``mfu_pct`` is None where the device's peak is not known, and
    ``bubble_share_of_total`` where it was not measured.
    """

    step_time_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu_pct: float | None
    flops_convention: str
    bubble_share_of_total: float | None
    memory: MemoryBytes
    time: TimeSeconds
    ranks: tuple[RankRecord, ...] = ()

    @property
    def peak_memory_bytes(self) -> int:
        """The highest peak over ranks, in bytes."""
        return self.memory.total

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: keys of the command-line contract."""
        return {
            "step_time_s": self.step_time_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu_pct": self.mfu_pct,
            "flops_convention": self.flops_convention,
            "bubble_share_of_total": self.bubble_share_of_total,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory_bytes": self.memory.as_dict(),
            "time_s": self.time.as_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Prediction(StepRecord):
    """What the cost model says a step will cost.

    ``step_time_low_s`` and ``step_time_high_s`` bound an 80 % band; ``hidden_s`` are seconds of
    communication that run behind compute, by axis; ``sources`` says where each constant came from.
    """

    step_time_low_s: float
    step_time_high_s: float
    oom_probability: float
    hidden_s: dict[str, float] = field(default_factory=dict[str, float])
    sources: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: keys of the command-line contract."""
        return super().as_dict() | {
            "step_time_low_s": self.step_time_low_s,
            "step_time_high_s": self.step_time_high_s,
            "oom_probability": self.oom_probability,
            "hidden_s": dict(self.hidden_s),
            "ranks": [r.as_dict() for r in self.ranks],
            "sources": list(self.sources),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Prediction:
        """Return the Prediction whose ``as_dict`` is ``data``."""
        return cls(
            step_time_s=data["step_time_s"],
            tokens_per_s_per_gpu=data["tokens_per_s_per_gpu"],
            model_tflops_per_gpu=data["model_tflops_per_gpu"],
            mfu_pct=data["mfu_pct"],
            flops_convention=data["flops_convention"],
            bubble_share_of_total=data["bubble_share_of_total"],
            memory=MemoryBytes(**data["memory_bytes"]),
            time=TimeSeconds(**data["time_s"]),
            step_time_low_s=data["step_time_low_s"],
            step_time_high_s=data["step_time_high_s"],
            oom_probability=data["oom_probability"],
            hidden_s=dict(data["hidden_s"]),
            ranks=tuple(
                RankRecord(rank=r["rank"], stage=r["stage"], memory=MemoryBytes(**r["memory_bytes"]))
                for r in data["ranks"]
            ),
            sources=tuple(data["sources"]),
        )


@dataclass(frozen=True, kw_only=True)
class Measurement(StepRecord):
    """What a run's steps did cost: medians over ``steps`` measured steps, memory from one traced step.

    In ``memory``, ``logits`` is counted inside ``activations`` and ``working`` is everything at the peak
    that is neither a parameter, a gradient, optimizer state nor a saved activation.
    """

    steps: int
    step_time_spread_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: the contract's keys, with the number of measured steps."""
        return super().as_dict() | {
            "steps": self.steps,
            "step_time_spread_s": self.step_time_spread_s,
            "ranks": [r.as_dict() for r in self.ranks],
        }


def errors_pct(prediction: StepRecord, measurement: StepRecord) -> dict[str, float]:
    """Return 100 * (predicted - measured) / measured for step time, throughput, peak and state memory.

    State memory is parameters + gradients + optimizer; a figure that was measured as 0 is left out.
    """
    pairs = {
        "step_time_s": (prediction.step_time_s, measurement.step_time_s),
        "tokens_per_s_per_gpu": (prediction.tokens_per_s_per_gpu, measurement.tokens_per_s_per_gpu),
        "peak_memory_bytes": (prediction.peak_memory_bytes, measurement.peak_memory_bytes),
    }
    for name in ("parameters", "gradients", "optimizer"):
        pairs[f"{name}_bytes"] = (
            getattr(prediction.memory, name),
            getattr(measurement.memory, name),
        )
    return {name: 100.0 * (p - m) / m for name, (p, m) in pairs.items() if m}
