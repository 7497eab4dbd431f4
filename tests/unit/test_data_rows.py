"""Rows of documents: long ones, packing, masks, held-out documents; the same in a store of one or many shards."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_data import chat_tokenizer, conversations, write_jsonl
from meshwright.base.errors import MeshwrightError, Problem
from meshwright.config.resolve import DataSettings
from meshwright.train.data import NO_LOSS, TokenData, check_samples, prepare_data, rank_batch
from meshwright.train.data.packing import cut_documents, pack, positions_of

pytest.importorskip("tokenizers")


def prepared(
    folder: Path, source: str | Path | None, tokenizer: str | None = "tok", **changes: Any
) -> TokenData:
    if not (folder / "tok").exists():
        chat_tokenizer(folder / "tok")
    options: dict[str, Any] = {"path": str(source) if source else None, "seq_len": 64, "eval_fraction": 0.1}
    return prepare_data(
        DataSettings(**(options | changes)),
        tokenizer=str(folder / tokenizer) if tokenizer else None,
        vocab_size=300,
        seed=0,
        cache_dir=folder / "cache",
    )


def refusal(call: Any) -> Problem:
    with pytest.raises(MeshwrightError) as caught:
        call()
    return caught.value.problems[0]


def documents_of(data: TokenData) -> list[tuple[list[int], list[int]]]:
    """Return (inputs, labels) of every document of the training rows, sorted."""
    out = []
    for index in range(data.num_samples):
        inputs, labels = data.train.row(index)
        ids = data.train.row_documents(index)
        out += [(inputs[ids == n].tolist(), labels[ids == n].tolist()) for n in range(ids.max() + 1)]
        assert (labels[ids < 0] == NO_LOSS).all()
    return sorted(out)


# -- pure functions


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_packing_holds_every_part_once_and_wastes_little(lengths: list[int]) -> None:
    given = np.asarray(lengths, np.int64)
    order, bounds = pack(given, 32)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    fill = [int(given[order[a:b]].sum()) for a, b in itertools.pairwise(bounds)]
    assert all(0 < f <= 32 for f in fill)
    assert all(a + b > 32 for n, a in enumerate(fill) for b in fill[:n])  # no two rows would fit in one
    assert len(fill) <= 11 / 9 * -(-sum(lengths) // 32) + 1 or max(lengths) > 16
    again = pack(given, 32)
    assert np.array_equal(order, again[0])
    assert np.array_equal(bounds, again[1])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(2, 12))
def test_split_makes_every_token_but_the_first_a_label_once(lengths: list[int], seq_len: int) -> None:
    given = np.asarray(lengths, np.int64)
    starts = np.cumsum(given) - given
    parts = cut_documents(starts, given, seq_len, "split")
    labels = [t for a, n in zip(parts.start, parts.length, strict=True) for t in range(a + 1, a + n + 1)]
    assert labels == [t for s, n in zip(starts, given, strict=True) for t in range(s + 1, s + n)]
    assert (parts.length <= seq_len).all()
    assert parts.split == np.count_nonzero(given - 1 > seq_len)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(2, 12))
def test_truncate_and_skip_count_what_they_do(lengths: list[int], seq_len: int) -> None:
    given = np.asarray(lengths, np.int64)
    starts = np.cumsum(given) - given
    long = np.count_nonzero(given - 1 > seq_len)
    cut = cut_documents(starts, given, seq_len, "truncate")
    assert (cut.start == starts[given > 1]).all()
    assert (cut.length == np.minimum(given - 1, seq_len)[given > 1]).all()
    left = cut_documents(starts, given, seq_len, "skip")
    assert (cut.truncated, left.skipped) == (long, long)
    assert left.length.tolist() == [n - 1 for n in lengths if 0 < n - 1 <= seq_len]


def test_h69_positions_begin_again_with_each_document() -> None:
    ids = np.array([[0, 0, 0, 1, 2, 2, -1, -1], [0] * 8])
    assert positions_of(ids).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]


# -- rows of documents


def test_packed_and_padded_rows_hold_the_same_documents(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(60))
    packed = prepared(tmp_path, source, seq_len=256)
    padded = prepared(tmp_path, source, seq_len=256, rows="pad")
    assert packed.train.isolated
    assert not padded.train.isolated
    assert documents_of(packed) == documents_of(padded)
    assert packed.num_samples < padded.num_samples
    assert packed.report["rows"] == "pack"
    assert packed.report["filled_share"] > padded.report["filled_share"]
    batch = rank_batch(
        packed.train, step=0, global_batch=2, micro_batch=1, accumulation=2, dp=1, dp_rank=0, seed=0
    )
    assert batch.documents is not None
    assert batch.positions is not None
    assert batch.positions.shape == batch.input_ids.shape == (2, 1, 256)
    assert (
        rank_batch(
            padded.train, step=0, global_batch=2, micro_batch=1, accumulation=2, dp=1, dp_rank=0, seed=0
        ).documents
        is None
    )
    assert len(pickle.dumps(packed)) < 4000
    again = pickle.loads(pickle.dumps(packed))
    assert np.array_equal(again.train.row(0)[1], packed.train.row(0)[1])


def test_held_out_documents_are_whole_and_apart(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(60))
    data = prepared(tmp_path, source, seq_len=256, eval_fraction=0.2)
    train = {tuple(inputs) for inputs, _ in documents_of(data)}
    held = data.eval
    rows = [(held.row(n)[0], held.row_documents(n)) for n in range(held.num_samples)]
    apart = {tuple(row[ids == n].tolist()) for row, ids in rows for n in range(ids.max() + 1)}
    assert apart
    assert not train & apart
    assert len(train) + len(apart) == 60


def test_built_documents_train_as_their_source_does(tmp_path: Path) -> None:
    from meshwright.cli.main import run as meshwright

    source = write_jsonl(tmp_path / "c.jsonl", conversations(60))
    chat_tokenizer(tmp_path / "tok")
    made = [
        "data",
        "build",
        str(source),
        "--tokenizer",
        str(tmp_path / "tok"),
        "--out",
        str(tmp_path / "built"),
    ]
    assert meshwright([*made, "--json"]) == 0
    straight = prepared(tmp_path, source, seq_len=256)
    built = prepared(tmp_path, tmp_path / "built", tokenizer=None, seq_len=256)
    assert straight.hash == built.hash
    assert documents_of(straight) == documents_of(built)


def test_a_stream_over_shards_is_the_stream_of_the_text(tmp_path: Path) -> None:
    from meshwright.train.data.build import build_documents
    from meshwright.train.data.corpus import open_corpus
    from meshwright.train.data.tokenizer import load_tokenizer

    texts = [c["messages"][0]["content"] for c in conversations(90)]
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": t} for t in texts])
    chat_tokenizer(tmp_path / "tok")
    corpus, words = open_corpus(str(source)), load_tokenizer(tmp_path / "tok")
    build_documents(corpus, words, tmp_path / "built", unit_bytes=700)
    straight = prepared(tmp_path, source, seq_len=16)
    built = prepared(tmp_path, tmp_path / "built", seq_len=16)
    assert straight.num_samples == built.num_samples > 50
    for split in ("train", "eval"):
        one, two = getattr(straight, split), getattr(built, split)
        assert one.num_samples == two.num_samples
        for index in range(one.num_samples):
            assert [a.tolist() for a in one.row(index)] == [a.tolist() for a in two.row(index)]


# -- long documents, documents without loss, tokenizers


def test_e646_long_documents_are_named_by_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    found = refusal(lambda: prepared(tmp_path, source, seq_len=60))
    assert found.code == "E646"
    assert "c.jsonl:" in found.found
    longest = int(found.do.split("data.seq_len to ")[1].split(",")[0])
    assert prepared(tmp_path, source, seq_len=longest).report["documents_truncated"] == 0
    assert refusal(lambda: prepared(tmp_path, source, seq_len=longest - 1)).code == "E646"


@pytest.mark.parametrize("policy", ["truncate", "skip", "split"])
def test_what_is_done_with_long_documents_is_counted(tmp_path: Path, policy: str) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    report = prepared(tmp_path, source, seq_len=90, too_long=policy, eval_fraction=0.0).report
    counts = {"truncate": "documents_truncated", "skip": "documents_skipped", "split": "documents_split"}
    assert report[counts[policy]] > 0
    assert all(report[name] == 0 for key, name in counts.items() if key != policy)


def test_h8_parts_without_any_loss_are_left_out_and_counted(tmp_path: Path) -> None:
    asks = {
        "messages": [{"role": "user", "content": "the rank " * 30}, {"role": "assistant", "content": "yes"}]
    }
    source = write_jsonl(tmp_path / "c.jsonl", [asks, *conversations(30)])
    data = prepared(tmp_path, source, seq_len=40, too_long="truncate", rows="pad", eval_fraction=0.0)
    assert data.report["parts_without_loss"] > 0
    for index in range(data.num_samples):
        assert (data.train.row(index)[1] != NO_LOSS).any()  # no row, so no batch, is without a label


def test_e647_nothing_to_predict(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}] * 5)
    found = refusal(lambda: prepared(tmp_path, source))
    assert found.code == "E647"
    assert "5 parts without a predicted token" in found.found


def test_tokenizers_that_do_not_fit(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    chat_tokenizer(tmp_path / "tok")
    chat_tokenizer(tmp_path / "wide", size=320)
    assert refusal(lambda: prepared(tmp_path, source, tokenizer="wide")).code == "E610"
    from meshwright.cli.main import run as meshwright

    made = [
        "data",
        "build",
        str(source),
        "--tokenizer",
        str(tmp_path / "tok"),
        "--out",
        str(tmp_path / "built"),
    ]
    assert meshwright([*made, "--json"]) == 0
    chat_tokenizer(tmp_path / "other", size=290)
    assert refusal(lambda: prepared(tmp_path, tmp_path / "built", tokenizer="other")).code == "E648"
    two = ((str(source), 1.0), (str(write_jsonl(tmp_path / "d.jsonl", conversations(9))), 1.0))
    assert refusal(lambda: prepared(tmp_path, None, tokenizer=None, sources=two)).code == "E648"


def test_e641_streams_and_forms(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    assert refusal(lambda: prepared(tmp_path, source, rows="stream")).code == "E641"
    from meshwright.cli.main import run as meshwright

    made = [
        "data",
        "build",
        str(source),
        "--tokenizer",
        str(tmp_path / "tok"),
        "--out",
        str(tmp_path / "built"),
    ]
    assert meshwright([*made, "--json"]) == 0
    (tmp_path / "plain.txt").write_text("the rank")
    assert refusal(lambda: prepared(tmp_path, tmp_path / "plain.txt", format="chat")).code == "E641"
    found = refusal(lambda: prepared(tmp_path, tmp_path / "built", tokenizer=None, format="text"))
    assert found.code == "E641"


def test_a_tokenizer_is_trained_on_what_a_named_template_writes(tmp_path: Path) -> None:
    from chat_data import CHATML

    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    assert refusal(lambda: prepared(tmp_path, source, tokenizer=None)).code == "E642"
    (tmp_path / "own.jinja").write_text(CHATML)
    data = prepared(
        tmp_path,
        source,
        tokenizer=None,
        chat_template=str(tmp_path / "own.jinja"),
        seq_len=128,
        too_long="split",
    )
    assert data.tokenizer().eos_token == "<|endoftext|>"
    assert data.num_samples > 0


def test_text_can_be_packed_and_long_text_is_split(tmp_path: Path) -> None:
    texts = [" ".join(m["content"] for m in c["messages"]) for c in conversations(40)]
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": t} for t in texts])
    data = prepared(tmp_path, source, rows="pack", seq_len=32, eval_fraction=0.0)
    assert data.report["documents_split"] > 0
    labels = sum(int((data.train.row(n)[1] != NO_LOSS).sum()) for n in range(data.num_samples))
    assert labels == data.report["tokens"] - 40 == data.train.num_tokens


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(40))
    before = documents_of(prepared(tmp_path, source, seq_len=256))
    for kind in ("documents-*/shard-00000.tokens", "rows-*/train-parts.npy", "rows-*/rows.json"):
        (file,) = (tmp_path / "cache").glob(kind)
        file.write_bytes(file.read_bytes()[:-4])
        assert documents_of(prepared(tmp_path, source, seq_len=256)) == before


def test_e607_e608_too_little(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(5))
    data = prepared(tmp_path, source, seq_len=512, eval_fraction=0.0)
    assert [p.code for p in check_samples(data, data.num_samples + 1)] == ["E608"]
    assert check_samples(data, data.num_samples) == []
    small, large = (write_jsonl(tmp_path / f"{n}.jsonl", [{"text": "the rank"}] * n) for n in (2, 400))
    two = ((str(large), 1.0), (str(small), 1.0))
    found = refusal(lambda: prepared(tmp_path, None, sources=two, rows="stream"))
    assert (found.code, found.where) == ("E607", f"data.path={small}")
    mixed = prepared(tmp_path, None, sources=two, rows="pad", eval_fraction=0.0)
    (found,) = check_samples(mixed, 8)  # four of the second source in each step, which has two
    assert (found.code, "4 sequences per step" in found.needs) == ("E608", True)
    assert check_samples(mixed, 4) == []
    assert json.dumps(mixed.report)
