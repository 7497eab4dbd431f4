"""Hazards of estimators, by number: each has its own arithmetic here."""

import math

import numpy as np
import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.base.units import GB, GIB, format_bytes, parse_bytes
from meshwright.cluster.load import cluster_from_dict, read_cluster
from meshwright.cost.collective import GroupShape, shape_of, strided_shape
from meshwright.cost.estimate import estimate
from meshwright.cost.memory import CATEGORIES
from meshwright.cost.pieces import make_pricer
from meshwright.cost.pipeline import pipeline_seconds
from meshwright.cost.predict import oom_probability, predict
from meshwright.cost.state import (
    MEGATRON_BF16,
    MIXED_ZERO_PAPER,
    NO_MASTER,
    expert_parallel_parameters,
    load_host_bytes,
    logits_bytes,
    textbook_state_bytes,
    unsynced_gradient_bytes,
)
from meshwright.cost.units import group_shapes, stage_units
from meshwright.layout.batch import derive_batch
from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import group
from meshwright.model.activations import saved_activation_bytes
from meshwright.model.read_hf import read_model, spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.schedule.generate import generate

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def tiny(**change: object) -> ModelSpec:
    return spec_from_config(TINY | change, "tiny")


def test_seeds_table_of_zero_stages():
    gb = [textbook_state_bytes(7.6e9, 8, stage, NO_MASTER) / GB for stage in range(4)]
    assert [round(x, 1) for x in gb] == [91.2, 38.0, 24.7, 11.4]


def test_h180_a_pipeline_is_not_a_perfect_speed_up():
    ones = np.ones((1, 4))
    for m, idle in ((2, 0.6), (8, 3 / 11)):
        length = pipeline_seconds(
            ones, 2 * ones, np.zeros(1), np.array([float(m)]), np.array([4.0]), np.array([True])
        )
        assert 1 - 3.0 * m / float(length[0]) == pytest.approx(idle)


def test_h182_the_link_is_chosen_by_placement():
    layout = parse_layout("dp=8,tp=4")
    assert strided_shape(8, 4, 8) == GroupShape(8, 4, 2)
    assert shape_of(group(layout, 0, "dp"), 8) == GroupShape(8, 4, 2)
    shards, _, _ = group_shapes(layout, 8)
    assert shards.nodes == 4


def test_h184_eighteen_bytes_where_the_engine_keeps_eighteen():
    assert 1e6 * MEGATRON_BF16.total == 18e6
    assert textbook_state_bytes(1e6, 4, 1, MEGATRON_BF16) == 9e6


def test_h185_every_stage_shards_its_part():
    per_parameter = [textbook_state_bytes(1.0, 4, stage, MIXED_ZERO_PAPER) for stage in range(4)]
    assert per_parameter == [16, 7, 5.5, 4]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_h186_norms_are_whole_on_every_tp_rank(tp: int):
    spec = tiny()
    pricer = make_pricer(spec, read_cluster("a100-80gb-x8"), 16, "bf16")
    units = stage_units(pricer, 1, tp, 1, 1)
    matrices = sum(t.numel for t in spec.tensors() if t.role != "norm")
    held = units.root[0].full + 2 * units.kinds[0].full
    assert held - matrices / tp == 40


def test_h188_experts_have_their_own_divisor():
    assert expert_parallel_parameters(1000, 8 * 100, tp=2, ep=4) == 700


def test_h192_logits_in_fp32():
    assert logits_bytes(8192, 151_936) / GIB == pytest.approx(4.637, abs=5e-4)
    assert logits_bytes(1024, 151_936) / GIB == pytest.approx(0.580, abs=5e-4)
    # and they are in the prediction: 12 bytes per logit at the loss, on the last stage only
    spec = tiny(vocab_size=151_936)
    cluster = read_cluster("a100-80gb-x8", 2)
    layout = parse_layout("pp=2,micro_batch=128")
    batch = derive_batch(layout, 128, 64)
    found = predict(spec, layout, batch, generate("1f1b", 2, 1), cluster)
    assert found.memory.logits == 12 * 8192 * 151_936
    assert found.ranks[0].memory.logits == 0


