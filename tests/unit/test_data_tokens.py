"""The tokenizer and the token store: cached, deterministic, split without overlap, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import ExitCode, MeshwrightError, Problem
from meshwright.train.data import (
    TokenData,
    check_samples,
    load_tokenizer,
    open_tokens,
    prepare_tokens,
)
from meshwright.train.data import tokenizer as tokenizer_module
from meshwright.train.data.cache import (
    WHOLE_HASH_BYTES,
    discard_folder,
    fingerprint,
    whole_folder,
    write_whole,
)

pytest.importorskip("tokenizers")

TEXT = "the rank sends its gradient to the next stage and waits for a micro-batch of the other group"
WORDS = TEXT.split()


def sentences(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(5, 30))) + f" {i}." for i in range(count)]


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def prepare(path: Path, cache: Path, **changes: object) -> TokenData:
    options: dict[str, object] = {"tokenizer": None, "vocab_size": 320, "seq_len": 16, "eval_fraction": 0.1}
    return prepare_tokens(str(path), cache_dir=cache, **(options | changes))  # type: ignore[arg-type]


def refused(path: Path, cache: Path, **changes: object) -> Problem:
    with pytest.raises(MeshwrightError) as caught:
        prepare(path, cache, **changes)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "corpus.jsonl", sentences(200))


def all_tokens(data: TokenData) -> tuple[list[int], list[int]]:
    return data.train.tokens.tolist(), data.eval.tokens.tolist() if data.eval.num_tokens else []


def test_tokens_decode_to_the_documents_again(corpus: Path, tmp_path: Path) -> None:
    data = prepare(corpus, tmp_path / "cache")
    words = data.tokenizer()
    train, held = all_tokens(data)
    texts = words.decode(train).split(words.eos_token)[:-1], words.decode(held).split(words.eos_token)[:-1]
    assert sorted(texts[0] + texts[1]) == sorted(sentences(200))
    assert texts[0] == [t for t in sentences(200) if t not in set(texts[1])]  # corpus order is kept
    report = data.report
    assert report["split"] == "whole documents, by hash"
    assert 0.05 <= data.eval.num_tokens / report["tokens"] <= 0.2
    assert report["documents"] == 200
    assert report["tokens"] == report["train_tokens"] + report["eval_tokens"]
    assert report["dropped_tokens"] == data.train.num_tokens - 1 - 16 * data.num_samples
    assert report["padded_tokens"] == 16 * data.eval.num_samples - (data.eval.num_tokens - 1)
    assert data.train.tokens.dtype == np.uint16


def test_any_text_survives_the_byte_level_tokenizer(corpus: Path, tmp_path: Path) -> None:
    words = prepare(corpus, tmp_path / "cache").tokenizer()
    for text in ("", " two  spaces", "ä語🙂\r\n\ttabs", "a <|endoftext|> written in text", "\x00\x7f"):
        ids = words.encode(text)
        assert words.decode(ids) == text
        assert words.eos_id not in ids  # written in a document it is text, not the end of it


def test_second_call_reads_the_cache_and_gives_the_same(corpus: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(corpus, tmp_path / "cache", show=said.append)
    files = sorted(p.name for p in (tmp_path / "cache").iterdir())
    second = prepare(corpus, tmp_path / "cache", show=said.append)
    assert (first.report["cached"], second.report["cached"]) == (False, True)
    assert first.hash == second.hash
    assert all_tokens(first) == all_tokens(second)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == files
    assert len(files) == 2  # nothing temporary is left
    assert any("trained a tokenizer" in line for line in said)
    assert "200 documents" in said[-1]


def test_training_and_tokens_are_the_same_in_another_cache(corpus: Path, tmp_path: Path) -> None:
    first, second = prepare(corpus, tmp_path / "a"), prepare(corpus, tmp_path / "b")
    assert first.tokenizer_file.read_bytes() == second.tokenizer_file.read_bytes()
    assert all_tokens(first) == all_tokens(second)


def test_changed_corpus_is_tokenised_again(corpus: Path, tmp_path: Path) -> None:
    before = prepare(corpus, tmp_path / "cache")
    jsonl(corpus, sentences(200, seed=1))
    after = prepare(corpus, tmp_path / "cache")
    assert not after.report["cached"]
    assert before.hash != after.hash


def test_equal_documents_are_on_one_side(tmp_path: Path) -> None:
    texts = sentences(60) * 3
    data = prepare(jsonl(tmp_path / "c.jsonl", texts), tmp_path / "cache", eval_fraction=0.2)
    words = data.tokenizer()
    train, held = (set(words.decode(t).split(words.eos_token)[:-1]) for t in all_tokens(data))
    assert held
    assert not train & held


def test_one_long_document_holds_out_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(sentences(300)))
    data = prepare(path, tmp_path / "cache")
    assert data.report["split"] == "tail of the stream"
    train, held = all_tokens(data)
    assert len(held) == round(0.1 * (len(train) + len(held)))
    assert data.tokenizer().decode(train + held) == path.read_text() + "<|endoftext|>"


def test_nothing_is_held_out_when_not_asked(corpus: Path, tmp_path: Path) -> None:
    data = prepare(corpus, tmp_path / "cache", eval_fraction=0.0)
    assert (data.eval.num_tokens, data.eval.num_samples) == (0, 0)
    assert data.report["split"] == "none held out"


def test_the_same_tokens_serve_another_seq_len_and_a_rank(corpus: Path, tmp_path: Path) -> None:
    data = prepare(corpus, tmp_path / "cache")
    longer = prepare(corpus, tmp_path / "cache", seq_len=32)
    assert longer.report["cached"]
    assert longer.train.sample(0)[:17].tolist() == data.train.sample(0).tolist()
    sent = pickle.loads(pickle.dumps(data))
    opened = open_tokens(data.folder, 16)
    assert sent.train.sample(5).tolist() == opened.train.sample(5).tolist() == data.train.sample(5).tolist()
    assert opened.hash == data.hash


def test_damaged_cache_is_rebuilt_and_said(corpus: Path, tmp_path: Path) -> None:
    data = prepare(corpus, tmp_path / "cache")
    before = all_tokens(data)
    whole = data.train.file.read_bytes()
    data.train.file.write_bytes(whole[: len(whole) // 2])
    said: list[str] = []
    again = prepare(corpus, tmp_path / "cache", show=said.append)
    assert any("damaged" in line for line in said)
    assert all_tokens(again) == before


def _prepare_in_a_process(path: Path, cache: Path, ready: object, results: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    results.put(prepare(path, cache).train.tokens.sum().item())  # type: ignore[attr-defined]


def test_two_processes_at_once_do_no_damage(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    both = [
        context.Process(target=_prepare_in_a_process, args=(corpus, tmp_path / "cache", ready, results))
        for _ in range(2)
    ]
    for process in both:
        process.start()
    sums = {results.get(timeout=60) for _ in both}
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert sums == {prepare(corpus, tmp_path / "cache").train.tokens.sum().item()}
    assert not list((tmp_path / "cache").glob(".tmp*"))


def test_e602_no_text_in_any_record(tmp_path: Path) -> None:
    problem = refused(jsonl(tmp_path / "a.jsonl", ["", " "]), tmp_path / "cache")
    assert problem.code == "E602"
    assert "2 records with an empty or null 'text'" in problem.found
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.bin").write_bytes(b"\0\1")
    problem = refused(tmp_path / "d", tmp_path / "cache")
    assert "skipped 1: a.bin (a NUL byte at byte 0" in problem.found
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_e604_reaches_the_user_whole_while_the_tokenizer_trains(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["fine"])
    path.write_text(path.read_text() + "{broken\n")
    problem = refused(path, tmp_path / "cache")
    assert (problem.code, problem.where) == ("E604", f"{path}:2")


def test_e607_too_small_says_what_would_do(tmp_path: Path) -> None:
    problem = refused(jsonl(tmp_path / "a.jsonl", ["a b c"]), tmp_path / "cache", seq_len=64)
    assert problem.code == "E607"
    assert "a sample of seq_len 64 takes 65" in problem.found
    assert "seq_len of at most" in problem.do


def test_e608_a_batch_of_more_samples_than_there_are(corpus: Path, tmp_path: Path) -> None:
    data = prepare(corpus, tmp_path / "cache")
    assert check_samples(data, data.num_samples) == []
    (problem,) = check_samples(data, data.num_samples + 1)
    assert problem.code == "E608"
    assert f"{data.num_samples + 1} sequences per step" in problem.found
    assert f"to {data.num_samples} or less, or seq_len of at most 15" in problem.do


def test_e609_tokenizer_that_is_not_there(corpus: Path, tmp_path: Path) -> None:
    assert refused(corpus, tmp_path / "cache", tokenizer=str(tmp_path / "no.json")).code == "E609"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.model").write_text("")
    problem = refused(corpus, tmp_path / "cache", tokenizer=str(tmp_path / "folder"))
    assert problem.code == "E609"
    assert "the folder holds tokenizer.model" in problem.found


def test_e610_more_tokens_than_the_model_has_rows(corpus: Path, tmp_path: Path) -> None:
    file = prepare(corpus, tmp_path / "cache").tokenizer_file
    problem = refused(corpus, tmp_path / "cache", tokenizer=str(file), vocab_size=300)
    assert problem.code == "E610"
    assert problem.found == "the tokenizer has 320 tokens, the model's vocab_size is 300"
    larger = prepare(corpus, tmp_path / "cache", tokenizer=str(file), vocab_size=50_000)
    assert larger.tokenizer_size == 320


def test_e611_tokenizer_file_that_is_something_else(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs")
    problem = refused(corpus, tmp_path / "cache", tokenizer=str(tmp_path))
    assert (problem.code, problem.found.startswith("23 B;")) == ("E611", True)


def test_e612_end_of_text_comes_from_the_config_or_the_usual_names(corpus: Path, tmp_path: Path) -> None:
    content = json.loads(prepare(corpus, tmp_path / "cache").tokenizer_file.read_text())
    folder = tmp_path / "own"
    folder.mkdir()
    text = json.dumps(content).replace("<|endoftext|>", "<stop-here>")
    (folder / "tokenizer.json").write_text(text)
    problem = refused(corpus, tmp_path / "cache", tokenizer=str(folder))
    assert (problem.code, "<stop-here>" in problem.found) == ("E612", True)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop-here>"}}')
    assert load_tokenizer(folder).eos_id == 0
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<other>"}')
    assert "'<other>' is not in the vocabulary" in refused(corpus, tmp_path, tokenizer=str(folder)).found
    (folder / "tokenizer_config.json").write_text("{")
    assert refused(corpus, tmp_path, tokenizer=str(folder)).code == "E611"


def test_e613_vocabulary_below_the_bytes(corpus: Path, tmp_path: Path) -> None:
    problem = refused(corpus, tmp_path / "cache", vocab_size=256)
    assert (problem.code, "need 257 ids" in problem.found) == ("E613", True)
    assert prepare(corpus, tmp_path / "cache", vocab_size=257).tokenizer_size == 257


def test_e614_without_tokenizers(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module.importlib.util, "find_spec", lambda name: None)
    assert refused(corpus, tmp_path / "cache").code == "E614"


def test_e615_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError) as caught:
        prepare(corpus, tmp_path / "file" / "cache")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert caught.value.problems[0].code == "E615"
    with pytest.raises(MeshwrightError) as caught, whole_folder(tmp_path / "file" / "x"):
        pass
    assert caught.value.problems[0].code == "E615"


def test_an_interrupted_folder_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole_folder(tmp_path / "x") as temporary:
            (temporary / "part").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    write_whole(tmp_path / "y", b"1")
    write_whole(tmp_path / "y", b"2")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"2"]
    (tmp_path / "z").mkdir()
    discard_folder(tmp_path / "z")
    discard_folder(tmp_path / "z")  # another process was faster
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_fingerprint_sees_names_contents_and_large_files_at_both_ends(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"a")
    one = fingerprint([("a", small)])
    assert fingerprint([("b", small)]) != one
    small.write_bytes(b"b")
    assert fingerprint([("a", small)]) != one
    with large.open("wb") as file:
        file.truncate(WHOLE_HASH_BYTES + 1)  # sparse: takes no room
    before = fingerprint([("a", large)])
    with large.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint([("a", large)]) != before


def test_long_work_says_how_far_it_is() -> None:
    from meshwright.train.data.cache import Progress

    said: list[str] = []
    progress = Progress("reading", 200, said.append, every_s=0.0)
    progress.at(0)
    progress.at(50)
    assert said[0] == "reading: 0 %"
    assert said[1].startswith("reading: 25 %, ")
    assert said[1].endswith(" left")
