"""One measured run as numbers: its model, devices, layout and what ran; or the reason why it cannot be scored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_seconds
from meshwright.cluster.catalogue import device, device_names
from meshwright.cluster.spec import DeviceSpec
from meshwright.cost.backtest.presets import Ran, known_architecture, known_vocabulary, ran
from meshwright.cost.backtest.shapes import model_flops_per_token
from meshwright.cost.backtest.table import Row
from meshwright.cost.kernels import generation

GIB: Final = 2**30
USABLE: Final = 0.985
"""Share of the printed memory, counted in GiB, that a process can allocate: 79.1 of an A100's "80 GB" are there."""
SLOWEST: Final = 1.5e-3
"""No run is slower than this share of its device's dense peak; milliseconds in a column of seconds are."""
SHARE_WRONG: Final = 0.5
"""Share of impossible measurements from which a whole file is refused."""
INTRA_GB_PER_S: Final = {"ampere": 300.0, "hopper": 450.0, "blackwell": 900.0, "volta": 150.0, "cdna": 350.0}
INTER_GB_PER_S: Final = {"ampere": 25.0, "hopper": 50.0, "blackwell": 50.0, "volta": 12.5, "cdna": 25.0}
"""GB/s per device and direction where a row prints none: NVLink of the generation, and one DGX network card per GPU."""
NVL_DOMAIN: Final = 72
"""Devices of one NVLink domain of GB200 and GB300."""


class Skip(Exception):
    """Why a row is not scored."""


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
        """Bytes that a process can allocate on the device."""
        return self.device.memory.value / 1e9 * GIB * USABLE

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


def resolve(rows: Sequence[Row], *, needs_measurement: bool = True) -> tuple[list[Case], list[Skipped]]:
    """Return the rows that can be predicted, and the others with their reasons.

    Raises:
        MeshwrightError: E462 when half of the file's measurements cannot be in their column's unit.
    """
    cases: list[Case] = []
    skipped: list[Skipped] = []
    wrong: list[Problem] = []
    measured = 0
    for row in rows:
        try:
            case = _care(_case(row, needs_measurement))
            measured += 1
            told = _unit_problem(case, row)
            if told is not None:
                wrong.append(told)
                raise Skip(f"unit: {told.found}")
            cases.append(case)
        except Skip as why:
            skipped.append(Skipped(row.id, row.source, str(why)))
    if needs_measurement and wrong and len(wrong) >= SHARE_WRONG * measured:
        raise MeshwrightError(wrong[:12])
    return cases, skipped


@cache
def _care_rules() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((files("meshwright.cost") / "data" / "care.json").read_text(encoding="utf-8")))


def _care(case: Case) -> Case:
    """Return the case as the table of rows to handle with care says, or raise its reason."""
    prefix = case.id.rsplit("-", 1)[0]
    for rule in _care_rules():
        named = case.id in rule.get("ids", ()) or rule.get("prefix") == prefix
        if not named or case.n_gpus > rule.get("most_gpus", case.n_gpus):
            continue
        treat, why = rule["treat"], rule["why"]
        if treat == "composed":
            case = replace(case, composed=True)
        elif treat == "time-only":
            case = replace(case, memory=None, memory_why=why)
        elif treat == "memory-only":
            case = replace(case, step_s=None, time_why=why)
        else:
            raise Skip(why)
    return case


def _unit_problem(case: Case, row: Row) -> Problem | None:
    label = f"line {row.line} ({row.id})"
    if case.step_s is not None:
        peak = max(f.value for f in case.device.peak_flops.values())
        work = model_flops_per_token(case) * case.global_batch * case.seq / case.n_gpus
        share = work / case.step_s / peak
        column = "step_time_s" if "step_time_s" in row.number else "tokens_per_s_per_gpu"
        if share > 1.02 or share < SLOWEST:
            shown = row.number[column]
            hint = "milliseconds in a column of seconds" if share * 1e3 <= 1.02 else "another unit"
            if share > 1.02:
                hint = "tokens of the whole job, or another unit"
            found = f"{column} = {shown:g} means {format_seconds(case.step_s)} a step, "
            found += f"{100 * share:.3g} % of the peak: {hint}"
            return problem("E462", where=label, found=found)
    if case.memory is not None and case.memory > case.capacity * 1.02:
        shown = row.number["peak_mem_gb"]
        at_most = case.capacity / GIB
        hint = (
            "GB written as GiB"
            if case.memory / 1.0737 <= case.capacity * 1.02
            else "bytes, MiB or all devices"
        )
        found = (
            f"peak_mem_gb = {shown:g} is {case.memory / GIB:.1f} GiB on a device of {at_most:.1f} GiB: {hint}"
        )
        return problem("E462", where=label, found=found)
    return None


