"""Training jobs that once went wrong: folders that were overwritten, limits that were not kept, faults of configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate.training import train_command

pytestmark = pytest.mark.gloo

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "vocab_size": 260,
    "max_position_embeddings": 32,
}
CLUSTER = {
    "name": "two cores",
    "gpus_per_node": 6,
    "num_nodes": 1,
    "source": "made up for tests",
    "device": {
        "name": "core",
        "memory": "4GiB",
        "peak_flops": {"fp32": 1e11},
        "matmul_flops": {"fp32": 5e10},
        "memory_rate_bytes_per_s": 5e9,
        "launch_s": 1e-5,
        "is_cpu": True,
    },
    "intra": {"name": "loop-back", "rate_bytes_per_s": 1e9, "latency_s": 1e-4},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i % 7} words\n" for i in range(400)))
    (tmp_path / "other.txt").write_text("".join(f"other {i} with {i % 5}\n" for i in range(400)))
    (tmp_path / "run.yaml").write_text(
        "model: {config: model}\n"
        "data: {path: text.txt, seq_len: 8, eval_fraction: 0}\n"
        "batch: {sequences: 4}\n"
        "cluster: cluster.json\n"
        "run: {steps: 3}\n"
    )
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def train(folder: Path, *sets: str, layout: str = "dp=2,precision=fp32", name: str = "out", **options):
    run = resolve(load_run(str(folder / "run.yaml"), [f"run.dir={folder / name}", *sets]), layout=layout)
    lines: list[str] = options.pop("lines", [])
    return train_command(run, layout=layout, show=lines.append, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("run.json", "plan.json", "metrics.jsonl")}


def test_a_refused_resume_leaves_the_run_as_it_was(folder: Path) -> None:
    train(folder)
    before = contents(folder / "out")
    for sets in (
        ("run.steps=3",),
        ("run.steps=5", f"data.path={folder / 'other.txt'}"),
        ("run.steps=5", "run.seed=7"),
        ("run.steps=5", "batch.sequences=8"),
    ):
        with pytest.raises(MeshwrightError, match=r"E559|E551") as caught:
            train(folder, *sets, resume=True)
        assert caught.value.exit_code == ExitCode.BAD_INPUT
        assert contents(folder / "out") == before, sets
    with pytest.raises(MeshwrightError, match=r"E559.*step-3.*ends after step 2"):
        train(folder, "run.steps=5", resume=True, stop_at_step=2)
    assert train(folder, "run.steps=4", resume=True)["steps"] == 4


def test_the_time_limit_ends_a_run_in_good_order(folder: Path) -> None:
    result = train(folder, "run.steps=100000", "run.max_minutes=0.01")
    assert 0 < result["steps"] < 100000
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]
    assert "time limit" in {e["event"] for e in events}
    assert (folder / "out" / "checkpoints" / f"step-{result['steps']}").is_dir()
    assert train(folder, "run.steps=100000", resume=True, stop_at_step=result["steps"] + 1)["steps"] > 1


def test_a_horizon_that_is_not_reached_is_said(folder: Path) -> None:
    lines: list[str] = []
    train(folder, stop_at_step=9, dry_run=True, lines=lines)
    assert any(line.startswith("W101") and "--steps 9" in line for line in lines)


def test_a_precision_without_a_price_runs_without_a_prediction(folder: Path) -> None:
    lines: list[str] = []
    result = train(folder, layout="dp=2,precision=bf16", lines=lines)
    assert (result["steps"], result["prediction"]) == (3, None)
    assert any(line.startswith("W542") for line in lines)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("rms_norm_eps", "x", "E123"),  # read by us, before transformers sees it
        ("rope_scaling", "x", "E811"),
        ("pad_token_id", 10**9, "E811"),
        ("hidden_act", "sillu", "E811"),
    ],
)
def test_a_config_that_cannot_be_built_writes_nothing(
    folder: Path, field: str, value: object, code: str
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(MeshwrightError, match=code) as caught:
        train(folder)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not (folder / "out").exists()


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(MeshwrightError) as caught:
        train(
            folder,
            "data.path=nowhere",
            "cluster=nowhere",
            "freeze=[nothing]",
            layout="pp=9,tp=3",
            name="file",
        )
    codes = {p.code for p in caught.value.problems}
    assert {"E601", "E401", "E812", "E211", "E201", "E813"} <= codes
    with pytest.raises(MeshwrightError) as caught:
        train(folder, "model.config=nowhere", "data.path=nowhere")
    assert {"E120", "E601"} <= {p.code for p in caught.value.problems}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_run_folder_that_cannot_be_made_is_refused_by_a_dry_run_too(folder: Path) -> None:
    run = resolve(load_run(str(folder / "run.yaml"), ["run.dir=/proc/out"]), layout="dp=2,precision=fp32")
    with pytest.raises(MeshwrightError, match="E813") as caught:
        train_command(run, layout="dp=2,precision=fp32", dry_run=True, show=lambda line: None)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert [p.name for p in folder.iterdir() if p.name.startswith(".meshwright")] == []


def test_two_runs_never_share_a_folder(folder: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    train(folder)
    before = contents(folder / "out")
    with (folder / "out" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MeshwrightError, match=r"E541.*another process"):
            train(folder, "run.steps=5", resume=True)
        assert contents(folder / "out") == before


def test_fewer_micro_batches_than_stages_run_with_a_warning(folder: Path) -> None:
    lines: list[str] = []
    result = train(folder, "run.steps=1", layout="pp=2,micro_batch=4,precision=fp32", lines=lines)
    assert result["steps"] == 1
    assert any(line.startswith("W301") for line in lines)


def test_odd_sizes_run(folder: Path) -> None:
    odd = {**CONFIG, "num_hidden_layers": 7, "hidden_size": 36, "num_attention_heads": 9}
    (folder / "model" / "config.json").write_text(json.dumps({**odd, "num_key_value_heads": 3}))
    sets = ("run.steps=1", "batch.sequences=5", "data.seq_len=2")
    assert train(folder, *sets, layout="pp=3,precision=fp32")["steps"] == 1


def test_a_proof_on_more_ranks_than_the_machine_carries_is_refused_at_once() -> None:
    from meshwright.orchestrate.proving import prove_command

    with pytest.raises(MeshwrightError, match="E509") as caught:
        prove_command(
            None,
            model=str(Path(__file__).parents[2] / "recipes" / "models" / "tiny-llama"),
            layout="dp=65536",
        )
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
