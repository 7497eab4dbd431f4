"""Writing one shard of tokenised documents, in a process of its own: its arrays, and last of all its record."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.train.data.cache import write_whole
from meshwright.train.data.corpus import Corpus, Unit
from meshwright.train.data.documents import file_hash
from meshwright.train.data.pieces import Account, Piece, piece_groups
from meshwright.train.data.records import lines_before
from meshwright.train.data.tokenizer import TextTokenizer, load_tokenizer

RECORD_FOLDER: Final = "records"


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """One shard to write: everything that a process needs for it."""

    folder: Path
    name: str
    corpus: Corpus
    unit: Unit
    tokenizer: Path
    token_bytes: int
    key: str


def write_shard(job: ShardJob) -> list[Problem]:
    """Write one shard and its record; return what is wrong with its source."""
    try:
        words = load_tokenizer(job.tokenizer)
        account = Account()
        facts = _tokenise(job, words, account)
        files = [
            {"file": f"{job.name}.{kind}", "bytes": size, "sha256": digest}
            for kind, size, digest in facts.pop("files")
        ]
    except MeshwrightError as error:
        return list(error.problems)
    except OSError as error:
        return [problem("E615", where=str(job.folder), found=error.strerror or str(error))]
    by_lines = job.corpus.kind in ("jsonl", "folder") and job.unit.start > 0
    record = {
        "key": job.key,
        "name": job.name,
        "source": job.unit.name,
        "first_line": lines_before(job.unit.path, job.unit.start) if by_lines else 0,
        **facts,
        "files": files,
        "text_bytes": account.text_bytes,
        "empty_records": account.empty_records,
        "beyond_limit": account.beyond_limit,
        "written": account.written,
        "skipped": account.skipped,
    }
    write_whole(job.folder / RECORD_FOLDER / f"{job.name}.json", json.dumps(record).encode())
    return []


def _tokenise(job: ShardJob, words: TextTokenizer, account: Account) -> dict[str, Any]:
    """Write the arrays of one shard under their final names, each whole."""
    masked = job.corpus.shape.form != "text"
    dtype = np.dtype(np.uint16 if job.token_bytes == 2 else np.uint32)
    ends, digests, places = [], [], []
    digest = hashlib.blake2b(digest_size=8)
    total = 0
    parts = {kind: job.folder / f"{job.name}.{kind}.part" for kind in ("tokens", "loss")}
    with parts["tokens"].open("wb") as tokens, parts["loss"].open("wb") as loss:
        for group in piece_groups(job.corpus.unit_pieces(job.unit, account)):
            for piece, (ids, mask) in zip(group, words.encode_pieces(group), strict=True):
                digest.update((piece.group or piece.text).encode())
                if piece.ends and piece.closes:
                    ids.append(words.eos_id)
                    mask = np.append(mask, np.uint8(_predicts_end(piece)))
                tokens.write(np.asarray(ids, dtype).tobytes())
                if masked:
                    loss.write(mask.tobytes())
                total += len(ids)
                if piece.ends:
                    ends.append(total)
                    places.append(piece.place)
                    digests.append(int.from_bytes(digest.digest(), "little"))
                    digest = hashlib.blake2b(digest_size=8)
    arrays = {"ends": np.asarray(ends, np.int64), "digests": np.asarray(digests, np.uint64)}
    arrays["places"] = np.asarray(places, np.int64)
    for kind, array in arrays.items():
        parts[kind] = job.folder / f"{job.name}.{kind}.part"
        parts[kind].write_bytes(array.tobytes())
    if not masked:
        parts.pop("loss").unlink()
    files = []
    for kind, part in parts.items():
        with part.open("rb") as file:
            _sync(file)
        files.append((kind, part.stat().st_size, file_hash(part)))
        part.replace(job.folder / f"{job.name}.{kind}")
    return {"tokens": total, "documents": len(ends), "files": files}


def _predicts_end(piece: Piece) -> bool:
    """Return whether the end-of-text token that follows is a part of the answer: it is when the answer goes up to it."""
    if piece.answers is None:
        return piece.loss
    return bool(piece.answers) and not piece.text[piece.answers[-1][1] :].strip()


def _sync(file: Any) -> None:
    os.fsync(file.fileno())
