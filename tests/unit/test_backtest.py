"""Measured runs: reading, units, what ran, folds, fits, scores, and what a wrong table is told."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.cli.main import run as command
from meshwright.cost.backtest import memory_model, model
from meshwright.cost.backtest.bands import own_band, quantile
from meshwright.cost.backtest.case import Case
from meshwright.cost.backtest.fit import common_part, rooted_losses
from meshwright.cost.backtest.folds import sweep_folds
from meshwright.cost.backtest.memory_terms import in_flight, layer_bytes, memory_terms
from meshwright.cost.backtest.page import pages
from meshwright.cost.backtest.presets import ran, stack_names
from meshwright.cost.backtest.resolve import resolve
from meshwright.cost.backtest.run import backtest
from meshwright.cost.backtest.score import over_sources, regrets, spearman
from meshwright.cost.backtest.shapes import model_flops_per_token, weights
from meshwright.cost.backtest.table import NEEDED, parse_table, read_table
from meshwright.cost.backtest.terms import terms
from meshwright.cost.collective import call_share
from meshwright.cost.kernels import attention_share, generation, wave_factor
from meshwright.cost.shipped import cold_band, factors

HERE = Path(__file__).parent / "backtest_rows"
RUNS, OOM = HERE / "runs.csv", HERE / "oom.csv"


def cases() -> dict[str, Case]:
    """The excerpt's cases by id."""
    return {case.id: case for case in resolve(read_table(RUNS))[0]}


def changed(change: Callable[[dict[str, str]], None], ids: tuple[str, ...] = ()) -> str:
    """The excerpt as CSV text with ``change`` made to the rows of ``ids`` (all without)."""
    rows = list(csv.DictReader(io.StringIO(RUNS.read_text(encoding="utf-8"), newline="")))
    for row in rows:
        if not ids or row["id"] in ids:
            change(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def refused(act: Callable[[], object]) -> list[str]:
    """The codes with which ``act`` is refused."""
    with pytest.raises(MeshwrightError) as caught:
        act()
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return [p.code for p in caught.value.problems]


def test_every_row_is_scored_or_has_a_reason():
    report = backtest(read_table(RUNS), read_table(OOM))
    s = report.scores
    assert s["scored"] + len([x for x in s["skipped"] if not x["id"].startswith("oom")]) == s["rows"] == 27
    assert all(row["why"] for row in s["skipped"])
    assert {x["id"] for x in s["skipped"]} == {"moefold-001", "dgxc-002"}
    assert s["memory"]["oom_rows"] == 5


def test_the_shipped_profile_is_near_the_measurements_and_says_that_it_knows_them():
    s = backtest(read_table(RUNS), read_table(OOM)).scores
    assert s["time"]["mape_pct"] < 12
    assert s["memory"]["mape_pct"] < 6
    assert s["profile"]["scored_rows_it_was_fitted_on"] == s["scored"]
    for source in s["by_source"].values():
        assert source["time"]["rows"] or source["memory"]["rows"]


def test_calibration_scores_held_out_sweeps_only(monkeypatch: pytest.MonkeyPatch):
    from meshwright.cost.backtest import calibrate

    seen: list[tuple[set[str], set[str]]] = []
    real = calibrate.predict_logs
    fitted: list[set[str]] = []
    real_fit = calibrate.fit_profile

    def watch_fit(t, logs, listed, train, *rest):
        fitted.append({"/".join(listed[i].sweep) for i in train})
        return real_fit(t, logs, listed, train, *rest)

    def watch(profile, t, listed, rows):
        seen.append((fitted[-1], {"/".join(listed[i].sweep) for i in rows}))
        return real(profile, t, listed, rows)

    monkeypatch.setattr(calibrate, "fit_profile", watch_fit)
    monkeypatch.setattr(calibrate, "predict_logs", watch)
    s = backtest(read_table(RUNS), calibrate=True, folds=3).scores
    assert s["folds"] == 3
    assert len(seen) >= 3
    for trained, tested in seen:
        assert not trained & tested
    assert set(s["left_out"]) == {"source", "model_size", "gpu_generation"}
    assert s["time"]["averaged_over"] == "sources"


def test_folds_take_whole_sweeps_and_every_row_once():
    listed = list(cases().values())
    parts = sweep_folds(listed, 4)
    assert sorted(np.concatenate(parts)) == list(range(len(listed)))
    where = {i: k for k, part in enumerate(parts) for i in part}
    for i, a in enumerate(listed):
        for j, b in enumerate(listed):
            if a.sweep == b.sweep:
                assert where[i] == where[j]
    sweeps = len({case.sweep for case in listed})
    for folds in (0, 1, sweeps + 1):
        assert refused(lambda n=folds: sweep_folds(listed, n)) == ["E464"]


def test_missing_columns_are_named_with_the_nearest():
    text = RUNS.read_text().replace("step_time_s", "step_time_sec", 1).replace("peak_mem_gb", "memory", 1)
    with pytest.raises(MeshwrightError) as caught:
        parse_table(text)
    problem = caught.value.problems[0]
    assert problem.code == "E461"
    assert "step_time_s (there is step_time_sec)" in problem.found
    assert "peak_mem_gb" in problem.found
    assert len(NEEDED) > 40


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "-3", "1e15"])
@pytest.mark.parametrize("column", ["step_time_s", "hidden", "tp", "peak_mem_gb"])
def test_numbers_that_are_no_numbers_are_refused(column: str, value: str):
    text = changed(lambda row: row.update({column: value}), ("hagemann-001",))
    with pytest.raises(MeshwrightError) as caught:
        parse_table(text)
    assert caught.value.problems[0].code == "E463"
    assert "hagemann-001" in caught.value.problems[0].where
    assert column in caught.value.problems[0].found


