"""Training on conversations: packed rows give the same run in every layout, over a restart, and where data ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_train_runs import CLUSTER, CONFIG

from chat_data import chat_tokenizer, conversations, write_jsonl
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate.training import train_command

pytestmark = pytest.mark.gloo


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 256}))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    chat_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "chat.jsonl", conversations(70))
    write_jsonl(tmp_path / "more.jsonl", conversations(30, seed=9))
    (tmp_path / "run.yaml").write_text(
        "model: {config: model}\n"
        "data: {path: chat.jsonl, tokenizer: tok, seq_len: 192, eval_fraction: 0.1}\n"
        "batch: {sequences: 4}\n"
        "optimizer: {lr: 3e-3}\n"
        "cluster: cluster.json\n"
        "run: {steps: 4}\n"
    )
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def train(folder: Path, layout: str, name: str, *sets: str, **options: Any) -> list[dict[str, Any]]:
    run = resolve(load_run(str(folder / "run.yaml"), [f"run.dir={folder / name}", *sets]), layout=layout)
    said: list[str] = []
    train_command(run, layout=layout, show=said.append, **options)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | {"said": said} for line in lines]


def told(folder: Path, layout: str, *sets: str) -> list[str]:
    """Return what a run says before its first step; it ends there."""
    run = resolve(load_run(str(folder / "run.yaml"), [f"run.dir={folder / 'never'}", *sets]), layout=layout)
    said: list[str] = []
    train_command(run, layout=layout, show=said.append, dry_run=True)
    return said


def losses(records: list[dict[str, Any]]) -> list[tuple[float, float, int]]:
    return [(r["loss"], r["grad_norm"], r["valid_tokens"]) for r in records]


def equal(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert len(one) == len(two)
    for a, b in zip(losses(one), losses(two), strict=True):
        assert a[2] == b[2]
        assert abs(a[0] - b[0]) <= 1e-9 * abs(a[0])
        assert abs(a[1] - b[1]) <= 1e-8 * abs(a[1])
    assert one[-1]["eval_loss"] == pytest.approx(two[-1]["eval_loss"], rel=1e-9)


def alike(folder: Path, layouts: tuple[str, ...]) -> None:
    """Hold the run of each layout, in float64, against the one of one device."""
    alone = train(folder, "dp=1,precision=fp64", "one")
    assert json.loads((folder / "one" / "run.json").read_text())["data"]["report"]["rows"] == "pack"
    assert alone[0]["valid_tokens"] < 4 * 192  # answers only
    for layout in layouts:
        equal(alone, train(folder, f"{layout},precision=fp64", layout))


def test_h152_h62_packed_conversations_train_alike_in_every_layout(folder: Path) -> None:
    """H152: a rank's rows follow its data coordinate; H62: later stages know the documents. Losses in float64."""
    alike(folder, ("dp=2,zero=3", "pp=2", "tp=2", "cp=2"))


@pytest.mark.slow
def test_h152_h62_packed_conversations_in_more_layouts(folder: Path) -> None:
    alike(folder, ("dp=2", "cp=2,cp_style=ulysses"))


def test_h75_packed_rows_train_as_their_documents_apart(folder: Path) -> None:
    """H75: one step over all documents has the same loss and gradient norm packed as padded."""
    both = {}
    for rows in ("pack", "pad"):
        sets = ("data.eval_fraction=0", f"data.rows={rows}", "run.steps=1", "data.epochs=1")
        said = told(folder, "dp=1,precision=fp64", *sets)
        count = next(int(line.split(" rows of")[0].split()[-1]) for line in said if " rows of" in line)
        both[rows] = (count, train(folder, "dp=1,precision=fp64", rows, *sets, f"batch.sequences={count}")[0])
    (packed, one), (padded, two) = both["pack"], both["pad"]
    assert packed < padded == 70
    assert one["valid_tokens"] == two["valid_tokens"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-9)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-8)


def test_context_parallel_takes_one_document_a_row(folder: Path) -> None:
    padded = "data.rows=pad"
    alone = train(folder, "dp=1,precision=fp64", "one", padded)
    equal(alone, train(folder, "cp=2,precision=fp64", "two", padded))


def test_h145_h149_a_restart_in_another_layout_goes_on_with_the_next_row(folder: Path) -> None:
    """H145, H149: two steps with dp=2, then pp=2 to the end: the four steps of one device."""
    alone = train(folder, "dp=1,precision=fp64", "one")
    train(folder, "dp=2,precision=fp64", "two", stop_at_step=2)
    equal(alone, train(folder, "pp=2,precision=fp64", "two", resume=True))


def test_h9_finite_data_ends_in_one_step_for_all(folder: Path) -> None:
    """H9: one pass over mixed sources with an uneven last batch ends alike for dp=1 and dp=2, and says so."""
    sets = (
        "data.path=null",
        f"data.sources={{{folder / 'chat.jsonl'}: 1, {folder / 'more.jsonl'}: 3}}",
        "data.epochs=1",
        "run.steps=50",
    )
    alone = train(folder, "dp=1,precision=fp64", "one", *sets)
    assert 1 < len(alone) < 50
    assert any("the data ends after step" in line for line in alone[0]["said"])
    equal(alone, train(folder, "dp=2,precision=fp64", "two", *sets))
