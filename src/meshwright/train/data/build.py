"""Building a folder of tokenised documents: in parallel, and going on where a stopped build stood.

The corpus is cut in units (files, line ranges, row groups) by size alone. Each unit becomes one shard, so the result
does not depend on the number of processes or on interruptions. A shard counts as written when its record is there,
which is the last of its files; ``manifest.json`` is written when all are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem
from meshwright.base.units import MIB
from meshwright.train.data.cache import Progress, Show, fingerprint, write_whole
from meshwright.train.data.corpus import Corpus, Unit, empty_problem
from meshwright.train.data.documents import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER_FOLDER,
    Documents,
    open_documents,
)
from meshwright.train.data.pieces import Account
from meshwright.train.data.shards import RECORD_FOLDER, ShardJob, write_shard
from meshwright.train.data.tokenizer import VERSION, TextTokenizer

UNIT_BYTES: Final = 64 * MIB
"""Source bytes of one shard."""

BEGUN: Final = (".lock", RECORD_FOLDER, TOKENIZER_FOLDER)
"""What a folder holds in which a build was stopped before its first shard."""

_SKIPS_KEPT = 100
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def build_documents(
    corpus: Corpus,
    words: TextTokenizer,
    out: Path,
    *,
    jobs: int = 1,
    unit_bytes: int = UNIT_BYTES,
    wait: bool = False,
    show: Show | None = None,
) -> Documents:
    """Return the corpus as documents in ``out``, built by ``jobs`` processes.

    Shards that an earlier, stopped build of the same corpus wrote are kept. Where another process builds in ``out``,
    this one waits for it (``wait``) or refuses.

    Raises:
        MeshwrightError: E602 without any text, E615 when ``out`` cannot be written, E651 when it holds another
            build, E652 when another process builds there, E653 when a process was killed, and what reading raises.
    """
    with _locked(out, wait, show):
        units = corpus.units(unit_bytes)
        keys = _keys(corpus, words, units, show)
        whole = _identity([words.content_hash, *keys])
        _start(out, whole, words, len(units))
        names = [f"shard-{n:05d}" for n in range(len(units))]
        token_bytes = 2 if words.size <= 1 << 16 else 4
        todo = [
            ShardJob(
                folder=out,
                name=name,
                corpus=corpus,
                unit=unit,
                tokenizer=out / TOKENIZER_FOLDER,
                token_bytes=token_bytes,
                key=key,
            )
            for name, unit, key in zip(names, units, keys, strict=True)
            if _record(out, name, key) is None
        ]
        if show is not None and len(todo) < len(units):
            show(f"{len(units) - len(todo)} of {len(units)} shards are there already")
        progress = Progress("tokenising", len(todo), show)
        for done, problems in enumerate(_run(todo, jobs), start=1):
            if problems:
                raise MeshwrightError(problems)
            progress.at(done)
        records = [_record(out, name, key) for name, key in zip(names, keys, strict=True)]
        _finish(out, corpus, words, [r for r in records if r is not None], whole, token_bytes)
    return open_documents(out)


@contextlib.contextmanager
def _locked(out: Path, wait: bool, show: Show | None = None) -> Iterator[None]:
    try:
        (out / RECORD_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise MeshwrightError(
            problem("E615", where=str(out), found=error.strerror or str(error)), ExitCode.ENVIRONMENT
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                found = "another process builds in it at this moment"
                raise MeshwrightError(problem("E652", where=str(out), found=found)) from None
            if show is not None:
                show(f"waiting for another process that builds {out.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def _identity(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _keys(corpus: Corpus, words: TextTokenizer, units: Sequence[Unit], show: Show | None) -> list[str]:
    """Return what each shard depends on, as a hash: source, cut, shape of the records, tokenizer."""
    shape = corpus.shape
    template = (
        _identity([shape.template.source, json.dumps(dict(shape.template.named))]) if shape.template else ""
    )
    named = [(name, path) for name, path in corpus.files]
    prints: dict[str, str]
    if corpus.kind == "python-docs":
        prints = {corpus.path: fingerprint(named, show)}
    else:
        prints = {name: fingerprint([(name, path)], None) for name, path in named}
    how = f"{VERSION} {FORMAT_VERSION} {corpus.kind} {shape.form} {shape.text_field} {template} {words.content_hash}"
    return [_identity([how, u.name, prints[u.name], f"{u.start} {u.stop}"]) for u in units]


def _start(out: Path, whole: str, words: TextTokenizer, units: int) -> None:
    """Say what is being built here, and keep the tokenizer beside it."""
    marker = out / "shards.json"
    try:
        held = json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else None
    except (OSError, ValueError):
        held = {"key": "unreadable"}
    if held is not None and held.get("key") != whole:
        found = "it holds documents of another corpus, tokenizer or shape of records"
        raise MeshwrightError(problem("E651", where=str(out), found=found))
    target = out / TOKENIZER_FOLDER
    try:
        target.mkdir(exist_ok=True)
        shutil.copyfile(words.file, target / "tokenizer.json")
        for name in _TOKENIZER_FILES[1:]:
            if (words.file.parent / name).is_file():
                shutil.copyfile(words.file.parent / name, target / name)
    except OSError as error:
        raise MeshwrightError(
            problem("E615", where=str(target), found=error.strerror or str(error)), ExitCode.ENVIRONMENT
        ) from error
    if held is None:
        write_whole(marker, json.dumps({"key": whole, "shards": units}).encode())


def _record(out: Path, name: str, key: str) -> dict[str, Any] | None:
    """Return the record of a shard that is whole and of this very build, else None."""
    try:
        held = json.loads((out / RECORD_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        sizes = [(out / f["file"]).stat().st_size == f["bytes"] for f in held["files"]]
        return held if held["key"] == key and all(sizes) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run(todo: Sequence[ShardJob], jobs: int) -> Iterator[list[Problem]]:
    if min(jobs, len(todo)) <= 1:
        for job in todo:
            yield write_shard(job)
        return
    pool = ProcessPoolExecutor(min(jobs, len(todo)), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(write_shard, todo)
    except BrokenProcessPool as error:
        raise MeshwrightError(
            problem("E653", where=str(todo[0].folder), found="a process was killed (often for memory)"),
            ExitCode.ENVIRONMENT,
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _written(account: Account) -> dict[str, Any]:
    """Return how conversations were written, where there are any."""
    if not account.written:
        return {}
    counts = {name: account.written.get(name, 0) for name in ("whole", "marked", "per answer")}
    return {"conversations": counts, "conversations_rewritten": account.written.get("rewritten", 0)}


def _finish(
    out: Path,
    corpus: Corpus,
    words: TextTokenizer,
    records: Sequence[dict[str, Any]],
    whole: str,
    token_bytes: int,
) -> None:
    account = Account(skipped=list(corpus.skipped))
    for record in records:
        skipped = [(name, why) for name, why in record["skipped"]]
        account.add(
            replace(
                Account(),
                documents=record["documents"],
                text_bytes=record["text_bytes"],
                empty_records=record["empty_records"],
                beyond_limit=record["beyond_limit"],
                skipped=skipped,
                written=record.get("written", {}),
            )
        )
    if account.documents == 0:
        raise MeshwrightError(empty_problem(corpus, account))
    sums = [file["sha256"] for record in records for file in record["files"]]
    kept = ("name", "source", "first_line", "tokens", "documents", "files")
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "key": whole,
        "hash": _identity([words.content_hash, *sums]),
        "token_bytes": token_bytes,
        "masked": corpus.shape.form != "text",
        "form": corpus.shape.form,
        "eos_id": words.eos_id,
        "tokenizer_hash": words.content_hash,
        "tokenizer_size": words.size,
        "shards": [{name: record[name] for name in kept} for record in records],
        "report": {
            "path": corpus.path,
            "kind": corpus.kind,
            "form": corpus.shape.form,
            "files": len(corpus.files),
            "bytes": corpus.num_bytes,
            "text_bytes": account.text_bytes,
            "documents": account.documents,
            "tokens": sum(record["tokens"] for record in records),
            "empty_records": account.empty_records,
            "beyond_limit": account.beyond_limit,
            **_written(account),
            "skipped_files": len(account.skipped),
            "skipped": [{"file": name, "reason": why} for name, why in account.skipped[:_SKIPS_KEPT]],
            "eos_token": words.eos_token,
        },
    }
    write_whole(out / MANIFEST, json.dumps(manifest, indent=1).encode())
