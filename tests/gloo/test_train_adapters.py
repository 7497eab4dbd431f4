"""Runs with LoRA from the run file to files that peft loads: state, resume on another layout, export, merge."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from test_train_runs import CONFIG, Job

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.export import export_command
from meshwright.checkpoint.metadata import read_index, read_tensor
from meshwright.parallel.build import build_model

pytestmark = pytest.mark.gloo

LORA = ["adapter.kind=lora", "adapter.rank=4", "optimizer.lr=2e-2"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def factors(rank: int) -> int:
    """Elements of A and B of rank ``rank`` on all seven matrices of the four layers."""
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    return 4 * rank * sum(out + inner for out, inner in shapes)


def test_only_the_adapter_trains_and_peft_loads_it(job, tmp_path):
    """H105 and H107: ZeRO-3, bf16 compute: the base stays bit for bit, every saved factor is whole and not zero."""
    job.run("dp=2,zero=3,precision=bf16", sets=LORA)
    held = job.metrics()[-1]
    assert held["loss"] < job.metrics()[0]["loss"]
    assert held["memory_bytes"]["optimizer"] == pytest.approx(2 * 4 * factors(4) / 2, rel=0.02)
    checkpoint = job.folder / "out" / "checkpoints" / "step-6"
    index = read_index(checkpoint)
    for name, p in build_model(CONFIG, seed=0).named_parameters():
        assert torch.equal(read_tensor(checkpoint, index, f"model/{name}"), p.detach()), name
    done = export_command(str(checkpoint), str(tmp_path / "adapter"), check_logits=True)
    assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(t.numel() for t in saved.values()) == factors(4)
    assert len(saved) == done["tensors"] == 2 * 7 * 4
    for name, tensor in saved.items():
        assert name.startswith("base_model.model.model.layers.")
        assert tensor.norm() > 0, name
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)


def test_plain_peft_and_the_merged_model_give_the_same_logits(job, tmp_path):
    job.run("dp=2,zero=2,precision=fp32", sets=LORA)
    checkpoint = str(job.folder / "out" / "checkpoints" / "step-6")
    export_command(checkpoint, str(tmp_path / "adapter"))
    done = export_command(checkpoint, str(tmp_path / "whole"), check_logits=True, merge=True)
    assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = build_model(CONFIG, seed=0).eval()  # what a user of peft has: the base as it was before the run
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        bare = base(input_ids=tokens).logits
        adapter = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        one = adapter(input_ids=tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True).eval()
        two = whole(input_ids=tokens).logits
    assert (one - two).abs().max() <= 1e-5 * one.abs().max()
    assert (one - bare).abs().max() > 1e-3 * one.abs().max()  # the adapter does something


def test_a_run_resumes_on_another_layout(job):
    job.run("dp=1,precision=fp64", "one", sets=LORA)
    job.run("dp=2,zero=3,precision=fp64", "cut", sets=LORA, stop_at_step=3)
    job.run("dp=2,pp=2,precision=fp64", "cut", sets=LORA, resume=True)
    want = [m["loss"] for m in job.metrics("one")]
    assert [m["loss"] for m in job.metrics("cut")] == pytest.approx(want, abs=1e-11)


MIXTURE = {
    **CONFIG,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SPREAD = {**MIXTURE, "num_experts_per_tok": 1}
"""Its adapter is on the experts and the attention's output."""

EVERYWHERE = [
    ("cp=2,zero=3", CONFIG),
    ("cp=2,cp_style=ulysses,tp=2", CONFIG),
    ("tp=2,pp=2", CONFIG),
    ("dp=4,zero=3,shard=2", CONFIG),
    ("dp=2,ep=2,zero=3", MIXTURE),
    ("cp=2,ep=2,pp=2", MIXTURE),
    ("dp=2,ep=2,zero=3", SPREAD),
    ("tp=2,ep=2,dp=2", SPREAD),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "config"), EVERYWHERE, ids=lambda v: v if isinstance(v, str) else v["model_type"]
)
def test_h107_a_saved_adapter_is_one_devices_in_every_layout(job, tmp_path, layout, config):
    """H107: the files that peft loads, after training in float64: equal names, shapes and values; and peft loads them."""
    (job.folder / "model" / "config.json").write_text(json.dumps(config))
    saved = []
    sets = [*LORA, "run.steps=3", "run.eval_every=0"]
    sets += ["adapter.targets=[experts,o_proj]"] if config is SPREAD else []
    for name, text in (("one", "dp=1"), ("cut", layout)):
        job.run(f"{text},precision=fp64", name, sets=sets)
        checkpoint = str(job.folder / name / "checkpoints" / "step-3")
        done = export_command(checkpoint, str(tmp_path / f"{name}-adapter"), check_logits=True)
        assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
        saved.append(load_file(tmp_path / f"{name}-adapter" / "adapter_model.safetensors"))
    one, cut = saved
    assert one.keys() == cut.keys()
    for key, want in one.items():
        assert want.norm() > 0
        assert cut[key].shape == want.shape
        assert (cut[key] - want).abs().max() <= 1e-9 * want.abs().max(), key