def test_milliseconds_for_seconds_are_told():
    def milliseconds(row: dict[str, str]) -> None:
        if row["step_time_s"]:
            row["step_time_s"] = str(float(row["step_time_s"]) * 1e3)
        row["tokens_per_s_per_gpu"] = ""

    rows = parse_table(changed(milliseconds))
    with pytest.raises(MeshwrightError) as caught:
        backtest(rows)
    assert caught.value.problems[0].code == "E462"
    assert "milliseconds" in caught.value.problems[0].found
    # one such row is skipped, with the same words
    rows = parse_table(changed(milliseconds, ("hagemann-001",)))
    why = {x["id"]: x["why"] for x in backtest(rows).scores["skipped"]}
    assert "milliseconds" in why["hagemann-001"]


def test_steps_above_the_peak_are_told():
    def rate(row: dict[str, str]) -> None:
        row["step_time_s"], row["tokens_per_s_per_gpu"] = "", "2e6"

    assert set(refused(lambda: backtest(parse_table(changed(rate))))) == {"E462"}


def test_gigabytes_written_as_gib_are_told():
    def wrong(row: dict[str, str]) -> None:
        row["peak_mem_gb"], row["notes"] = "84", "mem_unit=GiB"

    rows = parse_table(changed(wrong, ("hagemann-001",)))
    why = {x["id"]: x["why"] for x in backtest(rows).scores["skipped"]}
    assert "GB written as GiB" in why["hagemann-001"]