def test_h193_gradients_are_whole_while_accumulating_without_sync():
    assert unsynced_gradient_bytes(26e9, 16, 2, sharded=True) / GB == 3.25
    assert unsynced_gradient_bytes(26e9, 16, 2, sharded=False) / GB == 52
    spec = tiny()
    cluster = read_cluster("a100-80gb-x8")
    for accumulation in (1, 4):
        layout = parse_layout("dp=8,zero=1,precision=fp32")
        batch = derive_batch(layout, 8 * accumulation, 64)
        found = predict(spec, layout, batch, generate("1f1b", 1, accumulation), cluster)
        whole = 4 * spec.num_parameters
        assert (found.memory.gradients >= whole) == (accumulation > 1)


@pytest.mark.parametrize(
    ("text", "copies", "whole"),
    [
        ("dp=8,zero=3", 1, ("parameters", "gradients", "optimizer")),
        ("dp=8,zero=3,shard=2", 4, ("parameters", "gradients", "optimizer")),
        ("dp=4,zero=3,pp=2", 1, ("parameters", "gradients", "optimizer")),
        ("dp=4,zero=3,tp=2", 1, ("parameters", "gradients", "optimizer")),
        ("dp=8,zero=1", 1, ("optimizer",)),
        ("dp=4,zero=1,tp=2", 1, ("optimizer",)),
    ],
)
def test_h195_each_term_has_its_divisor(text: str, copies: int, whole: tuple[str, ...]):
    """What the prediction gives the ranks adds up, term by term, to the whole and what tp leaves whole on each rank."""
    spec = tiny()
    layout = parse_layout(text + ",precision=fp32")
    batch = derive_batch(layout, 16, 64)
    schedule = generate("1f1b", layout.pp, batch.accumulation)
    found = predict(spec, layout, batch, schedule, read_cluster("a100-80gb-x8"))
    assert len(found.ranks) == 8
    norms = sum(t.numel for t in spec.tensors() if t.role == "norm")
    numbers = copies * (spec.num_parameters + (layout.tp - 1) * norms)
    for term in whole:
        held = sum(getattr(rank.memory, term) for rank in found.ranks)
        assert held == 4 * numbers * (2 if term == "optimizer" else 1), term


def test_h197_training_has_no_cache_and_fp32_doubles():
    assert not any("cache" in name for name in CATEGORIES)
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
        "vocab_size": 128, "n_positions": 64, "activation_function": "gelu_new", "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    spec = spec_from_config(config, "tiny-gpt2")
    half, full = (saved_activation_bytes(spec, spec.blocks[0], 64, 2, c) for c in (2, 4))
    log_sum_exp = 4 * 4 * 128  # fp32 in both
    assert full - log_sum_exp == 2 * (half - log_sum_exp)


def test_h198_the_start_has_its_own_peak():
    assert load_host_bytes(7e9, 8, 4, broadcast=False) / GB == 224
    assert load_host_bytes(7e9, 8, 4, broadcast=True) / GB == 28


def test_h104_h198_host_memory_of_a_node_is_said_for_both_ways_of_loading():
    """Eight processes: a unit each while loading, 3 x 4 bytes a parameter for checkpoints, rows without any prefetch."""
    spec = read_model("llama-2-7b")
    layout, cluster = parse_layout("dp=8,zero=3,precision=bf16"), read_cluster("a100-40gb-x8", 8)
    found = estimate(spec, layout, cluster, 2048, 64)["host_bytes"]
    root = 2 * 32000 * 4096 + 4096
    assert found["load"] == 8 * 4 * root
    assert found["load_naive"] == 8 * 4 * spec.num_parameters
    assert found["checkpoint"] == pytest.approx(12 * spec.num_parameters, rel=0.01)
    assert found["data"] == 64 * 2048 * 24
    whole = estimate(spec, parse_layout("dp=8,precision=bf16"), cluster, 2048, 64)["host_bytes"]
    assert whole["checkpoint"] == pytest.approx(
        8 * found["checkpoint"], rel=0.01
    )  # every replica copies its own


