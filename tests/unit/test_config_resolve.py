"""The run as values: origins, paths, contradictions, settings without effect, and the shipped recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.config.load import load_run
from meshwright.config.resolve import ResolvedRun, resolve
from meshwright.config.schema import NOT_HONOURED, known_keys
from meshwright.config.template import run_file_text
from meshwright.model.read_hf import read_model

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes" / "demo.yaml"


def demo(*overrides: str, layout: str | None = None) -> ResolvedRun:
    return resolve(load_run(DEMO, overrides), layout=layout, folder=ROOT)


def refused(*overrides: str, layout: str | None = None) -> dict[str, str]:
    with pytest.raises(MeshwrightError) as caught:
        demo(*overrides, layout=layout)
    return {p.code: p.text() for p in caught.value.problems}


def test_the_recipe_resolves() -> None:
    run = demo()
    assert run.layout_text == "auto"
    assert run.data.path == "python-docs"
    assert run.run.dir == "runs/demo"
    assert run.optimizer.betas == (0.9, 0.95)
    assert run.warnings == ()
    assert list(run.flat()) == list(known_keys())
    assert read_model(run.model.config).num_layers == 6
    assert run.found_in["model.config"] == "the current folder"


def test_every_value_has_an_origin() -> None:
    run = demo("optimizer.lr=1e-4", layout="dp=2")
    assert run.origins["layout"] == "option --layout"
    assert run.origins["optimizer.lr"] == "--set"
    assert run.origins["data.seq_len"].startswith("file:")
    assert run.origins["optimizer.eps"] == "default"
    assert run.with_layout("dp=4", "the planner").origins["layout"] == "the planner"


def test_what_the_command_line_overrides_is_not_judged_in_the_file() -> None:
    """A plan in place of the layout."""
    assert "E112" in refused("layout=tp=x")
    run = resolve(load_run(DEMO, ("layout=tp=x",)), folder=ROOT, overridden=("layout",))
    assert run.layout_text == "tp=x"
    only = ("batch.accumulation=3", "layout=auto")
    assert "E108" in refused(*only)
    resolve(load_run(DEMO, only), folder=ROOT, overridden=("layout",))


def test_paths_beside_the_run_file_come_first(tmp_path: Path) -> None:
    for place in (tmp_path / "here", tmp_path / "there"):
        (place / "model").mkdir(parents=True)
    file = tmp_path / "there" / "run.yaml"
    file.write_text(
        "model: {config: model}\ndata: {path: corpus, seq_len: 8}\nbatch: {sequences: 1}\nrun: {steps: 1}\n"
    )
    (tmp_path / "here" / "corpus").mkdir()
    run = resolve(load_run(file), folder=tmp_path / "here")
    assert run.model.config == str(tmp_path / "there" / "model")
    assert run.found_in["model.config"] == "the run file's folder"
    assert run.data.path == str(tmp_path / "here" / "corpus")
    assert run.run.dir == "runs/run"
    assert run.origins["run.dir"] == "default"


def test_what_is_not_found_stays_as_written() -> None:
    run = demo("model.config=llama-2-7b", "data.path=no/such.txt")
    assert (run.model.config, run.data.path) == ("llama-2-7b", "no/such.txt")
    assert run.found_in["model.config"] == "as written"


# Hazard H13.
def test_accumulation_stated_twice_must_agree() -> None:
    assert demo("batch.accumulation=8", layout="dp=2").batch.accumulation == 8
    found = refused("batch.accumulation=4", layout="dp=2")
    assert list(found) == ["E108"]
    assert "batch.accumulation = 4" in found["E108"]
    assert "make 8" in found["E108"]
    assert "E108" in refused("batch.accumulation=4")  # layout = auto: nobody can know it yet


# Hazard H27.
def test_the_clip_in_force_is_in_the_record() -> None:
    run = demo("clip.max_norm=1e-9")
    assert run.as_dict()["clip"] == {"max_norm": 1e-9}
    assert run.origins["clip.max_norm"] == "--set"
    assert demo("clip.max_norm=null").clip.max_norm is None


# Hazard H170.
def test_nothing_but_the_layout_is_auto() -> None:
    assert [key for key, value in demo().flat().items() if value == "auto"] == ["layout"]
    assert "auto" not in demo(layout="dp=2").flat().values()


def test_layout_mistakes_are_found_with_the_rest() -> None:
    found = refused("profile.steps=2", "data.eval_fraction=0", layout="dp=2,zer=1")
    assert {"E108", "E901", "E111"} <= set(found)
    assert "(option --layout)" in found["E111"]
    assert "E220" in refused(layout="dp=3")


def test_keeping_the_best_needs_held_out_text() -> None:
    assert list(refused("run.keep_best=true", "run.keep_last=2", "data.eval_fraction=0")) == ["E108"]


def test_settings_that_nothing_reads_are_refused() -> None:
    assert list(NOT_HONOURED) == ["profile.steps"]
    assert list(refused("profile.steps=2")) == ["E901"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.momentum=0.5"], "optimizer.momentum"),
        (["optimizer.name=sgd"], "optimizer.betas"),
        (["schedule.name=constant"], "schedule.min_lr_ratio"),
        (["data.eval_fraction=0", "run.eval_every=0"], "run.eval_batches"),
        (["run.steps=3"], "schedule.warmup_steps"),
        (["data.chat_template=chat.jinja"], "data.chat_template"),
        (["data.path=a.jsonl", "data.format=text", "data.chat_template=chat.jinja"], "data.chat_template"),
        (["data.text_field=body"], "data.text_field"),
        (["data.path=a.jsonl", "data.format=chat", "data.text_field=body"], "data.text_field"),
        (["data.too_long=skip"], "data.too_long"),
        (["data.path=a.jsonl", "data.rows=stream", "data.too_long=skip"], "data.too_long"),
    ],
)
def test_settings_without_effect_are_said(overrides: list[str], key: str) -> None:
    (warning,) = demo(*overrides).warnings
    assert warning.code == "W101"
    assert warning.severity == "warning"
    assert warning.where.startswith(key)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.path=a.jsonl", "data.chat_template=chat.jinja", "data.text_field=body", "data.too_long=skip"],
        ["data.path=a.jsonl", "data.format=chat", "data.chat_template=chat.jinja"],
        ["data.path=a.jsonl", "data.format=text", "data.text_field=body"],
        ["data.rows=pack", "data.too_long=skip"],
    ],
)
def test_settings_of_data_that_may_have_an_effect_pass_without_a_word(overrides: list[str]) -> None:
    assert demo(*overrides).warnings == ()


def test_the_template_is_a_run_file(tmp_path: Path) -> None:
    model = ROOT / "recipes" / "models" / "tiny-llama"
    text = run_file_text(read_model(str(model)), str(model))
    file = tmp_path / "run.yaml"
    file.write_text(text)
    run = resolve(load_run(file))
    assert run.model.config == str(model)
    assert run.data.seq_len == 512
    # Taking every comment sign off gives a run file too: the defaults in it are the real ones.
    lines = [
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") and ":" in line.split("#")[1] else line
        for line in text.splitlines()[3:]
    ]
    file.write_text("\n".join(lines))
    assert resolve(load_run(file)).flat() == run.flat()
