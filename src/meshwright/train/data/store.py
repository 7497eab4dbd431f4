"""The token store: a corpus as two files of token ids that ranks map into memory, and samples cut from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_bytes, format_seconds
from meshwright.train.data.cache import Progress, Show, discard_folder, fingerprint, whole_folder
from meshwright.train.data.corpus import Corpus, empty_problem, open_corpus
from meshwright.train.data.holdout import held_out
from meshwright.train.data.order import Ints
from meshwright.train.data.pieces import Account, piece_groups
from meshwright.train.data.stream import Rows, TokenStream
from meshwright.train.data.tokenizer import VERSION, TextTokenizer, load_tokenizer, trained_tokenizer

_SKIPS_KEPT = 100
_META = "store.json"


@dataclass(frozen=True, kw_only=True)
class TokenData:
    """A corpus as tokens, ready to draw samples from; small to send, as the tokens stay in their files.

    Attributes:
        folder: where the tokens lie.
        train: the training split; the last partial sample of a stream is dropped.
        eval: the held-out split; the last partial sample of a stream is padded.
        end: samples after which finite data ends (``data.epochs``); None draws for ever.
        tokenizer_file: the tokenizer.json that made the tokens.
        eos_id: end-of-text token, which separates documents and pads rows.
        hash: changes with the corpus, the tokenizer and the split; the same for the same content anywhere.
        report: what was read, skipped, dropped, and how long it took.
    """

    folder: Path
    train: Rows
    eval: Rows
    tokenizer_file: Path
    tokenizer_size: int
    eos_id: int
    seq_len: int
    hash: str
    report: dict[str, Any]
    end: int | None = None

    @property
    def num_samples(self) -> int:
        """Samples of the training split."""
        return self.train.num_samples

    def last_step(self, global_batch: int) -> int | None:
        """Return the step (counted from 1) in which finite data ends, the same on every rank of any layout."""
        return None if self.end is None else -(-self.end // global_batch)

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer, for writing text from token ids."""
        return load_tokenizer(self.tokenizer_file)


def prepare_tokens(
    path: str,
    *,
    tokenizer: str | None,
    vocab_size: int,
    seq_len: int,
    eval_fraction: float,
    cache_dir: Path,
    text_field: str = "text",
    show: Show | None = None,
) -> TokenData:
    """Return the corpus as tokens, from the cache where it was tokenised before.

    One process calls this before the ranks start; ranks receive the result or call ``open_tokens``.

    Raises:
        MeshwrightError: E601-E607 about the corpus, E609-E613 about the tokenizer, E614 a missing package,
            E615 a cache that cannot be written, E616 a dataset that cannot be read.
    """
    progress = Progress("preparing the corpus", 1, None)
    corpus = open_corpus(path, text_field)
    corpus_hash = fingerprint(corpus.files, show)
    if tokenizer is None:
        words = trained_tokenizer(corpus, corpus_hash, vocab_size, cache_dir, show)
    else:
        words = load_tokenizer(tokenizer, vocab_size)
    identity = f"{VERSION} {corpus.kind} {text_field} {corpus_hash} {words.content_hash} {eval_fraction!r}"
    key = hashlib.sha256(identity.encode()).hexdigest()
    folder = cache_dir / f"tokens-{key[:16]}"
    cached = _whole(folder)
    if not cached:
        if folder.exists():
            if show is not None:
                show(f"the cached tokens in {folder.name} are damaged: tokenising again")
            discard_folder(folder)
        with whole_folder(folder) as temporary:
            _build(temporary, corpus, words, eval_fraction, key, show)
    data = open_tokens(folder, seq_len, tokenizer_file=words.file)
    if data.num_samples < 1:
        raise MeshwrightError(_too_small(data, path))
    data.report.update(path=path, cached=cached, seconds=progress.seconds)
    if show is not None:
        r = data.report
        show(
            f"corpus: {r['documents']} documents, {format_bytes(r['text_bytes'])}, {r['tokens']} tokens, "
            f"{r['train_samples']} samples of {seq_len} to train and {r['eval_samples']} held out"
            + (f", {r['skipped_files']} files skipped" if r["skipped_files"] else "")
            + f" ({'cached' if cached else 'tokenised'}, {format_seconds(progress.seconds)})"
        )
    return data


def open_tokens(folder: Path, seq_len: int, tokenizer_file: Path | None = None) -> TokenData:
    """Return tokens that ``prepare_tokens`` wrote, cut into samples of ``seq_len``; reads no corpus."""
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    streams = {
        name: TokenStream(
            file=folder / f"{name}.npy",
            num_tokens=meta[f"{name}_tokens"],
            seq_len=seq_len,
            pad_id=meta["eos_id"],
            keep_partial=name == "eval",
        )
        for name in ("train", "eval")
    }
    train, held = streams["train"], streams["eval"]
    report = dict(meta["report"])
    report |= {
        "train_tokens": train.num_tokens,
        "eval_tokens": held.num_tokens,
        "train_samples": train.num_samples,
        "eval_samples": held.num_samples,
        "dropped_tokens": max(train.num_tokens - 1 - train.num_samples * seq_len, 0),
        "padded_tokens": max(held.num_samples * seq_len - max(held.num_tokens - 1, 0), 0),
        "last_partial_sample": "train: dropped; eval: padded, labels -100",
    }
    return TokenData(
        folder=folder,
        train=train,
        eval=held,
        tokenizer_file=tokenizer_file or Path(meta["tokenizer_file"]),
        tokenizer_size=meta["tokenizer_size"],
        eos_id=meta["eos_id"],
        seq_len=seq_len,
        hash=meta["hash"],
        report=report,
    )