def test_tables_that_are_none(tmp_path: Path):
    assert refused(lambda: read_table(tmp_path / "nothing.csv")) == ["E460"]
    assert refused(lambda: read_table(tmp_path)) == ["E460"]
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    assert refused(lambda: read_table(tmp_path / "bytes.csv")) == ["E460"]
    for text in ("", "\n\n", RUNS.read_text().splitlines()[0]):
        assert refused(lambda t=text: parse_table(t)) == ["E460"]
    assert refused(lambda: parse_table("a,b\n1,2\n")) == ["E461"]
    twice = changed(lambda row: row.update(id="x"))
    assert set(refused(lambda: parse_table(twice))) == {"E466"}
    empty = changed(lambda row: row.update(gpu=""))
    assert refused(lambda: backtest(parse_table(empty))) == ["E465"]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("gpu", "H900", "H900"),
        ("framework", "unheard-of", "no preset"),
        ("dp", "7", "is not 32 devices"),
        ("hidden", "0", "is 0"),
        ("heads", "7", "head size"),
        ("micro_batch", "1.5", "whole number"),
        ("tp", "many", "not a number"),
        ("global_batch_sequences", "100", "sequences"),
        ("tokens_per_s_per_gpu", "1", "contradict"),
        ("seq_len", "4k", "seq_len = '4k' is not a number"),
        ("kv_heads", "all", "kv_heads = 'all' is not a number"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(column: str, value: str, said: str):
    rows = parse_table(changed(lambda row: row.update({column: value}), ("hagemann-001",)))
    skipped = {s.id: s.why for s in resolve(rows)[1]}
    assert said in skipped["hagemann-001"]


def test_what_ran_is_read_from_framework_device_and_notes():
    plain = ran("AA-Scaling", "A100-80GB-SXM4", "kernel: FlashAttention 1.0.8; x", False)
    fused = ran("AA-Scaling", "A100-80GB-SXM4", "kernel: FlashAttention-2 + fused RMSNorm kernel; x", False)
    assert (plain.attention, plain.norm, plain.logits_split) == ("fa1", "upcast", False)
    assert (fused.attention, fused.norm) == ("fa2", "fused")
    eager = ran("torchtitan FSDP2", "H100-SXM5-80GB", "", False)
    compiled = ran("torchtitan FSDP2", "H100-SXM5-80GB", "", True)
    assert (eager.activation, compiled.activation) == ("unfused", "fused")
    assert ran("nobody's", "H100", "", False).name == "unknown"
    assert len(stack_names()) > 20


def test_shapes_count_what_the_models_have():
    c = cases()
    assert model_flops_per_token(c["titan-001"]) == pytest.approx(
        6 * 7.505e9 + 6 * 32 * 4096 * 8192, rel=0.01
    )
    w = weights(c["titan-001"])
    assert 32 * w.dense + w.embedding + w.head == pytest.approx(8.03e9, rel=0.002)
    # a Llama block with grouped heads and a fused gate keeps 34 s b h; four f-wide tensors make it 41
    assert layer_bytes(c["titan-002"], False) / 4096 == pytest.approx(34, rel=0.02)
    assert layer_bytes(c["titan-001"], False) / 4096 == pytest.approx(41, rel=0.02)


def test_stages_hold_their_micro_batches():
    deep = cases()["hagemann-302"]
    assert (in_flight(deep, 0), in_flight(deep, deep.pp - 1)) == (4.0, 1.0)
    chunked = cases()["korth-004"]
    assert in_flight(chunked, 0) == pytest.approx((2 * 8 + 2 * 7 + 1) / 3)


def test_seconds_grow_with_every_factor_and_memory_with_every_part():
    listed = list(cases().values())
    t, zero = terms(listed), np.zeros(len(model.NAMES))
    base = model.seconds(t, zero)
    assert (base > 0).all()
    for k in range(len(model.NAMES)):
        more = zero.copy()
        more[k] = 0.3
        assert (model.seconds(t, more) >= base * (1 - 1e-9)).all(), model.NAMES[k]
    m, none = memory_terms(listed), np.zeros(len(memory_model.MEMORY_NAMES))
    peak = memory_model.peak_bytes(m, none)
    for k in range(len(none)):
        more = none.copy()
        more[k] = 0.3
        assert (memory_model.peak_bytes(m, more) >= peak).all()
    chance = memory_model.oom_probability(m, none)
    assert ((chance >= 0) & (chance <= 1)).all()


def test_scores():
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2]), np.array([1.0, 2])) is None
    c = cases()
    pair = [c["titan-001"], c["titan-002"], c["titan-003"]]
    found = regrets(pair, np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 3.0]))
    assert (found["top1_regret_pct"], found["top3_regret_pct"]) == (100.0, 0.0)
    mean = over_sources(
        {
            "many": {"rows": 99, "mape_pct": 1.0, "bias_pct": -2},
            "one": {"rows": 1, "mape_pct": 3.0, "bias_pct": 2},
        }
    )
    assert (mean["mape_pct"], mean["bias_pct"], mean["abs_bias_pct"]) == (2.0, 0.0, 2.0)


