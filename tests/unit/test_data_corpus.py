"""Corpora: what data.path may be, what is skipped and counted, and what is refused with which words."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import ExitCode, MeshwrightError, Problem
from meshwright.train.data import corpus as corpus_module
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.pieces import PIECE_BYTES, Account
from meshwright.train.data.python_docs import python_docs, python_files
from meshwright.train.data.texts import not_text

pyarrow = pytest.importorskip("pyarrow")


def read(path: str | Path, field: str = "text") -> tuple[list[str], Account]:
    account = Account()
    documents: list[str] = [""]
    for piece in open_corpus(str(path), field).pieces(account):
        documents[-1] += piece.text
        if piece.ends:
            documents.append("")
    assert documents.pop() == ""
    assert account.documents == len(documents)
    assert account.text_bytes == sum(len(d.encode()) for d in documents)
    return documents, account


def refused(path: str | Path, field: str = "text") -> tuple[Problem, ...]:
    with pytest.raises(MeshwrightError) as caught:
        read(path, field)
    return caught.value.problems


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


# -- python-docs


def test_python_docs_is_text_in_the_same_order_and_within_its_limit() -> None:
    files = python_files()[:40]
    first = [d for d in python_docs(files, 900_000) if d[1]]
    assert first == [d for d in python_docs(files, 900_000) if d[1]]
    assert sum(len(text.encode()) for _, text, _ in first) <= 900_000
    assert first[0][0].startswith("topic ")
    assert any(name == "abc.py" and text.startswith("module abc") for name, text, _ in first)


def test_python_docs_as_a_corpus_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "python_files", lambda: python_files()[:8])
    few, account = read("python-docs")
    assert account.beyond_limit == 0
    assert len(few) > 80
    monkeypatch.setattr(corpus_module, "python_docs", lambda files: python_docs(files, 100_000))
    cut, account = read("python-docs")
    assert account.beyond_limit == len(few) - len(cut) > 0
    assert account.text_bytes <= 100_000
    assert account.skipped == []


def test_python_docs_takes_docstrings_without_importing(tmp_path: Path) -> None:
    (tmp_path / "abc.py").write_text(
        '"""Doc of abc."""\nraise SystemExit(1)\n\ndef f(a, b):\n    """Doc of f."""\n    return a\n'
    )
    (tmp_path / "ast.py").write_text("def broken(:\n")
    documents = list(python_docs(python_files(tmp_path)))
    named = {name: text for name, text, reason in documents if not reason}
    assert named["abc.py"] == "module abc\n\nDoc of abc.\n\nf(a, b)\n\nDoc of f.\n"
    assert named["abc.py (source)"] == "raise SystemExit(1)\n\ndef f(a, b):\n    return a\n\n"
    assert [(n, r) for n, _, r in documents if r] == [("ast.py", "not readable as Python: SyntaxError")]


def test_e601_python_without_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "python_files", lambda: [])
    (problem,) = refused("python-docs")
    assert problem.code == "E601"
    assert "without the sources" in problem.found


# -- text


def test_a_file_is_one_document_however_long(tmp_path: Path) -> None:
    text = "A line of text, ä and 語.\r\n" * 40_000 + "x" * (2 * PIECE_BYTES) + "end"
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    documents, _ = read(path)
    assert documents == [text]  # byte order mark gone, line ends kept
    pieces = list(open_corpus(str(path)).pieces(Account()))
    assert len(pieces) > 4
    assert max(len(p.text) for p in pieces) <= PIECE_BYTES


def test_e601_missing_path_names_where_it_looked(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "no" / "such.txt")
    assert problem.code == "E601"
    assert str(tmp_path / "no" / "such.txt") in problem.found


def test_e602_empty_file_folder_and_white_space(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path / "empty.txt")[0].code == "E602"
    (problem,) = refused(tmp_path / "folder")
    assert (problem.code, problem.found) == ("E602", "no files")


@pytest.mark.parametrize(
    ("content", "offset", "wrong", "what"),
    [
        (b"abc\0def", 3, 1, "a NUL byte"),
        (b"Stra\xdfe nach Rom", 4, 1, "a byte that is not UTF-8"),
        (b"x" * (1 << 20) + b"\xe8\xaa", 1 << 20, 2, "a byte that is not UTF-8"),
        (b"x" * ((1 << 20) - 1) + "語".encode() + b"\xff", (1 << 20) + 2, 1, "a byte that is not UTF-8"),
        (b"\xff\xfea\0b\0", 0, 6, "a UTF-16 byte order mark"),
    ],
)
def test_e603_names_file_offset_and_share(
    tmp_path: Path, content: bytes, offset: int, wrong: int, what: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    (problem,) = refused(path)
    assert problem.code == "E603"
    assert problem.where == str(path)
    assert problem.found.startswith(f"{what} at byte {offset}; {wrong} of {len(content)} bytes are wrong")


def test_text_over_a_block_border_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * ((1 << 20) - 1) + "語".encode())
    assert not_text(path) is None


def test_folder_reads_sorted_and_counts_what_it_skips(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "2.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "e.txt").write_text(" \n")
    (tmp_path / ".git" / "config").write_text("hidden")
    write_jsonl(tmp_path / "f.jsonl", [{"text": "three"}, {"text": "four"}])
    documents, account = read(tmp_path)
    assert documents == ["one", "two", "three", "four"]
    reasons = dict(account.skipped)
    assert set(reasons) == {"c.png", "d.txt", "e.txt"}
    assert reasons["c.png"].startswith("a byte that is not UTF-8 at byte 0; 3 of 6 bytes")
    assert (reasons["d.txt"], reasons["e.txt"]) == ("empty", "only white space")


# -- JSONL


def test_jsonl_reads_the_field_and_counts_empty_records(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"body": "one"}, {"body": None}, {"body": " "}, {"body": "two"}]
    )
    path.write_text("\n" + path.read_text())
    documents, account = read(path, "body")
    assert documents == ["one", "two"]
    assert account.empty_records == 2


def test_json_file_of_object_lines_is_jsonl_and_another_is_text(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a.json", [{"text": "one"}]))[0] == ["one"]
    (tmp_path / "b.json").write_text("[1,\n2]")
    assert read(tmp_path / "b.json")[0] == ["[1,\n2]"]


def test_e604_names_each_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "fine"}\n{"text": "cut o\n[1]\n{"text": "\\ud800"}\n{"text": "Stra\xdfe"}\n{"text": "x"}\n'
    )
    problems = refused(path)
    assert [(p.code, p.where) for p in problems] == [("E604", f"{path}:{n}") for n in (2, 3, 4, 5)]
    assert "not JSON" in problems[0].found
    assert problems[1].found == "a list instead of an object"
    assert "surrogate" in problems[2].found
    assert problems[3].found == "not UTF-8 at byte 14 of the line"


def test_e605_lists_the_fields_there_are(tmp_path: Path) -> None:
    (problem,) = refused(write_jsonl(tmp_path / "a.jsonl", [{"body": "x", "id": 3}]))
    assert (problem.code, problem.found) == ("E605", "no field 'text'; there are: body, id")
    (problem,) = refused(write_jsonl(tmp_path / "b.jsonl", [{"text": ["x"]}]))
    assert (problem.code, problem.found) == ("E605", "'text' is a list, not a string")


def test_e606_chat_records_are_refused_as_code(tmp_path: Path) -> None:
    (problem,) = refused(
        write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    )
    assert (problem.code, problem.kind.value) == ("E606", "code")
    assert refused(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y"}]))[0].code == "E606"


# -- tables


def table(texts: list[str | None]) -> Any:
    return pyarrow.table({"id": list(range(len(texts))), "text": texts})


def write_arrow(path: Path, texts: list[str | None]) -> None:
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=2)


def save_to_disk(folder: Path, texts: list[str | None]) -> Path:
    """The files that datasets' save_to_disk writes for a dataset of one shard."""
    folder.mkdir(parents=True)
    write_arrow(folder / "data-00000-of-00001.arrow", texts)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_saved_dataset_is_read(tmp_path: Path) -> None:
    documents, account = read(save_to_disk(tmp_path / "d", ["one", None, "two", "three"]))
    assert documents == ["one", "two", "three"]
    assert account.empty_records == 1


