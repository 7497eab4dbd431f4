"""Rows to cases: what each row ran, or why it cannot be scored; units that cannot be right are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_seconds
from meshwright.cluster.catalogue import device, device_names
from meshwright.cost.backtest.case import GIB, Case, Skipped
from meshwright.cost.backtest.cells import (
    Skip,
    read_batch,
    read_chunks,
    read_degree,
    read_dense_layers,
    read_ffn,
    read_head_dim,
    read_memory,
    read_node,
    read_offload,
    read_recompute,
    read_sharding,
    read_step,
    read_vocab,
    read_whole,
    spec_link,
)
from meshwright.cost.backtest.presets import known_architecture, ran
from meshwright.cost.backtest.shapes import model_flops_per_token
from meshwright.cost.backtest.table import Row
from meshwright.cost.kernels import generation

SLOWEST: Final = 1.5e-3
"""No run is slower than this share of its device's dense peak; milliseconds in a column of seconds are."""
SHARE_WRONG: Final = 0.5
"""Share of impossible measurements from which a whole file is refused."""
INTRA_GB_PER_S: Final = {"ampere": 300.0, "hopper": 450.0, "blackwell": 900.0, "volta": 150.0, "cdna": 350.0}
INTER_GB_PER_S: Final = {"ampere": 25.0, "hopper": 50.0, "blackwell": 50.0, "volta": 12.5, "cdna": 25.0}
"""GB/s per device and direction where a row prints none: NVLink of the generation, and one DGX network card per GPU."""


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
    dims = {name: read_whole(row, name) for name in ("layers", "hidden", "heads", "seq_len")}
    if any(value < 1 for value in dims.values()):
        raise Skip("a model dim is 0")
    notes = f"{text['notes']}; {text['framework']}"
    what = ran(text["framework"], gpu, notes, n.get("compile", 0) >= 1)
    if what.name == "unknown":
        raise Skip(f"framework {text['framework'] or '(not printed)'}: no preset says what ran")
    if what.changes_model:
        raise Skip("the framework changes the model (parallel block, sliding window)")
    arch = dict(known_architecture(text["model_name"]))
    degree = {name: read_degree(row, name) for name in ("tp", "pp", "cp", "ep")}
    devices = read_whole(row, "n_gpus")
    inner = degree["tp"] * degree["pp"] * degree["cp"]
    dp = read_whole(row, "dp", max(1, devices // inner))
    if dp * inner != devices:
        if dp * degree["tp"] * degree["pp"] == devices:  # dp counts the context ranks
            dp //= degree["cp"]
        if dp < 1 or dp * inner != devices:
            raise Skip(
                f"dp {dp} x tp {degree['tp']} x pp {degree['pp']} x cp {degree['cp']} is not {devices} devices"
            )
    batch = read_batch(row, what, dp, degree["pp"])
    node = read_node(row, gpu, devices)
    family = generation(gpu)
    row_nvlink = n.get("intra_bw") or spec_link(gpu) or INTRA_GB_PER_S.get(family, 32.0)
    stage, shard = read_sharding(text["zero_stage_or_fsdp"], what, dp * degree["cp"], notes)
    step, time_why = read_step(row, batch[2], dims["seq_len"], devices)
    memory, memory_why = read_memory(row, what)
    if needs_measurement and step is None and memory is None:
        raise Skip("no time and no memory that can be compared" + (f": {time_why}" if time_why else ""))
    experts = read_whole(row, "moe_experts", 0)
    ffn = read_ffn(row, dims["hidden"])
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
        kv_heads=read_whole(row, "kv_heads", heads) or heads,
        head_dim=read_head_dim(arch, dims["hidden"], heads),
        value_dim=int(arch.get("value_dim", 0)) or read_head_dim(arch, dims["hidden"], heads),
        vocab=read_vocab(row),
        seq=dims["seq_len"],
        tied=n.get("tied_embeddings", 0) >= 1,
        gated=n.get("gated_mlp", 0) >= 1,
        experts=experts,
        topk=read_whole(row, "moe_topk", 1) if experts else 0,
        shared_ffn=ffn * int(arch.get("shared_experts", 0)) if experts else 0,
        dense_layers=read_dense_layers(arch, dims["layers"]) if experts else 0,
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
        vpp=read_chunks(row, dims["layers"], degree["pp"], what),
        cp=degree["cp"],
        ep=degree["ep"] if experts else 1,
        dp=dp,
        stage=stage,
        shard=shard,
        recompute=read_recompute(text.get("activation_recompute", ""), what, notes),
        offload=read_offload(text["offload"]),
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
