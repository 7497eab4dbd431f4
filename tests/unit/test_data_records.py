"""Records: conversations through a chat template, prompts with completions, and what is refused with line and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_data import CHATML, chat_tokenizer, conversations, write_jsonl
from meshwright.base.errors import MeshwrightError, Problem
from meshwright.train.data.build import build_documents
from meshwright.train.data.chat import ChatTemplate, messages_of, read_template
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.documents import Documents
from meshwright.train.data.prepare import shape_of
from meshwright.train.data.records import Form
from meshwright.train.data.tokenizer import load_tokenizer

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def template(source: str = CHATML) -> ChatTemplate:
    return ChatTemplate(
        source=source, where="t", named={"eos_token": "<|im_end|>", "bos_token": ""}, special=MARKS
    )


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]


def refusal(call: Any) -> Problem:
    with pytest.raises(MeshwrightError) as caught:
        call()
    return caught.value.problems[0]


def built(folder: Path, source: Path, form: Form | None = None, **options: Any) -> Documents:
    from meshwright.config.resolve import DataSettings

    tokenizer = folder / "tok"
    if not tokenizer.exists():
        chat_tokenizer(tokenizer)
    loaded = load_tokenizer(tokenizer)
    corpus = open_corpus(str(source))
    shape = shape_of(form or corpus.form(), DataSettings(seq_len=8), loaded.file, loaded)
    return build_documents(corpus.shaped(shape), loaded, folder / "out", **options)


def spelled(documents: Documents, document: int) -> list[tuple[str, bool]]:
    """Return runs of equal mask of one document as text."""
    ends = documents.ends()
    begin = int(ends[document - 1]) if document else 0
    tokens, loss = documents.read(begin, int(ends[document]))
    assert loss is not None
    reader = load_tokenizer(documents.tokenizer_file)
    runs: list[tuple[list[int], bool]] = []
    for token, valid in zip(tokens.tolist(), loss.tolist(), strict=True):
        if not runs or runs[-1][1] != valid:
            runs.append(([], valid))
        runs[-1][0].append(token)
    return [(reader.decode(ids), valid) for ids, valid in runs]


# -- the template


def test_answers_are_what_the_template_adds_to_the_open_turn() -> None:
    parts = template().segments(turns("hi", "hello", "and?", "bye"), "x")
    assert parts == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>\n", True),
        ("<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
        ("bye<|im_end|>\n", True),
    ]
    assert template().closed(parts)
    assert "".join(text for text, _ in parts) == template().render(turns("hi", "hello", "and?", "bye"))


def test_a_question_without_an_answer_carries_no_loss() -> None:
    parts = template().segments(turns("hi", "hello", "and?"), "x")
    assert [answer for _, answer in parts] == [False, True, False]
    assert [answer for _, answer in template().segments(turns("hi"), "x")] == [False]


def test_e643_a_template_that_rewrites_earlier_turns() -> None:
    only_last_thinks = CHATML.replace(
        "message['content']",
        "('<think>' if loop.last and message['role'] == 'assistant' else '') + message['content']",
    )
    found = refusal(lambda: template(only_last_thinks).segments(turns("a", "b", "c", "d"), "f.jsonl:7"))
    assert (found.code, found.where) == ("E643", "f.jsonl:7")
    assert "message 2" in found.found
    assert template(only_last_thinks).segments(turns("a", "b"), "x")[1] == ("<think>b<|im_end|>\n", True)


def test_e644_a_message_cannot_close_its_own_turn() -> None:
    found = refusal(lambda: template().segments(turns("hi<|im_end|>", "no"), "f.jsonl:2"))
    assert (found.code, found.where) == ("E644", "f.jsonl:2")
    assert "message 1 (user) contains '<|im_end|>'" in found.found


def test_e642_no_template_broken_template_and_template_that_refuses(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "none", template=None)
    found = refusal(lambda: read_template(folder / "tokenizer.json", None, "</s>", ()))
    assert found.code == "E642"
    assert "has no chat_template" in found.found
    assert refusal(lambda: template("{% for %}").render([])).code == "E642"
    angry = template("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refusal(lambda: angry.segments(turns("a", "b"), "f:1")).found
    missing = str(tmp_path / "no.jinja")
    assert refusal(lambda: read_template(folder / "tokenizer.json", missing, "</s>", ())).where == missing


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    reaching = template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    assert refusal(lambda: reaching.render(turns("a"))).code == "E642"


def test_the_template_named_comes_before_the_tokenizers(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tok")
    assert read_template(folder / "tokenizer.json", None, "x", ()).source == CHATML
    (folder / "chat_template.jinja").write_text("beside")
    assert read_template(folder / "tokenizer.json", None, "x", ()).source == "beside"
    (tmp_path / "own.jinja").write_text("own")
    assert read_template(folder / "tokenizer.json", str(tmp_path / "own.jinja"), "x", ()).source == "own"


def test_from_and_value_are_read_as_role_and_content() -> None:
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert messages_of(record, "x") == turns("a", "b")
    found = refusal(lambda: messages_of({"messages": [{"role": "user"}]}, "f:3"))
    assert (found.code, found.where) == ("E605", "f:3")
    assert "message 1" in found.found


# -- masks


def test_h6_only_answers_carry_a_loss_also_their_end(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "c.jsonl", [{"messages": turns("the rank", "next stage", "and", "group")}]
    )
    documents = built(tmp_path, source)
    assert documents.form == "chat"
    assert spelled(documents, 0) == [
        ("<|im_start|>user\nthe rank<|im_end|>\n<|im_start|>assistant\n", False),
        ("next stage<|im_end|>\n", True),
        ("<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n", False),
        ("group<|im_end|>\n", True),
    ]
    reader = load_tokenizer(documents.tokenizer_file)
    assert documents.read(0, 1)[0].tolist() == [
        reader.backend.token_to_id("<|im_start|>")
    ]  # a token, not text


def test_an_answer_that_does_not_end_gets_the_end_of_text_with_a_loss(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "the rank ", "completion": "sends"}])
    documents = built(tmp_path, source)
    assert documents.form == "completion"
    assert spelled(documents, 0) == [("the rank ", False), ("sends<|im_end|>", True)]


def test_completions_keep_special_words_as_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a<|im_end|>", "completion": "b"}])
    documents = built(tmp_path, source)
    reader = load_tokenizer(documents.tokenizer_file)
    tokens = documents.read(0, documents.num_tokens)[0].tolist()
    assert tokens.count(reader.eos_id) == 1
    assert tokens[-1] == reader.eos_id


def test_parquet_and_arrow_give_the_same_documents_as_jsonl(tmp_path: Path) -> None:
    records = conversations(20)
    source = write_jsonl(tmp_path / "c.jsonl", records)
    table = pyarrow.Table.from_pylist(records)
    import pyarrow.parquet as parquet

    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=4)
    with (
        pyarrow.OSFile(str(tmp_path / "c.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    tokens = []
    for name in (source.name, "c.parquet", "c.arrow"):
        folder = tmp_path / name.replace(".", "-")
        documents = built(folder, tmp_path / name, unit_bytes=600)
        tokens.append([a.tolist() for a in documents.read(0, documents.num_tokens) if a is not None])
        assert len(documents.shards) > 1 or name == "c.arrow"
        assert documents.num_documents == 20
    assert tokens[0] == tokens[1] == tokens[2]


# -- what is refused or counted


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b'{"messages": [', "E604", "not JSON"),
        (b'{"messages": "\xff"}', "E604", "not UTF-8"),
        (b'{"text": "x"}', "E605", "no field 'messages'"),
        (b'{"messages": "x"}', "E605", "is a str, not a list"),
        (b'{"messages": [{"role": "user", "content": "a \\ud800"}]}', "E604", "surrogate"),
        (b"[1]", "E604", "a list instead of an object"),
    ],
)
@pytest.mark.parametrize("unit_bytes", [1 << 20, 400])
def test_a_bad_line_is_named_by_file_and_number_in_every_shard(
    tmp_path: Path, line: bytes, code: str, words: str, unit_bytes: int
) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", conversations(30))
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join([*lines[:20], b"\n", line + b"\n", *lines[20:]]))
    found = refusal(lambda: built(tmp_path, source, unit_bytes=unit_bytes))
    assert (found.code, found.where) == (code, f"{source}:22")
    assert words in found.found


def test_e606_preference_pairs(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"chosen": "a", "rejected": "b"}])
    found = refusal(lambda: built(tmp_path, source))
    assert found.code == "E606"
    assert "chosen, rejected" in found.found


def test_empty_records_are_counted(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": []}, *conversations(3), {"messages": []}])
    assert built(tmp_path, source, form="chat").report["empty_records"] == 2
    source = write_jsonl(
        tmp_path / "p.jsonl", [{"prompt": "a", "completion": ""}, {"prompt": "", "completion": "b"}]
    )
    (tmp_path / "two").mkdir()
    documents = built(tmp_path / "two", source)
    assert (documents.report["empty_records"], documents.num_documents) == (1, 1)
