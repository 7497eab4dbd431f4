"""From the data section of a run file to samples: which form, which tokenizer, which rows, in which shares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.base.units import format_seconds
from meshwright.config.resolve import DataSettings
from meshwright.train.data.build import build_documents
from meshwright.train.data.cache import Progress, Show, discard_folder, fingerprint
from meshwright.train.data.chat import read_template
from meshwright.train.data.corpus import PYTHON_DOCS, Corpus, open_corpus
from meshwright.train.data.documents import MANIFEST, Documents, is_documents, open_documents
from meshwright.train.data.mixture import MixedRows, end_of, quotas_of
from meshwright.train.data.packing import RowKind, TooLong
from meshwright.train.data.records import Form, Shape
from meshwright.train.data.rows import DocumentRows, RowWish, split_rows
from meshwright.train.data.store import TokenData, prepare_tokens
from meshwright.train.data.tokenizer import (
    END_OF_TEXT,
    VERSION,
    TextTokenizer,
    load_tokenizer,
    trained_tokenizer,
)


def sources_of(data: DataSettings) -> dict[str, float]:
    """Return the weight of each source of a run, by path."""
    return dict(data.sources) if data.sources else {str(data.path): 1.0}


def form_of_source(path: str, data: DataSettings) -> Form:
    """Return what the records of a source are, from its files.

    Raises:
        MeshwrightError: as ``open_corpus`` and ``open_documents``; E641 where it is not what the run file says.
    """
    if is_built(path):
        form = cast("Form", open_documents(Path(path).expanduser()).form)
    else:
        corpus = open_corpus(path, data.text_field)
        form = corpus.form()
        if data.format is not None and corpus.kind not in ("text", "python-docs"):
            return data.format
    if data.format not in (None, form):
        found = f"{path} holds documents of form {form}, the run file says {data.format}"
        raise MeshwrightError(problem("E641", where="data.format", found=found))
    return form


def is_built(path: str) -> bool:
    """Return whether a source is a folder of tokenised documents."""
    return path != PYTHON_DOCS and is_documents(Path(path).expanduser())


def row_kind(data: DataSettings, forms: Mapping[str, Form]) -> RowKind:
    """Return how documents fill rows: as the run file says, else a stream for plain text and packs for the rest.

    Raises:
        MeshwrightError: E641 for a stream of documents with masks.
    """
    masked = [path for path, form in forms.items() if form != "text"]
    if data.rows is not None:
        if data.rows == "stream" and masked:
            found = f"rows: stream, but {masked[0]} is of form {forms[masked[0]]}"
            raise MeshwrightError(problem("E641", where="data.rows", found=found))
        return data.rows
    return "pack" if masked else "stream"


def check_data(data: DataSettings) -> RowKind:
    """Return how documents will fill rows, after a look at every source; reads the first record at most.

    Raises:
        MeshwrightError: what is wrong with the sources.
    """
    forms: dict[str, Form] = {path: form_of_source(path, data) for path in sources_of(data)}
    return row_kind(data, forms)


def prepare_data(
    data: DataSettings,
    *,
    tokenizer: str | None,
    vocab_size: int,
    seed: int,
    cache_dir: Path,
    show: Show | None = None,
    jobs: int = 1,
) -> TokenData:
    """Return a run's data as samples; what was tokenised or packed before comes from the cache.

    Args:
        data: the run file's section.
        tokenizer: the run file's, or that of the pretrained weights; None trains one on the corpus.
        vocab_size: of the model.
        seed: of the run; in a mixture it decides where finite data ends.
        cache_dir: where tokens are kept.
        show: takes lines of progress.
        jobs: processes that tokenise.

    Raises:
        MeshwrightError: E601-E616 as ``prepare_tokens``; E641-E653 about forms, templates, shares, long documents,
            documents built before, and tokenizers that do not match.
    """
    sources = sources_of(data)
    forms: dict[str, Form] = {path: form_of_source(path, data) for path in sources}
    kind = row_kind(data, forms)
    first = next(iter(sources))
    if len(sources) == 1 and kind == "stream" and not is_built(first):
        tokens = prepare_tokens(
            first,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            seq_len=data.seq_len,
            eval_fraction=data.eval_fraction,
            cache_dir=cache_dir,
            text_field=data.text_field,
            show=show,
        )
        return replace(tokens, end=end_of(tokens.train, data.epochs, seed))
    progress = Progress("preparing the data", 1, None)
    wish = RowWish(
        kind=kind,
        seq_len=data.seq_len,
        too_long=_too_long(data, forms),
        eval_fraction=data.eval_fraction,
    )
    words = _tokenizer(sources, forms, data, tokenizer, vocab_size, cache_dir, show)
    train: list[DocumentRows] = []
    held: list[DocumentRows] = []
    reports: list[dict[str, Any]] = []
    for path in sources:
        documents = _documents(path, forms[path], data, words, cache_dir, show, jobs)
        rows, eval_rows, record = split_rows(documents, wish, cache_dir)
        if rows.num_samples < 1:
            raise MeshwrightError(_no_rows(documents, record, path, data.seq_len))
        train.append(rows)
        held += [eval_rows] if eval_rows.num_samples else []
        reports.append(_report(path, documents, wish, rows, eval_rows, record))
    joined = _joined(train, held, sources, words, data, reports, seed, kind)
    joined.report["seconds"] = progress.seconds
    if show is not None:
        r = joined.report
        show(
            f"data: {r['documents']} documents, {r['tokens']} tokens, {r['train_samples']} rows of {data.seq_len} "
            f"({kind}) to train and {r['eval_samples']} held out"
            + _left_out(r)
            + f" ({format_seconds(r['seconds'])})"
        )
    return joined


def _too_long(data: DataSettings, forms: Mapping[str, Form]) -> TooLong:
    if data.too_long is not None:
        return data.too_long
    return "split" if all(form == "text" for form in forms.values()) else "refuse"


def shape_of(form: Form, data: DataSettings, file: Path | None, words: TextTokenizer | None) -> Shape:
    """Return how the records of a source become documents; ``file`` and ``words`` are None before a tokenizer is.

    Raises:
        MeshwrightError: E642 a chat template that is missing or cannot be read.
    """
    if form != "chat":
        return Shape(form=form, text_field=data.text_field)
    eos = words.eos_token if words is not None else END_OF_TEXT
    special = words.special_tokens() if words is not None else (END_OF_TEXT,)
    template = read_template(file, data.chat_template, eos, special)
    return Shape(form=form, text_field=data.text_field, template=template)


def _tokenizer(
    sources: Mapping[str, float],
    forms: Mapping[str, Form],
    data: DataSettings,
    tokenizer: str | None,
    vocab_size: int,
    cache_dir: Path,
    show: Show | None,
) -> TextTokenizer:
    """Return the tokenizer: the one named, that of documents built before, or one trained on the corpus."""
    if tokenizer is not None:
        return load_tokenizer(tokenizer, vocab_size)
    built = [path for path in sources if is_built(path)]
    if built:
        return load_tokenizer(open_documents(Path(built[0]).expanduser()).tokenizer_file, vocab_size)
    if len(sources) > 1:
        found = f"{len(sources)} sources and no tokenizer"
        raise MeshwrightError(problem("E648", where="data.tokenizer", found=found))
    path = next(iter(sources))
    shape = shape_of(forms[path], data, None, None)
    corpus = open_corpus(path, data.text_field).shaped(shape)
    written = shape.template.source if shape.template is not None else ""
    key = f"{fingerprint(corpus.files, show)} {shape.form} {written}"
    return trained_tokenizer(corpus, key, vocab_size, cache_dir, show)


def _documents(
    path: str,
    form: Form,
    data: DataSettings,
    words: TextTokenizer,
    cache_dir: Path,
    show: Show | None,
    jobs: int,
) -> Documents:
    if is_built(path):
        documents = open_documents(Path(path).expanduser())
        if documents.tokenizer_hash != words.content_hash:
            found = f"{path} was built with another tokenizer than {words.file}"
            raise MeshwrightError(problem("E648", where="data.tokenizer", found=found))
        return documents
    shape = shape_of(form, data, words.file, words)
    return cached_documents(open_corpus(path, data.text_field).shaped(shape), words, cache_dir, show, jobs)


def cached_documents(
    corpus: Corpus, words: TextTokenizer, cache_dir: Path, show: Show | None = None, jobs: int = 1
) -> Documents:
    """Return a corpus as documents, from the cache where they were built before; a damaged cache is built again."""
    shape = corpus.shape
    written = (
        (shape.template.source, sorted(shape.template.named.items())) if shape.template is not None else ""
    )
    identity = f"{fingerprint(corpus.files, show)} {corpus.kind} {shape.form} {shape.text_field} {written}"
    key = hashlib.sha256(f"{VERSION} {identity} {words.content_hash}".encode()).hexdigest()[:16]
    folder = cache_dir / f"documents-{key}"
    if (folder / MANIFEST).is_file():
        try:
            return open_documents(folder)
        except MeshwrightError:
            if show is not None:
                show(f"the cached documents in {folder.name} are damaged: tokenising again")
            discard_folder(folder)
    return build_documents(corpus, words, folder, jobs=jobs, wait=True, show=show)


def _no_rows(documents: Documents, record: Mapping[str, Any], path: str, seq_len: int) -> Problem:
    facts = record["train"]
    if facts.get("without_loss") or facts.get("skipped"):
        found = (
            f"{documents.num_documents} documents, {facts['without_loss']} parts without a predicted token, "
            f"{facts['skipped']} documents skipped as longer than {seq_len} tokens"
        )
        return problem("E647", where=f"data.path={path}", found=found)
    found = f"{documents.num_tokens} tokens make no row of {seq_len}"
    return problem("E607", where=f"data.path={path}", found=found, do="use a shorter seq_len or more text")


def _report(
    path: str,
    documents: Documents,
    wish: RowWish,
    train: DocumentRows,
    held: DocumentRows,
    record: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what was read, made of it, and left out, of one source."""
    facts = record["train"]
    both = {
        name: facts.get(name, 0) + record["eval"].get(name, 0)
        for name in ("truncated", "skipped", "without_loss")
    }
    return documents.report | {
        "path": path,
        "rows": wish.kind,
        "too_long": wish.too_long,
        "split": record["split"],
        "train_tokens": train.num_tokens,
        "eval_tokens": held.num_tokens,
        "train_samples": train.num_samples,
        "eval_samples": held.num_samples,
        "documents_split": facts.get("split", 0) + record["eval"].get("split", 0),
        "documents_truncated": both["truncated"],
        "documents_skipped": both["skipped"],
        "parts_without_loss": both["without_loss"],
        "dropped_tokens": facts.get("dropped_tokens", 0),
        "padded_tokens": facts["padded_tokens"] + record["eval"]["padded_tokens"],
        "filled_share": 1.0 - facts["padded_tokens"] / (train.num_samples * wish.seq_len),
    }


