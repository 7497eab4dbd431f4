"""Parameters in host memory or in files: one device's gradients, every bit of a run without, bytes as predicted."""

from __future__ import annotations

import json

import pytest
from proofs import SMALL, prove
from test_train_offload import state
from test_train_runs import CONFIG, Job

from meshwright.base.errors import MeshwrightError
from meshwright.model.spec import AdapterSpec
from meshwright.parallel.offload import Seals

pytestmark = pytest.mark.gloo

HOMES = ["parameters", "parameters-nvme"]
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "vocab_size": 67,
    "n_positions": 64,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
}
WIDE = CONFIG | {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


CORE = [("dp=2", "parameters"), ("dp=2,zero=3,pp=2", "parameters-nvme"), ("dp=2,zero=1", "parameters-nvme")]
EVERY = (
    *("dp=1", "dp=2", "pp=2", "dp=3,zero=3", "dp=2,zero=1", "dp=2,zero=2,micro_batch=2"),
    *("dp=2,zero=1,pp=2", "dp=2,zero=3,pp=2", "pp=2,schedule=interleaved", "dp=2,pp=2,schedule=gpipe"),
    *("dp=2,recompute=full,loss=chunked", "dp=2,zero=3,recompute=selective"),
    "dp=4,zero=3,pp=2,schedule=interleaved",
)
REST = [(layout, home) for layout in EVERY for home in HOMES if (layout, home) not in CORE]
slow = pytest.mark.slow


@pytest.mark.parametrize(("layout", "home"), [*CORE, *(pytest.param(*case, marks=slow) for case in REST)])
def test_equals_one_device(pool, layout, home):
    """Float64: losses, gradients, weights, the order of the schedule, and every collective of the step program."""
    result = prove(pool, f"{layout},offload={home}", config=SMALL, steps=3)
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["weights"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]


MIXTRAL = SMALL | {
    "num_hidden_layers": 2,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LORA = AdapterSpec(kind="lora", rank=3, alpha=5.0)
BESIDE = [
    *(
        (layout, SMALL, None)
        for layout in ("tp=2,pp=2,recompute=full", "dp=2,zero=3,tp=2", "cp=2", "cp=2,zero=3")
    ),
    *(
        (layout, SMALL, None)
        for layout in ("dp=4,zero=3,shard=2", "dp=4,zero=1,shard=2", "tp=4,kv_heads=replicate")
    ),
    *((layout, MIXTRAL, None) for layout in ("dp=4,ep=2", "dp=2,ep=2,zero=3", "dp=4,ep=2,zero=1")),
    *((layout, MIXTRAL, None) for layout in ("dp=2,cp=2,ep=2,zero=2", "tp=2,ep=2,dp=2,pp=2")),
    *((layout, SMALL, LORA) for layout in ("dp=2", "dp=2,zero=3", "pp=2,dp=2,zero=1", "tp=2,dp=2")),
    ("dp=2,ep=2", MIXTRAL, AdapterSpec(kind="lora", rank=3, alpha=5.0, targets=("experts",))),
    *((f"dp=2,zero={z},pp=2,schedule={s}", SMALL, None) for z, s in ((1, "zb-h1"), (2, "zbv,chunks=2"))),
    *((f"{layout},compile=blocks", SMALL, None) for layout in ("dp=2", "dp=2,zero=3", "tp=2,recompute=full")),
]


@pytest.mark.parametrize(
    ("layout", "config", "adapter", "home"),
    [
        ("dp=2,ep=2,tp=2", MIXTRAL, None, "parameters"),
        *(pytest.param(*case, home, marks=slow) for case in BESIDE for home in HOMES),
    ],
    ids=lambda v: v if isinstance(v, str) else v["model_type"] if isinstance(v, dict) else "",
)
def test_beside_every_axis_and_adapters(pool, layout, config, adapter, home):
    result = prove(pool, f"{layout},offload={home}", config=config, adapter=adapter, steps=2)
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10
    assert result["ledger"]["matches"]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp=2", {"config": GPT2}),
        pytest.param("dp=2,zero=3", {"freeze": ("model.embed_tokens.*", "model.layers.[01].*")}, marks=slow),
        pytest.param("dp=2", {"freeze": ("model.embed_tokens.*", "model.layers.[01].*")}, marks=slow),
        pytest.param("pp=2", {"config": SMALL | {"tie_word_embeddings": True}}, marks=slow),
        pytest.param("dp=2", {"config": "recipes/models/tiny-mixtral"}, marks=slow),
        pytest.param("dp=2,zero=3,pp=2", {"config": "recipes/models/tiny-qwen3"}, marks=slow),
    ],
)
def test_families_dropout_frozen_and_tied(pool, layout, options):
    result = prove(pool, f"{layout},offload=parameters-nvme", **{"config": SMALL, "steps": 2} | options)
    assert result["passed"], result["checks"]
    assert result["gradients"]["max_rel_diff"] <= 1e-10


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,precision=fp32",
        pytest.param("dp=2,zero=3,precision=bf16", marks=slow),
        pytest.param("dp=2,precision=bf16", marks=slow),
        pytest.param("dp=2,zero=1,precision=fp16", marks=slow),
    ],
)
def test_every_bit_is_that_of_a_run_without_offload(job, layout):
    """Parameters and both moments after six steps with evaluations and clipping, in memory and in files."""
    job.run(layout, "plain")
    want = state(job, "plain")
    for home in HOMES:
        job.run(f"{layout},offload={home}", home)
        got = state(job, home)
        assert got.keys() == want.keys()
        assert [key for key in want if not bool((got[key] == want[key]).all())] == []
        assert not (job.folder / home / "offload").exists()