def test_h120_the_record_says_which_checkpointing_runs_and_adapters_learn_beside_it(job):
    """H120: nobody sets the flag a second time: a run file has none, run.json has the one in use, gradients are equal.

    The embedding is frozen. torch's re-entrant form leaves the factors of recomputed blocks without a gradient there.
    """
    for name, layout in (("kept", "dp=1"), ("again", "dp=1,recompute=full")):
        job.run(f"{layout},precision=fp64", name, sets=[*LORA, "run.steps=2", "run.eval_every=0"])
    record = [json.loads((job.folder / name / "run.json").read_text()) for name in ("kept", "again")]
    assert record[0]["recompute"] is None
    assert record[1]["recompute"] == {"mode": "full", "use_reentrant": False}
    for kept, again in zip(job.metrics("kept"), job.metrics("again"), strict=True):
        assert kept["grad_norm"] > 0
        assert again["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-12)
        assert again["loss"] == pytest.approx(kept["loss"], abs=1e-12)
    with pytest.raises(MeshwrightError) as refused:
        job.run("dp=1,recompute=full", "own", sets=["run.use_reentrant=true"])
    assert {p.code for p in refused.value.problems} == {"E104"}  # no such key


@pytest.mark.slow
def test_adapters_on_experts_load_in_plain_peft_and_merge(job, tmp_path):
    """Trained with the experts spread over two ranks; peft and the merged model give the checkpoint's logits."""
    (job.folder / "model" / "config.json").write_text(json.dumps(MIXTURE))
    job.run("dp=2,ep=2,zero=3,precision=fp32", sets=[*LORA, "adapter.targets=[experts]"])
    checkpoint = str(job.folder / "out" / "checkpoints" / "step-6")
    export_command(checkpoint, str(tmp_path / "adapter"), check_logits=True)
    done = export_command(checkpoint, str(tmp_path / "whole"), check_logits=True, merge=True)
    assert done["check_logits"]["max_abs_diff"] <= done["check_logits"]["tolerance"]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = build_model(MIXTURE, seed=0).eval()
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        bare = base(input_ids=tokens).logits
        adapter = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        one = adapter(input_ids=tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True).eval()
        two = whole(input_ids=tokens).logits
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * MIXTURE["num_hidden_layers"]
    assert all(t.norm() > 0 for t in saved.values())
    assert (one - two).abs().max() <= 1e-5 * one.abs().max()
    assert (one - bare).abs().max() > 1e-3 * one.abs().max()


def test_initial_factors_do_not_depend_on_the_layout(job):
    for name, layout in (("a", "dp=1"), ("b", "dp=2,zero=3,pp=2")):
        job.run(
            f"{layout},precision=fp64",
            name,
            sets=[*LORA[:2], "run.steps=1", "batch.sequences=12", "optimizer.lr=1e-30"],
        )
    parts = [job.folder / name / "checkpoints" / "step-1" for name in ("a", "b")]
    indices = [read_index(part) for part in parts]
    keys = [k for k in indices[0].state_dict_metadata if "lora_A" in k and k.startswith("model/")]
    assert len(keys) == 28
    for key in keys:
        a, b = (read_tensor(part, index, key) for part, index in zip(parts, indices, strict=True))
        assert torch.equal(a, b), key


def test_the_prediction_knows_what_an_adapter_saves(job):
    full = job.run("dp=2,zero=3,precision=fp32", "full")
    lora = job.run("dp=2,zero=3,precision=fp32", "lora", sets=LORA)
    for kind in ("gradients", "optimizer"):
        measured = lora["measurement"]["memory_bytes"][kind]
        assert lora["prediction"]["memory_bytes"][kind] == pytest.approx(measured, rel=0.05), kind
        assert measured < 0.6 * full["measurement"]["memory_bytes"][kind]
    whole = lora["measurement"]["peak_memory_bytes"]
    assert lora["prediction"]["peak_memory_bytes"] == pytest.approx(whole, rel=0.15)


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["adapter.kind=lora", "adapter.targets=[q_prj]"], "E271"),
        (["adapter.kind=lora", "adapter.targets=[norm]"], "E271"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(job, sets, code):
    with pytest.raises(MeshwrightError) as error:
        job.run("dp=2", sets=sets)
    assert {p.code for p in error.value.problems} == {code}
    assert not (job.folder / "out").exists()
