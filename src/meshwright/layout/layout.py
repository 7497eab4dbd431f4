"""Layout: one value that says how a job is cut over ranks (the text form is a contract)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from meshwright.base.axes import LAYOUT_AXES

LOSS_CHUNKS: Final = 8
"""``loss=chunked``: no rank holds more at once than this part of the logits of a micro-batch."""


def loss_chunks(tp: int) -> int:
    """Return in how many parts ``loss=chunked`` cuts the tokens, where each rank has 1 / tp of the logits' columns."""
    return -(-LOSS_CHUNKS // tp)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and policies: every key of the layout text, resolved.

    Nothing is "auto" but ``cut``, until a plan fixes it: "auto", "even" or layers per stage such as
    "7/9/8/8". ``shard`` is the size of the ZeRO shard group: dp * cp for zero >= 1 unless written
    smaller (HSDP), 1 for zero = 0.
    """

    dp: int = 1
    zero: int = 0
    shard: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    chunks: int = 1
    cut: str = "auto"
    order: tuple[str, ...] = LAYOUT_AXES
    loss: str = "eager"
    kv_heads: str = "split"
    compile: str = "off"
    schedule: str = "1f1b"
    cp: int = 1
    cp_style: str = "ring"
    ep: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    offload: str = "none"
    precision: str = "bf16"

    @property
    def world_size(self) -> int:
        """Ranks in all: dp * tp * pp * cp (ep is borrowed from dp * cp)."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.chunks

    @property
    def dp_shard(self) -> int:
        """Degree of the mesh axis dp_shard: the shard group without cp."""
        return max(1, self.shard // self.cp) if self.zero else 1

    @property
    def dp_replicate(self) -> int:
        """Degree of the mesh axis dp_replicate."""
        return self.dp // self.dp_shard

    @property
    def cut_layers(self) -> tuple[int, ...]:
        """Layers per stage, once ``cut`` is written as numbers; empty before."""
        return tuple(int(n) for n in self.cut.split("/")) if "/" in self.cut or self.cut.isdigit() else ()

    def with_cut(self, layers: tuple[int, ...]) -> Layout:
        """Return this layout with its cut written as layers per stage."""
        return replace(self, cut="/".join(str(n) for n in layers))

    def as_dict(self) -> dict[str, Any]:
        """Return every key of the layout text with its value (``sp`` as on/off, ``order`` as text)."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["sp"] = "on" if self.sp else "off"
        out["order"] = "/".join(self.order)
        return out

    def text(self) -> str:
        """Return the shortest layout text that reads back as this layout; ``precision`` is always written."""
        default = Layout().as_dict() | {
            "shard": self.dp * self.cp if self.zero else 1,
            "sp": "on" if self.tp > 1 else "off",
            "chunks": default_chunks(self.schedule),
        }
        written = self.as_dict().items()
        return ",".join(f"{k}={v}" for k, v in written if k in ("dp", "precision") or v != default[k])


def default_chunks(schedule: str) -> int:
    """Return the stages per pipeline rank that ``schedule`` has when none is written."""
    return 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
