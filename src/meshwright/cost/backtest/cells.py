"""Cells of a row as numbers: degrees, batch, sharding, policy and measurements, or the reason why they cannot be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from meshwright.cluster.catalogue import device_rows
from meshwright.cost.backtest.presets import Ran, known_vocabulary
from meshwright.cost.backtest.table import LOOSE, Row

GIB: Final = 2**30
NVL_DOMAIN: Final = 72
"""Devices of one NVLink domain of GB200 and GB300."""


class Skip(Exception):
    """Why a row is not scored."""


def read_whole(row: Row, name: str, default: int | None = None) -> int:
    """Return a whole number of a cell, or ``default`` where it is empty."""
    value = row.number.get(name)
    if name in row.words and name not in LOOSE:
        raise Skip(f"{name} = {row.words[name][:40]!r} is not a number")
    if value is None:
        if default is None:
            raise Skip(f"{name} is not printed")
        return default
    if value != math.floor(value):
        raise Skip(f"{name} = {value:g} is not a whole number")
    return int(value)


def read_degree(row: Row, name: str) -> int:
    """Return a degree: 1 where the cell is empty."""
    value = read_whole(row, name, 1)
    if value < 1:
        raise Skip(f"{name} = {value} is below 1")
    return value


def spec_link(gpu: str) -> float:
    """Return the link between devices of a node in GB/s per direction, or 0 where the table has none."""
    value = device_rows().get(gpu, {}).get("nvlink_gb_per_s_per_direction", "")
    return float(value) if value else 0.0


def read_head_dim(arch: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Return the size of a query head."""
    if "nope_dim" in arch:
        return int(arch["nope_dim"] + arch["rope_dim"])
    if "head_dim" in arch:
        return int(arch["head_dim"])
    if hidden % heads:
        raise Skip(f"hidden {hidden} is not a multiple of {heads} heads, and the head size is not printed")
    return hidden // heads


def read_dense_layers(arch: Mapping[str, Any], layers: int) -> int:
    """Return dense layers of a mixture: those of the whole model, the first one in a model cut down in depth."""
    if layers < int(arch.get("source_layers", layers)):
        return min(1, int(arch.get("dense_layers", 0)))
    return min(int(arch.get("dense_layers", 0)), layers)


def read_ffn(row: Row, hidden: int) -> int:
    """Return the feed-forward's width."""
    if "ffn_hidden" in row.number:
        return read_whole(row, "ffn_hidden")
    if row.number.get("gated_mlp", 1.0) == 0:
        return 4 * hidden
    raise Skip("ffn_hidden is not printed")


def read_vocab(row: Row) -> int:
    """Return the vocabulary, a known family's where it is not printed."""
    size = read_whole(row, "vocab", 0) or known_vocabulary(row.text["model_name"])
    if not size:
        raise Skip("the vocabulary is not printed")
    return size


