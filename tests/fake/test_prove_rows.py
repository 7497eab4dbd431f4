"""Which rows a proof takes: packed ones by option or by the run file, and what they look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config.load import load_run
from meshwright.config.resolve import resolve
from meshwright.orchestrate import proving
from meshwright.train.data import NO_LOSS, synthetic_batch, synthetic_documents


@pytest.mark.parametrize("seq_len", [1, 2, 5, 32, 257])
@pytest.mark.parametrize("valid", ["unequal", "all"])
def test_documents_of_a_synthetic_batch(seq_len: int, valid: Any) -> None:
    """No label reaches into the next document, some rows end in padding, and something is left to predict."""
    seen = 0
    for step in range(4):
        _, labels = synthetic_batch(step, 50, 8, seq_len, 3, valid, micro_batch=2, dp=2)
        documents, left = synthetic_documents(step, labels, 3)
        assert np.any(left != NO_LOSS)
        assert np.array_equal(left[left != NO_LOSS], labels[left != NO_LOSS])
        if seq_len == 1:
            continue
        steps = np.diff(documents, axis=1)
        assert documents[:, 0].max() == 0
        assert set(np.unique(steps)) <= {0, 1}
        assert documents[:, -1].min() >= 1  # two documents or more
        if seq_len >= 32:
            assert np.all(left[:, :-1][steps == 1] == NO_LOSS)
            ends = documents == documents[:, -1:]
            seen += sum(bool(np.all(row[end] == NO_LOSS)) for row, end in zip(left, ends, strict=True))
    assert seq_len < 32 or valid == "unequal" or 0 < seen < 32


@pytest.mark.parametrize(
    ("rows", "option", "packed"), [("pack", False, True), ("null", True, True), ("pad", False, False)]
)
def test_a_run_file_with_packed_rows_is_proven_with_packed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, option: bool, packed: bool
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {config: recipes/models/tiny-llama}\n"
        f"data: {{path: text.jsonl, seq_len: 32, rows: {rows}}}\n"
        "batch: {sequences: 4}\n"
        f"run: {{dir: {tmp_path / 'out'}, steps: 2}}\n"
    )
    asked: list[bool] = []

    def noted(*_: Any, packed: bool, **__: Any) -> dict[str, Any]:
        asked.append(packed)
        return {"passed": True}

    monkeypatch.setattr(proving, "run_proof", noted)
    run = resolve(load_run(str(file), []), layout="cp=2", check_batch=False)
    proving.prove_command(run, model=None, layout="cp=2", packed=option)
    assert asked == [packed]
