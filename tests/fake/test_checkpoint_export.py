"""Exports are plain Hugging Face folders: names, dtypes, ties and logits are those that transformers expects."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_runs import LLAMA, SGD, TIED, Run
from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.checkpoint import stream as stream_module
from meshwright.checkpoint.export import compare_logits, export_command, export_hf
from meshwright.checkpoint.metadata import read_index, read_tensor

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 37,
    "n_embd": 18,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = TIED | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 24,
    "head_dim": 8,
    "intermediate_size": 28,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return ``saved(name)``: the run and its checkpoint, made once."""
    configs = {"llama": LLAMA, "llama-tied": TIED, "gpt2": GPT2, "qwen3": QWEN3, "mixtral": MIXTRAL}
    made: dict[str, tuple[Run, Path]] = {}

    def of(name: str) -> tuple[Run, Path]:
        if name not in made:
            run = Run(0, configs[name], "precision=fp32", seed=1)
            run.train(1, 1)
            made[name] = run, run.save(tmp_path_factory.mktemp(name) / "checkpoints", 1)
        return made[name]

    return of


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(MeshwrightError) as caught:
        call(*args, **kwargs)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0].code


def copy_of(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    import shutil

    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["plan"]["model_config"] |= changes
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "qwen3", "mixtral"])
def test_h130_an_export_has_the_names_and_values_of_the_live_model(saved, tmp_path, name) -> None:
    """H129, H130: keys are those that transformers itself writes, values bit for bit, a tied head left out."""
    run, checkpoint = saved(name)
    out = tmp_path / "out"
    report = export_command(str(checkpoint.parent.parent), str(out), check_logits=True)
    assert report["check_logits"]["max_abs_diff"] <= report["check_logits"]["tolerance"]
    got = load_file(out / "model.safetensors")
    live = run.model.module.causal_lm
    live.save_pretrained(tmp_path / "theirs")
    want = load_file(tmp_path / "theirs" / "model.safetensors")
    assert sorted(got) == sorted(want)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert ("lm_head.weight" in got) == (not run.spec.tied_embeddings)
    assert report["tensors"] == len(want)
    reloaded = AutoModelForCausalLM.from_pretrained(out)
    params = dict(reloaded.named_parameters())
    assert sorted(params) == sorted(run.model.params)
    assert all(torch.equal(params[n], p) for n, p in run.model.params.items())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
@pytest.mark.parametrize(
    ("asked", "dtype", "width"),
    [
        (None, "float32", 4),
        ("bf16", "bfloat16", 2),
        (torch.float16, "float16", 2),
        ("fp64", "float64", 8),
    ],
)
def test_h99_tensors_config_and_file_size_agree_on_the_dtype(
    saved, tmp_path, name, asked, dtype, width
) -> None:
    """H99: what is asked for is in the tensors, in config.json, in the bytes, and in the reloaded model."""
    run, checkpoint = saved(name)
    report = export_hf(checkpoint, tmp_path / "out", dtype=asked)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == report["dtype"] == dtype
    assert "torch_dtype" not in config
    payload = run.spec.num_parameters * width
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report["bytes"] == payload
    assert payload < size < payload + 8192
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype) == f"torch.{dtype}"
    compare_logits(checkpoint, tmp_path / "out")


def test_shards_are_bounded_and_indexed(saved, tmp_path) -> None:
    run, checkpoint = saved("mixtral")
    limit = 20_000
    report = export_hf(checkpoint, tmp_path / "out", max_shard_bytes=limit)
    assert len(report["files"]) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["bytes"] == run.spec.num_parameters * 4
    held: set[str] = set()
    for file in report["files"]:
        tensors = load_file(tmp_path / "out" / file)
        assert sum(t.numel() * t.element_size() for t in tensors.values()) <= limit
        assert {index["weight_map"][n] for n in tensors} == {file}
        held |= set(tensors)
    assert held == set(index["weight_map"])
    assert len(held) == report["tensors"]
    compare_logits(checkpoint, tmp_path / "out")


def test_a_layout_of_stages_and_shards_leaves_no_trace(saved) -> None:
    """The manifest's tensors are logical: nothing of rank, stage or wrapper is in a name."""
    _, checkpoint = saved("llama")
    names = {t["name"] for t in json.loads((checkpoint / "manifest.json").read_text())["tensors"]}
    assert names == {
        n for n, _ in AutoModelForCausalLM.from_pretrained(_exported(checkpoint)).named_parameters()
    }


def _exported(checkpoint: Path) -> Path:
    out = checkpoint.parent / "exported"
    if not out.exists():
        export_hf(checkpoint, out)
    return out