def read_chunks(row: Row, layers: int, pp: int, what: Ran) -> int:
    """Return the stages per pipeline rank."""
    if "vpp" in row.words:
        if "layers-per-stage" not in row.words["vpp"]:
            raise Skip(f"vpp = {row.words['vpp'][:40]!r} is not a number")
        return max(1, -(-(layers + (2 if what.spare_ends else 0)) // pp))
    value = max(1, read_whole(row, "vpp", 1))
    return value if pp > 1 else 1


def read_batch(row: Row, what: Ran, dp: int, pp: int) -> tuple[int, int, int]:
    """Return (micro-batch, micro-batches per step, sequences per step), two of which give the third."""
    micro = read_whole(row, "micro_batch", 0)
    steps = read_whole(row, "grad_accum", 0)
    total = read_whole(row, "global_batch_sequences", 0)
    if not micro and what.name == "torchtitan" and pp > 1 and total:
        micro = 1  # its pipeline cuts the local batch into single sequences
    if not total and micro and steps:
        total = micro * steps * dp
    if not steps and micro and total:
        steps = total // (micro * dp)
    if not micro and steps and total:
        micro = total // (steps * dp)
    if not (micro and steps and total):
        raise Skip("micro-batch, accumulation and global batch: two of three are needed")
    if micro * steps * dp != total:
        if steps > 1 and (total // dp) % micro == 0 and total % dp == 0:
            steps = total // dp // micro  # accumulation printed in another sense: the batch decides
        else:
            raise Skip(f"micro-batch {micro} x accumulation {steps} x dp {dp} is not {total} sequences")
    return micro, steps, total


def read_node(row: Row, gpu: str, devices: int) -> int:
    """Return how many devices share the inner link."""
    per_node = read_whole(row, "gpus_per_node", 8) or 8
    if gpu.startswith(("GB200", "GB300")):
        return min(devices, NVL_DOMAIN)
    return min(devices, per_node)


def read_sharding(words: str, what: Ran, ranks: int, notes: str) -> tuple[int, int]:
    """Return (stage, ranks that share the state)."""
    low = words.lower()
    printed = re.search(r"FSDP degree (\d+) printed", notes)
    if printed and "fsdp" in low:
        return 3, min(ranks, int(printed.group(1)))
    group = re.search(r"groups of (\d+)", low)
    if "shard_grad_op" in low or "zero-2" in low or "no reshard" in low:
        return 2, ranks
    if "fsdp" in low or "zero-3" in low or "gemini" in low:
        in_node = "hsdp" in low or "in node" in low
        return 3, min(ranks, 8) if in_node else ranks
    if "zero-1" in low or "distributed optimizer" in low or "sharded over dp" in low:
        return 1, min(ranks, int(group.group(1))) if group else ranks
    if not low and what.name in ("megatron-lm-2021", "megatron-lm", "zero-bubble"):
        return 0, 1
    if low in ("none", "ddp", "none (ddp)"):
        return 0, 1
    if not low and what.name in (
        "megatron-bridge",
        "nemo",
        "megatron-core",
        "megatron-swift",
        "megascale-moe",
    ):
        return 1, ranks
    if not low and what.name in ("kempner", "torchtitan", "automodel"):
        return 3, ranks
    raise Skip(f"sharding of state {words!r} is not known")


def read_recompute(words: str, what: Ran, notes: str) -> str:
    """Return the recompute policy."""
    low = words.lower()
    if what.recompute == "every-second-layer":
        return "every-second-layer"
    if low.startswith("full"):
        return "full"
    if low.startswith("selective"):
        if "[" in low:
            return "modules"
        return what.recompute
    if low.startswith("minimal"):
        return "minimal"
    if low == "none":
        return "none"
    if low:
        return "modules"
    if what.unprinted_recompute:
        return what.unprinted_recompute
    raise Skip("whether activations are recomputed is not printed")


def read_offload(words: str) -> str:
    """Return what rests in host memory."""
    low = words.lower()
    if "optimizer" in low:
        return "optimizer"
    if "activations" in low:
        return "activations"
    return "none"


def read_step(row: Row, sequences: int, seq_len: int, devices: int) -> tuple[float | None, str]:
    """Return (seconds of a step, why there are none)."""
    rate, step = row.number.get("tokens_per_s_per_gpu"), row.number.get("step_time_s")
    if "use memory only" in row.text["notes"]:
        return (step, "") if step else (None, "the printed rate counts time between steps")
    if "not for speed" in row.text["notes"]:
        return None, "a launch-bound test model, for memory only"
    from_rate = sequences * seq_len / (rate * devices) if rate else None
    if step and from_rate and not 0.8 < step / from_rate < 1.25:
        raise Skip(f"step time {step:g} s and the token rate ({from_rate:.4g} s) contradict each other")
    value = step or from_rate
    return (value, "") if value else (None, "only FLOP/s or MFU are printed")


def read_memory(row: Row, what: Ran) -> tuple[float | None, str]:
    """Return (bytes at the peak, why there are none)."""
    value = row.number.get("peak_mem_gb")
    if not value:
        return None, "no peak printed"
    notes = row.text["notes"]
    unit = re.search(r"mem_unit=(GiB|GB)", notes)
    if unit is None:
        return None, "the unit of the peak is not printed"
    return value * (GIB if unit.group(1) == "GiB" else 1e9), ""
