"""A base in 4 bits without bitsandbytes: bytes, borders of blocks, refusals with the nearest layout, prices, search."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster.load import read_cluster
from meshwright.cost.estimate import estimate
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import (
    adapted,
    adapter_from_dict,
    adapter_to_dict,
    make_adapter,
    without_adapter,
)
from meshwright.model.quantised import (
    BLOCK,
    bits_per_weight,
    cut_on_blocks,
    held_bytes,
    quantised_tensors,
    row_bytes,
)
from meshwright.model.read_hf import read_model
from meshwright.program.derive import derive
from meshwright.program.make import make_plan
from meshwright.program.plan_file import plan_from_dict, plan_to_dict
from meshwright.schedule.generate import generate
from meshwright.search.legal import tensor_degrees
from meshwright.search.search import search

TINY = "recipes/models/tiny-llama"
QLORA = make_adapter("qlora", 16, None, ())


def problems(model: str, layout: str) -> list[tuple[str, str]]:
    spec = adapted(read_model(model), QLORA)
    parsed = parse_layout(layout)
    batch = derive_batch(parsed, 8, 64)
    return [(p.code, f"{p.found} {p.do}") for p in check(spec, parsed, batch) if p.severity == "error"]


def test_bytes_of_a_matrix() -> None:
    assert held_bytes(64, double=False) == 32 + 4
    assert held_bytes(65, double=False) == 33 + 8
    assert held_bytes(64 * 257, double=True) == 32 * 257 + 257 + 8 + 1028
    large = 4096 * 11008
    assert bits_per_weight(False) == 4.5
    assert bits_per_weight(True) == 4.126953125
    for double in (False, True):
        assert held_bytes(large, double) * 8 / large == pytest.approx(bits_per_weight(double), rel=1e-4)


def test_a_cut_is_on_borders_exactly_when_no_block_is_shared() -> None:
    """Against blocks that are counted out, weight by weight."""
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        rows, columns = draw.choice((1, 2, 6, 8, 32)), draw.choice((8, 32, 48, 64, 128, 192, 96))
        blocks = np.arange(rows * columns).reshape(rows, columns) // BLOCK
        dim = draw.randrange(2)
        size = blocks.shape[dim]
        at = sorted(draw.sample(range(size + 1), 2))
        if draw.random() < 0.5:
            at = [a // 32 * 32 for a in at]
        start, length = at[0], at[1] - at[0]
        if not length:
            continue
        part = blocks.take(range(start, start + length), axis=dim)
        rest = np.delete(blocks, range(start, start + length), axis=dim)
        apart = not set(part.flat) & set(rest.flat)
        on_borders = cut_on_blocks((rows, columns), dim, [(start, length)])
        if on_borders:
            assert apart, (rows, columns, dim, start, length)
        elif apart and rest.size and (rows * columns) % BLOCK == 0:
            # blocks that run over the end of a row cannot be cut inside rows, even where one part is all there is
            assert (dim, columns % BLOCK > 0) == (1, True), (rows, columns, dim, start, length)
        seen.add((on_borders, apart))
    assert {(True, True), (False, False)} <= seen


def test_matrices_of_the_blocks_are_in_four_bits_and_nothing_else() -> None:
    spec = adapted(read_model(TINY), QLORA)
    held = quantised_tensors(spec)
    assert len(held) == 7 * spec.num_layers
    assert {t.role for t in held} == {"attention_in", "attention_out", "mlp_in", "mlp_out"}
    only = adapted(read_model(TINY), make_adapter("qlora", 4, None, ("q_proj",)))
    assert len(quantised_tensors(only)) == 7 * spec.num_layers  # those without an adapter too
    assert without_adapter(spec) == read_model(TINY)
    assert not quantised_tensors(adapted(read_model(TINY), make_adapter("lora", 4, None, ())))


def test_a_plan_keeps_the_kind_of_base() -> None:
    spec = adapted(read_model(TINY), make_adapter("qlora", 4, 8.0, ("q_proj",), "fp4", False))
    plan = make_plan(spec, parse_layout("dp=2,zero=1"), 4, 32, TINY)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert adapter_from_dict(adapter_to_dict(QLORA)) == QLORA
    assert plan.adapter is not None
    other = make_plan(adapted(read_model(TINY), replace(plan.adapter, double=True)), plan.layout, 4, 32, TINY)
    assert other.hash != plan.hash


@pytest.mark.parametrize(
    "layout",
    [
        "dp=1",
        "dp=2",
        "dp=2,zero=1",
        "dp=4,zero=2",
        "pp=2",
        "tp=2,dp=2",
        "cp=2",
        "dp=2,recompute=full,offload=optimizer",
    ],
)
def test_what_runs(layout: str) -> None:
    assert problems(TINY, layout) == []


@pytest.mark.parametrize(
    ("model", "layout", "code", "says"),
    [
        (TINY, "tp=4,kv_heads=replicate,pp=2", "E282", "in parts of 32 tp = 2; the other 2 as dp or pp"),
        (TINY, "dp=2,compile=blocks", "E283", "compile=off"),
        (TINY, "dp=2,zero=1,offload=parameters", "E283", "offload=optimizer | none"),
        ("recipes/models/tiny-mixtral", "dp=2", "E284", "of its experts"),
    ],
)
def test_what_is_refused_and_the_nearest_that_runs(model: str, layout: str, code: str, says: str) -> None:
    found = problems(model, layout)
    assert [c for c, _ in found] == [code], found
    assert says in found[0][1]


def test_nothing_gathers_or_reduces_the_base() -> None:
    spec = adapted(read_model(TINY), QLORA)
    layout = parse_layout("dp=2,zero=1,cut=6,precision=fp32")
    batch = derive_batch(layout, 4, 32)
    program = derive(spec, layout, batch, generate("1f1b", 1, batch.accumulation), 0)
    gathered = sum(c.num_bytes for c in program.collectives if c.kind == "all_gather")
    rest = spec.num_parameters - sum(t.numel for t in quantised_tensors(spec))
    assert 4 * rest <= gathered < 4 * rest * 1.01


def test_stage_three_gathers_the_packed_rows_with_their_blocks() -> None:
    """Twice a micro-batch, but not for the backward of the frozen embedding's side; bytes are cut anywhere."""
    spec = adapted(read_model(TINY), QLORA)
    assert spec.adapter is not None
    layout = parse_layout("dp=3,zero=3,cut=6,precision=fp32,micro_batch=2")
    batch = derive_batch(layout, 6, 32)
    plain = adapted(read_model(TINY), make_adapter("lora", 16, None, ()))
    frozen = [t for t in plain.tensors() if t.name in {q.name for q in quantised_tensors(spec)}]
    found = []
    for one in (spec, plain):
        program = derive(one, layout, batch, generate("1f1b", 1, batch.accumulation), 0)
        found.append(sum(c.num_bytes for c in program.collectives if c.kind == "all_gather"))
    rows = sum(-(-row_bytes(t.numel, t.numel, True) // 3) * 3 for t in frozen)
    whole = sum(4 * -(-t.shape[0] // 3) * 3 * t.shape[1] for t in frozen)
    assert found[1] - found[0] == 2 * (whole - rows)


def test_stage_three_shares_the_base_in_the_prediction() -> None:
    layout = "dp=8,precision=bf16,recompute=full,loss=chunked,micro_batch=1"
    spec = adapted(read_model("llama-2-70b"), QLORA)
    cluster = read_cluster("a100-40gb-x8", 8)
    two, three = (
        estimate(spec, parse_layout(f"{layout},zero={zero}"), cluster, 2048, 8)["predicted"]
        for zero in (2, 3)
    )
    packed = sum(held_bytes(t.numel, True) for t in quantised_tensors(spec))
    rest = spec.num_parameters - sum(t.numel for t in quantised_tensors(spec))
    assert two["memory_bytes"]["parameters"] == pytest.approx(packed + 4 * rest / 8, rel=1e-6)
    assert three["memory_bytes"]["parameters"] == pytest.approx((packed + 4 * rest) / 8, rel=1e-6)
    assert three["step_time_s"] > two["step_time_s"]
    pair = parse_layout(f"{layout},zero=3".replace("dp=8", "dp=2"))
    found = estimate(spec, pair, read_cluster("rtx-4090-x8", 2), 1024, 8)
    assert found["predicted"]["peak_memory_bytes"] / 2**30 == pytest.approx(24.0, abs=0.7)  # as the pages say


def priced(kind: str, layout: str, double: bool = True):
    spec = adapted(read_model("llama-2-7b"), make_adapter(kind, 16, None, (), "nf4", double))  # pyright: ignore[reportArgumentType]
    return spec, estimate(spec, parse_layout(layout), read_cluster("rtx-4090-x8", 1), 2048, 8)


@pytest.mark.parametrize("double", [True, False])
def test_seven_billion_parameters_fit_on_one_card(double: bool) -> None:
    """4.127 (4.5) bits for each of 6.48e9 weights of the blocks; embedding, head and factors in float32."""
    layout = "dp=1,precision=bf16,recompute=full,loss=chunked,micro_batch=1"
    spec, four = priced("qlora", layout, double)
    _, plain = priced("lora", layout)
    memory = four["predicted"]["memory_bytes"]
    held = quantised_tensors(spec)
    packed = sum(held_bytes(t.numel, double) for t in held)
    rest = spec.num_parameters - sum(t.numel for t in held)
    assert memory["parameters"] == packed + 4 * rest
    assert packed * 8 / sum(t.numel for t in held) == pytest.approx(4.127 if double else 4.5, abs=0.002)
    assert (four["fits"], plain["fits"]) == (True, False)
    assert four["predicted"]["peak_memory_bytes"] / 2**30 == pytest.approx(7.2, abs=0.5)  # as the pages say
    same = ("gradients", "optimizer", "logits", "outside_allocator")
    assert all(memory[k] == plain["predicted"]["memory_bytes"][k] for k in same)
    # one matrix whole while it is multiplied with, of 11008 x 4096 in bfloat16
    more = memory["working"] - plain["predicted"]["memory_bytes"]["working"]
    assert more >= 2 * 11008 * 4096 * 0.99
    assert four["predicted"]["step_time_s"] > plain["predicted"]["step_time_s"]


def test_a_search_proposes_only_what_runs() -> None:
    spec = adapted(read_model("llama-2-13b"), QLORA)
    cluster = read_cluster("rtx-4090-x8", 4)
    found = search(spec, cluster, 2048, 16)
    assert found.plans
    for plan in found.plans:
        batch = derive_batch(plan.layout, 16, 2048)
        assert not [p for p in check(spec, plan.layout, batch, cluster) if p.severity == "error"]
    assert tensor_degrees(adapted(read_model(TINY), QLORA), (1, 2, 4), None).tolist() == [True, True, False]
    assert tensor_degrees(read_model(TINY), (1, 2, 4), None).tolist() == [True, True, True]
