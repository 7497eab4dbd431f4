"""Building documents: the same whatever the processes and interruptions; damage is named; what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chat_data import chat_tokenizer, conversations, write_jsonl
from meshwright.base.errors import MeshwrightError, Problem
from meshwright.cli.main import run as meshwright
from meshwright.config.resolve import DataSettings
from meshwright.train.data import build as build_module
from meshwright.train.data import documents as documents_module
from meshwright.train.data.build import build_documents
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.documents import Documents, open_documents, verify_documents
from meshwright.train.data.prepare import shape_of
from meshwright.train.data.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")


def build(source: Path, out: Path, tokenizer: Path, jobs: int = 1, unit_bytes: int = 2000) -> Documents:
    words = load_tokenizer(tokenizer)
    corpus = open_corpus(str(source))
    shape = shape_of(corpus.form(), DataSettings(seq_len=8), words.file, words)
    return build_documents(corpus.shaped(shape), words, out, jobs=jobs, unit_bytes=unit_bytes)


def manifest(out: Path) -> dict[str, object]:
    return json.loads((out / "manifest.json").read_text())


def refusal(call) -> Problem:
    with pytest.raises(MeshwrightError) as caught:
        call()
    return caught.value.problems[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    chat_tokenizer(tmp_path / "tok")
    return write_jsonl(tmp_path / "c.jsonl", conversations(80))


def test_two_processes_write_what_one_writes(source: Path, tmp_path: Path) -> None:
    one = build(source, tmp_path / "one", tmp_path / "tok")
    build(source, tmp_path / "two", tmp_path / "tok", jobs=2)
    assert len(one.shards) > 4
    assert manifest(tmp_path / "one") == manifest(tmp_path / "two")
    assert one.num_documents == 80
    assert one.num_tokens == int(one.ends()[-1])
    whole = build(source, tmp_path / "whole", tmp_path / "tok", unit_bytes=1 << 20)
    assert len(whole.shards) == 1
    assert whole.read(0, whole.num_tokens)[0].tolist() == one.read(0, one.num_tokens)[0].tolist()
    assert whole.digests().tolist() == one.digests().tolist()
    assert [one.place(n) for n in range(80)] == [f"c.jsonl:{n + 1}" for n in range(80)]


def test_a_folder_of_more_shards_than_may_be_open(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = build(source, tmp_path / "out", tmp_path / "tok", unit_bytes=500)
    assert len(documents.shards) > 20
    whole = [a.tolist() for a in documents.read(0, documents.num_tokens) if a is not None]
    monkeypatch.setattr(documents_module, "MOST_OPEN", 3)
    fresh = open_documents(tmp_path / "out")
    edges = [0, *fresh.ends().tolist()]
    for begin, end in reversed(list(itertools.pairwise(edges))):
        assert [a.tolist() for a in fresh.read(begin, end) if a is not None] == [w[begin:end] for w in whole]
        assert len(fresh._maps) <= 3


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from meshwright.train.data import shards as shards_module
import test_data_build
calls = 0
def counting(path, whole=shards_module.{where}):
    global calls
    calls += 1
    if calls == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path)
shards_module.{where} = counting
test_data_build.build(Path({source!r}), Path({out!r}), Path({tokenizer!r}))
"""


