"""Parameters away from the device, and fp8: prices, memory, what plan proposes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from meshwright.base.errors import MeshwrightError
from meshwright.cli.main import app
from meshwright.cluster.load import read_cluster
from meshwright.cost.eight import copies_bytes, linear_seconds
from meshwright.cost.estimate import estimate
from meshwright.cost.fast import columns
from meshwright.cost.offloaded import HOST_BYTES
from meshwright.cost.pieces import make_pricer
from meshwright.cost.rates import device_rates
from meshwright.cost.rows import rows_of
from meshwright.cost.slots import make_slot
from meshwright.cost.sweep import sweep
from meshwright.cost.tables import make_tables
from meshwright.layout.batch import derive_batch
from meshwright.layout.check import check
from meshwright.layout.layout import Layout
from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import FP8, precision_table
from meshwright.model.read_hf import read_model
from meshwright.search.asked import ask
from meshwright.search.search import search

LLAMA = read_model("llama-2-7b")
BIG = read_model("llama-3.1-8b")
H100 = read_cluster("h100-x8")
SEQ, BATCH = 2048, 16


def priced(text, cluster=H100, spec=LLAMA):
    layout = parse_layout(text)
    pricer = make_pricer(spec, cluster, SEQ, layout.precision)
    return columns(pricer, [layout], [derive_batch(layout, BATCH, SEQ)])


@pytest.mark.parametrize("layout", ["dp=8,zero=3", "dp=8,zero=1", "dp=4,pp=2,zero=3", "dp=8"])
def test_the_peak_falls_by_what_leaves(layout):
    """ZeRO: exactly shards and moments (gradients are no part of the peak, or leave too); zero=0: all but two blocks."""
    plain, some, away = (
        float(priced(f"{layout},offload={o}").peak[0]) for o in ("none", "optimizer", "parameters")
    )
    files = float(priced(f"{layout},offload=parameters-nvme").peak[0])
    assert away == files
    assert away < some < plain
    x = parse_layout(layout)
    share = 4.0 * LLAMA.num_parameters / x.pp / x.shard
    assert share < plain - away < 4.2 * share


def test_travel_is_bytes_over_the_links_of_the_cluster():
    """One stage, one micro-batch, nothing to hide behind: parameters twice, gradients once, the update at home."""
    layout = "dp=8,micro_batch=2,precision=bf16"
    slow = replace(H100.device, host_rate=replace(H100.device.host_rate, value=1e9))
    ten = replace(H100.device, host_rate=replace(H100.device.host_rate, value=1e10))
    one, other = (
        float(priced(f"{layout},offload=parameters", replace(H100, device=d)).offload[0]) for d in (slow, ten)
    )
    total, root = 4.0 * LLAMA.num_parameters, 4.0 * 2 * 32000 * 4096
    moved = root + 2.0 * (total - root) + total  # in once or twice, gradients out
    window = one - other - 0.9 * moved / 1e9
    assert abs(window) < 0.02 * moved / 1e9
    assert other > moved / 1e10


def test_files_are_slower_than_host_memory_and_optimizer_alone_is_cheapest():
    seconds = [
        float(priced(f"dp=8,zero=3,offload={o}").offload[0])
        for o in ("none", "optimizer", "parameters", "parameters-nvme")
    ]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)


def test_a_host_link_is_that_of_the_device_and_a_cluster_file_can_say_it(tmp_path):
    assert device_rates(H100, "bf16").host_rate == pytest.approx(0.8 * 64e9)
    assert device_rates(read_cluster("a100-40gb-x8"), "bf16").host_rate == pytest.approx(0.8 * 32e9)
    text = (
        '{"name": "mine", "gpus_per_node": 8, "num_nodes": 1, "source": "test", "device": {"name": "X", '
        '"memory": "80GB", "peak_flops": {"bf16": 1e14}, "memory_rate_bytes_per_s": 2e12, '
        '"host_rate_bytes_per_s": 4e11, "disk_read_bytes_per_s": 7e9, "disk_write_bytes_per_s": 5e9}, '
        '"intra": {"name": "x", "rate_bytes_per_s": 1e11}}'
    )
    (tmp_path / "c.json").write_text(text)
    rates = device_rates(read_cluster(str(tmp_path / "c.json")), "bf16")
    assert (rates.host_rate, rates.disk_read, rates.disk_write) == (4e11, 7e9, 5e9)


@pytest.mark.parametrize("pp", [1, 2])
def test_the_search_prices_as_a_single_prediction_does(pp):
    """One formula in both tiers: peak and seconds of offload of every kind."""
    made = [
        replace(
            parse_layout(f"dp={8 // pp},pp={pp},micro_batch=1,offload={o}{z}"),
            cut="32" if pp == 1 else "16/16",
        )
        for o in ("none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme")
        for z in ("", ",zero=1", ",zero=3")
    ]
    batches = [derive_batch(x, BATCH, SEQ) for x in made]
    pricer = make_pricer(LLAMA, H100, SEQ, "bf16")
    slot = make_slot(pricer, made[0])
    many = sweep(make_tables(pricer), rows_of(made, batches), slot)
    one = columns(pricer, made, batches)
    np.testing.assert_allclose(many.peak, one.peak, rtol=1e-9)
    away = one.offload + one.optimizer
    np.testing.assert_allclose(
        many.rest - many.rest[0], away - away[0] + many_data(one), rtol=1e-6, atol=1e-9
    )


def many_data(one):
    """Return the once-a-step data seconds that differ between ZeRO stages."""
    once = one.once.max(axis=1)
    return once - once[0]


def test_plan_proposes_offload_when_nothing_fits_without():
    found = search(BIG, read_cluster("h100-x8", 1), 2048, 8, top=2)
    best = found.plans[0]
    assert best.layout.offload in ("optimizer", "parameters")
    assert best.prediction.time.offload > 0
    assert "Nothing fits without offload" in best.why[0]
    assert f"{best.prediction.time.offload:.2f}"[:3] in best.why[0]
    assert not search(BIG, read_cluster("h100-x8", 1), 2048, 8, fix="offload=none").plans


def test_plan_proposes_none_where_something_fits():
    assert all(p.layout.offload == "none" for p in search(BIG, H100, 2048, 64).plans)


def test_files_are_proposed_where_host_memory_does_not_hold_it():
    found = search(read_model("llama-3.1-405b"), H100, 2048, 8, top=1)
    assert found.plans[0].layout.offload == "parameters-nvme"
    assert HOST_BYTES < 16.0 * 405e9 / 8
    assert "in files" in found.plans[0].why[0]


def test_a_named_layout_that_does_not_fit_is_told_that_offload_cures_it():
    layout = parse_layout("dp=1,micro_batch=1,recompute=full,loss=chunked")
    said = ask(BIG, read_cluster("h100-x8", 1), layout, 2048, 8, None)
    assert any("offload=optimizer would make it fit" in s for s in said.sentences)
    said = ask(read_model("llama-2-13b"), read_cluster("h100-x8", 1), layout, 2048, 8, None)
    assert any(
        "offload=parameters would make it fit" in s for s in said.sentences
    )  # its gradients alone take 49 GiB
    cut = parse_layout("pp=2,schedule=zb-h1,micro_batch=1,recompute=full,loss=chunked")
    said = ask(read_model("llama-2-70b"), read_cluster("h100-x8", 2), cut, 2048, 8, None)
    assert not any("offload=parameters would" in s for s in said.sentences)  # E290: backwards in two halves


@pytest.mark.parametrize("recipe", FP8)
def test_fp8_multiplies_linear_layers_only(recipe):
    wide, eight = device_rates(H100, "bf16"), device_rates(H100, "fp8")
    sizes = (8192.0, 4096.0, 14336.0)
    for seconds in linear_seconds(recipe, wide, eight, sizes):
        assert eight.matmul_s(*sizes) < seconds < wide.matmul_s(*sizes)
    assert copies_bytes(sizes) == 8192 * 4096 + 4096 * 14336 + 2 * 8192 * 14336
    bf16, fp8 = (priced(f"dp=8,zero=3,precision={p}", spec=BIG) for p in ("bf16", recipe))
    ratio = float(bf16.step[0] / fp8.step[0])
    assert 1.05 < ratio < 2.0
    assert float(fp8.peak[0]) >= float(bf16.peak[0])
    small = LLAMA.hidden_size / 64
    tiny = linear_seconds(recipe, wide, eight, (256.0, small, small))[0]
    assert tiny > wide.matmul_s(256.0, small, small)  # casts cost more than small products save


def test_fp8_is_bf16_but_for_its_linear_layers():
    table, wide = (precision_table(Layout(dp=2, zero=3, shard=2, precision=p)) for p in ("fp8", "bf16"))
    assert replace(table, linear="bf16") == wide
    assert table.bytes_of("linear") == 1
    assert {r[0]: r[1] for r in table.rows()}["linear"] == "fp8"
    assert "linear" not in {r[0] for r in wide.rows()}


def test_fp8_is_priced_and_refused_where_it_would_run():
    item = estimate(BIG, parse_layout("dp=8,zero=3,precision=fp8"), H100, 2048, 64)
    assert item["predicted"] is not None
    assert not item["legal"]
    (problem,) = item["problems"]
    assert (problem["code"], problem["kind"], problem["do"]) == ("E291", "code", "precision=bf16")
    codes = {p.code for p in check(BIG, parse_layout("dp=8,precision=fp8"), None)}
    assert codes == {"E291"}
    assert not check(BIG, parse_layout("dp=8,precision=fp8"), None, for_run=False)


def test_fp8_needs_a_device_that_has_it():
    with pytest.raises(MeshwrightError) as error:
        estimate(BIG, parse_layout("dp=8,precision=fp8"), read_cluster("a100-80gb-x8"), 2048, 64)
    (problem,) = error.value.problems
    assert problem.code == "E405"
    assert "fp8" in problem.found
    assert "precision=bf16" in problem.do


def test_precision_is_searched_only_when_it_is_asked_for():
    def tried(cluster, **options):
        options["fix"] = f"dp=8,zero=3,micro_batch=2,recompute=none{options.pop('more', '')}"
        return {p.layout.precision for p in search(BIG, read_cluster(cluster), 2048, 64, **options).plans}

    assert tried("h100-x8") == {"bf16"}
    assert {"fp8", "bf16"} <= tried("h100-x8", precision="any", top=9)
    assert tried("h100-x8", precision="any", top=1) == {"fp8"}
    assert tried("h100-x8", more=",precision=fp8-blockwise") == {"fp8-blockwise"}
    assert "fp8" not in tried("a100-80gb-x8", precision="any", top=9)


def test_the_command_says_that_fp8_cannot_run_yet():
    command = "plan llama-3.1-8b --cluster h100-x8 --seq-len 2048 --global-batch 64 --precision any --top 1"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0
    assert "#1 cannot run yet: precision=fp8 cannot run yet" in result.output
