"""Hazards of the engine that no other file names: mixed norms, tensor copies that drift, converted weights."""

from __future__ import annotations

import json

import pytest
import torch
from proofs import prove
from safetensors.torch import load_file, save_file
from test_prove_tensor import LLAMA
from test_train_runs import Job

from meshwright.checkpoint.export import export_command
from meshwright.parallel.build import build_model

pytestmark = pytest.mark.gloo

MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("layout", ["dp=2,zero=1,tp=2,ep=2", "dp=2,zero=3,tp=2", "dp=2,tp=2,ep=2"])
def test_h21_one_norm_of_matrices_that_are_cut_in_different_ways(pool, layout):
    """H21: cut over tp, replicated, spread over ep, sharded by ZeRO: the norm that clips is one device's."""
    result = prove(pool, layout, config=MIXTRAL, max_norm=0.1)
    assert result["passed"], result["checks"]
    assert result["grad_norm"]["max_rel_diff"] <= 1e-12
    assert min(result["grad_norm"]["reference"]) > 0.1


def drifts(model, step):
    """Change one rank's copy of a replicated weight by hand, as a missed sum would."""
    if step == 0 and model.view.coords["tp"] == 1:
        model.params["model.layers.1.input_layernorm.weight"].data.add_(1e-3)


def test_h36_a_copy_that_drifts_on_the_tensor_axis_is_found(pool):
    """H36: each rank compares its own copy, so one that is 1e-3 off is found and named, though the other is right."""
    result = prove(pool, "tp=2", config=LLAMA, steps=2, fault=drifts)
    assert not result["passed"]
    assert not result["checks"]["weights"]
    assert result["weights"]["worst"]["tensor"] == "model.layers.1.input_layernorm.weight"


def test_h45_weights_through_the_tensor_axis_come_out_as_they_went_in(tmp_path, monkeypatch):
    """H45: 4 heads, 2 kv heads: read, cut over tp=2, saved and exported, bit for bit; logits at late positions too."""
    job = Job(tmp_path, monkeypatch)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    model = build_model(config, seed=7, dtype=torch.float32)
    weights = {n: p.detach().clone().contiguous() for n, p in model.state_dict().items()}
    pretrained = tmp_path / "pretrained"
    pretrained.mkdir()
    (pretrained / "config.json").write_text(json.dumps(config))
    tied = bool(config.get("tie_word_embeddings"))
    save_file(
        {n: w for n, w in weights.items() if not (tied and n == "lm_head.weight")},
        pretrained / "model.safetensors",
    )
    still = ["optimizer.lr=1e-30", "optimizer.weight_decay=0", f"model.weights={pretrained}", "run.steps=1"]
    job.run("tp=2,precision=fp32", "cut", sets=still)
    checkpoint = job.folder / "cut" / "checkpoints" / "step-1"
    export_command(str(checkpoint), str(tmp_path / "export"))
    exported = {}
    for file in (tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    assert {n.replace("lm_head", "model.embed_tokens") if tied else n for n in weights} == set(exported)
    from transformers import AutoModelForCausalLM

    ids = torch.arange(6)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits[0, 5], model.eval()(ids).logits[0, 5])