def _whole(row: Row, name: str, default: int | None = None) -> int:
    value = row.number.get(name)
    if value is None:
        if default is None:
            raise Skip(f"{name} is not printed")
        return default
    if value != math.floor(value):
        raise Skip(f"{name} = {value:g} is not a whole number")
    return int(value)


def _degree(row: Row, name: str) -> int:
    if name in row.words:
        raise Skip(f"{name} = {row.words[name][:40]!r} is not a number")
    value = _whole(row, name, 1)
    if value < 1:
        raise Skip(f"{name} = {value} is below 1")
    return value


def _case(row: Row, needs_measurement: bool) -> Case:
    n, text = row.number, row.text
    gpu = text["gpu"]
    if not gpu:
        raise Skip("the device is not printed")
    if gpu.startswith("TPU") or gpu not in device_names():
        raise Skip(f"device {gpu}: no rates, or another kind of machine")
    spec = device(gpu)
    if "bf16" not in spec.matmul_flops and "fp16" not in spec.matmul_flops:
        raise Skip(f"device {gpu}: no source prints its peak")
    if spec.memory_rate.value <= 0 or spec.memory.value <= 0:
        raise Skip(f"device {gpu}: memory size or rate not known")
    dims = {name: _whole(row, name) for name in ("layers", "hidden", "heads", "seq_len")}
    if any(value < 1 for value in dims.values()):
        raise Skip("a model dim is 0")
    notes = f"{text['notes']}; {text['framework']}"
    what = ran(text["framework"], gpu, notes, n.get("compile", 0) >= 1)
    if what.name == "unknown":
        raise Skip(f"framework {text['framework'] or '(not printed)'}: no preset says what ran")
    if what.changes_model:
        raise Skip("the framework changes the model (parallel block, sliding window)")
    arch = dict(known_architecture(text["model_name"]))
    degree = {name: _degree(row, name) for name in ("tp", "pp", "cp", "ep")}
    devices = _whole(row, "n_gpus")
    inner = degree["tp"] * degree["pp"] * degree["cp"]
    dp = _whole(row, "dp", max(1, devices // inner))
    if dp * inner != devices:
        if dp * degree["tp"] * degree["pp"] == devices:  # dp counts the context ranks
            dp //= degree["cp"]
        if dp < 1 or dp * inner != devices:
            raise Skip(
                f"dp {dp} x tp {degree['tp']} x pp {degree['pp']} x cp {degree['cp']} is not {devices} devices"
            )
    batch = _batch(row, what, dp, degree["pp"])
    node = _node(row, gpu, devices)
    family = generation(gpu)
    row_nvlink = n.get("intra_bw") or spec_link(gpu) or INTRA_GB_PER_S.get(family, 32.0)
    stage, shard = _sharding(text["zero_stage_or_fsdp"], what, dp * degree["cp"], notes)
    step, time_why = _step(row, batch[2], dims["seq_len"], devices)
    memory, memory_why = _memory(row, what)
    if needs_measurement and step is None and memory is None:
        raise Skip("no time and no memory that can be compared" + (f": {time_why}" if time_why else ""))
    experts = _whole(row, "moe_experts", 0)
    ffn = _ffn(row, dims["hidden"])
    heads = dims["heads"]
    return Case(
        id=row.id,
        source=row.source,
        model=text["model_name"],
        gpu=gpu,
        device=spec,
        ran=what,
        layers=dims["layers"],
        hidden=dims["hidden"],
        ffn=ffn,
        heads=heads,
        kv_heads=_whole(row, "kv_heads", heads) or heads,
        head_dim=_head_dim(arch, dims["hidden"], heads),
        value_dim=int(arch.get("value_dim", 0)) or _head_dim(arch, dims["hidden"], heads),
        vocab=_vocab(row),
        seq=dims["seq_len"],
        tied=n.get("tied_embeddings", 0) >= 1,
        gated=n.get("gated_mlp", 0) >= 1,
        experts=experts,
        topk=_whole(row, "moe_topk", 1) if experts else 0,
        shared_ffn=ffn * int(arch.get("shared_experts", 0)) if experts else 0,
        dense_layers=_dense_layers(arch, dims["layers"]) if experts else 0,
        dense_ffn=int(arch.get("dense_ffn", ffn)),
        q_lora=int(arch.get("q_lora", 0)),
        kv_lora=int(arch.get("kv_lora", 0)),
        rope_dim=int(arch.get("rope_dim", 0)),
        qk_norm=bool(arch.get("qk_norm", False)),
        lora="lora" in text["model_name"].lower(),
        n_gpus=devices,
        node=node,
        intra=row_nvlink * 1e9,
        inter=(n.get("inter_bw") or INTER_GB_PER_S.get(family, 12.5)) * 1e9,
        tp=degree["tp"],
        sp=degree["tp"] > 1 and n.get("sp", float(what.sequence_parallel)) >= 1,
        pp=degree["pp"],
        vpp=_chunks(row, dims["layers"], degree["pp"], what),
        cp=degree["cp"],
        ep=degree["ep"] if experts else 1,
        dp=dp,
        stage=stage,
        shard=shard,
        recompute=_recompute(text.get("activation_recompute", ""), what, notes),
        offload=_offload(text["offload"]),
        micro_batch=batch[0],
        accumulation=batch[1],
        global_batch=batch[2],
        fp8=n.get("float8", 0) >= 1 or "fp8" in text["dtype"] or "fp4" in text["dtype"],
        fp4="fp4" in text["dtype"],
        step_s=step,
        memory=memory,
        memory_why=memory_why,
        time_why=time_why,
    )


def spec_link(gpu: str) -> float:
    """Return the link between devices of a node in GB/s per direction, or 0 where the table has none."""
    from meshwright.cluster.catalogue import device_rows

    value = device_rows().get(gpu, {}).get("nvlink_gb_per_s_per_direction", "")
    return float(value) if value else 0.0


def _head_dim(arch: dict[str, Any], hidden: int, heads: int) -> int:
    if "nope_dim" in arch:
        return int(arch["nope_dim"] + arch["rope_dim"])
    if "head_dim" in arch:
        return int(arch["head_dim"])
    if hidden % heads:
        raise Skip(f"hidden {hidden} is not a multiple of {heads} heads, and the head size is not printed")
    return hidden // heads


def _dense_layers(arch: dict[str, Any], layers: int) -> int:
    """Return dense layers of a mixture: those of the whole model, the first one in a model cut down in depth."""
    if layers < int(arch.get("source_layers", layers)):
        return min(1, int(arch.get("dense_layers", 0)))
    return min(int(arch.get("dense_layers", 0)), layers)


def _ffn(row: Row, hidden: int) -> int:
    if "ffn_hidden" in row.number:
        return _whole(row, "ffn_hidden")
    if row.number.get("gated_mlp", 1.0) == 0:
        return 4 * hidden
    raise Skip("ffn_hidden is not printed")


def _vocab(row: Row) -> int:
    size = _whole(row, "vocab", 0) or known_vocabulary(row.text["model_name"])
    if not size:
        raise Skip("the vocabulary is not printed")
    return size


def _chunks(row: Row, layers: int, pp: int, what: Ran) -> int:
    if "vpp" in row.words:
        if "layers-per-stage" not in row.words["vpp"]:
            raise Skip(f"vpp = {row.words['vpp'][:40]!r} is not a number")
        return max(1, -(-(layers + (2 if what.spare_ends else 0)) // pp))
    value = max(1, _whole(row, "vpp", 1))
    return value if pp > 1 else 1


def _batch(row: Row, what: Ran, dp: int, pp: int) -> tuple[int, int, int]:
    """Return (micro-batch, micro-batches per step, sequences per step), two of which give the third."""
    micro = _whole(row, "micro_batch", 0)
    steps = _whole(row, "grad_accum", 0)
    total = _whole(row, "global_batch_sequences", 0)
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


def _node(row: Row, gpu: str, devices: int) -> int:
    per_node = _whole(row, "gpus_per_node", 8) or 8
    if gpu.startswith(("GB200", "GB300")):
        return min(devices, NVL_DOMAIN)
    return min(devices, per_node)


def _sharding(words: str, what: Ran, ranks: int, notes: str) -> tuple[int, int]:
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


def _recompute(words: str, what: Ran, notes: str) -> str:
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


def _offload(words: str) -> str:
    low = words.lower()
    if "optimizer" in low:
        return "optimizer"
    if "activations" in low:
        return "activations"
    return "none"


def _step(row: Row, sequences: int, seq_len: int, devices: int) -> tuple[float | None, str]:
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


def _memory(row: Row, what: Ran) -> tuple[float | None, str]:
    value = row.number.get("peak_mem_gb")
    if not value:
        return None, "no peak printed"
    notes = row.text["notes"]
    unit = re.search(r"mem_unit=(GiB|GB)", notes)
    if unit is None:
        return None, "the unit of the peak is not printed"
    return value * (GIB if unit.group(1) == "GiB" else 1e9), ""
