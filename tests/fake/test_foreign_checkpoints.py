"""Weights out of DeepSpeed's checkpoints and torch's: every tensor bit for bit, damage named, nothing executed."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoint_runs import LLAMA, TIED
from deepspeed_files import their_classes, write_deepspeed
from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.export import export_command
from meshwright.checkpoint.foreign import open_foreign
from meshwright.checkpoint.foreign_export import export_foreign, read_config
from meshwright.checkpoint.inspect import inspect_command
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.build import build_model
from meshwright.train.weights import load_pretrained

FROZEN = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")


def weights_of(config: dict[str, Any], seed: int = 4) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in build_model(config, seed=seed).named_parameters()}


def problems_of(call: Callable[[], Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(MeshwrightError) as caught:
        call()
    return [(p.code, p.where, p.found) for p in caught.value.problems]


@pytest.mark.parametrize(("stage", "world", "sub_group"), [(1, 2, 0), (2, 5, 0), (3, 4, 10**9), (3, 5, 900)])
@pytest.mark.parametrize("bf16", [False, True])
def test_every_tensor_is_that_of_the_ranks(
    tmp_path: Path, stage: int, world: int, sub_group: int, bf16: bool
) -> None:
    """ZeRO 1, 2 and 3 on 2 to 5 ranks, with padding, several flat vectors and frozen parameters."""
    want = weights_of(LLAMA)
    write_deepspeed(
        tmp_path / "ds",
        want,
        stage=stage,
        world=world,
        frozen=FROZEN,
        bf16=bf16,
        sub_group=sub_group,
        gap=3 * bf16,
    )
    weights = load_pretrained(str(tmp_path / "ds"), spec_from_config(LLAMA, "small"), tmp_path)
    assert sorted(weights) == sorted(want)
    for name, tensor in want.items():
        rounded = tensor.bfloat16() if bf16 and name in FROZEN else tensor
        assert weights[name].dtype == rounded.dtype
        assert torch.equal(weights[name], rounded), name
    told = inspect_command(str(tmp_path / "ds"))
    assert (told["kind"], told["step"], told["world_size"]) == (f"deepspeed-zero-{stage}", 7, world)
    assert told["elements"] == sum(t.numel() for t in want.values())
    made = build_model(LLAMA, seed=9, weights=weights)
    assert all(torch.equal(p, weights[n].to(p.dtype)) for n, p in made.named_parameters())


def test_a_tied_head_and_a_prefix(tmp_path: Path) -> None:
    want = {"module." + n: t for n, t in weights_of(TIED).items()}
    shared = {"module.lm_head.weight": "module.model.embed_tokens.weight"}
    write_deepspeed(tmp_path / "ds", want, stage=3, world=2, shared=shared)
    weights = load_pretrained(
        str(tmp_path / "ds" / "global_step7"), spec_from_config(TIED, "small"), tmp_path
    )
    assert all(torch.equal(weights[n.removeprefix("module.")], t) for n, t in want.items())


def test_a_checkpoint_without_zero(tmp_path: Path) -> None:
    want = weights_of(LLAMA)
    state = {"module": want, "param_shapes": None, "global_steps": 3, "dp_world_size": 4, "buffer_names": []}
    (tmp_path / "ds").mkdir()
    torch.save(state, tmp_path / "ds" / "mp_rank_00_model_states.pt")
    weights = load_pretrained(str(tmp_path / "ds"), spec_from_config(LLAMA, "small"), tmp_path)
    assert all(torch.equal(weights[n], t) for n, t in want.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_export_and_its_logits(tmp_path: Path, stage: int) -> None:
    """The config beside the checkpoint is found, as the Trainer of transformers leaves it, and --config goes first."""
    from safetensors.torch import load_file

    want = weights_of(TIED)
    write_deepspeed(tmp_path / "ds", want, stage=stage, world=2)
    assert problems_of(lambda: export_command(str(tmp_path / "ds"), str(tmp_path / "out")))[0][0] == "E713"
    config = tmp_path / "model.json"
    config.write_text(json.dumps(TIED))
    done = export_command(str(tmp_path / "ds"), str(tmp_path / "a"), check_logits=True, config=str(config))
    assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
    shutil.copyfile(config, tmp_path / "ds" / "config.json")
    export_command(str(tmp_path / "ds"), str(tmp_path / "b"))
    for out in ("a", "b"):
        got = load_file(tmp_path / out / "model.safetensors")
        assert sorted(got) == sorted(want)
        assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_export_of_an_fsdp_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    want = weights_of(LLAMA)
    state = {"model": want, "optim": {"exp_avg": {n: t * 0 for n, t in want.items()}}}
    dcp.save(state, checkpoint_id=tmp_path / "step-9", no_dist=True)
    (tmp_path / "step-9").rename(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(LLAMA))
    done = export_command(str(tmp_path / "theirs"), str(tmp_path / "out"), check_logits=True, dtype="fp64")
    assert done["kind"] == "torch-dcp"
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(got[n], want[n].double()) for n in want)
    assert inspect_command(str(tmp_path / "theirs"))["tensors"] == 2 * len(want)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_missing_and_short_files_of_an_fsdp_checkpoint(tmp_path: Path) -> None:
    dcp.save(weights_of(LLAMA), checkpoint_id=tmp_path / "theirs", no_dist=True)
    file = next((tmp_path / "theirs").glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-400])
    (code, where, _), *_ = problems_of(lambda: open_foreign(tmp_path / "theirs"))
    assert (code, where) == ("E582", str(file))
    file.unlink()
    (code, _, found), *_ = problems_of(lambda: open_foreign(tmp_path / "theirs"))
    assert code == "E580"
    assert file.name in found


def _cut(folder: Path) -> None:
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _other_step(folder: Path) -> None:
    write_deepspeed(folder / "new", weights_of(LLAMA), stage=3, world=2, step=8)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(folder / "new" / "global_step7" / name, folder / name)
    shutil.rmtree(folder / "new")


def _other_model(folder: Path) -> None:
    write_deepspeed(folder / "new", weights_of(LLAMA | {"vocab_size": 61}), stage=3, world=2)
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        shutil.copyfile(folder / "new" / "global_step7" / name, folder / name)
    shutil.rmtree(folder / "new")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda f: (f / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), "E580", "zero_pp_rank_1"),
        (lambda f: (f / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(), "E580", "zero_pp_rank_1"),
        (lambda f: (f / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink(), "E580", "zero_pp_rank_0"),
        (_cut, "E582", "zero_pp_rank_1"),
        (lambda f: (f / "zero_pp_rank_0_mp_rank_01_model_states.pt").touch(), "E583", "mp_rank_01"),
        (lambda f: (f / "layer_00-model_00-model_states.pt").touch(), "E583", "layer_00"),
        (_other_step, "E584", "optimizer step is 8"),
        (
            lambda f: shutil.copyfile(
                f / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                f / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
            ),
            "E584",
            "zero_pp_rank_2",
        ),
        (_other_model, "E585", "elements"),
        (lambda f: (f.parent / "latest").write_text("../elsewhere"), "E580", "../elsewhere"),
    ],
)
def test_damage_has_a_name(tmp_path: Path, damage: Callable[[Path], Any], code: str, words: str) -> None:
    folder = write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=3, world=2)
    damage(folder)
    whole = code == "E580" and words.startswith("..")
    found = problems_of(lambda: open_foreign(tmp_path / "ds" if whole else folder))
    assert found[0][0] == code
    assert words in found[0][1] + found[0][2]


def test_another_model_is_refused(tmp_path: Path) -> None:
    write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=2, world=2)
    for changes, code in (
        ({"num_hidden_layers": 4}, "E621"),
        ({"num_hidden_layers": 2}, "E622"),
        ({"intermediate_size": 30}, "E623"),
    ):
        spec = spec_from_config(LLAMA | changes, "small")
        assert problems_of(lambda s=spec: load_pretrained(str(tmp_path / "ds"), s, tmp_path))[0][0] == code


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


class Exec(Marker):
    def __reduce__(self) -> Any:
        return (exec, (f"import os; os.mkdir({str(self.path)!r})",))


class Hidden(Marker):
    """A call through a package whose names are kept as records."""

    def __reduce__(self) -> Any:
        import numpy as np

        return (np.save, (str(self.path), np.float64(1.0)))


def test_a_crafted_file_runs_nothing(tmp_path: Path) -> None:
    """Calls of os.mkdir and exec end the reading with their names; one of numpy.save is a record and never made."""
    want = weights_of(LLAMA)
    marker = tmp_path / "executed.npy"
    folder = write_deepspeed(tmp_path / "ds", want, stage=1, world=2)
    file = folder / "mp_rank_00_model_states.pt"
    with their_classes():
        state = torch.load(file, weights_only=False)
    for crafted, name in ((Marker(marker), "mkdir"), (Exec(marker), "exec")):
        torch.save(state | {"client": crafted}, file)
        (code, where, found), *_ = problems_of(lambda: open_foreign(tmp_path / "ds"))
        assert (code, where) == ("E581", str(file))
        assert name in found
    torch.save(state | {"client": Hidden(marker)}, file)
    weights = load_pretrained(str(tmp_path / "ds"), spec_from_config(LLAMA, "small"), tmp_path)
    assert all(torch.equal(weights[n], t) for n, t in want.items())
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists()  # read as pickle reads it, the same file does run


def test_a_storage_outside_its_file_is_refused(tmp_path: Path) -> None:
    """A pickle that promises more elements than the archive holds: E582, not memory of something else."""
    folder = write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=1, world=2)
    file = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(file) as archive:
        held = {i.filename: archive.read(i) for i in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content[:40] if "/data/" in name else content)
    assert problems_of(lambda: open_foreign(tmp_path / "ds"))[0][:2] == ("E582", str(file))


def test_numpy_scalars_and_their_classes_are_records(tmp_path: Path) -> None:
    import numpy as np

    folder = write_deepspeed(tmp_path / "ds", weights_of(LLAMA), stage=1, world=1)
    file = folder / "mp_rank_00_model_states.pt"
    with their_classes() as (scaler, _):
        state = torch.load(file, weights_only=False)
        state |= {"lr": np.float64(0.1), "rng": np.random.RandomState(3).get_state(), "object": scaler()}
        torch.save(state, file)
    assert open_foreign(tmp_path / "ds").step == 7


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is not told here"
)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_export_holds_one_shard_and_one_tensor(tmp_path: Path, stage: int) -> None:
    """Memory stays below 1.2 x the largest file + one tensor, at a size where all tensors together would not."""
    from multiprocessing import get_context

    shard = 8 * 2**20
    wide = LLAMA | {
        "hidden_size": 256,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    wide |= {"head_dim": 32, "intermediate_size": 768, "vocab_size": 8192}
    want = weights_of(wide)
    largest = max(t.numel() * 4 for t in want.values())
    bound = int(1.2 * shard) + largest
    assert sum(t.numel() * 4 for t in want.values()) > 4 * bound
    write_deepspeed(tmp_path / "ds", want, stage=stage, world=2)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(wide))
    del want

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

    def merge(results: Any) -> None:
        import gc

        given = read_config(config)
        export_foreign(tmp_path / "ds", tmp_path / "warm", config=given, dtype="bf16", max_shard_bytes=shard)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        export_foreign(tmp_path / "ds", tmp_path / "out", config=given, max_shard_bytes=shard)
        results.put(status("VmHWM") - before)

    context = get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=merge, args=(results,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert results.get() <= bound
