"""What data asks of layout and model: refused before any process starts, with a code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_data import chat_tokenizer, conversations, write_jsonl
from meshwright.cli.main import run as meshwright
from meshwright.config.resolve import DataSettings
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.orchestrate.data_rules import data_problems


@pytest.fixture
def chat(tmp_path: Path) -> DataSettings:
    chat_tokenizer(tmp_path / "tok")
    return DataSettings(path=str(write_jsonl(tmp_path / "c.jsonl", conversations(30))), seq_len=128)


def codes(*arguments) -> list[str]:
    return [p.code for p in data_problems(*arguments)]


def test_w640_w656_packed_documents_and_the_layout(chat: DataSettings) -> None:
    """Over a context axis the mask is made some queries at a time and never whole."""
    spec = read_model("recipes/models/tiny-llama")
    assert codes(chat, spec, parse_layout("cp=2")) == ["W656"]
    assert codes(chat, spec, parse_layout("dp=2")) == ["W640"]
    padded = DataSettings(path=chat.path, seq_len=128, rows="pad")
    assert codes(padded, spec, parse_layout("cp=2")) == []
    assert codes(DataSettings(path="python-docs", seq_len=128), spec, parse_layout("cp=2")) == []


def test_e654_a_family_for_which_packing_is_not_tested(chat: DataSettings) -> None:
    assert codes(chat, read_model("opt-6.7b"), parse_layout("dp=1")) == ["E654"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("{seq_len: 64}", "E640"),
        ("{path: c.jsonl, sources: {c.jsonl: 1}, seq_len: 64}", "E640"),
        ("{path: c.jsonl, rows: stream, seq_len: 64}", "E641"),
        ("{path: c.jsonl, format: text, tokenizer: tok, seq_len: 64}", "E606"),
        ("{path: c.jsonl, seq_len: 64}", "E642"),
        ("{path: c.jsonl, tokenizer: tok, seq_len: 40}", "E646"),
        ("{sources: {c.jsonl: 1, d.jsonl: 1.0e-9}, tokenizer: tok, seq_len: 256}", "E645"),
        ("{path: built, seq_len: 64}", "E650"),
    ],
)
def test_refused_with_exit_2_before_anything_is_written(
    tmp_path: Path, chat: DataSettings, capsys: pytest.CaptureFixture[str], monkeypatch, data: str, code: str
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path / "d.jsonl", conversations(9))
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "shards.json").write_text("{}")
    config = read_model("recipes/models/tiny-llama").config
    (tmp_path / "config.json").write_text(json.dumps(dict(config) | {"vocab_size": 300}))
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{config: {tmp_path / 'config.json'}}}\ndata: {data}\nbatch: {{sequences: 2}}\ncluster: h100-x8\n"
        f"run: {{steps: 1, dir: {tmp_path / 'out'}}}\n"
    )
    code_of = meshwright(["train", str(run), "--layout", "dp=1,precision=fp32", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (code_of, said["problems"][0]["code"]) == (2, code)
    assert not (tmp_path / "out").exists()
