"""A small tokenizer with a chat template, and records, for tests of fine-tuning data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = "the rank sends its gradient to the next stage and waits for a micro batch of the other group"


def words(count: int, chance: random.Random) -> str:
    return " ".join(chance.choices(TEXT.split(), k=count))


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return records with one to three turns each."""
    chance = random.Random(seed)
    out = []
    for number in range(count):
        messages = []
        for _ in range(chance.randint(1, 3)):
            messages.append({"role": "user", "content": f"{words(chance.randint(1, 5), chance)} {number}?"})
            messages.append({"role": "assistant", "content": words(chance.randint(1, 8), chance)})
        out.append({"messages": messages})
    return out


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def chat_tokenizer(folder: Path, template: str | None = CHATML, size: int = 300) -> Path:
    """Write a byte-level tokenizer with ChatML's special tokens; its end of text is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
