"""What ``train --resume`` refuses before a process is started, and folders in which a start failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kill_runs import MODEL, records, start, wait, write_inputs
from meshwright.base.errors import MeshwrightError, problem
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate import training

pytestmark = pytest.mark.gloo

LAYOUT = "dp=1,precision=fp32"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    patch = pytest.MonkeyPatch()
    patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
    write_inputs(folder)
    assert wait(start(folder, "out", LAYOUT, None, "run.steps=2")) == 0
    patch.undo()
    return folder


def go_on(folder: Path, *sets: str, resume: bool = True) -> Any:
    run = resolve(load_run(str(folder / "run.yaml"), [f"run.dir={folder / 'out'}", *sets]), layout=LAYOUT)
    return training.train_command(run, layout=LAYOUT, resume=resume, show=lambda _: None)


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ("run.seed=7", ["E551"]),
        ("data.seq_len=16", ["E551"]),
        ("data.path={folder}/other.txt", ["E551"]),
        ("adapter.kind=lora", ["E705"]),
        ("model.config={folder}/wider", ["E707"]),
        ("model.config={folder}/deeper", ["E705"]),
    ],
)
def test_another_run_is_refused_before_a_process_starts(
    trained: Path, monkeypatch: pytest.MonkeyPatch, change: str, codes: list[str]
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(trained / "cache"))
    monkeypatch.setattr(training, "run_local", lambda *_, **__: pytest.fail("ranks were started"))
    for name, key, value in (("wider", "intermediate_size", 32), ("deeper", "num_hidden_layers", 3)):
        (trained / name).mkdir(exist_ok=True)
        (trained / name / "config.json").write_text(json.dumps(MODEL | {key: value}))
    (trained / "other.txt").write_text("another text\n" * 400)
    before = (trained / "out" / "run.json").read_bytes()
    with pytest.raises(MeshwrightError) as caught:
        go_on(trained, "run.steps=4", change.format(folder=trained))
    assert {p.code for p in caught.value.problems if p.severity == "error"} >= set(codes)
    assert int(caught.value.exit_code) == 2
    assert (trained / "out" / "run.json").read_bytes() == before


def test_a_start_that_fails_in_building_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_inputs(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise MeshwrightError(problem("E811", where="rank 0", found="the class refuses the config"))

    with monkeypatch.context() as patch:
        patch.setattr(training, "run_local", fails)
        for _ in range(2):
            with pytest.raises(MeshwrightError, match="E811"):
                go_on(tmp_path, "run.steps=2", resume=False)
    assert wait(start(tmp_path, "other", LAYOUT, None, "run.steps=2")) == 0
    assert sorted(records(tmp_path / "other")) == [1, 2]
    run = resolve(load_run(str(tmp_path / "run.yaml"), [f"run.dir={tmp_path / 'other'}"]), layout=LAYOUT)
    with pytest.raises(MeshwrightError, match="E541"):
        training.train_command(run, layout=LAYOUT, show=lambda _: None)