def test_seconds_of_a_checkpoint_and_of_the_data():
    """Copies of one state are written once, by all ranks that hold them; each reads what it holds."""
    spec = read_model("llama-2-7b")
    cluster = cluster_from_dict(
        {
            "name": "c", "gpus_per_node": 8,
            "device": {
                "name": "X", "memory": "80GiB", "memory_rate_bytes_per_s": 1e12, "launch_s": 0.0,
                "matmul_flops": {"bf16": 1e14}, "peak_flops": {"bf16": 2e14}, "host_rate_bytes_per_s": 2e10,
                "disk_write_bytes_per_s": 1e9,
            },
            "intra": {"name": "n", "rate_bytes_per_s": 1e11},
        }
    )  # fmt: skip
    sharded, whole, cut = (
        estimate(spec, parse_layout(text), cluster, 2048, 64)
        for text in ("dp=8,zero=3,precision=bf16", "dp=8,precision=bf16", "pp=8,precision=bf16")
    )
    each = 12 * spec.num_parameters / 8
    write = each * (1 / 1e9 + 1 / 1.9e9)
    assert sharded["host_seconds"]["checkpoint_write"] == pytest.approx(write, rel=1e-9)
    assert whole["host_seconds"]["checkpoint_write"] == pytest.approx(write, rel=1e-9)
    assert write < cut["host_seconds"]["checkpoint_write"] < 1.2 * write, "the last stage has the head too"
    assert sharded["host_seconds"]["checkpoint_copy"] == pytest.approx(each / 2e10, rel=0.01)
    assert sharded["host_seconds"]["checkpoint_read"] == pytest.approx(each * (1 / 3e9 + 1 / 1.9e9), rel=0.01)
    assert whole["host_seconds"]["checkpoint_read"] == pytest.approx(
        8 * each * (1 / 3e9 + 1 / 1.9e9), rel=0.01
    )
    assert sharded["host_seconds"]["data"] == pytest.approx(8 * 2048 * 24 / 2e10)
    assert sharded["host_assumptions"] == ["disks read 3 GB/s a rank"]


def mfu_on(peak: float | None, matmul: float) -> float | None:
    """Return the MFU of a device on which nothing but matmuls of big shapes takes time."""
    device: dict[str, object] = {
        "name": "X", "memory": "80GiB", "memory_rate_bytes_per_s": 1e18, "launch_s": 0.0,
        "matmul_flops": {"bf16": matmul},
    }  # fmt: skip
    if peak is not None:
        device["peak_flops"] = {"bf16": peak}
    cluster = cluster_from_dict(
        {"name": "c", "gpus_per_node": 1, "device": device, "intra": {"name": "n", "rate_bytes_per_s": 1e12}}
    )
    spec = tiny(hidden_size=4096, intermediate_size=16384, num_attention_heads=32, num_key_value_heads=32)
    layout = parse_layout("micro_batch=8")
    found = predict(spec, layout, derive_batch(layout, 8, 1024), generate("1f1b", 1, 1), cluster)
    if found.mfu_pct is not None and peak is not None:
        assert found.mfu_pct == pytest.approx(100 * found.model_tflops_per_gpu * 1e12 / peak)
    return found.mfu_pct


def test_h204_mfu_has_the_dense_peak_or_is_not_printed():
    dense = mfu_on(989e12, 450e12)
    assert dense is not None
    assert 30 < dense < 46
    sparse = mfu_on(1979e12, 450e12)
    assert sparse == pytest.approx(dense * 989 / 1979)
    assert mfu_on(None, 450e12) is None
    with pytest.raises(MeshwrightError) as error:
        mfu_on(200e12, 450e12)
    assert error.value.problems[0].code == "E408"


def test_h206_gb_and_gib_are_two_units():
    assert format_bytes(83e9) == "77.30 GiB"
    assert parse_bytes("80GB") < 83e9 < parse_bytes("80GiB")
    assert oom_probability(83e9, parse_bytes("80GiB")) < 0.5 < oom_probability(83e9, parse_bytes("80GB"))
    assert oom_probability(0.93 * 80e9, 80e9) == pytest.approx(0.0060, abs=5e-4)
    assert math.isclose(oom_probability(80e9, 80e9), 0.5)
