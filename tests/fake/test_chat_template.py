"""Our rendering of a chat template and its tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_data import CHATML, chat_tokenizer, conversations, write_jsonl
from meshwright.config.resolve import DataSettings
from meshwright.train.data.build import build_documents
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.prepare import shape_of
from meshwright.train.data.tokenizer import load_tokenizer

MARKED = (
    "{%- for message in messages %}\n"
    "    {%- if message['role'] == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)

ASKING = (
    "{%- if tools is not none %}{{- raise_exception('no tools here') }}{%- endif %}\n"
    "{{- bos_token }}{%- for message in messages if message['role'] != 'system' %}\n"
    "{%- if loop.index0 > 9 %}{%- break %}{%- endif %}\n"
    "{{- '<|im_start|>' + message['role'] + ':\\n' + message['content'] | trim + '<|im_end|>' }}\n"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant:\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, ASKING])
def test_tokens_are_those_of_apply_chat_template(tmp_path: Path, template: str) -> None:
    """H6: and where the template marks answers, the mask is the one that transformers reads from the marks."""
    from transformers import AutoTokenizer

    records = conversations(12)
    source = write_jsonl(tmp_path / "c.jsonl", records)
    words = load_tokenizer(chat_tokenizer(tmp_path / "tok", template))
    shape = shape_of("chat", DataSettings(seq_len=8), words.file, words)
    documents = build_documents(open_corpus(str(source)).shaped(shape), words, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tok")
    marked = template == MARKED
    ends = documents.ends().tolist()
    for begin, end, record in zip([0, *ends[:-1]], ends, records, strict=True):
        tokens, loss = documents.read(begin, end)
        wanted = theirs.apply_chat_template(
            record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
        )
        assert tokens.tolist() == wanted["input_ids"]
        if marked:
            assert loss is not None
            assert loss.astype(int).tolist() == wanted["assistant_masks"]


def test_tokens_are_those_of_the_whole_conversation(tmp_path: Path) -> None:
    """Where a merge crosses from the prompt into the answer, tokens stay transformers' and that one is predicted."""
    from transformers import AutoTokenizer

    spaced = ASKING.replace(":\\n'", ": '")
    records = conversations(12)
    source = write_jsonl(tmp_path / "c.jsonl", records)
    words = load_tokenizer(chat_tokenizer(tmp_path / "tok", spaced))
    shape = shape_of("chat", DataSettings(seq_len=8), words.file, words)
    documents = build_documents(open_corpus(str(source)).shaped(shape), words, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tok")
    begin, crossed = 0, 0
    for end, record in zip(documents.ends().tolist(), records, strict=True):
        tokens, loss = documents.read(begin, end)
        assert loss is not None
        joined = theirs.apply_chat_template(record["messages"], tokenize=True, return_dict=True)["input_ids"]
        assert tokens.tolist() == joined
        asked = theirs.apply_chat_template(
            record["messages"][:1], tokenize=True, return_dict=True, add_generation_prompt=True
        )["input_ids"]
        same = next(k for k in range(len(asked) + 1) if k == len(asked) or joined[k] != asked[k])
        assert loss[: same + 1].tolist() == [False] * same + [True]
        crossed += same < len(asked)
        begin = end
    assert crossed


@pytest.mark.parametrize("marks", [False, True])
def test_each_answer_of_a_rewriting_template_has_the_context_of_its_turn(tmp_path: Path, marks: bool) -> None:
    """The tokens are those that transformers gives for the messages up to the answer; the mask is behind the prompt."""
    from transformers import AutoTokenizer

    content = "{{- message.content }}"
    if marks:
        content = "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' and loop.last %}" + content + "{%- else %}"
        "{{- message.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}"
        + ("{%- if message.role != 'assistant' or not loop.last %}" if marks else "")
        + "{{- '<|im_end|>' }}"
        + ("{%- endif %}" if marks else "")
        + "{{- '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    records = conversations(12)
    for record in records:
        for message in record["messages"][1::2]:
            message["content"] = "<think>\nwaits\n</think>\n" + message["content"]
    source = write_jsonl(tmp_path / "c.jsonl", records)
    words = load_tokenizer(chat_tokenizer(tmp_path / "tok", template))
    shape = shape_of("chat", DataSettings(seq_len=8), words.file, words)
    documents = build_documents(open_corpus(str(source)).shaped(shape), words, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tok")
    ends = iter(documents.ends().tolist())
    begin = 0
    for record in records:
        for turn in range(1, len(record["messages"]), 2):
            end = next(ends)
            tokens, loss = documents.read(begin, end)
            assert loss is not None
            upto = theirs.apply_chat_template(
                record["messages"][: turn + 1],
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=marks,
            )
            asked = theirs.apply_chat_template(
                record["messages"][:turn], tokenize=True, return_dict=True, add_generation_prompt=True
            )["input_ids"]
            assert tokens.tolist() == upto["input_ids"]
            assert tokens[: len(asked)].tolist() == asked
            want = upto["assistant_masks"] if marks else [0] * len(asked) + [1] * (len(tokens) - len(asked))
            assert loss.astype(int).tolist() == want
            begin = end
    assert next(ends, None) is None