def test_saved_dataset_dict_uses_train_and_says_so(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "train", ["one"])
    save_to_disk(tmp_path / "test", ["two"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    documents, account = read(tmp_path)
    assert documents == ["one"]
    assert account.skipped == [("test", "another split than train")]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    (problem,) = refused(tmp_path)
    assert (problem.code, "the splits test and no train" in problem.found) == ("E616", True)


def test_parquet_file_and_hub_folder(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    (tmp_path / "data").mkdir()
    parquet.write_table(table(["one"]), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(table(["two", "three"]), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(table(["held"]), tmp_path / "data" / "validation-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("card")
    documents, account = read(tmp_path)
    assert documents == ["one", "two", "three"]
    assert dict(account.skipped) == {
        "README.md": "not a .parquet file",
        "data/validation-00000-of-00001.parquet": "another split than train",
    }
    assert read(tmp_path / "data" / "validation-00000-of-00001.parquet")[0] == ["held"]
    (tmp_path / "data" / "train-00000-of-00002.parquet").unlink()
    (tmp_path / "data" / "train-00001-of-00002.parquet").unlink()
    assert refused(tmp_path)[0].code == "E616"


def test_arrow_in_the_file_format_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    data = table(["one", "two"])
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, data.schema) as writer:
        writer.write_table(data)
    assert read(path)[0] == ["one", "two"]


def test_e605_e606_of_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    (problem,) = refused(tmp_path / "a.parquet")
    assert (problem.code, problem.found) == ("E605", "no field 'text'; there are: body, id")
    (problem,) = refused(tmp_path / "a.parquet", "id")
    assert problem.found == "column 'id' is of type int64, not string"
    parquet.write_table(pyarrow.table({"messages": ["x"]}), tmp_path / "b.parquet")
    assert refused(tmp_path / "b.parquet")[0].code == "E606"


def test_e616_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not parquet")
    assert refused(tmp_path / "a.parquet")[0].code == "E616"
    (tmp_path / "a.arrow").write_bytes(b"neither stream nor file")
    assert refused(tmp_path / "a.arrow")[0].code == "E616"
    whole = save_to_disk(tmp_path / "d", ["one"])
    (whole / "data-00000-of-00001.arrow").unlink()
    (problem,) = refused(whole)
    assert (problem.code, "1 are missing" in problem.found) == ("E616", True)
    (whole / "state.json").write_text("{")
    assert refused(whole)[0].code == "E616"
    (whole / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    assert "indices" in refused(whole)[0].found


def test_e614_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_to_disk(tmp_path / "d", ["one"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshwrightError) as caught:
        read(tmp_path / "d")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    (problem,) = caught.value.problems
    assert (problem.code, problem.do) == ("E614", "pip install 'meshwright[run]'")


def test_reading_text_needs_no_heavy_package() -> None:
    import subprocess

    heavy = "{'torch', 'tokenizers', 'pyarrow', 'transformers'}"
    code = f"import sys, meshwright.train.data; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
