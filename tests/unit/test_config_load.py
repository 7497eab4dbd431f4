"""Run files as written: every mistake at once, with its line, its nearest names and its own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.base.errors import MeshwrightError, Problem
from meshwright.config.load import LoadedRun, load_run
from meshwright.config.schema import RunFile, described_keys, known_keys

GOOD = """\
model: {config: tiny}
data: {path: python-docs, seq_len: 64}
batch: {sequences: 8}
run: {steps: 10}
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def problems_of(path: Path, overrides: tuple[str, ...] = ()) -> list[Problem]:
    with pytest.raises(MeshwrightError) as caught:
        load_run(path, overrides)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def by_where(problems: list[Problem], start: str) -> Problem:
    return next(p for p in problems if p.where.startswith(start))


def test_defaults_and_origins(write) -> None:
    run = load_run(write(GOOD), ["optimizer.lr=1e-3"])
    assert run.written.optimizer.lr == 1e-3
    assert run.written.clip.max_norm == 1.0
    assert run.origins["optimizer.lr"] == "--set"
    assert run.origins["data.seq_len"] == "file:2"
    assert run.origins["clip.max_norm"] == "default"
    assert set(run.origins) == set(known_keys())


def test_json_and_toml_say_the_same(write) -> None:
    content = {
        "model": {"config": "tiny"},
        "data": {"path": "python-docs", "seq_len": 64},
        "batch": {"sequences": 8},
        "run": {"steps": 10},
    }
    from_json = load_run(write(json.dumps(content, indent=1), "run.json"))
    toml = "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in part.items())
        for name, part in content.items()
    )
    from_toml = load_run(write(toml, "run.toml"))
    assert from_json.written == from_toml.written == load_run(write(GOOD)).written
    assert from_json.origins["data.seq_len"].startswith("file:")
    assert from_toml.origins["data.seq_len"] == "file"


# Hazard H168.
@pytest.mark.parametrize("place", ["optimizer", ""])
def test_unknown_key_suggests_learning_rate(write, place: str) -> None:
    text = GOOD + ("optimizer: {learning_rat: 1e-4}\n" if place else "learning_rat: 1e-4\n")
    (found,) = problems_of(write(text))
    assert found.code == "E104"
    assert "learning_rate (here optimizer.lr)" in found.do
    assert "run.yaml:5" in found.where


# Hazard H168.
def test_unknown_key_on_the_command_line_is_refused_too(write) -> None:
    (found,) = problems_of(write(GOOD), ("optimizer.learning_rat=1e-4",))
    assert found.code == "E104"
    assert found.where == "--set optimizer.learning_rat"
    assert "optimizer.lr" in found.do


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("batch: {sequences: 8, gradient_accumulation_steps: 4}", "batch.accumulation"),
        ("clip: {max_grad_norm: 1.0}", "clip.max_norm"),
        ("run: {steps: 10, checkpoint_evry: 3}", "run.checkpoint_every"),
        ("bf16: true", "layout (precision=bf16)"),
        ("optimiser: {name: sgd}", "optimizer"),
    ],
)
def test_unknown_keys_say_where_the_setting_lives(write, line: str, wanted: str) -> None:
    name = line.split(":")[0]
    text = "".join(part + "\n" for part in GOOD.splitlines() if not part.startswith(f"{name}:")) + line + "\n"
    (found,) = problems_of(write(text))
    assert found.code == "E104"
    assert wanted in found.do


def test_every_mistake_at_once(write) -> None:
    text = """\
model:
  config: 5
data: {path: a, seq_len: "128", text_field: x}
batch:
  sequences: 010
  sequences: 8
optimizer: {lr: auto, betas: [0.9], name: adam}
clip:
run: {steps: -1, deterministic: yes}
layouts: dp=2
freeze: x
"""
    found = problems_of(write(text), ("foo=1", "run.seed", "optimizer=3", "run.dir=5", "optimizer.eps=.inf"))
    codes = {p.where: p.code for p in found}
    assert codes == {
        "run.yaml:6": "E103",
        "--set foo": "E104",
        "--set run.seed": "E109",
        "--set optimizer=3": "E109",
        "model.config (run.yaml:2)": "E105",
        "data.seq_len (run.yaml:3)": "E105",
        "batch.sequences (run.yaml:5)": "E105",
        "optimizer.lr (run.yaml:7)": "E105",
        "optimizer.betas (run.yaml:7)": "E106",
        "optimizer.name (run.yaml:7)": "E106",
        "optimizer.eps (--set)": "E106",
        "clip (run.yaml:8)": "E105",
        "run.steps (run.yaml:9)": "E106",
        "run.deterministic (run.yaml:9)": "E105",
        "layouts (run.yaml:10)": "E104",
        "freeze (run.yaml:11)": "E105",
    }
    assert by_where(found, "data.seq_len").do == "write it without quotes: 128"
    assert by_where(found, "batch.sequences").do == "write it without leading zeros: 10"
    assert by_where(found, "run.deterministic").do == "write true"
    assert by_where(found, "optimizer.name").do == "did you mean adamw?"
    assert by_where(found, "freeze").do == "write a list: [x]"
    assert by_where(found, "model.config").do == 'write it in quotes: "5"'