def test_the_tokenizer_goes_along(saved, tmp_path) -> None:
    _, checkpoint = saved("llama")
    copy = copy_of(checkpoint, tmp_path)
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer.json").write_text('{"version": "1.0"}')
    manifest = json.loads((copy / "manifest.json").read_text())
    for place in (words, words / "tokenizer.json"):
        (copy / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": str(place)}))
        out = tmp_path / f"out-{place.name}"
        assert export_hf(copy, out)["tokenizer"] == ["tokenizer.json", "tokenizer_config.json"]
        assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_an_output_folder_with_something_in_it_is_refused(saved, tmp_path) -> None:
    _, checkpoint = saved("llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    assert code_of(export_hf, checkpoint, tmp_path / "full") == "E712"
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]
    (tmp_path / "empty").mkdir()
    export_hf(checkpoint, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    (tmp_path / "file").write_text("a file")
    assert code_of(export_hf, checkpoint, tmp_path / "file") == "E712"
    assert code_of(export_hf, checkpoint, tmp_path / "file" / "below") == "E703"


def test_an_unknown_dtype_is_refused(saved, tmp_path) -> None:
    _, checkpoint = saved("llama")
    assert code_of(export_hf, checkpoint, tmp_path / "out", dtype="int3") == "E714"
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_model_is_refused(saved, tmp_path) -> None:
    _, checkpoint = saved("llama")
    copy = copy_of(checkpoint, tmp_path)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["plan"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert code_of(export_hf, copy, tmp_path / "out") == "E713"


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"num_hidden_layers": 4}, ["E719"]),
        ({"num_hidden_layers": 2}, ["E719"]),
        ({"intermediate_size": 30}, ["E719"]),
        ({"vocab_size": 40, "num_hidden_layers": 4}, ["E719", "E719"]),
    ],
)
def test_h130_tensors_that_are_not_the_models_fail_the_export(saved, tmp_path, changes, codes) -> None:
    """H130: a missing, left-over or misshapen tensor is named; nothing is written."""
    _, checkpoint = saved("llama")
    copy = copy_of(checkpoint, tmp_path, **changes)
    with pytest.raises(MeshwrightError) as caught:
        export_hf(copy, tmp_path / "out")
    assert [p.code for p in caught.value.problems] == codes
    assert "model." in caught.value.problems[0].found
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(saved, tmp_path) -> None:
    _, checkpoint = saved("llama")
    copy = copy_of(checkpoint, tmp_path)
    shard = next(copy.glob("__0_*"))
    content = bytearray(shard.read_bytes())
    content[-600] ^= 1
    shard.write_bytes(bytes(content))
    assert code_of(export_hf, copy, tmp_path / "out") == "E709"


@pytest.mark.parametrize("fault", ["value", "missing"])
def test_check_logits_finds_a_wrong_export(saved, tmp_path, fault) -> None:
    """The check must be able to fail: one changed matrix, and one tensor left out (E715)."""
    _, checkpoint = saved("llama")
    export_hf(checkpoint, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "value":
        tensors[name] = tensors[name] * 1.05
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MeshwrightError) as caught:
        compare_logits(checkpoint, tmp_path / "out")
    assert [p.code for p in caught.value.problems] == ["E715"]
    assert caught.value.exit_code is ExitCode.NO


def test_a_failed_export_leaves_nothing(saved, tmp_path, monkeypatch) -> None:
    _, checkpoint = saved("llama")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream_module, "_write", full)
    assert code_of(export_hf, checkpoint, tmp_path / "out") == "E703"
    assert list(tmp_path.iterdir()) == []


WIDE = LLAMA | {
    "hidden_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 8192,
}
SHARD = 8 * 2**20


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is not told here"
)
@pytest.mark.parametrize("naive", [False, True], ids=["streamed", "naive"])
def test_a_merge_holds_one_shard_and_one_tensor(tmp_path, naive) -> None:
    """Memory stays below 1.2 x the largest file + one tensor, at a size where all tensors together would not."""
    from multiprocessing import get_context

    run = Run(0, WIDE, "precision=fp32", seed=1, optimizer=SGD)
    run.optimizer.state.clear()
    checkpoint = run.save(tmp_path / "checkpoints", 1)
    largest = max(p.numel() * 4 for p in run.model.params.values())
    whole = sum(p.numel() * 4 for p in run.model.params.values())
    bound = int(1.2 * SHARD) + largest
    assert whole > 4 * bound
    del run
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the child fills what was freed here, without growing

    def merge(results: Any) -> None:
        index = read_index(checkpoint)
        export_hf(
            checkpoint, tmp_path / "warm", dtype="bf16", max_shard_bytes=SHARD
        )  # imports and their memory
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        if naive:
            held = {k: read_tensor(checkpoint, index, k) for k in index.state_dict_metadata}
            save_file(held, tmp_path / "all.safetensors")
        else:
            export_hf(checkpoint, tmp_path / "out", max_shard_bytes=SHARD)
        results.put(_status("VmHWM") - before)

    context = get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=merge, args=(results,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    grown = results.get()
    assert (grown > bound) == naive, (grown, bound)
    if not naive:
        sizes = [p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")]
        assert len(sizes) > 4
        assert max(sizes) < SHARD + largest
