"""``meshwright data``: build, look into and verify folders of tokenised documents."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.errors import ExitCode, MeshwrightError, Problem, problem, refuse
from meshwright.base.units import MIB
from meshwright.config.resolve import DataSettings
from meshwright.train.data.build import BEGUN, RECORD_FOLDER, build_documents
from meshwright.train.data.cache import Show
from meshwright.train.data.corpus import open_corpus
from meshwright.train.data.documents import MANIFEST, Documents, open_documents, verify_documents
from meshwright.train.data.prepare import form_of_source, shape_of
from meshwright.train.data.tokenizer import load_tokenizer


def build_command(
    data: DataSettings, out: str, jobs: int | None, shard_mib: int, show: Show
) -> dict[str, Any]:
    """Return what was built from ``data.path`` into ``out``, as ``--json`` prints it.

    Raises:
        MeshwrightError: everything that is wrong with the source, the tokenizer or the folder, by the names of the
            command's arguments.
    """
    try:
        return _built(data, out, jobs, shard_mib, show)
    except MeshwrightError as error:
        raise MeshwrightError([_as_typed(p) for p in error.problems], error.exit_code) from error


TYPED = {
    ", or leave data.tokenizer out to train one on the corpus": "",
    "data.path=": "PATH ",
    "data.path": "PATH",
    "data.tokenizer=": "--tokenizer ",
    "data.tokenizer": "--tokenizer",
    "data.format": "--format",
    "data.text_field": "--text-field",
    "data.chat_template": "--chat-template",
    "the run file says": "--format says",
}
"""What a run file's key is called on the command line of ``meshwright data build``."""


def _as_typed(found: Problem) -> Problem:
    def renamed(text: str) -> str:
        for key, typed in TYPED.items():
            text = text.replace(key, typed)
        return text

    return replace(
        found,
        where=renamed(found.where),
        found=renamed(found.found),
        needs=renamed(found.needs),
        do=renamed(found.do),
    )


def _built(data: DataSettings, out: str, jobs: int | None, shard_mib: int, show: Show) -> dict[str, Any]:
    begin = time.perf_counter()
    path = str(data.path)
    source, target = Path(path).expanduser().absolute(), Path(out).expanduser().absolute()
    if target == source or source in target.parents:
        found = f"{out} lies in the folder that is read"
        raise MeshwrightError(problem("E651", where="--out", found=found))
    ours = (target / "shards.json").is_file()
    there = [p.name for p in target.iterdir() if p.name not in BEGUN] if target.is_dir() and not ours else []
    if there:
        raise MeshwrightError(problem("E651", where="--out", found=f"{out} holds other files: {there[0]}"))
    problems: list[Problem] = []
    try:
        form = form_of_source(path, data)
    except MeshwrightError as error:
        problems += error.problems
    try:
        words = load_tokenizer(str(data.tokenizer))
    except MeshwrightError as error:
        problems += error.problems
    refuse(problems)
    corpus = open_corpus(path, data.text_field).shaped(shape_of(form, data, words.file, words))
    documents = build_documents(
        corpus, words, target, jobs=jobs or os.cpu_count() or 1, unit_bytes=shard_mib * MIB, show=show
    )
    return _described(documents) | {"seconds": time.perf_counter() - begin}


def inspect_documents(folder: str) -> dict[str, Any]:
    """Return what a folder of documents holds.

    Raises:
        MeshwrightError: E601 no such folder, E650 incomplete or damaged.
    """
    return _described(open_documents(_there(folder)))


def verify_command(folder: str) -> dict[str, Any]:
    """Return the files of a folder whose content is not what its manifest says; reads every byte.

    A build that was not finished, and a manifest that cannot be read, are an answer too: ``ok`` is false.

    Raises:
        MeshwrightError: E601 no such folder, E650 a folder that no build has begun.
    """
    path = _there(folder)
    try:
        files, damaged = verify_documents(path)
    except MeshwrightError as error:
        if not (path / RECORD_FOLDER).is_dir():
            raise
        files, damaged = 0, [{"file": MANIFEST, "why": p.found, "source": ""} for p in error.problems]
    return {"path": folder, "ok": not damaged, "files": files, "damaged": damaged}


def _there(folder: str) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise MeshwrightError(
            problem(
                "E601",
                where=folder,
                found=f"no folder {path.absolute()}",
                needs="a folder of built documents",
            ),
            ExitCode.BAD_INPUT,
        )
    return path


def _described(documents: Documents) -> dict[str, Any]:
    files = [size for shard in documents.shards for _, size, _ in shard.files]
    return {
        "path": str(documents.folder),
        "form": documents.form,
        "shards": len(documents.shards),
        "documents": documents.num_documents,
        "tokens": documents.num_tokens,
        "token_bytes": documents.token_bytes,
        "bytes": sum(files),
        "masked": documents.masked,
        "tokenizer_size": documents.tokenizer_size,
        "hash": documents.hash,
        "source": documents.report,
    }