@pytest.mark.parametrize(
    "layout",
    [
        "dp=1,pp=2",
        pytest.param("dp=2", marks=slow),
        pytest.param("dp=2,zero=3", marks=slow),
        pytest.param("dp=1", marks=slow),
        pytest.param("dp=2,zero=1", marks=slow),
        pytest.param("dp=2,micro_batch=4", marks=slow),
        pytest.param("dp=2,recompute=full", marks=slow),
        pytest.param("dp=2,pp=2,zero=3", marks=slow),
    ],
)
def test_bytes_on_the_device_fall_as_predicted(job, layout):
    """The fall of the measured peak is that of the predicted one, and what rests on the device is next to nothing."""
    (job.folder / "model" / "config.json").write_text(json.dumps(WIDE))
    sets = ["data.seq_len=8", "run.eval_every=0", "run.steps=4"]
    plain = job.run(f"{layout},precision=fp32", "plain", sets=sets)
    at_rest = job.metrics("plain")[-1]["memory_bytes"]
    home = HOMES[len(layout) % 2]
    away = job.run(f"{layout},precision=fp32,offload={home}", "away", sets=sets)
    fallen, foreseen = (
        plain[kind]["peak_memory_bytes"] - away[kind]["peak_memory_bytes"]
        for kind in ("measurement", "prediction")
    )
    assert fallen == pytest.approx(foreseen, rel=0.03)
    if "zero" not in layout:
        predicted, measured = (away[kind]["peak_memory_bytes"] for kind in ("prediction", "measurement"))
        assert predicted == pytest.approx(measured, rel=0.08)
    left = job.metrics("away")[-1]["memory_bytes"]
    everything = sum(at_rest[k] for k in ("parameters", "gradients", "optimizer"))
    assert sum(left[k] for k in ("parameters", "gradients", "optimizer")) < 0.01 * everything
    assert left["offloaded"] >= 0.99 * everything
    assert away["prediction"]["time_s"]["offload"] > 0


@slow
def test_a_run_resumes_with_and_without(job):
    """H210: files are made again, what a stopped run left is not read, and the losses go on."""
    job.run("dp=2,precision=fp64", "one")
    job.run("dp=2,zero=3,precision=fp64,offload=parameters-nvme", "cut", stop_at_step=2)
    job.run("dp=2,pp=2,precision=fp64,offload=parameters", "cut", resume=True, stop_at_step=4)
    job.run("dp=1,precision=fp64", "cut", resume=True)
    want = [m["loss"] for m in job.metrics("one")]
    assert [m["loss"] for m in job.metrics("cut")] == pytest.approx(want, abs=1e-11)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3"])
def test_a_changed_byte_ends_the_run_before_it_is_used(job, monkeypatch, layout):
    """E277 with the parameter's name, on blocks and on shards."""
    seal = Seals.seal
    names = []

    def seal_and_spoil(self, only=None):
        seal(self, only)
        name = "model.layers.1.mlp.down_proj.weight"
        if only is not None and name in only and name in self._places:
            names.append(name)
            self._home[self._places[name][0] + 5] += 1.0

    monkeypatch.setattr(Seals, "seal", seal_and_spoil)
    with pytest.raises(MeshwrightError) as error:
        job.run(f"{layout},precision=fp32,offload=parameters-nvme", sets=["run.eval_every=0"])
    found = " ".join(f"{p.code} {p.where} {p.found}" for p in error.value.problems)
    assert "E277" in found
    assert "model.layers.1.mlp.down_proj.weight" in found


@pytest.mark.parametrize(
    ("layout", "code", "do"),
    [
        ("pp=2,schedule=zbv,chunks=2,offload=parameters", "E290", "schedule=interleaved"),
        ("dp=2,pp=2,schedule=zb-h1,offload=parameters-nvme", "E290", "zero = 1"),
        ("dp=2,precision=fp8", "E291", "precision=bf16"),
        ("dp=2,zero=3,precision=fp8-rowwise", "E291", "precision=bf16"),
    ],
)
def test_what_is_not_built_is_refused_before_a_rank_starts(job, layout, code, do):
    with pytest.raises(MeshwrightError) as error:
        job.run(layout)
    (problem,) = [p for p in error.value.problems if p.code == code]
    assert do in problem.do
    assert problem.kind.value == "code"
    assert error.value.exit_code == 2
    assert not (job.folder / "out").exists()


def test_a_proof_refuses_fp8_though_it_has_a_precision_of_its_own():
    from meshwright.orchestrate.proving import prove_command

    with pytest.raises(MeshwrightError) as error:
        prove_command(None, model="recipes/models/tiny-llama", layout="dp=2,precision=fp8")
    assert [p.code for p in error.value.problems] == ["E291"]


def test_a_precision_that_was_asked_for_stands_in_place_of_the_layouts(monkeypatch):
    """What the command line overrides is judged after that: nothing of fp8 is left in the plan."""
    from meshwright.orchestrate import proving

    plans = []
    monkeypatch.setattr(proving, "run_proof", lambda plan, *_, **__: plans.append(plan) or {"passed": True})
    proving.prove_command(
        None, model="recipes/models/tiny-llama", layout="dp=2,precision=fp8", precision="fp32"
    )
    assert plans[0].layout.precision == "fp32"
