"""Terminal tables: the figures, the units, and nothing read as markup."""

from __future__ import annotations

import io
from typing import Any

import pytest

from meshwright.cluster.catalogue import describe_clusters
from meshwright.report.tables import (
    as_text,
    clusters_table,
    console,
    final_screen,
    memory_bar,
    models_table,
    plan_table,
    ranks_table,
)
from meshwright.report.timing import compare_causes

GIB = 2**30
LAYOUT: dict[str, Any] = {"dp": 4, "zero": 3, "shard": 4, "pp": 2, "cut": "3/3", "sp": "off", "order": "tp/cp/dp/pp",
                          "precision": "bf16"}  # fmt: skip
MEMORY = {
    "parameters": 2 * GIB,
    "gradients": GIB,
    "optimizer": 4 * GIB,
    "activations": 2 * GIB,
    "logits": GIB,
}


def item(**more: Any) -> dict[str, Any]:
    predicted = {
        "step_time_s": 2.0,
        "step_time_low_s": 1.5,
        "step_time_high_s": 2.5,
        "tokens_per_s_per_gpu": 4096.0,
        "mfu_pct": 41.5,
        "flops_convention": "causal",
        "bubble_share_of_total": 0.125,
        "peak_memory_bytes": 10 * GIB,
        "oom_probability": 0.01,
        "memory_bytes": MEMORY,
        "time_s": {"compute": 1.5, "data": 0.2, "bubble": 0.3},
    }
    return {"layout": LAYOUT, "world_size": 8, "predicted": predicted, "why": [], "binds": "compute"} | more


def test_plan_table_shows_figures_with_their_convention() -> None:
    text = as_text(plan_table([item(), item(binds="[bold]link[/bold]")]))
    for part in (
        "dp=4,zero=3,pp=2",
        "2.00 s",
        "1.50 s - 2.50 s",
        "4,096",
        "41.5 %",
        "12.5 %",
        "10.00 GiB",
        "1 %",
    ):
        assert part in text
    assert "causal attention" in text
    assert "share of the total" in text
    assert "[bold]link[/bold]" in text


def test_plan_table_of_an_item_without_figures_does_not_invent_any() -> None:
    text = as_text(plan_table([{"layout": LAYOUT}]))
    assert "0.00" not in text


def test_memory_bar_is_in_proportion_to_capacity() -> None:
    bar = memory_bar(MEMORY, 20 * GIB, width=40).plain
    drawn = bar[1:41]
    assert [drawn.count(c) for c in "PGOAL."] == [4, 2, 8, 4, 2, 20]
    assert "10.00 GiB of 20.00 GiB (50.0 %)" in bar


def test_memory_bar_beyond_capacity_stays_inside_its_width() -> None:
    assert memory_bar(MEMORY, 5 * GIB, width=40).plain[41] == "]"
    assert "(200.0 %)" in memory_bar(MEMORY, 5 * GIB, width=40).plain


def screen(prove: dict[str, Any]) -> str:
    prediction = item()["predicted"]
    measured_memory = MEMORY | {"logits": 0, "activations": 4 * GIB}
    measurement = prediction | {
        "step_time_s": 2.5,
        "peak_memory_bytes": 11 * GIB,
        "memory_bytes": measured_memory,
        "time_s": {"compute": 2.0, "data": 0.2, "bubble": 0.3},
    }
    run = {
        "plan": {"model_name": "[red]tiny[/red]", "layout": LAYOUT},
        "prediction": prediction,
        "measurement": measurement,
    }
    return as_text(final_screen(run, prove, "runs/demo/report.html", ["meshwright one", "meshwright two"]))


def test_final_screen_subtracts_prediction_and_measurement() -> None:
    text = screen(
        {
            "passed": True,
            "gradients": {"max_rel_diff": 2e-12, "worst": "a.weight"},
            "ledger": {"matches": True},
        }
    )
    rows = {line.split("  ")[0].strip(): line for line in text.split("\n")}
    assert "-25.0 %" in rows["compute"]
    assert "-20.0 %" in rows["step"]
    assert "-9.1 %" in rows["peak"]
    assert "3.00 GiB" in rows["activations and logits"]
    assert "-25.0 %" in rows["activations and logits"]
    assert "[red]tiny[/red]" in text
    assert "passed" in text
    assert "2.0e-12 (worst: a.weight)" in text
    assert "runs/demo/report.html" in text
    assert text.index("meshwright one") < text.index("meshwright two")


def test_causes_that_a_loop_cannot_part_are_compared_as_one_sum() -> None:
    predicted = {"compute": 1.0, "bubble": 0.5, "data": 0.25, "optimizer": 0.25}
    rows = compare_causes(predicted, {"compute": 1.5, "data": 0.5, "optimizer": 0.2, "other": 0.1})
    assert rows == (
        ("compute, communication and waiting", 1.75, 2.0),
        ("- of it compute", 1.0, None),
        ("- of it data parallel", 0.25, None),
        ("- of it bubble", 0.5, None),
        ("optimizer", 0.25, 0.2),
        ("other", 0.0, 0.1),
    )
    assert compare_causes(predicted, predicted)[3] == ("optimizer", 0.25, 0.25)
    assert compare_causes(predicted, {})[0] == ("compute", 1.0, None)


def test_final_screen_says_what_is_not_there() -> None:
    text = as_text(final_screen({}, {}, None, []))
    for part in ("No prediction", "No measurement", "not checked"):
        assert part in text


def test_final_screen_shows_a_failed_proof() -> None:
    text = screen(
        {
            "passed": False,
            "sentinel": {"factor": 2.0, "cause": "summed over dp"},
            "ledger": {"matches": False},
        }
    )
    assert "FAILED" in text
    assert "factor 2.0, summed over dp" in text
    assert "NOT as expected" in text


def test_plain_text_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    console(file).print(plan_table([item()]))
    assert "\x1b" not in file.getvalue()
    assert "dp=4,zero=3,pp=2" in file.getvalue()


def test_models_table() -> None:
    text = as_text(
        models_table([{"name": "m", "family": "llama", "num_parameters": 6738415616, "num_layers": 32}])
    )
    assert "6.74 B" in text
    assert "1 known models" in text


def test_clusters_table_shows_the_catalogue_with_sources() -> None:
    text = as_text(clusters_table(describe_clusters()), width=220)
    row = next(line for line in text.split("\n") if line.strip().startswith("a100-40gb-x8"))
    for part in ("A100-40GB", "40 GB", "312 TFLOP/s"):
        assert part in row
    assert " nan " not in text


def test_ranks_table() -> None:
    text = as_text(
        ranks_table([{"rank": 3, "stage": 1, "peak_memory_bytes": 10 * GIB, "memory_bytes": MEMORY}])
    )
    assert "10.00 GiB" in text
    assert "2.00 GiB" in text


@pytest.mark.parametrize("value", [None, {}, [], "text", float("nan")])
def test_odd_values_do_not_break_a_table(value: Any) -> None:
    assert as_text(plan_table([{"layout": value, "predicted": value, "world_size": value}]))
    assert as_text(
        final_screen({"plan": value, "prediction": value}, {"loss": value, "passed": value}, None, [])
    )
