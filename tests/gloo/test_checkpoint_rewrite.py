"""Checkpoints rewritten for another layout; real write errors; saves that share the work."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from checkpoint_runs import LLAMA, TIED, Run, differing
from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.checkpoint.inspect import find_checkpoint, verify_command
from meshwright.checkpoint.load import latest_checkpoint
from meshwright.checkpoint.metadata import read_index
from meshwright.checkpoint.reshard import logical_hashes, reshard_command
from meshwright.model.adapters import make_adapter
from meshwright.model.spec import AdapterSpec

EVEN = LLAMA | {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
}


MIXTURE = EVEN | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
"""Three experts a rank with ep=2: ZeRO cuts them in two and one."""

LORA = make_adapter("lora", 3, None, ("q_proj", "o_proj", "gate_proj", "down_proj"))
ON_EXPERTS = make_adapter("lora", 3, None, ("q_proj", "experts"))


def saved(
    rank: int,
    world: int,
    folder: Path,
    config: dict[str, Any],
    layout: str,
    adapter: AdapterSpec | None = None,
) -> dict[str, Any]:
    run = Run(rank, config, layout, seed=1, adapter=adapter)
    run.train(1, 2)
    path = run.save(folder, 2)
    return {"path": path, "state": run.state()}


def loaded(
    rank: int,
    world: int,
    path: Path,
    config: dict[str, Any],
    layout: str,
    adapter: AdapterSpec | None = None,
) -> dict[str, Any]:
    run = Run(rank, config, layout, seed=2, adapter=adapter)
    run.load(path)
    return run.state()


def places(index: Any) -> set[tuple[str, tuple[int, ...]]]:
    """Return (key, offsets) of every piece that holds something: torch notes empty ends of a cut too."""
    empty = {
        (key, tuple(chunk.offsets))
        for key, entry in index.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
        if 0 in chunk.sizes
    }
    return {(where.fqn, tuple(where.offset or ())) for where in index.storage_data} - empty


@pytest.mark.parametrize(
    ("config", "layout", "world", "adapter"),
    [
        (EVEN, "dp=2,tp=2,zero=3", 4, None),
        (EVEN, "pp=2,tp=2,schedule=zbv", 4, None),
        (TIED, "dp=2,pp=2,zero=1", 4, None),
        (LLAMA, "dp=4,zero=3,shard=2", 4, None),
        (EVEN, "dp=2,cp=2,zero=3", 4, None),
        (MIXTURE, "dp=4,ep=2,zero=3", 4, None),
        (MIXTURE, "dp=2,tp=2,ep=2,zero=1", 4, None),
        pytest.param(MIXTURE, "dp=4,ep=2,zero=3,shard=2", 4, None, marks=pytest.mark.slow),
        pytest.param(MIXTURE, "dp=2,cp=2,ep=2,pp=2,zero=2", 8, None, marks=pytest.mark.slow),
        (EVEN, "tp=2,pp=2", 4, LORA),
        pytest.param(MIXTURE, "dp=4,ep=2,zero=3", 4, ON_EXPERTS, marks=pytest.mark.slow),
        pytest.param(MIXTURE, "tp=2,ep=2,dp=2", 4, ON_EXPERTS, marks=pytest.mark.slow),
        (LLAMA, "dp=1", 1, None),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_rewritten_checkpoint_is_that_of_the_other_layout(pool, tmp_path, config, layout, world, adapter):
    """Same logical hashes, same files as a run of that layout would write, and each rank needs its own file only."""
    first = pool.run(saved, 2, tmp_path / "a", config, "dp=2,zero=3,precision=fp32", adapter)
    source = first[0]["path"]
    text = f"{layout},precision=fp32"
    report = reshard_command(str(source), text, str(tmp_path / "b"))
    made = Path(report["out"])
    assert find_checkpoint(tmp_path / "b") == made
    assert verify_command(str(made))["ok"]
    assert logical_hashes(made) == logical_hashes(source)
    assert len(logical_hashes(made)) == report["tensors_equal"]
    index = read_index(made)
    own = pool.run(saved, world, tmp_path / "c", config, text, adapter)[0]["path"]
    theirs = read_index(own)
    assert places(index) == places(theirs), "the pieces are those that the layout itself saves"
    want = pool.run(loaded, world, source, config, text, adapter)
    for got, held in zip(pool.run(loaded, world, made, config, text, adapter), want, strict=True):
        assert differing(got, held) == []
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["world_size"] == world
    assert manifest["extra"]["plan_hash"] == manifest["plan_hash"] == report["plan_hash"]


def test_what_cannot_be_rewritten_is_refused(pool, tmp_path):
    source = pool.run(saved, 1, tmp_path / "a", LLAMA, "precision=fp32")[0]["path"]
    for layout, code in (("tp=2", "E2"), ("dp=3,zero=1", "E"), ("dp=2,ep=2", "E210")):
        with pytest.raises(MeshwrightError, match=code) as caught:
            reshard_command(str(source), f"{layout},precision=fp32", str(tmp_path / "b"))
        assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not (tmp_path / "b").exists()
    reshard_command(str(source), "dp=2,zero=1,precision=fp32", str(tmp_path / "b"))
    with pytest.raises(MeshwrightError, match="E712"):
        reshard_command(str(source), "dp=2,zero=1,precision=fp32", str(tmp_path / "b"))


def full_disk(rank: int, world: int, folder: Path) -> list[Any]:
    run = Run(rank, LLAMA, "dp=2,zero=3,precision=fp32", seed=1)
    run.train(1, 1)
    run.save(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    found: list[Any] = []
    try:
        if rank == 1:  # the system refuses to let this rank's files grow
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        run.save(folder, 2)
    except MeshwrightError as error:
        found = [(p.code, "rank 1" in p.found) for p in error.problems]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    run.save(folder, 3)
    return found


def test_a_full_disk_on_one_rank_leaves_the_older_checkpoint(pool, tmp_path):
    """A real refusal of the system in the middle of a shard: both ranks say E703, step 1 stays, the next save works."""
    assert pool.run(full_disk, 2, tmp_path) == [[("E703", True)]] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert latest_checkpoint(tmp_path)[0] == tmp_path / "step-3"


def read_only(rank: int, world: int) -> list[str]:
    run = Run(rank, LLAMA, "dp=2,zero=3,precision=fp32", seed=1)
    try:
        run.save(Path("/proc/meshwright"), 1)
    except MeshwrightError as error:
        return [p.code for p in error.problems]
    return []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_ends_the_save_on_all_ranks(pool):
    assert pool.run(read_only, 2) == [["E703"], ["E703"]]
