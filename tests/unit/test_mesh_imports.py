"""Importing torch and transformers in less time: what can be called afterwards is the same."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.mesh.imports import deferred, load_modules, resting
from meshwright.mesh.model_index import READER, TOOLS, Reader, files_key, remembered


def test_the_collector_works_again_and_searches_nothing_old() -> None:
    before = gc.get_freeze_count()
    with resting():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_modules_that_are_there_are_not_imported_again() -> None:
    load_modules(("os", "sys"))
    assert gc.isenabled()
    with pytest.raises(ImportError):
        load_modules(("os", "meshwright_has_no_such_module"))
    assert gc.isenabled()
    gc.unfreeze()


def fake_models(folder: Path) -> tuple[Path, list[object]]:
    """Return the tools' file of a small ``transformers``, and the list of what its reader was asked for."""
    (folder / "models" / "one").mkdir(parents=True)
    (folder / "utils").mkdir()
    (folder / "models" / "one" / "modeling_one.py").write_text("__all__ = ['One']")
    tools = folder / "utils" / "import_utils.py"
    tools.write_text("")
    return tools, []


def test_what_the_models_hold_is_read_once_for_a_state_of_the_files(tmp_path: Path) -> None:
    tools, asked = fake_models(tmp_path / "transformers")
    models = tools.parent.parent / "models"
    found = {frozenset({"torch"}): {"one.modeling_one": {"One"}}, frozenset(): {"one.other": {"A", "B"}}}

    def read(module_path: object, prefix: str | None = None) -> object:
        asked.append(str(module_path))
        return found

    for _ in range(2):  # a second process
        reader = Reader(read, tools, tmp_path / "cache")
        assert reader(models, prefix="models") == {
            needs: {f"models.{name}": names for name, names in modules.items()}
            for needs, modules in found.items()
        }
        assert reader(str(models / "__init__.py")) == found
        assert list(reader(models)) == list(found)
    assert asked == [str(models)]
    assert reader(str(models / "one" / "__init__.py")) == found  # another folder: asked each time
    assert len(asked) == 2
    changed = models / "one" / "modeling_one.py"
    key = files_key(models, tools)
    (tmp_path / "link").symlink_to(models, target_is_directory=True)
    assert files_key(tmp_path / "link", tools) == key
    os.utime(changed, (time.time() + 5, time.time() + 5))
    assert files_key(models, tools) != key
    Reader(read, tools, tmp_path / "cache")(models)
    assert len(asked) == 3
    kept = next((tmp_path / "cache").glob(f"*{files_key(models, tools)}.json"))
    whole = kept.read_text()
    damages = ("{", "[]", "[1, 2]", '{"a": 1}', '[[["x"], [["m", [1]]]]]')
    for number, damage in enumerate(damages, start=4):  # a damaged file is read anew, and replaced
        kept.write_text(damage)
        assert Reader(read, tools, tmp_path / "cache")(models) == found
        assert (len(asked), kept.read_text()) == (number, whole)


def test_a_module_is_imported_when_something_of_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lazy_pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "solve.py").write_text("def add(a, b):\n    return a + b\n\nLIMIT = 7\n")
    (tmp_path / "lazy_user.py").write_text("from lazy_pack.solve import add\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with deferred("lazy_pack.solve", ("add",)):
        user = importlib.import_module("lazy_user")
    assert "lazy_pack.solve" not in sys.modules
    assert user.add(1, b=2) == 3
    real = sys.modules["lazy_pack.solve"]
    assert isinstance(real, ModuleType)
    assert user.add.__name__ == "add"
    monkeypatch.delitem(sys.modules, "lazy_pack.solve")
    with deferred("lazy_pack.solve", ("add",)):
        from lazy_pack.solve import LIMIT  # type: ignore[import-not-found]

        assert LIMIT == 7
    with deferred("lazy_pack.none", ("add",)), pytest.raises(ImportError):
        importlib.import_module("lazy_pack.none")
    for name in ("lazy_pack", "lazy_pack.solve", "lazy_user"):
        sys.modules.pop(name, None)


def test_transformers_knows_the_same_after_it() -> None:
    script = f"""
import sys
from meshwright.mesh.imports import MODEL_CODE, load_modules
load_modules(MODEL_CODE)
assert "scipy.optimize" not in sys.modules
import transformers, transformers.models
from {TOOLS} import {READER}
assert {READER}.__module__ == "{TOOLS}"
there = {READER}(transformers.models.__file__)
known = {{name for names in there.values() for module in names.values() for name in module}}
assert known <= set(dir(transformers.models)), sorted(known - set(dir(transformers.models)))[:5]
assert known <= set(dir(transformers)), sorted(known - set(dir(transformers)))[:5]
assert transformers.models._class_to_module["LlamaForCausalLM"] == "llama.modeling_llama"
import numpy
from transformers.loss.loss_for_object_detection import linear_sum_assignment
assert linear_sum_assignment(numpy.array([[4.0, 1.0], [2.0, 8.0]]))[1].tolist() == [1, 0]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_that_was_made_before_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    finders = list(sys.meta_path)
    with remembered(tmp_path):
        assert sys.meta_path == finders
