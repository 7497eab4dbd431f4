"""What a step is made of, by what ran: products run again, casts, gathers, messages, hops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost.backtest import model
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.presets import ran
from meshwright.cost.backtest.resolve import resolve
from meshwright.cost.backtest.table import read_table
from meshwright.cost.backtest.terms import terms

RUNS = Path(__file__).parent / "backtest_rows" / "runs.csv"
TITAN = ran("torchtitan FSDP2", "H100-SXM5-80GB", "", True)


def llama(**changed: object) -> Case:
    """An 8B Llama under torchtitan on eight devices."""
    base = next(case for case in resolve(read_table(RUNS))[0] if case.step_s is not None)
    dims = {
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "value_dim": 128,
    }
    run = {
        "n_gpus": 8,
        "node": 8,
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "cp": 1,
        "ep": 1,
        "dp": 8,
        "stage": 3,
        "shard": 8,
    }
    batch = {
        "micro_batch": 1,
        "accumulation": 1,
        "global_batch": 8,
        "seq": 8192,
        "vocab": 128256,
        "sp": False,
    }
    kind = {"gated": True, "experts": 0, "topk": 0, "kv_lora": 0, "q_lora": 0}
    kind |= {"lora": False, "fp8": False, "fp4": False}
    made = replace(base, ran=TITAN, recompute="none", offload="none", **dims, **run, **batch, **kind)
    return replace(made, **changed)  # type: ignore[arg-type]


def term(name: str, **changed: object) -> float:
    return float(terms([llama(**changed)])[name][0])


def seconds(**changed: object) -> float:
    return float(model.seconds(terms([llama(**changed)]), np.zeros(len(model.NAMES)))[0])


def test_what_is_run_again_is_counted_product_by_product():
    # q, k, v, o, gate, up, down of a layer in units of 4096 x 1024
    q, kv, ffn = 4.0, 1.0, 14.0
    every = 2 * q + 2 * kv + 3 * ffn
    assert term("again_matmul", recompute="per-op") == pytest.approx((kv + q + ffn) / every)
    # a reduce-scatter's output is kept, which spares the product before it
    cut = {"tp": 8, "sp": True, "dp": 1, "shard": 1, "recompute": "per-op"}
    assert term("again_matmul", **cut) == pytest.approx((kv + ffn) / every)
    # products in 8 bits are not on the list of what is kept
    assert term("again_matmul", recompute="per-op", fp8=True) == pytest.approx((every - ffn) / every)
    # a checkpoint that stops early does not run the last product again; a reentrant one does
    assert term("again_matmul", recompute="full") == pytest.approx((every - ffn) / every)
    older = replace(TITAN, early_stop=False)
    assert term("again_matmul", recompute="full", ran=older) == 1.0
    assert term("again_matmul") == term("again") == 0.0
    assert term("again_attention", recompute="full") == 1.0 > term("again_attention", recompute="per-op")


def test_tensor_communication_is_repeated_as_the_layers_do():
    cut = {"tp": 8, "sp": True, "dp": 1, "shard": 1}
    assert [term("tp_again", recompute=r, **cut) for r in ("none", "per-op", "full")] == [0.0, 0.5, 0.75]
    hidden = replace(TITAN, overlap_tp=True)
    assert term("tp_again", recompute="per-op", ran=hidden, **cut) == 0.75
    megatron = replace(TITAN, keeps_gathered=False)
    assert [term("tp_again", recompute=r, ran=megatron, **cut) for r in ("none", "full")] == [0.5, 1.5]
    assert term("tp_again", recompute="full", ran=megatron, **{**cut, "sp": False}) == 1.0


def test_eight_bits_pay_for_their_casts():
    rows = replace(TITAN, fp8="rowwise")
    assert seconds(fp8=True) < seconds(fp8=True, ran=rows)
    # the gradient of a result is cast too
    assert term("cast_b", fp8=True) > 0 == term("cast_b")
    assert term("cast", fp8=True, ffn=28672) > 1.4 * term("cast", fp8=True)


def test_a_pipeline_of_torchtitan_gathers_once_a_step():
    piped = {"pp": 2, "dp": 4, "shard": 4, "accumulation": 8}
    assert term("gathers_forward", **piped) == 0 < term("gathers_once", **piped)
    assert term("reduces_each", **piped) == 0 < term("reduces_each")
    kept = replace(TITAN, holds_stage=False)
    assert term("gathers_forward", ran=kept, **piped) == 1


def test_pipeline_messages_are_cut_where_the_framework_cuts_them():
    piped = {"pp": 2, "tp": 4, "dp": 1, "shard": 1, "node": 4}
    whole = replace(TITAN, sends_cut=False)
    cut = replace(TITAN, sends_cut=True)
    assert term("send_out", ran=cut, **piped) == pytest.approx(term("send_out", ran=whole, **piped) / 4)
    assert term("send_in", ran=cut, **piped) > 0 == term("send_in", ran=whole, **piped)


def test_hops_grow_slower_than_nodes_and_short_rings_are_slower():
    few, many = (term("gather_hops", n_gpus=n, dp=n, shard=n) for n in (8 * 9, 8 * 129))
    assert many / few == pytest.approx((128 / 8) ** 0.75)
    short, long = (term("tp_in", tp=n, dp=8 // n, shard=1, sp=True) for n in (2, 8))
    assert short / long > (1 / 2) / (7 / 8) * 1.1


def test_the_ends_of_the_model_communicate_too():
    cut = {"tp": 8, "sp": True, "dp": 1, "shard": 1}
    assert term("tp_end", **cut) == pytest.approx(0.5 / 32)
    assert term("tp_end") == 0
