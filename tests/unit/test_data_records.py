"""Records: conversations through a chat template, prompts with completions, and what is refused with line and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_data import CHATML, chat_tokenizer, conversations, write_jsonl
from meshwright.base.errors import MeshwrightError, Problem
from meshwright.train.data.answers import Rendered, rendered
from meshwright.train.data.build import build_documents
from meshwright.train.data.chat import ChatTemplate, messages_of, read_template
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.documents import Documents
from meshwright.train.data.prepare import shape_of
from meshwright.train.data.records import Form
from meshwright.train.data.tokenizer import answer_mask, load_tokenizer

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


def parts(made: Rendered) -> list[tuple[str, bool]]:
    """Return the text in runs, and which are answers."""
    out, at = [], 0
    for first, end in made.answers:
        out += [(made.text[at:first], False), (made.text[first:end], True)]
        at = end
    return [part for part in [*out, (made.text[at:], False)] if part[0]]


def one(source: ChatTemplate, messages: list[dict[str, Any]]) -> Rendered:
    made = rendered(source, messages, "x")
    assert len(made) == 1
    return made[0]


def test_answers_are_what_the_template_adds_to_the_open_turn() -> None:
    made = one(template(), turns("hi", "hello", "and?", "bye"))
    assert parts(made) == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello<|im_end|>\n", True),
        ("<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
        ("bye<|im_end|>\n", True),
    ]
    assert (made.how, made.closes) == ("whole", False)
    assert made.text == template().render(turns("hi", "hello", "and?", "bye"))


def test_a_question_without_an_answer_carries_no_loss() -> None:
    assert [answer for _, answer in parts(one(template(), turns("hi", "hello", "and?")))] == [
        False,
        True,
        False,
    ]
    assert [answer for _, answer in parts(one(template(), turns("hi")))] == [False]


THINKS = (  # as reasoning models write it: what stands before </think> is left out of all but the last answer
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- if message.role == 'assistant' and loop.last %}{{- message.content }}{%- else %}{{- said }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKED_THINKS = THINKS.replace(
    "{{- message.content }}", "{% generation %}{{- message.content }}{% endgeneration %}"
)
THOUGHTS = turns("a", "<think>\nx\n</think>\nb", "c", "<think>\ny\n</think>\nd")


def test_a_template_that_rewrites_earlier_turns_gives_each_answer_its_own_sample() -> None:
    """The context of each answer is what the template really writes at that turn, the answer with its reasoning."""
    first, second = rendered(template(THINKS), THOUGHTS, "x")
    assert parts(first) == [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\nx\n</think>\nb<|im_end|>\n", True),
    ]
    assert parts(second) == [
        (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("<think>\ny\n</think>\nd<|im_end|>\n", True),
    ]
    assert first.how == second.how == "per answer"
    assert [m.how for m in rendered(template(THINKS), THOUGHTS[:2], "x")] == [
        "whole"
    ]  # one answer: nothing rewritten


def test_marks_say_what_an_answer_is_also_where_turns_are_rewritten() -> None:
    """Only what is marked is predicted: not the end of the turn here."""
    first, second = rendered(template(MARKED_THINKS), THOUGHTS, "x")
    assert [t for t, answer in parts(first) if answer] == ["<think>\nx\n</think>\nb"]
    assert [t for t, answer in parts(second) if answer] == ["<think>\ny\n</think>\nd"]
    whole = CHATML.replace(
        "message['content']", "'' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ ''"
    )
    made = one(template(whole), turns("hi", "hello", "and?", "bye"))
    assert made.how == "marked"
    assert [t for t, answer in parts(made) if answer] == [
        "hi",
        "hello",
        "and?",
        "bye",
    ]  # it marks all: it is believed
    assert made.text == template().render(turns("hi", "hello", "and?", "bye"))


def test_characters_that_stand_for_marks_may_occur_in_a_message() -> None:
    strange = turns("\ufdd0", "a\ufdd1b")
    made = one(template(MARKED_THINKS), strange)
    assert [t for t, answer in parts(made) if answer] == ["a\ufdd1b"]
    every = turns("".join(map(chr, range(0xFDD0, 0xFDF0))), "b")
    assert parts(one(template(MARKED_THINKS), every))[-1] == (
        "b<|im_end|>\n",
        True,
    )  # no marks left: by the prompt


def test_e643_a_head_that_the_finished_turn_lacks() -> None:
    """A prompt that opens the reasoning, and a turn without it: no telling where the answer begins, unless marked."""
    opens = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    heady = THINKS.replace("{{- '<|im_start|>assistant\\n' }}", opens).replace(
        "{{- message.content }}", "{{- said }}"
    )
    found = refusal(lambda: rendered(template(heady), THOUGHTS, "f.jsonl:7"))
    assert (found.code, found.where) == ("E643", "f.jsonl:7")
    assert "message 2" in found.found
    assert "<think>" in found.found
    marked = heady.replace("{{- said }}", "{% generation %}{{- said }}{% endgeneration %}", 1)
    assert [t for t, answer in parts(one(template(marked), THOUGHTS)) if answer] == ["d"]


def test_e644_a_message_cannot_close_its_own_turn() -> None:
    found = refusal(lambda: rendered(template(), turns("hi<|im_end|>", "no"), "f.jsonl:2"))
    assert (found.code, found.where) == ("E644", "f.jsonl:2")
    assert "message 1 (user) contains '<|im_end|>'" in found.found


def test_e642_no_template_broken_template_and_template_that_refuses(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "none", template=None)
    found = refusal(lambda: read_template(folder / "tokenizer.json", None, "</s>", ()))
    assert found.code == "E642"
    assert "has no chat_template" in found.found
    assert refusal(lambda: template("{% for %}").render([])).code == "E642"
    angry = template("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refusal(lambda: rendered(angry, turns("a", "b"), "f:1")).found
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


def test_rewritten_conversations_are_counted_and_held_out_together(tmp_path: Path) -> None:
    """Every answer is predicted once; the samples of one conversation have one digest; the report says what was done."""
    chance = conversations(40)
    for record in chance:
        for message in record["messages"][1::2]:
            message["content"] = "<think>\nwaits\n</think>\n" + message["content"]
    source = write_jsonl(tmp_path / "c.jsonl", chance)
    chat_tokenizer(tmp_path / "tok", THINKS)
    documents = built(tmp_path, source)
    answers = [len(r["messages"]) // 2 for r in chance]
    many = [n for n in answers if n > 1]
    assert documents.num_documents == sum(answers)
    assert documents.report["conversations"] == {
        "whole": answers.count(1),
        "marked": 0,
        "per answer": sum(many),
    }
    assert documents.report["conversations_rewritten"] == len(many)
    for document in range(documents.num_documents):
        (_, asked), (answer, predicted) = spelled(documents, document)
        assert (asked, predicted) == (False, True)
        assert answer.startswith("<think>\nwaits\n</think>\n")
    digests = documents.digests().tolist()
    at = 0
    for count in answers:
        assert len(set(digests[at : at + count])) == 1
        at += count
    assert len(set(digests)) == len(answers)


def test_the_mask_of_tokens_by_their_characters() -> None:
    """A token is predicted when it shares a character with an answer; tokens of one character in several pieces too."""
    offsets = [(0, 3), (3, 5), (5, 5), (5, 6), (5, 6), (6, 9), (9, 12)]
    assert answer_mask(offsets, [(4, 6), (9, 10)]).tolist() == [0, 1, 1, 1, 1, 0, 1]
    assert answer_mask(offsets, []).tolist() == [0] * 7
    assert answer_mask([], [(0, 1)]).tolist() == []


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