def test_bands_cover_four_fifths():
    residuals = np.linspace(-1, 1, 1001)
    assert np.mean(np.abs(residuals) <= quantile(residuals)) == pytest.approx(0.8, abs=0.01)
    # every source counts once: ninety small errors of one weigh as much as ten large ones of another
    mixed = np.concatenate([np.full(90, 0.01), np.full(10, 0.5)])
    weight = np.concatenate([np.full(90, 1 / 90), np.full(10, 1 / 10)])
    assert quantile(mixed) < 0.1 < quantile(mixed, weight)


def test_a_band_rests_on_sweeps_and_not_on_rows():
    base = cases()["titan-001"]
    rows = [replace(base, n_gpus=8)] * 90 + [replace(base, n_gpus=8 * n) for n in range(2, 10)]
    errors = np.array([0.01] * 90 + [0.02, -0.03, 0.04, 0.05, -0.06, 0.07, -0.08, 0.5])
    # ninety rows of one sweep say how well that one is met; the band is for another sweep: eight of nine and one more
    assert quantile(errors) == 0.01
    assert own_band(errors, rows) == 0.08
    # three sweeps and one more that is missed are not 80 %
    assert own_band(errors[:92], rows[:92]) is None


def test_a_disturbed_run_bends_a_fit_less_than_one_that_is_too_fast():
    # a row 30 % faster than predicted, and one 30 % slower, in deviations of one measurement
    fast, slow = rooted_losses(np.array([10.0, -10.0])) ** 2
    assert slow < 0.5 * fast
    near = rooted_losses(np.array([0.01, -0.01]))
    assert near == pytest.approx([0.01, -0.01], rel=1e-3)
    # what the rows of a device have in common is moved by two that were disturbed, more by two that were too fast
    left = np.array([0.02, 0.01, 0.03, 0.02, -0.1, -0.1])
    assert 0 < 0.02 - common_part(left) < 0.5 * (common_part(-left) + 0.02)
    assert common_part(left[:4]) == pytest.approx(0.02, abs=1e-3)


def test_attention_over_few_heads_leaves_multiprocessors_idle():
    # SimuMax's kernel table on B200: TFLOP/s of causal forward and backward at 4,096 tokens
    measured = {8: (349, 741), 16: (650, 850), 32: (823, 896), 64: (980, 820)}
    for heads, (ahead, behind) in measured.items():
        share = attention_share("cudnn", "blackwell", 128, 4096, heads)
        assert 1745 * share[0] == pytest.approx(ahead, rel=0.25)
        assert 1745 * share[1] == pytest.approx(behind, rel=0.25)
    long = [attention_share("fa2", "hopper", 128, 65536, heads)[0] for heads in (8, 64)]
    assert long[0] == pytest.approx(long[1], rel=0.01)


def test_what_a_collective_takes_beside_its_bytes_grows_with_its_ring():
    # vTrain's traces on A100, 55 us + 4.8 us a member; SimuMax's on B200, 46 us + 17 us a member for both halves
    assert call_share(2, False) == pytest.approx(60 / 89, rel=0.05)
    assert call_share(4, False) == pytest.approx(69 / 89, rel=0.05)
    assert call_share(2, True) == pytest.approx((49 + 17 * 1) / (49 + 17 * 7), rel=0.1)
    assert call_share(4, True) == pytest.approx((49 + 17 * 3) / (49 + 17 * 7), rel=0.1)
    assert call_share(8, True) == call_share(8, False) == 1


def test_all_to_alls_of_the_context_axis():
    base = replace(cases()["titan-001"], cp=4, tp=1, heads=32, kv_heads=8)
    ring, around = (terms([replace(base, ran=replace(base.ran, cp_style=s))]) for s in ("ring", "ulysses"))
    # queries and output too, in four calls; as much in backward, where a ring carries gradients beside
    assert (around["cp_behind"][0], ring["cp_behind"][0]) == (1.0, 2.0)
    sent = base.tokens * 2 * (32 + 8) * base.head_dim * 2 * 3 / 4
    small = 1 + 0.6 / 4**2
    assert around["cp_in"][0] == pytest.approx(base.layers * sent * small / base.intra)
    assert around["cp_copies"][0] > 0 == ring["cp_copies"][0]