def check_samples(data: TokenData, global_batch: int) -> list[Problem]:
    """Return E608 when one step would take more samples than the corpus has."""
    most = data.train.fresh_draws
    if global_batch <= most:
        return []
    stream = isinstance(data.train, TokenStream)
    longest = (data.train.num_tokens - 1) // global_batch if stream else 0
    or_shorter = f", or seq_len of at most {longest}" if longest >= 1 else ""
    return [
        problem(
            "E608",
            where="batch.sequences",
            found=f"{global_batch} sequences per step, but the corpus has {data.num_samples} samples "
            f"of {data.seq_len} tokens"
            + ("" if most == data.num_samples else f", by shares only {most} without a repeat"),
            needs=f"at most {most} sequences per step{or_shorter}",
            do=f"set batch.sequences to {most} or less{or_shorter}, or use more text",
        )
    ]


def _too_small(data: TokenData, path: str) -> Problem:
    tokens = data.train.num_tokens
    held = data.eval.num_tokens
    or_shorter = f"seq_len of at most {tokens - 1}" if tokens >= 2 else "more text"
    return problem(
        "E607",
        where=f"data.path={path}",
        found=f"{tokens} tokens to train on ({held} more held out), a sample of seq_len {data.seq_len} "
        f"takes {data.seq_len + 1}",
        needs=f"at least {data.seq_len + 1} tokens",
        do=f"use {or_shorter}" + (", more text, or data.eval_fraction=0" if held else " or more text"),
    )


# -- writing ------------------------------------------------------------------------------------------------


def _whole(folder: Path) -> bool:
    """Return whether a cached store is complete: its record and both files of the recorded length."""
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        return all(
            len(np.load(folder / f"{name}.npy", mmap_mode="r")) == meta[f"{name}_tokens"]
            for name in ("train", "eval")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(
    folder: Path, corpus: Corpus, words: TextTokenizer, eval_fraction: float, key: str, show: Show | None
) -> None:
    """Tokenise the corpus into ``folder``: one pass that writes all tokens, then the split."""
    account = Account()
    dtype = np.dtype(np.uint16 if words.size <= 1 << 16 else np.uint32)
    progress = Progress("tokenising", corpus.expected_bytes, show)
    ends: list[int] = []  # tokens up to the end of each document
    digests: list[int] = []
    digest = hashlib.blake2b(digest_size=8)
    total = read = 0
    raw = folder / "all.bin"
    with raw.open("wb") as file:
        for group in piece_groups(corpus.pieces(account)):
            for piece, ids in zip(group, words.encode_many([p.text for p in group]), strict=True):
                digest.update(piece.text.encode())
                if piece.ends:
                    ids.append(words.eos_id)
                file.write(np.asarray(ids, dtype).tobytes())
                total += len(ids)
                read += piece.source_bytes
                if piece.ends:
                    ends.append(total)
                    digests.append(int.from_bytes(digest.digest(), "little"))
                    digest = hashlib.blake2b(digest_size=8)
            progress.at(read)
    if not ends:
        raise MeshwrightError(empty_problem(corpus, account))
    tokens = np.memmap(raw, dtype, "r", shape=(total,))
    held, how = held_out(np.asarray(ends), np.asarray(digests, np.uint64), eval_fraction)
    sizes = {
        "train": _write_split(
            folder / "train.npy", tokens, np.asarray(ends), ~held, how, eval_fraction, False
        ),
        "eval": _write_split(folder / "eval.npy", tokens, np.asarray(ends), held, how, eval_fraction, True),
    }
    del tokens
    raw.unlink()
    meta = {
        "hash": key,
        "train_tokens": sizes["train"],
        "eval_tokens": sizes["eval"],
        "eos_id": words.eos_id,
        "tokenizer_file": str(words.file.absolute()),
        "tokenizer_size": words.size,
        "report": {
            "path": corpus.path,
            "kind": corpus.kind,
            "files": len(corpus.files),
            "bytes": corpus.num_bytes,
            "text_bytes": account.text_bytes,
            "documents": account.documents,
            "tokens": total,
            "empty_records": account.empty_records,
            "beyond_limit": account.beyond_limit,
            "skipped_files": len(account.skipped),
            "skipped": [{"file": name, "reason": reason} for name, reason in account.skipped[:_SKIPS_KEPT]],
            "split": how,
            "eos_token": words.eos_token,
            "tokenizer_size": words.size,
            "token_bytes": dtype.itemsize,
            "tokenising_seconds": progress.seconds,
        },
    }
    (folder / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _write_split(
    file: Path,
    tokens: NDArray[Any],
    ends: Ints,
    chosen: NDArray[np.bool_],
    how: str,
    fraction: float,
    is_eval: bool,
) -> int:
    """Write the tokens of one split and return how many they are."""
    if how == "whole documents, by hash":
        starts = np.concatenate([[0], ends[:-1]])
        edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
        runs = [(int(starts[a]), int(ends[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    else:
        border = len(tokens) - round(fraction * len(tokens))
        runs = [(border, len(tokens))] if is_eval else [(0, border)]
    total = sum(end - start for start, end in runs)
    if total == 0:
        np.save(file, np.zeros(0, tokens.dtype))
        return 0
    target = np.lib.format.open_memmap(file, "w+", tokens.dtype, (total,))
    at = 0
    for start, end in runs:
        target[at : at + end - start] = tokens[start:end]
        at += end - start
    target.flush()
    return total
