"""The rules as columns: which combinations of degrees and policies are legal, without asking one layout at a time.

These masks say what ``layout.check`` says (a test compares them over random layouts); each layout that a search
returns is asked of ``layout.check`` itself as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.layout.batch import MOST_ACTIONS
from meshwright.layout.check import check_built
from meshwright.layout.check_quantised import cut_inside_blocks
from meshwright.layout.layout import Layout
from meshwright.model.quantised import is_quantised
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import SPLIT, fewest_micro_batches

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def tensor_degrees(spec: ModelSpec, degrees: tuple[int, ...], kv_heads: str | None) -> Flags:
    """Return which tensor degrees divide the heads and widths; key/value heads may be replicated unless pinned."""
    widths = {b.ffn_size for b in spec.blocks if b.kind == "dense"}
    if spec.moe is not None:
        widths |= {spec.moe.ffn_size, spec.moe.shared_ffn_size}

    def good(tp: int) -> bool:
        if tp == 1:
            return True
        heads = spec.num_heads % tp == 0 and all(w % tp == 0 for w in widths if w)
        if heads and cut_inside_blocks(spec, tp) is not None:
            return False
        if not heads or spec.attention.kind != "gqa":
            return heads
        kv = spec.num_kv_heads
        return kv % tp == 0 or (tp % kv == 0 and kv_heads != "split")

    return np.array([good(tp) for tp in degrees])


def sequences(spec: ModelSpec, seq_len: int, tp: Ints, cp: Ints, sp: Flags, ulysses: Flags) -> Flags:
    """Return where a sequence divides over tp (with sp), and the query heads over an all-to-all cp."""
    if any(t.role == "position" for t in spec.embedding) and 0 < spec.max_position_embeddings < seq_len:
        return np.zeros(len(tp), dtype=np.bool_)
    # with cp a sequence is padded to what its ranks divide
    out = ~(sp & (tp == 1)) & (~sp | (tp == 1) | (cp > 1) | (seq_len % tp == 0))
    local = spec.num_heads // tp
    return out & ~((cp > 1) & ulysses & (spec.num_heads % tp == 0) & (local % cp > 0))


def experts(spec: ModelSpec, ep: Ints, room: Ints) -> Flags:
    """Return where the expert degree divides dp * cp and the experts."""
    if spec.moe is None:
        return ep == 1
    return (ep == 1) | ((room % ep == 0) & (spec.moe.num_experts % ep == 0))


def expert_shards(layout: Layout, zero: int, shard: int, order: tuple[str, ...]) -> bool:
    """Return whether the runtime runs spread experts with a shard group: ep cuts it, or takes in whole groups."""
    if layout.ep == 1 or zero == 0 or shard == 1:
        return True
    outside = layout.cp > 1 and order.index("cp") > order.index("dp")
    return shard % layout.ep == 0 or (layout.ep % shard == 0 and not outside)


def micro_batches(schedule: str, pp: int, chunks: int, m: Ints) -> Flags:
    """Return where a schedule can run this many micro-batches, and a step has few enough actions."""
    out = m <= MOST_ACTIONS // (pp * chunks)
    if pp > 1 and not schedule.startswith("@"):
        least, step = fewest_micro_batches(schedule, pp)
        out &= (m >= least) & (m % step == 0)
    return out


def shard_allowed(zero: int, schedule: str, pp: int) -> bool:
    """Return whether a schedule runs under a ZeRO stage: halves of a backward need the gathered parameters."""
    return not (zero == 3 and pp > 1 and schedule in SPLIT)


def runs(spec: ModelSpec, layout: Layout) -> bool:
    """Return whether the runtime runs a layout, as far as rules about what is built go."""
    return not any(p.severity == "error" for p in check_built(layout, spec))


def tensor_kind(spec: ModelSpec, tp: int) -> int:
    """Return a number of tensor degrees that are alike to ``runs``: 0 for one rank, 1 that run, 2 that do not.

    Matrices in 4 bits are cut at whole blocks, so that there each degree is of its own.
    """
    if tp == 1:
        return 0
    if is_quantised(spec):
        return tp
    return 1 if runs(spec, Layout(tp=tp)) else 2
