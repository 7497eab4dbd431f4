"""The ledger of a machine and the joint fit on it: what is learnt, what is not believed, and who says so."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine_runs import TRUTH, cluster, plan, row, rows, truth

from meshwright.base.errors import MeshwrightError
from meshwright.cost.ledger import add_rows, ledger_path, read_ledger, row_from_dict
from meshwright.cost.machine_fit import calibrated, fit_machine, predict_plan
from meshwright.cost.machine_profile import NAMES, adjusted


def test_a_row_survives_its_text(tmp_path: Path) -> None:
    path = tmp_path / "machines" / "m" / "ledger.jsonl"
    made = [row("dp=2"), row("pp=2", predicted_s=0.5, predicted_bytes=7, processor_s=1.5)]
    assert add_rows(path, made) == made
    assert read_ledger(path) == made
    assert add_rows(path, [made[0], row("tp=2")])[:2] == made
    assert len(read_ledger(path)) == 3
    assert [p.name for p in path.parent.iterdir() if p.name != ".lock"] == ["ledger.jsonl"]


def test_writers_at_one_time_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made = [replace(row("dp=2"), source=str(i)) for i in range(12)]
    threads = [threading.Thread(target=add_rows, args=(path, [one])) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {r.source for r in read_ledger(path)} == {str(i) for i in range(12)}


@pytest.mark.parametrize("line", ["{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_ledger_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ledger.jsonl"
    add_rows(path, [row("dp=2")])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MeshwrightError) as error:
        read_ledger(path)
    assert [(p.code, p.where) for p in error.value.problems] == [("E477", f"{path}, line 2")]


def test_figures_that_cannot_be_are_no_row() -> None:
    good = row("dp=2").as_dict()
    assert row_from_dict(good, "x") == row("dp=2")
    for change in (
        {"step_time_s": 0.0},
        {"step_time_s": float("nan")},
        {"spread_s": -1.0},
        {"peak_memory_bytes": 0},
    ):
        with pytest.raises(MeshwrightError) as error:
            row_from_dict(good | change, "x")
        assert error.value.problems[0].code == "E477"


def test_the_joint_fit_finds_what_the_machine_really_does() -> None:
    found = fit_machine(rows(), cluster())
    assert found is not None
    assert found.runs == 7
    assert found.before_pct > 15.0
    assert found.after_pct < 3.0
    assert found.held_out_pct is not None
    assert found.after_pct < found.held_out_pct < 6.0
    # collectives are well seen by layouts that live on them, the optimizer's few milliseconds are not
    assert found.factors["collective"] == pytest.approx(TRUTH[NAMES.index("collective")], abs=0.15)
    assert abs(found.factors["optimizer"]) < 0.05
    # a layout that no run had is predicted as the machine does it
    unseen = plan("dp=2,zero=2")
    really = predict_plan(unseen, truth()).step_time_s
    assert predict_plan(unseen, cluster()).step_time_s < 0.9 * really
    assert predict_plan(unseen, adjusted(cluster(), found)).step_time_s == pytest.approx(really, rel=0.06)


def test_one_odd_run_does_not_bend_the_fit() -> None:
    odd = [*rows(), row("dp=2,zero=2", times=3.0)]
    found = fit_machine(odd, cluster())
    assert found is not None
    fitted = adjusted(cluster(), found)
    for layout in ("dp=2", "tp=2", "dp=2,zero=3"):
        really = predict_plan(plan(layout), truth()).step_time_s
        assert predict_plan(plan(layout), fitted).step_time_s == pytest.approx(really, rel=0.12), layout


def test_what_a_fit_does_not_believe() -> None:
    quiet = rows(("dp=2", "pp=2"))
    other = row("tp=2", times=9.0, machine="another")
    disturbed = row("tp=2", times=9.0, spread=0.6)
    more_ranks = row("dp=4", times=9.0)
    found = fit_machine([*quiet, other, disturbed, more_ranks], cluster())
    alone = fit_machine(quiet, cluster())
    assert found is not None
    assert alone is not None
    assert found.factors == alone.factors
    assert (found.runs, found.left_out) == (2, 2)
    assert fit_machine([other, disturbed, more_ranks], cluster()) is None


def test_a_fit_says_how_sure_it_is() -> None:
    one, many = fit_machine(rows(("dp=2",)), cluster()), fit_machine(rows(), cluster())
    assert one is not None
    assert many is not None
    assert one.held_out_pct is None
    assert many.spread < one.spread
    assert many.covariance[3][3] < one.covariance[3][3]
    said = predict_plan(plan("dp=2"), adjusted(cluster(), many))
    width = said.step_time_high_s / said.step_time_s
    assert width == pytest.approx(2.718281828 ** (1.2816 * many.spread), rel=1e-6)
    assert any(
        "fitted on 7 runs of this machine" in s and "before" in s and "after" in s for s in said.sources
    )


def test_a_profile_is_kept_until_probe_or_ledger_change(tmp_path: Path) -> None:
    path = ledger_path(tmp_path, "feedc0de")
    assert calibrated(cluster(), tmp_path) == (cluster(), None)
    add_rows(path, rows(("dp=2", "pp=2")))
    first = calibrated(cluster(), tmp_path)[1]
    (file,) = path.parent.glob("profile-*.json")
    assert first is not None
    file.write_text(json.dumps(first.as_dict() | {"date": "1999-01-01"}))
    again = calibrated(cluster(), tmp_path)[1]
    assert again is not None
    assert again.date == "1999-01-01", "a fit on these very figures and rows is not made twice"
    add_rows(path, rows(("tp=2",)))
    renewed = calibrated(cluster(), tmp_path)[1]
    assert renewed is not None
    assert renewed.date != "1999-01-01"
    assert renewed.runs == 3
    assert not file.exists()
    slower = replace(cluster(), measured={**cluster().measured, "op_s": 1e-5})
    assert calibrated(slower, tmp_path)[1] != renewed
    nameless = replace(cluster(), machine="")
    assert calibrated(nameless, tmp_path) == (nameless, None)
