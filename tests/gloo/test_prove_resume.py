"""``prove --resume`` through the command's own path: killed for real, and gone on in the same layout or in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.orchestrate import proving
from meshwright.orchestrate.proving import prove_command

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_same_layout_has_the_same_bits(model: str) -> None:
    found = prove_command(
        None, model=model, layout="dp=2,zero=1", precision="fp32", steps=1, seq_len=8, resume=True
    )
    assert found["passed"]
    assert found["resume"]["bit_equal"]


def test_another_layout_goes_on_within_the_bound(model: str) -> None:
    found = prove_command(
        None, model=model, layout="dp=2,zero=1", steps=1, seq_len=8, resume=True, resume_layout="pp=2"
    )
    assert found["passed"]
    assert not found["resume"]["bit_equal"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_proof_multiplies_as_the_run_file_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, resume: bool
) -> None:
    """Both kinds of a proof are given ``run.matmul``, and give it to the ranks."""
    from meshwright.config.load import load_run
    from meshwright.config.resolve import resolve
    from meshwright.orchestrate import proving_resume

    seen: list[Any] = []

    def ranks(worker: Any, nproc: int, work: Any, **_: Any) -> Any:
        seen.append(work)
        raise InterruptedError

    recipe = "recipes/demo.yaml"
    run = resolve(
        load_run(recipe, (f"model.config={model}", "run.matmul=torch")), layout="dp=2", check_batch=False
    )
    monkeypatch.setattr(proving, "run_local", ranks)
    monkeypatch.setattr(proving_resume, "run_local", ranks)
    with pytest.raises(InterruptedError):
        prove_command(run, model=None, layout="dp=2", precision="fp32", steps=1, seq_len=8, resume=resume)
    work = seen[0]
    assert (work.task.run.run.matmul if resume else work.recipe.matmul) == "torch"