def _conversations(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the conversations of all sources were written, where there are any."""
    held = [r for r in reports if "conversations" in r]
    if not held:
        return {}
    counts = {name: sum(r["conversations"][name] for r in held) for name in held[0]["conversations"]}
    return {
        "conversations": counts,
        "conversations_rewritten": sum(r["conversations_rewritten"] for r in held),
    }


_SUMMED = (
    "documents",
    "tokens",
    "train_tokens",
    "eval_tokens",
    "train_samples",
    "eval_samples",
    "documents_truncated",
    "documents_skipped",
    "parts_without_loss",
    "empty_records",
    "skipped_files",
    "dropped_tokens",
    "padded_tokens",
)


def _left_out(report: Mapping[str, Any]) -> str:
    names = {
        "documents_truncated": "cut off",
        "documents_skipped": "skipped as too long",
        "parts_without_loss": "without a predicted token",
        "empty_records": "empty",
    }
    out = "".join(f", {report[name]} {words}" for name, words in names.items() if report.get(name))
    rewritten = report.get("conversations_rewritten", 0)
    if rewritten:
        samples = report.get("conversations", {}).get("per answer", 0)
        out += f", {rewritten} conversations as {samples} samples (the template rewrites earlier turns)"
    return out


def _joined(
    train: list[DocumentRows],
    held: list[DocumentRows],
    sources: Mapping[str, float],
    words: TextTokenizer,
    data: DataSettings,
    reports: list[dict[str, Any]],
    seed: int,
    kind: RowKind,
) -> TokenData:
    """Return the sources as one, in their shares."""
    rows: Any = train[0]
    eval_rows: Any = held[0] if held else replace(train[0], name="eval", num_samples=0, num_tokens=0)
    report = dict(reports[0])
    identity = [f"{r.documents.hash} {r.kind} {report['too_long']} {data.eval_fraction!r}" for r in train]
    if len(train) > 1:
        quotas = quotas_of(list(sources.values()), list(sources))
        rows = MixedRows(parts=tuple(train), quotas=quotas)
        eval_rows = MixedRows(parts=tuple(held)) if held else eval_rows
        report = {name: sum(r[name] for r in reports) for name in _SUMMED}
        report |= _conversations(reports)
        total = sum(quotas)
        shares = {path: quota / total for path, quota in zip(sources, quotas, strict=True)}
        report |= {"sources": reports, "shares": shares, "rows": kind, "too_long": reports[0]["too_long"]}
        identity.append(str(quotas))
    return TokenData(
        folder=train[0].documents.folder,
        train=rows,
        eval=eval_rows,
        tokenizer_file=words.file,
        tokenizer_size=words.size,
        eos_id=words.eos_id,
        seq_len=data.seq_len,
        hash=hashlib.sha256("\n".join(identity).encode()).hexdigest(),
        report=report,
        end=end_of(rows, data.epochs, seed),
    )
