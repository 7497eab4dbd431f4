"""A measured run as numbers: its model, devices, layout and what ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.cluster.catalogue import capacity
from meshwright.cluster.spec import DeviceSpec
from meshwright.cost.backtest.presets import Ran
from meshwright.cost.kernels import generation

GIB: Final = 2**30
USABLE: Final = 0.985
"""Share of the printed memory, counted in GiB, that a process can allocate where no total was found."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured run, resolved. Degrees are those of the row; seconds and bytes as measured, None where not printed.

    Attributes:
        node: devices that share the inner link (a node, or an NVLink domain).
        shard: ranks over which state is sharded; ``stage`` the ZeRO stage.
        moe_layers: layers with experts; the others have a dense MLP of ``dense_ffn``.
        recompute: none, core, per-op, every-second-layer, minimal, modules or full.
        offload: none, optimizer, activations.
    """

    id: str
    source: str
    model: str
    gpu: str
    device: DeviceSpec
    ran: Ran
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocab: int
    seq: int
    tied: bool
    gated: bool
    experts: int
    topk: int
    shared_ffn: int
    dense_layers: int
    dense_ffn: int
    q_lora: int
    kv_lora: int
    rope_dim: int
    qk_norm: bool
    lora: bool
    n_gpus: int
    node: int
    intra: float
    inter: float
    tp: int
    sp: bool
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    stage: int
    shard: int
    recompute: str
    offload: str
    micro_batch: int
    accumulation: int
    global_batch: int
    fp8: bool
    fp4: bool
    step_s: float | None
    memory: float | None
    memory_why: str
    time_why: str
    composed: bool = False

    @property
    def label(self) -> str:
        """The source that its score counts for; rows composed from timed pieces count for themselves."""
        return f"{self.source} (composed rows)" if self.composed else self.source

    @property
    def sweep(self) -> tuple[str, ...]:
        """The sweep that a fold takes whole."""
        return (self.source, self.model, self.gpu, str(self.n_gpus), str(self.seq))

    @property
    def group(self) -> tuple[str, ...]:
        """Rows among which a layout is chosen."""
        return (self.source, self.model, self.gpu, str(self.n_gpus), str(self.global_batch), str(self.seq))

    @property
    def stack(self) -> str:
        """The preset's name; rows composed from timed pieces are a stack of their own."""
        return f"{self.ran.name}-composed" if self.composed else self.ran.name

    @property
    def generation(self) -> str:
        """The device's generation."""
        return generation(self.gpu)

    @property
    def capacity(self) -> float:
        """Bytes that a process can allocate on the device: torch's total, or a share of the printed GiB."""
        known = capacity(self.gpu)
        return known.value if known is not None else self.device.memory.value / 1e9 * GIB * USABLE

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored, and why."""

    id: str
    source: str
    why: str