@pytest.mark.parametrize(
    ("where", "at"), [("file_hash", 1), ("file_hash", 8), ("_sync", 12), ("load_tokenizer", 3)]
)
def test_a_killed_build_goes_on_and_ends_the_same(source: Path, tmp_path: Path, where: str, at: int) -> None:
    unbroken = build(source, tmp_path / "whole", tmp_path / "tok")
    out = tmp_path / "out"
    script = KILLED.format(
        paths=[str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path],
        where=where,
        at=at,
        source=str(source),
        out=str(out),
        tokenizer=str(tmp_path / "tok"),
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert refusal(lambda: open_documents(out)).code == "E650"
    kept = {p.name: p.stat().st_mtime_ns for p in (out / "records").iterdir()}
    again = build(source, out, tmp_path / "tok")
    assert manifest(out) == manifest(tmp_path / "whole")
    assert again.hash == unbroken.hash
    assert verify_documents(out)[1] == []
    assert {n: t for n, t in kept.items() if (out / "records" / n).stat().st_mtime_ns != t} == {}


def test_damage_is_named(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out", tmp_path / "tok")
    file = tmp_path / "out" / "shard-00002.tokens"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(bytes(content))
    assert [item["file"] for item in verify_documents(tmp_path / "out")[1]] == ["shard-00002.tokens"]
    assert meshwright(["data", "verify", str(tmp_path / "out"), "--json"]) == 1
    file.write_bytes(bytes(content[:-2]))
    found = refusal(lambda: open_documents(tmp_path / "out"))
    assert (found.code, found.where) == ("E650", str(file))
    assert "the manifest says" in verify_documents(tmp_path / "out")[1][0]["why"]
    assert (
        meshwright(["data", "verify", str(tmp_path / "out"), "--json"]) == 1
    )  # it ran, and the answer is no
    build(source, tmp_path / "out", tmp_path / "tok")  # the shard that is too short is built again
    assert verify_documents(tmp_path / "out")[1] == []
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert meshwright(["data", "verify", str(tmp_path / "out")]) == 1
    (tmp_path / "out" / "manifest.json").unlink()
    assert meshwright(["data", "verify", str(tmp_path / "out")]) == 1
    assert meshwright(["data", "verify", str(tmp_path / "tok")]) == 2


def test_what_was_typed_is_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run file's key says nothing to one who wrote a path on the command line."""
    (tmp_path / "empty").mkdir()
    for path in ("nope", str(tmp_path / "empty")):
        command = [
            "data",
            "build",
            path,
            "--out",
            str(tmp_path / "new"),
            "--tokenizer",
            str(tmp_path / "tok"),
        ]
        assert meshwright(command) == 2
        told = capsys.readouterr().err
        assert f"PATH {path}" in told
        assert "data." not in told
    assert meshwright(["data", "build", "nope", "--out", str(tmp_path / "new"), "--tokenizer", "none"]) == 2
    told = capsys.readouterr().err
    assert "PATH nope" in told
    assert "--tokenizer none" in told


def test_a_manifest_cannot_reach_out_of_its_folder(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out", tmp_path / "tok")
    held = manifest(tmp_path / "out")
    held["shards"][0]["files"][0]["file"] = "../c.jsonl"  # type: ignore[index]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(held))
    assert "not a file name" in refusal(lambda: open_documents(tmp_path / "out")).found


def test_e651_another_corpus_or_tokenizer_in_the_folder(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out", tmp_path / "tok")
    other = write_jsonl(tmp_path / "d.jsonl", conversations(80, seed=1))
    assert refusal(lambda: build(other, tmp_path / "out", tmp_path / "tok")).code == "E651"
    chat_tokenizer(tmp_path / "other", size=280)
    assert refusal(lambda: build(source, tmp_path / "out", tmp_path / "other")).code == "E651"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    options = ["--tokenizer", str(tmp_path / "tok"), "--json", "--out"]
    assert meshwright(["data", "build", str(source), *options, str(tmp_path / "mine")]) == 2


def test_e652_one_build_at_a_time(source: Path, tmp_path: Path) -> None:
    with build_module._locked(tmp_path / "out", wait=False):
        assert refusal(lambda: build(source, tmp_path / "out", tmp_path / "tok")).code == "E652"


def test_h164_a_rank_that_waits_for_anothers_tokens_says_so_and_gets_the_same(
    source: Path, tmp_path: Path
) -> None:
    """H164: data is prepared before any group exists, so no collective can time out; who waits says what for."""
    words = load_tokenizer(tmp_path / "tok")
    corpus = open_corpus(str(source))
    shape = shape_of("chat", DataSettings(seq_len=8), words.file, words)
    said: list[str] = []

    def second() -> Documents:
        return build_documents(corpus.shaped(shape), words, tmp_path / "out", wait=True, show=said.append)

    with ThreadPoolExecutor(1) as pool:
        with build_module._locked(tmp_path / "out", wait=False):
            waiting = pool.submit(second)
            while not said:
                time.sleep(0.01)
            assert not waiting.done()
        assert (
            waiting.result(30).hash
            == build(source, tmp_path / "other", tmp_path / "tok", unit_bytes=1 << 26).hash
        )
    assert said[0] == "waiting for another process that builds out"


def test_e653_a_killed_process_of_the_pool(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: object, **__: object) -> None: ...
        def shutdown(self, **_: object) -> None: ...
        def map(self, *_: object) -> None:
            raise build_module.BrokenProcessPool

    monkeypatch.setattr(build_module, "ProcessPoolExecutor", Broken)
    assert refusal(lambda: build(source, tmp_path / "out", tmp_path / "tok", jobs=2)).code == "E653"


def test_e602_nothing_to_build(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "tok")
    empty = write_jsonl(tmp_path / "c.jsonl", [{"messages": []}])
    assert refusal(lambda: build(empty, tmp_path / "out", tmp_path / "tok")).code == "E602"


def test_the_command_builds_inspects_and_verifies(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    code = meshwright(
        ["data", "build", str(source), "--tokenizer", str(tmp_path / "tok"), "--out", out, "--json"]
    )
    made = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (made["form"], made["documents"], made["masked"]) == ("chat", 80, True)
    assert meshwright(["data", "inspect", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == made["hash"]
    assert meshwright(["data", "verify", out]) == 0
    assert meshwright(["data", "verify", str(tmp_path / "none")]) == 2
    assert meshwright(["data", "inspect", str(tmp_path / "tok")]) == 2
    assert meshwright(["data", "build", str(source), "--tokenizer", out, "--out", out]) == 2