def test_kernels_have_shares_and_waves():
    assert generation("GB200-186GB") == "blackwell"
    assert generation("H100-SXM-96GB-HBM2e") == "hopper"
    assert generation("abacus") == "other"
    assert attention_share("fa2", "hopper", 128, 8192)[0] < attention_share("fa3", "hopper", 128, 8192)[0]
    assert attention_share("fa2", "ampere", 64, 8192)[0] < attention_share("fa2", "ampere", 128, 8192)[0]
    assert wave_factor(128 * 108, 256, 1, "ampere") == pytest.approx(1)
    # one row of tiles too many: a second wave for large tiles, part of a third for small ones, which lose less
    assert wave_factor(128 * 109, 256, 1, "ampere") == pytest.approx(1.08 * 3 * 108 / 218)
    # causal kernels are slow on short sequences, cuDNN's on Blackwell more so (cudnn-frontend's table: 824 of 1371)
    assert attention_share("fa2", "hopper", 128, 2048)[0] == pytest.approx(0.48 * 298 / 335, rel=0.03)
    ends = [attention_share("cudnn", "blackwell", 128, seq)[1] for seq in (2048, 16384)]
    assert ends[0] / ends[1] == pytest.approx(824 / 1371, rel=0.08)


def test_plan_prices_with_the_shipped_factors():
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.rates import device_rates

    rates = device_rates(read_cluster("a100-80gb-x8"), "bf16")
    big = rates.matmul_rate(16384, 8192, 28672)
    assert big < 271.2e12 / factors()["matmul"]
    assert big > 0.9 * 271.2e12 / factors()["matmul"]
    assert any("fitted on" in source for source in rates.sources)
    assert 0.05 < cold_band() < 0.4


def test_the_command_writes_page_profile_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = ["backtest", str(RUNS), "--oom", str(OOM), "--calibrate", "--folds", "3"]
    profile = tmp_path / "p.json"
    assert command([*args, "--page", str(tmp_path), "--save-profile", str(profile), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("rows", "scored", "skipped", "time", "memory", "by_source", "left_out", "predictions"):
        assert key in found
    row = next(p for p in found["predictions"] if p["id"] == "titan-001")
    assert row["step_time_low_s"] < row["step_time_s"] < row["step_time_high_s"]
    assert {p["ran_out"] for p in found["predictions"]} == {True, False}
    page = (tmp_path / "backtest.md").read_text()
    assert "moefold-001" in page
    assert (tmp_path / "backtest-time.svg").read_text().count("<circle") > 20
    stored = json.loads(profile.read_text())
    assert "aa-scaling" in stored["stacks"]
    assert "hagemann-001" in stored["stacks"]["aa-scaling"]["rows"]
    assert len(stored["stacks"]["aa-scaling"]["time_covariance"]) == len(model.NAMES)
    assert command(["backtest", str(RUNS)]) == 0
    assert "rows skipped" in capsys.readouterr().out


def test_the_page_names_every_skipped_row():
    report = backtest(read_table(RUNS))
    text = pages(report)["backtest.md"]
    for row in report.skipped:
        assert f"`{row.id}`" in text


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--folds", "3"], "E864"),
        (["--save-profile", "x.json"], "E864"),
        (["--calibrate", "--folds", "1"], "E464"),
        (["--calibrate", "--folds", "1000"], "E464"),
        (["--page", "no/such/folder"], "E867"),
        (["--oom", "no-such.csv"], "E460"),
    ],
)
def test_wrong_options_are_problems(args: list[str], code: str, capsys: pytest.CaptureFixture[str]):
    assert command(["backtest", str(RUNS), *args, "--json"]) == ExitCode.BAD_INPUT
    assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == code
