"""``checkpoint verify`` of other programs' folders: whole, damaged with a name, incomplete, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_foreign_checkpoints import weights_of
from typer.testing import CliRunner

from checkpoint_runs import LLAMA, TIED
from deepspeed_files import write_deepspeed
from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.inspect import inspect_command, verify_command
from meshwright.cli.main import app

NAME = "model.layers.1.mlp.up_proj.weight"


def flip(file: Path, what: bytes) -> None:
    """Change one byte in the middle of ``what`` in ``file``."""
    content = bytearray(file.read_bytes())
    at = content.index(what) + len(what) // 2
    content[at] ^= 1
    file.write_bytes(bytes(content))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def names_of(result: dict[str, Any]) -> list[str]:
    return [t for item in result["damaged"] for t in item["tensors"]]


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    """Intact, with what was compared; a changed byte of a rank's partition names the tensors that lie there."""
    want = weights_of(LLAMA)
    want[NAME][0, 0] = float("nan")
    folder = write_deepspeed(tmp_path / "ds", want, stage=stage, world=2)
    (tmp_path / "ds" / "config.json").write_text(json.dumps(LLAMA))
    told = verify_command(str(tmp_path / "ds"))
    assert (told["ok"], told["step"], told["kind"]) == (True, 7, f"deepspeed-zero-{stage}")
    assert told["compared_with"] == "config.json"
    assert told["not_finite"] == {NAME: 1}
    count = len(list(folder.glob("*.pt")))
    assert told["checksums"] == f"{count} of {count} archives have them"
    flip(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", raw(want["model.embed_tokens.weight"])[:200])
    told = verify_command(str(tmp_path / "ds"))
    assert not told["ok"]
    assert "CRC-32" in told["damaged"][0]["why"]
    assert "model.embed_tokens.weight" in names_of(told)
    (tmp_path / "ds" / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
    assert "9 of 39 tensors: model.layers.3" in verify_command(str(tmp_path / "ds"))["incomplete"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp(tmp_path: Path) -> None:
    want = weights_of(LLAMA)
    dcp.save(want | {"note": {"a": 1}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    told = verify_command(str(tmp_path / "theirs"))
    assert (told["ok"], told["tensors"], told["compared_with"]) == (True, len(want), "")
    assert told["checksums"].startswith(f"{len(want) + 1} of {len(want) + 1} ")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    flip(file, raw(want[NAME]))
    told = verify_command(str(tmp_path / "theirs"))
    assert not told["ok"]
    assert names_of(told) == [NAME]
    file.write_bytes(file.read_bytes()[:-400])
    told = verify_command(str(tmp_path / "theirs"))
    assert told["damaged"][0]["file"] == file.name
    assert "the index says" in told["damaged"][0]["why"]


def test_archives_without_checksums_are_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=2, world=2)
    finally:
        torch.serialization.set_crc32_options(True)
    told = verify_command(str(tmp_path / "ds"))
    assert told["ok"]
    assert told["checksums"] == "0 of 3 archives have them"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of two files, tied head left out, as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "model"
    config = AutoConfig.for_model("llama", **{k: v for k, v in TIED.items() if k != "model_type"})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    held = load_file(file)
    change(held)
    save_file(held, file)


def _twice(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file(load_file(second) | {next(iter(load_file(first))): torch.zeros(1)}, second)


def _cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-7])


def _gap(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes() + b"1234")


def _nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    sorted(folder.glob("*.safetensors"))[0].unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "files are missing"),
        (_cut, "cut off: "),
        (_gap, "its tensors end after"),
        (_twice, "tensors twice"),
        (lambda f: _rewrite(f, lambda t: t.popitem()), "it is in none"),
        (lambda f: _rewrite(f, lambda t: t.update({next(iter(t)): torch.zeros(3)})), "the model's is"),
        (_nothing, "tensors: model."),
    ],
)
def test_a_damaged_hugging_face_folder(
    hub: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    shutil.copytree(hub, tmp_path / "hub")
    damage(tmp_path / "hub")
    told = verify_command(str(tmp_path / "hub"))
    assert not told["ok"]
    assert words in told["incomplete"] + " ".join(i["why"] for i in told["damaged"])


def test_exit_codes_and_lines(hub: Path, tmp_path: Path) -> None:
    """0 intact, with elements that are not finite said; 1 damaged; 2 for what is no checkpoint or is not read."""
    shutil.copytree(hub, tmp_path / "hub")
    _rewrite(tmp_path / "hub", lambda t: t[sorted(t)[0]].view(-1)[:2].fill_(float("inf")))
    told = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "hub")])
    assert told.exit_code == 0, told.output
    assert "intact" in told.output
    assert "not finite" in told.output
    assert "config.json" in told.output
    assert inspect_command(str(tmp_path / "hub"))["kind"] == "hugging-face"
    _cut(tmp_path / "hub")
    told = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "hub")])
    assert told.exit_code == 1
    assert "damaged: model-" in told.output
    with pytest.raises(MeshwrightError) as caught:
        verify_command(str(tmp_path))
    assert caught.value.problems[0].code == "E701"
    folder = write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=3, world=2)
    (folder / "layer_00-model_00-model_states.pt").touch()
    with pytest.raises(MeshwrightError) as caught:
        verify_command(str(tmp_path / "ds"))
    assert caught.value.problems[0].code == "E583"
