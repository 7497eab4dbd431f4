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


def test_a_prompt_has_the_tokens_that_it_has_alone(tmp_path: Path) -> None:
    """Where a merge would cross into the answer, the prompt keeps the tokens that a model is given to answer."""
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
        asked = theirs.apply_chat_template(
            record["messages"][:1], tokenize=True, return_dict=True, add_generation_prompt=True
        )["input_ids"]
        assert tokens[: len(asked)].tolist() == asked
        assert loss[: len(asked) + 1].tolist() == [False] * len(asked) + [True]
        joined = theirs.apply_chat_template(record["messages"], tokenize=True, return_dict=True)["input_ids"]
        crossed += joined[: len(asked)] != asked
        assert theirs.decode(tokens) == theirs.decode(joined)
        begin = end
    assert crossed
