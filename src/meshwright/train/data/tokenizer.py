"""From text to token ids and back: a tokenizer of the model, or one trained on the corpus and cached."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import ExitCode, MeshwrightError, problem
from meshwright.base.units import MIB, format_bytes, format_seconds
from meshwright.train.data.cache import Progress, Show, write_whole
from meshwright.train.data.corpus import Corpus, empty_problem
from meshwright.train.data.pieces import Account, Piece

END_OF_TEXT: Final = "<|endoftext|>"
"""The end-of-text token of a tokenizer that we train."""

TRAINING_BYTES = 4 * MIB
"""Text from which merges are learned; of a larger corpus, pieces spread evenly over it."""

VERSION = 2
"""Raised when the same corpus would give other tokens than before."""

_BYTE_TOKENS = 256
_USUAL_ENDS = (
    END_OF_TEXT,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|end▁of▁sentence|>",
)


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer read from a file.

    Attributes:
        file: the tokenizer.json.
        size: one more than the highest token id.
        eos_id: the end-of-text token, which separates documents and pads rows.
        eos_token: how it is written.
        content_hash: hash of the file and the end-of-text token.
    """

    file: Path
    size: int
    eos_id: int
    eos_token: str
    content_hash: str
    backend: Any = field(repr=False, compare=False)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, without anything added."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without anything added."""
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[tuple[list[int], NDArray[np.uint8]]]:
        """Return the token ids of each piece, and which of them are predicted.

        In markup, special tokens that are written are tokens. A piece with ``answers`` is tokenised whole, and a token
        is predicted when one of its characters is an answer's. Other pieces are predicted as a whole or not at all,
        and tokenised each by itself: a prompt has the tokens that it has without its completion.

        Shapes: ``[tokens]`` each.
        """
        out: list[tuple[list[int], NDArray[np.uint8]]] = [([], np.zeros(0, np.uint8)) for _ in pieces]
        chosen = [n for n, piece in enumerate(pieces) if piece.answers is None]
        for n, ids in zip(chosen, self.encode_many([pieces[n].text for n in chosen]), strict=True):
            out[n] = (ids, np.full(len(ids), pieces[n].loss, np.uint8))
        for markup in (False, True):
            chosen = [n for n, p in enumerate(pieces) if p.answers is not None and p.markup is markup]
            if chosen:
                self._offsets.encode_special_tokens = not markup
                texts = [pieces[n].text for n in chosen]
                for n, found in zip(
                    chosen, self._offsets.encode_batch(texts, add_special_tokens=False), strict=True
                ):
                    out[n] = (found.ids, answer_mask(found.offsets, pieces[n].answers or ()))
        return out

    @functools.cached_property
    def _offsets(self) -> Any:
        """The same tokenizer without what it does after tokenising, which may move the ends of tokens."""
        backend = _backend().Tokenizer.from_str(self.backend.to_str())
        backend.post_processor = None
        backend.no_padding()
        backend.no_truncation()
        return backend

    def special_tokens(self) -> tuple[str, ...]:
        """Return every special token as it is written."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()) if token.special)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; the end-of-text token is written out as it is."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)


def answer_mask(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """Return 1 for each token (first character, end) that shares a character with an answer (first, end; ascending).

    Shapes: ``[tokens]``.
    """
    out = np.zeros(len(offsets), np.uint8)
    if not answers or not offsets:
        return out
    tokens = np.asarray(offsets, np.int64)
    begins, ends = np.asarray(answers, np.int64).T
    behind = np.searchsorted(
        ends, tokens[:, 0], "right"
    )  # the first answer that ends behind a token's beginning
    there = behind < len(ends)
    out[there] = begins[behind[there]] < tokens[there, 1]
    return out


def _backend() -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise MeshwrightError(
            problem(
                "E614",
                where="data.tokenizer",
                found="tokenizers is not installed",
                needs="tokenizers 0.22 or newer",
                do="pip install 'meshwright[run]'",
            ),
            ExitCode.ENVIRONMENT,
        )
    return importlib.import_module("tokenizers")


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> TextTokenizer:
    """Return the tokenizer of a tokenizer.json or of a folder that holds one.

    Raises:
        MeshwrightError: E609 no such file, E611 not a tokenizer, E612 no end-of-text token, E610 more tokens
            than ``vocab_size``, E614 without the package.
    """
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    where = f"data.tokenizer={path}"
    if not file.is_file():
        found = f"no file {file.absolute()}"
        if given.is_dir():
            there = sorted(p.name for p in given.iterdir())
            found += f"; the folder holds {', '.join(there[:8]) or 'nothing'}"
        raise MeshwrightError(problem("E609", where=where, found=found))
    library = _backend()
    content = file.read_bytes()
    try:
        backend = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises a bare Exception
        raise MeshwrightError(
            problem("E611", where=where, found=f"{format_bytes(len(content))}; {error}")
        ) from error
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # "</s>" inside a document is text, not the end of it
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if vocab_size is not None and size > vocab_size:
        raise MeshwrightError(
            problem(
                "E610",
                where=where,
                found=f"the tokenizer has {size} tokens, the model's vocab_size is {vocab_size}",
                needs=f"vocab_size of at least {size}, or a tokenizer of at most {vocab_size} tokens",
                do="use the tokenizer that belongs to the model, or leave data.tokenizer out to train one "
                f"of {vocab_size} tokens on the corpus",
            )
        )
    eos_token, eos_id = _end_of_text(file, backend, where)
    return TextTokenizer(
        file=file,
        size=size,
        eos_id=eos_id,
        eos_token=eos_token,
        content_hash=hashlib.sha256(content + eos_token.encode()).hexdigest(),
        backend=backend,
    )


def _end_of_text(file: Path, backend: Any, where: str) -> tuple[str, int]:
    config = file.parent / "tokenizer_config.json"
    if config.is_file():
        try:
            named: Any = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise MeshwrightError(problem("E611", where=str(config), found=str(error))) from error
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str):
            number = backend.token_to_id(token)
            if number is None:
                raise MeshwrightError(
                    problem("E612", where=where, found=f"eos_token {token!r} is not in the vocabulary")
                )
            return token, int(number)
    special = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    for token in _USUAL_ENDS:
        if token in special:
            return token, int(special[token])
    shown = ", ".join(list(special)[:8]) or "none"
    raise MeshwrightError(
        problem("E612", where=where, found=f"no tokenizer_config.json names one; special tokens: {shown}")
    )


def trained_tokenizer(
    corpus: Corpus, corpus_hash: str, vocab_size: int, cache_dir: Path, show: Show | None = None
) -> TextTokenizer:
    """Return a byte-level BPE tokenizer trained on the corpus, from the cache where it was trained before.

    The corpus may teach fewer merges than ``vocab_size`` has room for; the rest of the ids stays unused.

    Raises:
        MeshwrightError: E613 when ``vocab_size`` cannot hold the byte tokens; what reading the corpus raises;
            E615 when the cache cannot be written.
    """
    if vocab_size < _BYTE_TOKENS + 1:
        raise MeshwrightError(
            problem(
                "E613",
                where="model.vocab_size",
                found=f"vocab_size is {vocab_size}; bytes and the end of text need {_BYTE_TOKENS + 1} ids",
            )
        )
    library = _backend()
    version = f"{VERSION} {library.__version__} {TRAINING_BYTES}"
    key = hashlib.sha256(f"{corpus_hash} {corpus.text_field} {vocab_size} {version}".encode()).hexdigest()[
        :16
    ]
    file = cache_dir / f"tokenizer-{vocab_size}-{key}.json"
    if not file.is_file():
        progress = Progress("training the tokenizer", 1, None)
        account = Account()
        backend = _train(library, _spread(corpus, account), vocab_size)
        if account.documents == 0:
            raise MeshwrightError(empty_problem(corpus, account))
        write_whole(file, backend.to_str().encode())
        if show is not None:
            show(
                f"trained a tokenizer of {backend.get_vocab_size()} tokens on the corpus in "
                f"{format_seconds(progress.seconds)}"
            )
    return load_tokenizer(file, vocab_size)


def _spread(corpus: Corpus, account: Account) -> Iterator[str]:
    """Yield about TRAINING_BYTES of the corpus, pieces taken evenly over its whole length."""
    share = min(1.0, TRAINING_BYTES / max(corpus.expected_bytes, 1))
    due = 1.0
    taken = 0
    for piece in corpus.pieces(account):
        size = len(piece.text)
        due += share * size
        if size and taken + size <= due + size / 2:
            taken += size
            yield piece.text


def _train(library: Any, texts: Iterator[str], vocab_size: int) -> Any:
    models = importlib.import_module("tokenizers.models")
    pre_tokenizers = importlib.import_module("tokenizers.pre_tokenizers")
    decoders = importlib.import_module("tokenizers.decoders")
    trainers = importlib.import_module("tokenizers.trainers")
    backend = library.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
