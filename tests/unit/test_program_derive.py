"""The step program: its collectives, bytes and volumes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import MeshwrightError
from meshwright.layout import built
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import coordinates, group
from meshwright.model.counts import flops_per_token
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.program.derive import derive, expected_ledger
from meshwright.program.make import make_plan
from meshwright.program.plan import Plan
from meshwright.program.step import Collective, Compute, StepProgram
from meshwright.program.units import stage_units
from meshwright.program.volume import data_parallel_volume, ring_volume
from meshwright.schedule.text import parse_schedule


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
    return spec_from_config(config | changes, "small")


def program(text: str, rank: int = 0, spec: ModelSpec | None = None, m: int = 2, **more: Any) -> StepProgram:
    spec = spec or llama()
    layout = parse_layout(text)
    plan = make_plan(spec, layout, layout.dp * layout.micro_batch * m, 16, "small", **more)
    return of(plan, spec, rank)


def of(plan: Plan, spec: ModelSpec, rank: int) -> StepProgram:
    schedule = parse_schedule(plan.schedule_text, plan.layout.schedule)
    return derive(spec, plan.layout, plan.batch, schedule, rank, plan.frozen)


def lines(found: StepProgram) -> dict[tuple[str, str], tuple[int, int]]:
    return {(x.kind, x.axis): (x.count, x.num_bytes) for x in expected_ledger(found)}


M = llama().num_parameters * 4


def test_one_rank_has_no_collective() -> None:
    found = program("", m=3)
    assert found.collectives == ()
    assert [op.what for op in found.ops if isinstance(op, Compute)] == ["forward", "backward"] * 3 + [
        "optimizer"
    ]


def test_zero0_reduces_each_unit_once() -> None:
    found = lines(program("dp=4,precision=fp32", m=8))
    assert found == {("all_reduce", "world"): (2, 32), ("all_reduce", "dp_replicate"): (5, M)}


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 3), (3, 6, 3)])
def test_zero_by_accumulation(zero: int, gathers: int, scatters: int) -> None:
    found = lines(program(f"dp=4,zero={zero},precision=fp32", m=3))
    assert found["all_gather", "dp_shard"] == (5 * gathers, M * gathers)
    assert found["reduce_scatter", "dp_shard"] == (5 * scatters, M * scatters)
    assert ("all_reduce", "dp_replicate") not in found


def test_dtypes_of_the_wire() -> None:
    found = lines(program("dp=4,zero=1,precision=bf16", m=1))
    assert found["all_gather", "dp_shard"][1] == M // 2
    assert found["reduce_scatter", "dp_shard"][1] == M
    found = lines(program("dp=4,zero=1,precision=fp64", m=1))
    assert found["all_gather", "dp_shard"][1] == found["reduce_scatter", "dp_shard"][1] == 2 * M


@pytest.mark.parametrize(
    ("text", "size"),
    [("precision=bf16", 4), ("precision=fp32", 4), ("precision=fp64", 8), ("dp=2,zero=1,precision=fp16", 2)],
)
def test_hidden_states_cross_stages_in_the_wire_dtype(text: str, size: int) -> None:
    found = lines(program(f"pp=2,micro_batch=2,{text}", m=3))
    assert found["send", "pp"] == found["recv", "pp"] == (3, 3 * 2 * 16 * 32 * size)


def test_hsdp_also_reduces_shards_over_replicas_once() -> None:
    found = lines(program("dp=4,zero=3,shard=2,precision=fp32", m=3))
    assert found["all_reduce", "dp_replicate"] == (5, M // 2)
    assert found["reduce_scatter", "dp_shard"] == (15, 3 * M)


def test_zero_over_one_rank_is_nothing() -> None:
    assert program("zero=3").collectives == ()
    assert set(lines(program("zero=3,pp=2"))) == {("all_reduce", "world"), ("send", "pp"), ("recv", "pp")}


def test_rows_are_padded_to_the_shard_group() -> None:
    spec = llama(vocab_size=101)
    found = lines(program("dp=4,zero=1,precision=fp32", spec=spec, m=1))
    padding = 2 * 3 * 32 * 4  # embedding and head: 101 rows to 104
    assert found["all_gather", "dp_shard"][1] == spec.num_parameters * 4 + padding


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    frozen = ("model.embed_tokens.weight", "model.layers.0.*")
    spec = llama()
    left = M - 128 * 32 * 4 - spec.blocks[0].num_parameters * 4
    found = lines(program("dp=4,zero=1,precision=fp32", m=1, frozen=frozen))
    assert found["all_gather", "dp_shard"] == (5, M)
    assert found["reduce_scatter", "dp_shard"] == (4, left)
    assert lines(program("dp=4,precision=fp32", frozen=frozen))["all_reduce", "dp_replicate"] == (4, left)


@pytest.mark.parametrize(("text", "rows"), [("pp=2", 101), ("pp=2,dp=4,zero=3", None), ("pp=2,dp=2", 101)])
def test_tied_embedding_is_summed_by_shard(text: str, rows: int | None) -> None:
    spec = llama(vocab_size=101, tie_word_embeddings=True)
    layout = parse_layout(text)
    total = 0
    for rank in group(layout, 0, "dp"):
        mine = [c for c in program(text, rank, spec).collectives if c.axis == "tied"]
        other = [c for c in program(text, rank + layout.dp, spec).collectives if c.axis == "tied"]
        assert [c.num_bytes for c in mine] == [c.num_bytes for c in other]
        assert mine[0].group_size == 2
        total += mine[0].num_bytes
    whole = 101 * 32 * 4
    assert total == (whole if rows is None else whole * layout.dp)


def test_no_tied_sum_in_the_middle_nor_when_frozen() -> None:
    spec = llama(tie_word_embeddings=True)
    assert "tied" not in {c.axis for c in program("pp=3", 1, spec, m=4).collectives}
    assert "tied" not in {c.axis for c in program("pp=2", 0, spec, frozen=("lm_head.weight",)).collectives}
    assert "tied" not in {c.axis for c in program("dp=2", 0, spec).collectives}


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("n", [2, 4])
def test_volume_is_2m_2m_2m_3m(zero: int, factor: int, n: int) -> None:
    found = data_parallel_volume(program(f"dp={n},zero={zero},precision=fp32", m=1))
    assert found == pytest.approx(factor * M * (n - 1) / n)
    assert found == pytest.approx(ring_volume(zero, n, M, M))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("m", [2, 5])
def test_volume_with_accumulation(zero: int, m: int) -> None:
    found = data_parallel_volume(program(f"dp=4,zero={zero},precision=bf16", m=m))
    gathered = M / 2 if zero else M
    assert found == pytest.approx(ring_volume(zero, 4, M, gathered, m))


def test_flops_sum_to_the_model() -> None:
    spec = llama()
    for text in ("pp=4,micro_batch=2", "micro_batch=2", "pp=2,micro_batch=2"):
        layout = parse_layout(text)
        total = sum(
            op.flops
            for rank in range(layout.world_size)
            for op in program(text, rank, m=4).ops
            if isinstance(op, Compute)
        )
        assert total == pytest.approx(flops_per_token(spec, 16).causal * 4 * 2 * 16)


def test_axes_without_described_collectives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = llama()
    monkeypatch.setattr(built, "AXES", frozenset({"dp", "pp"}))
    plan = make_plan(spec, parse_layout("cp=2"), 2, 16, "small", for_run=False)
    with pytest.raises(MeshwrightError, match="E250"):
        of(plan, spec, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, tuple[str, ...]]:
    dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    zero = draw(st.integers(0, 3))
    parts = [f"dp={dp},pp={pp},zero={zero}"]
    if zero and dp == 4:
        parts.append(f"shard={draw(st.sampled_from([2, 4]))}")
    parts.append("schedule=" + draw(st.sampled_from(["gpipe", "1f1b"])))
    parts.append("precision=" + draw(st.sampled_from(["fp32", "bf16", "fp64"])))
    frozen = draw(st.sampled_from([(), ("*embed*",), ("*norm*", "*.1.mlp*")]))
    return ",".join(parts), draw(st.integers(1, 5)), frozen


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_every_rank_agrees_with_the_ranks_it_meets(
    case: tuple[str, int, tuple[str, ...]], tied: bool
) -> None:
    text, m, frozen = case
    spec = llama(tie_word_embeddings=tied, vocab_size=101)
    layout = parse_layout(text)
    plan = make_plan(spec, layout, layout.dp * m, 16, "small", frozen)
    programs = [of(plan, spec, rank) for rank in range(layout.world_size)]
    for rank, mine in enumerate(programs):
        sent = [c for c in mine.collectives if c.kind == "send"]
        for c in sent:
            peer = group(layout, rank, "pp")[c.peer or 0]
            arrivals = [
                r
                for r in programs[peer].collectives
                if r.kind == "recv" and (r.micro_batch, r.what) == (c.micro_batch, c.what)
            ]
            assert [r.num_bytes for r in arrivals if r.peer == coordinates(layout, rank)["pp"]] == [
                c.num_bytes
            ]
        for axis in ("dp_shard", "dp_replicate", "world", "tied"):
            members = group(layout, rank, axis)
            mine_on = [(c.kind, c.num_bytes, c.what) for c in mine.collectives if c.axis == axis]
            for other in members:
                theirs = [
                    (c.kind, c.num_bytes, c.what) for c in programs[other].collectives if c.axis == axis
                ]
                assert theirs == mine_on
            assert all(c.group_size == len(members) for c in mine.collectives if c.axis == axis)
        stage = coordinates(layout, rank)["pp"]
        units = stage_units(spec, plan.layout, stage, frozen)
        reduced = {c.what for c in mine.collectives if "gradients of" in c.what and isinstance(c, Collective)}
        if layout.dp > 1:
            assert len({w.removeprefix("shard of the ") for w in reduced}) == sum(
                1 for u in units if u.trainable_tensors
            )