# Hazard H170.
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "batch.sequences", "batch.accumulation", "clip.max_norm", "schedule.warmup_steps"]
)
def test_auto_is_for_the_layout_only(write, key: str) -> None:
    (found,) = problems_of(write(GOOD), (f"{key}=auto",))
    assert found.code == "E105"
    assert "only layout may be auto" in found.do


# Hazard H170.
def test_auto_as_a_name_is_refused(write) -> None:
    (found,) = problems_of(write(GOOD), ("optimizer.name=auto",))
    assert found.code == "E106"
    assert "auto" in found.do


@pytest.mark.parametrize(("text", "code"), [("", "E102"), ("- a\n- b\n", "E102"), ("just words\n", "E102")])
def test_files_that_are_no_mapping(write, text: str, code: str) -> None:
    assert [p.code for p in problems_of(write(text))] == [code]


def test_files_that_do_not_parse(write) -> None:
    (found,) = problems_of(write("model: {config: a\nrun: 1\n"))
    assert found.code == "E101"
    assert found.where.startswith("run.yaml:2")


def test_missing_sections_and_keys(write) -> None:
    found = problems_of(write("model: {}\ndata: {path: x, seq_len: 8}\n"))
    assert {p.where.split(" ")[0]: p.code for p in found} == {
        "model.config": "E107",
        "batch": "E107",
        "run": "E107",
    }


def test_missing_file_names_its_neighbours(write, tmp_path: Path) -> None:
    write(GOOD, "demo.yaml")
    (found,) = problems_of(tmp_path / "demo.yml")
    assert found.code == "E100"
    assert "demo.yaml" in found.do


def test_unreadable_files(write, tmp_path: Path) -> None:
    assert problems_of(tmp_path)[0].found == "is a folder, not a run file"
    (tmp_path / "latin.yaml").write_bytes(b"model: {config: \xe9}\n")
    assert "UTF-8" in problems_of(tmp_path / "latin.yaml")[0].found


def test_overrides_may_give_what_the_file_lacks(write) -> None:
    text = GOOD.replace("run: {steps: 10}\n", "")
    assert load_run(write(text), ["run.steps=3"]).written.run.steps == 3
    # A typo in the override is one mistake, not two.
    codes = [p.code for p in problems_of(write(text), ("run.steps",))]
    assert "E109" in codes


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("layout=dp=2,zero=3", "layout", "dp=2,zero=3"),
        ("run.dir=010", "run.dir", "010"),
        ("run.dir=null", "run.dir", None),
        ("clip.max_norm=null", "clip.max_norm", None),
        ("clip.max_norm=2", "clip.max_norm", 2.0),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", [0.8, 0.9]),
        ("freeze=[a.*, b]", "freeze", ["a.*", "b"]),
    ],
)
def test_overrides_are_typed_by_the_schema(write, override: str, key: str, value: object) -> None:
    held: object = load_run(write(GOOD), [override]).written
    for name in key.split("."):
        held = getattr(held, name)
    assert held == value


def test_the_same_override_twice_is_refused(write) -> None:
    (found,) = problems_of(write(GOOD), ("run.seed=1", "run.seed=2"))
    assert found.code == "E109"


def test_loaded_is_frozen(write) -> None:
    run = load_run(write(GOOD))
    assert isinstance(run, LoadedRun)
    with pytest.raises(ValueError, match="frozen"):
        run.written.layout = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_every_key_is_described() -> None:
    rows = described_keys()
    assert [row[0] for row in rows] == list(known_keys())
    assert all(meaning for *_, meaning in rows)
    assert set(RunFile.model_json_schema()["required"]) == {"model", "data", "batch", "run"}


def test_a_nul_in_a_text_is_refused_where_it_stands(write) -> None:
    text = GOOD.replace("tiny", '"ti\\0ny"').replace("{steps: 10}", '{steps: 10, dir: "a\\0b"}')
    found = problems_of(write(text + 'freeze: ["x\\0"]\n'))
    assert [p.code for p in found] == ["E106"] * 3
    assert [p.where for p in found] == [
        "model.config (run.yaml:1)",
        "run.dir (run.yaml:4)",
        "freeze.0 (run.yaml:5)",
    ]
    assert "NUL" in found[0].found
