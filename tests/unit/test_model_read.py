"""Reading config.json: what is accepted, what is refused, and that everything wrong is said at once."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.codes.model import CODES as MODEL_CODES
from meshwright.base.errors import MeshwrightError
from meshwright.model.describe import block_lines, describe
from meshwright.model.families import BY_MODEL_TYPE
from meshwright.model.read_hf import read_model, spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def problems(config: dict[str, Any]) -> dict[str, str]:
    """The text of every problem, joined by code."""
    with pytest.raises(MeshwrightError) as caught:
        spec_from_config(config, "tiny")
    found: dict[str, str] = {}
    for p in caught.value.problems:
        found[p.code] = f"{found.get(p.code, '')}{p.text()}\n"
    return found


def codes_of(target: Path | str) -> MeshwrightError:
    with pytest.raises(MeshwrightError) as caught:
        read_model(str(target))
    return caught.value


def test_folder_file_and_catalogue_name_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    a, b = read_model(str(folder)), read_model(str(folder / "config.json"))
    assert a.name == b.name == "mine"
    assert list(a.tensors()) == list(b.tensors())
    assert read_model("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"
    assert hash(a) == hash(read_model(str(folder)))
    assert pickle.loads(pickle.dumps(a)) == a


def test_not_found_names_the_nearest(tmp_path: Path) -> None:
    error = codes_of("llama-3.1-8")
    assert error.problems[0].code == "E120"
    assert "llama-3.1-8b" in error.problems[0].do
    inside = tmp_path / "models" / "m1"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text(json.dumps(LLAMA))
    error = codes_of(tmp_path / "models")
    assert error.problems[0].code == "E120"
    assert "m1" in error.problems[0].do


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n "hidden_size": 8,\n}', "line 3, column 1"),
        ("", "line 1, column 1"),
        ("[1, 2]", "not an object"),
        ("{'a': 1}", "line 1, column 2"),
    ],
)
def test_not_json(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    error = codes_of(tmp_path)
    assert [p.code for p in error.problems] == ["E121"]
    assert says in error.problems[0].found


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    assert [p.code for p in codes_of(tmp_path).problems] == ["E121"]


@pytest.mark.parametrize("target", ["x" * 5000, "a\0b", "~nobody-here/x", ""])
def test_names_no_file_can_have_are_not_found(target: str) -> None:
    assert codes_of(target).problems[0].code == "E120"


def test_a_number_too_long_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}")
    assert [p.code for p in codes_of(tmp_path).problems] == ["E121"]


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 24),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
_BASE = LLAMA | {
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 16,
    "ffn_dim": 16,
    "layer_types": None,
    "sliding_window": 4,
    "head_dim": 2,
    "q_lora_rank": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
    "auto_map": {},
    "quantization_config": {},
    "architectures": [],
    "text_config": {},
}


@given(
    st.sampled_from(sorted(BY_MODEL_TYPE)),
    st.dictionaries(st.sampled_from(sorted(_BASE)), _VALUES, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_any_config_is_read_or_refused_with_a_code(kind: str, changes: dict[str, Any]) -> None:
    config = _BASE | {"model_type": kind} | changes
    spec, codes = None, set[str]()
    try:
        spec = spec_from_config(config, "any")
    except MeshwrightError as error:
        codes = {p.code for p in error.problems}
    assert (spec is None) == bool(codes)
    assert codes <= {"E122", "E123", "E124", "E125"}
    if spec is not None:
        assert all(size > 0 for t in spec.tensors() for size in t.shape)
        assert describe(spec)["num_parameters"] > 0


def test_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert read_model(str(tmp_path)).hidden_size == 8


def test_missing_fields_are_listed_at_once() -> None:
    found = problems({"model_type": "llama", "hidden_size": 8})
    for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert name in found["E122"]
    assert set(found) == {"E122"}
    assert "model_type" in problems({"hidden_size": 8})["E122"]


def test_missing_and_wrong_fields_are_said_together() -> None:
    config = LLAMA | {"hidden_size": 10, "num_hidden_layers": 0, "vocab_size": "32", "mlp_bias": "yes"}
    del config["intermediate_size"]
    found = problems(config)
    assert "intermediate_size" in found["E122"]
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "mlp_bias"):
        assert name in found["E123"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": -8}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 2**21}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 8.5}, "hidden_size"),
        ({"hidden_size": [8]}, "hidden_size"),
        ({"hidden_size": 12}, "head_dim"),
        ({"head_dim": 3}, "head_dim"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"vocab_size": 2**24 + 1}, "vocab_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"attention_dropout": 1.5}, "attention_dropout"),
    ],
)
def test_wrong_values(change: dict[str, Any], field: str) -> None:
    found = problems(LLAMA | change)
    assert set(found) == {"E123"}
    assert field in found["E123"]


NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 2.0}
SEVERAL = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": -1.0}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"layer_norm_epsilon": INF}, "layer_norm_epsilon"),
        ({"rope_theta": -10000.0}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"initializer_range": -0.02}, "initializer_range"),
        ({"attention_dropout": NAN}, "attention_dropout"),
        ({"rope_scaling": YARN | {"factor": 0}}, "rope_scaling.factor"),
        ({"rope_parameters": YARN | {"factor": NAN}}, "rope_parameters.factor"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": SEVERAL}, "rope_parameters.sliding_attention.rope_theta"),
        (
            {"rope_scaling": {"short_factor": [1.0, 0.0], "long_factor": [1.0, 2.0]}},
            "rope_scaling.short_factor",
        ),
        (
            {"rope_scaling": {"low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "rope_scaling.high_freq_factor",
        ),
        ({"rope_scaling": {"original_max_position_embeddings": 0}}, "rope_scaling.original_max"),
    ],
)
def test_numbers_that_would_be_nan_some_steps_later(change: dict[str, Any], field: str) -> None:
    found = problems(LLAMA | change)
    assert set(found) == {"E123"}
    assert f"tiny: {field}" in found["E123"]


def test_numbers_that_can_be() -> None:
    rope = YARN | {
        "attention_factor": None,
        "beta_fast": 32,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 8,
    }
    fine = {
        "rope_parameters": rope,
        "initializer_range": 0,
        "rope_theta": None,
        "final_logit_softcapping": 0.0,
    }
    spec_from_config(LLAMA | fine, "tiny")  # a cap says nothing to a Llama
    gemma = LLAMA | {"model_type": "gemma2", "head_dim": 4, "final_logit_softcapping": 0.0}
    assert "final_logit_softcapping" in problems(gemma)["E123"]
    assert problems(LLAMA | {"head_dim": 0})["E123"].count("E123  ") == 1


def test_wrong_values_of_mixtures_and_lists() -> None:
    moe = LLAMA | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}
    assert "num_experts_per_tok" in problems(moe)["E123"]
    assert "num_local_experts" in problems(LLAMA | {"model_type": "mixtral"})["E122"]
    qwen = LLAMA | {"model_type": "qwen2", "layer_types": ["full_attention"]}
    assert "layer_types" in problems(qwen)["E123"]
    qwen["layer_types"] = ["full_attention", 3]
    assert "layer_types" in problems(qwen)["E123"]
    qwen["layer_types"] = ["full_attention", "sliding_attention"]
    assert "sliding_window" in problems(qwen)["E123"]


def test_whole_floats_are_sizes_and_null_means_default() -> None:
    spec = spec_from_config(LLAMA | {"hidden_size": 8.0, "num_key_value_heads": None}, "tiny")
    assert spec.hidden_size == 8
    assert spec.num_kv_heads == 4


def test_unknown_model_type_names_the_nearest() -> None:
    found = problems(LLAMA | {"model_type": "llamas"})
    assert "llama" in found["E124"]
    found = problems(LLAMA | {"model_type": None, "architectures": ["LlamaForCausalLMs"]})
    assert "LlamaForCausalLM" in found["E124"]


def test_architectures_stand_in_for_model_type() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "model_type"}
    assert spec_from_config(config, "tiny").family == "llama"


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "gpt2",
            "n_embd": 8,
            "n_layer": 1,
            "n_head": 2,
            "vocab_size": 8,
            "add_cross_attention": True,
        },
        LLAMA | {"model_type": "opt", "ffn_dim": 16, "word_embed_proj_dim": 4},
        LLAMA | {"model_type": "opt", "ffn_dim": 16, "do_layer_norm_before": False},
        LLAMA | {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]},
    ],
)
def test_variants_not_built(config: dict[str, Any]) -> None:
    assert set(problems(config)) == {"E125"}


def test_every_code_of_this_file_is_triggered_and_has_a_page() -> None:
    for info in MODEL_CODES:
        assert info.code in Path(__file__).read_text()
        assert 3 <= len(info.page.splitlines()) <= 8
        assert info.needs
        assert info.why
        assert info.do


def test_both_generations_of_field_names() -> None:
    old = LLAMA | {
        "torch_dtype": "bfloat16",
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    new = LLAMA | {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert list(spec_from_config(old, "a").tensors()) == list(spec_from_config(new, "a").tensors())
    mixture = LLAMA | {"model_type": "mixtral"}
    a = spec_from_config(mixture | {"num_local_experts": 4}, "a")
    b = spec_from_config(mixture | {"num_experts": 4}, "a")
    assert list(a.tensors()) == list(b.tensors())


def test_text_part_of_a_multimodal_config() -> None:
    inner = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7}
    spec = spec_from_config(
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner},
        "g",
    )
    assert spec.architecture == "Gemma3ForCausalLM"
    assert spec.num_heads == 8
    assert [b.sliding_window for b in spec.blocks] == [4096] * 5 + [None, 4096]
    assert "text part of a multimodal model" in spec.flags


def test_flags() -> None:
    spec = spec_from_config(
        LLAMA
        | {
            "num_hidden_layers": 41,
            "max_position_embeddings": 8193,
            "tie_word_embeddings": True,
            "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"},
            "quantization_config": {"quant_method": "fp8"},
        },
        "tiny",
    )
    assert spec.flags == (
        "tied embeddings",
        "more than 40 layers",
        "context above 8192",
        "custom code, not executed",
        "weights stored quantised (fp8), read as full precision",
    )
    assert (
        spec_from_config(LLAMA | {"num_hidden_layers": 40, "max_position_embeddings": 8192}, "t").flags == ()
    )
    assert {"MoE", "MLA", "unequal blocks"} <= set(read_model("deepseek-v3").flags)


def test_describe_has_the_contract_keys() -> None:
    spec = read_model("mixtral-8x7b")
    facts = describe(spec, 2048)
    assert list(facts)[:14] == [
        "name",
        "family",
        "num_parameters",
        "num_active_parameters",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "tied_embeddings",
        "is_moe",
        "max_position_embeddings",
        "flops_per_token",
        "flags",
    ]
    json.dumps(facts)
    assert facts["seq_len"] == 2048
    assert describe(spec)["seq_len"] == 4096
    assert describe(read_model("gpt2"))["seq_len"] == 1024
    sizes = facts["parameters"]
    assert sum(sizes["per_block"]) == sizes["blocks"]
    final = sum(t.numel for t in spec.final)
    assert sizes["embedding"] + sizes["blocks"] + final + sizes["head"] == spec.num_parameters
    per_block = facts["forward_flops_per_token"]
    assert 3 * (sum(per_block["per_block"]) + per_block["head"]) == facts["flops_per_token"]["causal"]


def test_block_lines_join_equal_blocks() -> None:
    lines = block_lines(read_model("deepseek-v3"))
    assert [line.split("  ")[0] for line in lines] == [
        "embedding",
        "blocks 0-2",
        "blocks 3-60",
        "final norm",
        "head",
    ]
    assert "tied to the embedding" in block_lines(read_model("gpt2"))[-1]


def test_reading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from meshwright.model import read_hf, describe, sharding; "
        "describe.describe(read_hf.read_model('llama-3.1-405b')); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
