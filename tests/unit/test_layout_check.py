"""The rules about layouts: each code, its numbers and its nearest legal choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.axes import LAYOUT_AXES
from meshwright.base.codes import layout as codes
from meshwright.base.errors import Kind, Problem
from meshwright.cluster.load import read_cluster
from meshwright.layout.batch import check_batch, derive_batch
from meshwright.layout.check import check, check_built, check_world
from meshwright.layout.cut import resolve
from meshwright.layout.layout import LOSS_CHUNKS, Layout, loss_chunks
from meshwright.layout.parse import CHOICES, complete, parse_layout
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 1001,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    }
    return spec_from_config(config | changes, "small")


def mixtral(**changes: Any) -> ModelSpec:
    return llama(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=8,
        num_experts_per_tok=2,
        **changes,
    )


def gpt2() -> ModelSpec:
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 48,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "n_ctx": 128,
        "vocab_size": 200,
    }
    return spec_from_config(config, "small-gpt2")


def found(
    text: str, spec: ModelSpec | None = None, batch: int = 0, seq: int = 64, **more: Any
) -> list[Problem]:
    layout = parse_layout(text)
    size = batch or layout.dp * layout.micro_batch * 2 * layout.num_stages
    more = {"for_run": False} | more
    return check(spec or llama(), layout, derive_batch(layout, size, seq), **more)


CASES = [
    ("tp=8,dp=1", {}, "E201", ("tp = 8", "12 query heads", "tp = 6 | 4 | 12")),
    ("tp=6", {}, "E202", ("4 key/value heads", "tp = 6", "tp = 4")),
    ("tp=12", {}, "W201", ("kv_heads=replicate", "3 ranks")),
    ("tp=12,kv_heads=replicate", {}, "W201", ("3 ranks",)),
    ("tp=3", {}, "E203", ("width 256", "tp = 2 | 4 | 1")),
    ("sp=on", {}, "E204", ("tp = 1",)),
    ("tp=4", {"seq": 66}, "E205", ("66", "64 | 68")),
    ("cp=4,dp=1", {"seq": 60}, "W260", ("60", "8 pieces", "56 | 64", "6.2 %")),
    ("cp=4,cp_style=ulysses", {"seq": 62}, "W260", ("4 pieces", "60 | 64")),
    (
        "cp=2",
        {"spec": mixtral(router_jitter_noise=0.1, attention_dropout=0.2), "for_run": True},
        "E260",
        ("router_jitter_noise 0.1",),
    ),
    (
        "cp=2",
        {"spec": replace(llama(), family="bloom"), "for_run": True},
        "E260",
        ("bloom", "one of llama"),
    ),
    ("cp=8,cp_style=ulysses", {}, "E207", ("12 query heads", "cp = 6 | 4 | 12")),
    ("dp=4,ep=3", {"spec": mixtral()}, "E208", ("4 * 1 = 4", "ep = 2 | 4")),
    ("dp=16,ep=16", {"spec": mixtral()}, "E209", ("8 experts", "ep = 8")),
    ("dp=2,ep=2", {}, "E210", ("small",)),
    (
        "dp=4,cp=2,ep=4,zero=2,shard=2,order=tp/dp/cp/pp",
        {"spec": mixtral(), "for_run": True},
        "E265",
        ("cp = 2 outside dp", "ep = 2 | 1"),
    ),
    ("dp=12,zero=1,shard=6,ep=4", {"spec": mixtral(), "for_run": True}, "E265", ("6 ranks", "ep = 2 | 1")),
    ("dp=2,ep=2", {"spec": replace(mixtral(), family="other"), "for_run": True}, "E266", ("family other",)),
    ("dp=2", {"spec": mixtral(intermediate_size=252)}, "W265", ("252 x 2 bytes", "no multiple of 16")),
    ("pp=9", {}, "E211", ("9 stages", "8 layers", "pp = 8")),
    ("pp=4,schedule=interleaved,chunks=3", {}, "E211", ("4 * 3", "12 stages", "pp = 2")),
    ("pp=2,cut=4/3", {}, "E212", ("sum to 7", "4/4")),
    ("dp=6,zero=3,shard=4", {}, "E213", ("shard = 4", "shard = 3 | 2 | 6")),
    ("dp=4,cp=2,zero=3,shard=1,micro_batch=1", {}, "E214", ("dp * cp = 8", "shard = 8")),
    ("dp=2,cp=4,zero=3,shard=2", {}, "E213", ("cp = 4 divides shard",)),
    ("pp=2,dp=2,zero=3,schedule=zbv", {}, "E216", ("zbv",)),
    ("dp=4,shard=2", {}, "E217", ("shard = 2",)),
    ("pp=2,schedule=interleaved", {"batch": 5}, "E218", ("accumulation = 5", "4 | 6")),
    ("dp=1", {"spec": gpt2(), "seq": 129}, "E219", ("129", "128")),
    ("dp=1", {"seq": 512}, "W219", ("512", "256")),
    ("pp=2,chunks=2", {}, "E223", ("chunks = 2", "1f1b")),
    ("pp=2,schedule=zbv,chunks=3", {}, "E223", ("chunks = 3", "chunks = 2")),
    ("dp=2,schedule=zbv", {}, "E223", ("pp = 1", "schedule=1f1b")),
    ("pp=5,schedule=zbv", {}, "E211", ("5 * 2", "10 stages", "pp = 4")),
    ("pp=4,schedule=dualpipev", {"batch": 4}, "E308", ("accumulation = 4", "global batch = 8")),
    ("tp=2", {}, "W202", ("1001", "501", "500 on the last")),
    ("zero=2", {}, "W203", ("zero = 2",)),
    ("dp=2,pp=2,zero=2", {}, "W204", ("4 micro-batches", "MiB")),
    ("pp=4", {"batch": 2}, "W301", ("2 micro-batches", "60 %", "3/5", "global batch = 4")),
]


@pytest.mark.parametrize(("text", "more", "code", "parts"), CASES, ids=[f"{c[2]}:{c[0]}" for c in CASES])
def test_each_rule(text: str, more: dict[str, Any], code: str, parts: tuple[str, ...]) -> None:
    hits = [p for p in found(text, **more) if p.code == code]
    assert hits, found(text, **more)
    told = "\n".join(p.text() for p in hits)
    for part in parts:
        assert part in told
    assert hits[0].severity == ("warning" if code.startswith("W") else "error")


@pytest.mark.parametrize(
    "text", ["dp=4", "dp=4,zero=3", "dp=4,zero=2,shard=2", "pp=4", "pp=8,schedule=gpipe", "dp=2,zero=1,pp=2"]
)
def test_what_runs_has_no_problem(text: str) -> None:
    assert found(text, for_run=True) == []


def test_h173_the_product_and_the_world_are_told() -> None:
    layout = parse_layout("dp=2,cp=2,tp=4")
    (hit,) = check_world(layout, 8)
    assert hit.code == "E215"
    assert "= 16 ranks" in hit.found
    assert "there are 8" in hit.found
    assert "tp = 2" in hit.do
    assert check_world(parse_layout("dp=2,cp=2,tp=2"), 8) == []
    # ep adds no ranks, and divides dp * cp
    spec = mixtral()
    errors = [
        p for p in check(spec, parse_layout("dp=2,cp=2,tp=2,ep=4"), None, for_run=False) if p.code[0] == "E"
    ]
    assert errors == []
    assert "E208" in {p.code for p in check(spec, parse_layout("dp=2,cp=2,tp=2,ep=8"), None, for_run=False)}


def test_h177_four_kv_heads_under_tp8_are_refused_or_replicated() -> None:
    spec = llama(num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    for text in ("tp=8", "tp=8,kv_heads=replicate"):
        assert not [p for p in found(text, spec) if p.code.startswith("E")]
        (hit,) = [p for p in found(text, spec) if p.code == "W201"]
        assert "each lives on 2 ranks" in hit.found
        assert resolve(spec, parse_layout(text), 64).kv_heads == "replicate"
    assert resolve(spec, parse_layout("tp=4"), 64).kv_heads == "split"


def test_h55_too_few_micro_batches_for_chunks_are_told() -> None:
    hits = {p.code: p for p in found("pp=2,schedule=interleaved", batch=2)}
    assert "2 micro-batches over 4 stages" in hits["W301"].found
    assert "global batch = 4" in hits["W301"].do


def test_h175_what_is_not_built_is_refused_and_named() -> None:
    layout = parse_layout(
        "tp=2,cp=2,ep=2,dp=2,pp=2,schedule=zbv,recompute=full,offload=parameters,loss=parallel,compile=blocks"
    )
    problems = check_built(layout, replace(llama(), family="another"))
    assert {p.kind for p in problems} == {Kind.CODE}
    where = sorted(f"layout.{k}" for k in ("tp", "cp", "compile", "pp", "schedule"))
    assert sorted(p.where for p in problems) == where
    assert {p.code for p in problems} == {"E252", "E253", "E260", "E279", "E290"}
    assert "offload=optimizer" in "\n".join(p.do for p in problems)


def test_experts_run_on_every_zero_stage_and_schedule() -> None:
    for text in (
        "dp=2,ep=2",
        "dp=4,ep=2,zero=1",
        "dp=4,ep=4,zero=3",
        "dp=8,ep=2,zero=2,shard=4",
        "dp=2,ep=2,pp=2,schedule=zbv,zero=1",
    ):
        assert check_built(parse_layout(text), mixtral()) == [], text
    for text in ("dp=4,ep=4", "dp=2,pp=2", "tp=2", "cp=2", "tp=2,cp=2,pp=2,schedule=zbv"):
        assert check_built(parse_layout(text), mixtral(output_router_logits=True)) == [], text
    # float64 is for proofs: no word on what torch's grouped product cannot do
    assert found("dp=2,precision=fp64", mixtral(intermediate_size=252)) == []


def test_key_value_heads_that_are_fused_with_queries_stay_whole() -> None:
    phi = llama(model_type="phi3", architectures=["Phi3ForCausalLM"])
    heads, kv = phi.num_heads, phi.num_kv_heads
    assert kv < heads
    assert check_built(parse_layout(f"tp={kv}"), phi) == []
    (split,) = check_built(parse_layout(f"tp={heads},kv_heads=replicate"), phi)
    assert (split.code, split.kind) == ("E253", Kind.CODE)
    assert f"{kv} key/value heads" in split.found
    assert f"tp = {kv}" in split.do
    assert check_built(parse_layout(f"tp={heads},kv_heads=replicate"), llama()) == []


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev", "interleaved"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_runs_with_every_schedule(schedule: str, recompute: str) -> None:
    assert check_built(parse_layout(f"pp=2,schedule={schedule},recompute={recompute}"), llama()) == []


def test_random_numbers_that_depend_on_the_layout_are_said() -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "vocab_size": 64,
    }
    opt = spec_from_config(
        {"model_type": "opt", "dropout": 0.1, "max_position_embeddings": 64, **sizes}, "opt"
    )
    assert [p.code for p in check(opt, parse_layout("dp=2"), None) if p.code == "W207"] == ["W207"]
    assert "W207" not in {p.code for p in check(opt, parse_layout("dp=1"), None)}
    assert "W207" not in {p.code for p in check(gpt2(), parse_layout("dp=2"), None)}


def test_a_parallel_loss_needs_a_tensor_axis() -> None:
    (alone,) = check_built(parse_layout("dp=2,loss=parallel"), llama())
    assert (alone.code, alone.kind) == ("E255", Kind.MATH)
    assert check_built(parse_layout("tp=2,loss=parallel"), llama()) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_every_precision_runs(precision: str) -> None:
    assert check_built(parse_layout(f"dp=2,precision={precision}")) == []


def test_cluster_rules() -> None:
    cluster = read_cluster("a100-40gb-x8", None)
    codes_of = [p.code for p in found("tp=4,dp=1", cluster=cluster)]
    assert "E215" in codes_of
    spec = llama(num_attention_heads=16, num_key_value_heads=16, hidden_size=128)
    two = read_cluster("a100-40gb-x8", 16)
    hits = {p.code: p for p in found("tp=16", spec, cluster=two)}
    assert "spans nodes 0, 1" in hits["W206"].found
    turned = {p.code: p for p in found("tp=8,dp=2,order=dp/cp/tp/pp", spec, cluster=two)}
    assert turned["W206"].do == "order=tp/cp/dp/pp"
    assert "W206" not in {p.code for p in found("tp=8,dp=2", spec, cluster=two)}


def test_every_layout_code_is_triggered_somewhere() -> None:
    here = {case[2] for case in CASES} | {
        "E215",
        "E250",
        "E251",
        "E252",
        "E253",
        "E255",
        "E262",
        "W206",
        "W207",
    }
    batch = {"E220", "E221", "E222", "E224"}
    assert {info.code for info in codes.CODES} == (here | batch) - {"W301", "E308"}


SPECS = [llama(), mixtral(), gpt2()]
DEGREE = st.sampled_from([1, 1, 2, 3, 4, 8, 12])


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    values: dict[str, Any] = {k: draw(DEGREE) for k in ("dp", "tp", "pp", "cp", "ep", "micro_batch")}
    values["zero"] = draw(st.integers(0, 3))
    for key in ("shard", "chunks"):
        if draw(st.booleans()):
            values[key] = draw(DEGREE)
    for key, allowed in CHOICES.items():
        if key not in ("zero", "sp"):
            values[key] = draw(st.sampled_from(allowed))
    if draw(st.booleans()):
        values["sp"] = draw(st.booleans())
    values["cut"] = draw(st.sampled_from(["auto", "even", "8", "4/4", "0/8", "1/2/2/3"]))
    values["order"] = tuple(draw(st.permutations(LAYOUT_AXES)))
    return complete(values)


@settings(max_examples=200, deadline=None)
@given(
    random_layouts(),
    st.sampled_from(SPECS),
    st.integers(1, 64),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([None, 8, 24]),
)
def test_random_layouts_give_problems_and_nothing_else(
    layout: Layout, spec: ModelSpec, global_batch: int, seq: int, for_run: bool, ranks: int | None
) -> None:
    batch = None if check_batch(layout, global_batch, seq) else derive_batch(layout, global_batch, seq)
    problems = check(spec, layout, batch, for_run=for_run, num_ranks=ranks)
    assert all(p.code[0] in "EW" and p.found and p.do and p.why for p in problems)
    assert all(any(c.isdigit() for c in p.found) or p.kind is Kind.CODE for p in problems)
    assert len({(p.code, p.where, p.found) for p in problems}) == len(problems)
    if not for_run:
        assert not any(p.kind is Kind.CODE for p in problems)


def test_no_rank_holds_more_than_an_eighth_of_the_logits() -> None:
    assert [loss_chunks(tp) for tp in (1, 2, 3, 4, 8, 16)] == [8, 4, 3, 2, 1, 1]
    assert all(loss_chunks(tp) * tp >= LOSS_CHUNKS for tp in range(1, 65))
