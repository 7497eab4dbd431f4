"""Tokenised documents in a folder of memory-mapped shards: what ``meshwright data build`` writes.

A shard holds whole documents. Its files are plain arrays: ``.tokens`` (16 or 32 bits each), ``.ends`` (tokens up to
the end of each document), ``.digests`` (hash of each document's text, for the held-out split), ``.places`` (line or
row in its source) and, where not every token is predicted, ``.loss`` (one byte a token). ``manifest.json`` names them
with length and SHA-256 and is written last, so that a folder without it is not complete.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.base.errors import MeshwrightError, problem
from meshwright.base.units import MIB
from meshwright.train.data.order import Ints

MANIFEST: Final = "manifest.json"
FORMAT: Final = "meshwright documents"
FORMAT_VERSION: Final = 1
TOKENIZER_FOLDER: Final = "tokenizer"
MOST_OPEN: Final = 128
"""Files of one folder that a process keeps mapped."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard: its name, where its documents came from, and how much it holds.

    ``first_line`` is added to the places of its documents; ``files`` gives (bytes, SHA-256) by file name.
    """

    name: str
    source: str
    first_line: int
    tokens: int
    documents: int
    files: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents as tokens. Small to send: the tokens stay in their files.

    Attributes:
        folder: where the shards lie.
        shards: in the order of the corpus; documents and tokens are numbered through all of them.
        token_bytes: 2 or 4.
        masked: whether some tokens carry no loss.
        hash: the same for the same tokens, masks and shards anywhere.
    """

    folder: Path
    shards: tuple[Shard, ...]
    token_bytes: int
    masked: bool
    form: str
    eos_id: int
    tokenizer_hash: str
    tokenizer_size: int
    hash: str
    report: dict[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the place of the arrays, not the arrays."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_maps", "_starts")}

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer that made the tokens."""
        return self.folder / TOKENIZER_FOLDER / "tokenizer.json"

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @functools.cached_property
    def _starts(self) -> Ints:
        return np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)

    @functools.cached_property
    def _maps(self) -> dict[str, NDArray[Any]]:
        return {}

    def _array(self, shard: Shard, kind: str) -> NDArray[Any]:
        """Return an array of a shard; of those mapped, the ones read last stay open."""
        dtypes = {"tokens": np.uint16 if self.token_bytes == 2 else np.uint32, "loss": np.uint8}
        dtypes |= {"ends": np.int64, "digests": np.uint64, "places": np.int64}
        dtype = np.dtype(dtypes[kind])
        file = f"{shard.name}.{kind}"
        if kind not in ("tokens", "loss") or not shard.tokens:
            return np.fromfile(self.folder / file, dtype)
        mapped = self._maps.pop(file, None)
        if mapped is None:
            mapped = np.memmap(self.folder / file, dtype, "r", shape=(shard.tokens,))
        self._maps[file] = mapped
        while len(self._maps) > MOST_OPEN:  # a mapped file holds a file descriptor
            self._maps.pop(next(iter(self._maps)))
        return mapped

    def ends(self) -> Ints:
        """Return up to which token each document goes. Shapes: ``[num_documents]``."""
        parts = [self._array(s, "ends") + at for s, at in zip(self.shards, self._starts[:-1], strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def digests(self) -> NDArray[np.uint64]:
        """Return the hash of each document's text. Shapes: ``[num_documents]``."""
        parts = [self._array(s, "digests") for s in self.shards]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def place(self, document: int) -> str:
        """Return where a document came from: file, and line or row where there is one."""
        for shard in self.shards:
            if document < shard.documents:
                line = int(self._array(shard, "places")[document])
                return f"{shard.source}:{line + shard.first_line}" if line else shard.source
            document -= shard.documents
        raise IndexError("no such document")

    def read(self, start: int, stop: int) -> tuple[Ints, NDArray[np.bool_] | None]:
        """Return the tokens from ``start`` to ``stop`` and which of them are predicted (None: all).

        Shapes: ``[stop - start]`` each.
        """
        tokens, loss = [], []
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for shard, at in zip(self.shards[first:], self._starts[first:-1].tolist(), strict=True):
            if at >= stop:
                break
            part = slice(max(start - at, 0), stop - at)
            tokens.append(self._array(shard, "tokens")[part].astype(np.int64))
            if self.masked:
                loss.append(self._array(shard, "loss")[part].astype(np.bool_))
        joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
        return joined, (np.concatenate(loss) if loss else None)

    def predicted(self, starts: Ints, stops: Ints) -> Ints:
        """Return how many predicted tokens stand in each range; the ranges ascend and stay inside their shards.

        Shapes: ``[ranges]`` each.
        """
        if not self.masked:
            return stops - starts
        out = np.zeros(len(starts), np.int64)
        edges = np.searchsorted(starts, self._starts)
        for shard, at, first, last in zip(self.shards, self._starts[:-1], edges[:-1], edges[1:], strict=True):
            counts = np.concatenate([[0], np.cumsum(self._array(shard, "loss"), dtype=np.int64)])
            out[first:last] = counts[stops[first:last] - at] - counts[starts[first:last] - at]
        return out


def is_documents(folder: Path) -> bool:
    """Return whether ``folder`` is one that ``meshwright data build`` writes, complete or not."""
    return (folder / MANIFEST).is_file() or (folder / "shards.json").is_file()


def open_documents(folder: Path) -> Documents:
    """Return the documents of a folder, after a look at the length of every file.

    Raises:
        MeshwrightError: E650 for an incomplete or damaged folder, with the file.
    """
    documents = described_documents(folder)
    for shard in documents.shards:
        for file, size, _ in shard.files:
            if why := _other_length(folder / file, size):
                raise MeshwrightError(problem("E650", where=str(folder / file), found=f"{file}: {why}"))
    return documents


def described_documents(folder: Path) -> Documents:
    """Return the documents of a folder as its manifest describes them, whatever its other files are.

    Raises:
        MeshwrightError: E650 without a manifest, or with one that cannot be.
    """
    where = str(folder)
    try:
        held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if held["format"] != FORMAT or held["version"] != FORMAT_VERSION:
            found = f"{MANIFEST} is of format {held['format']!r}, version {held['version']}"
            raise MeshwrightError(problem("E650", where=where, found=found))
        shards = tuple(
            Shard(
                name=item["name"],
                source=item["source"],
                first_line=item["first_line"],
                tokens=item["tokens"],
                documents=item["documents"],
                files=tuple((f["file"], f["bytes"], f["sha256"]) for f in item["files"]),
            )
            for item in held["shards"]
        )
        documents = Documents(
            folder=folder,
            shards=shards,
            token_bytes=held["token_bytes"],
            masked=held["masked"],
            form=held["form"],
            eos_id=held["eos_id"],
            tokenizer_hash=held["tokenizer_hash"],
            tokenizer_size=held["tokenizer_size"],
            hash=held["hash"],
            report=held["report"],
        )
    except FileNotFoundError:
        found = f"there is no {MANIFEST}: the build was not finished"
        raise MeshwrightError(problem("E650", where=where, found=found)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{MANIFEST}: {type(error).__name__}: {error}"
        raise MeshwrightError(problem("E650", where=where, found=found)) from error
    for file in (file for shard in shards for file, _, _ in shard.files):
        if Path(file).name != file:
            raise MeshwrightError(problem("E650", where=where, found=f"{file!r} is not a file name"))
    return documents


def verify_documents(folder: Path) -> tuple[int, list[dict[str, str]]]:
    """Return the number of files, and those that are not what the manifest says; reads every byte.

    Raises:
        MeshwrightError: E650 without a manifest that can be read.
    """
    shards = described_documents(folder).shards
    damaged: list[dict[str, str]] = []
    for shard in shards:
        for file, size, digest in shard.files:
            if why := _other_than(folder / file, size, digest):
                damaged.append({"file": file, "why": why, "source": shard.source})
    return sum(len(shard.files) for shard in shards), damaged


def _other_than(file: Path, size: int, digest: str) -> str:
    """Return what is wrong with a file; "" when nothing is."""
    try:
        return _other_length(file, size) or ("" if file_hash(file) == digest else "SHA-256 differs")
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"


def _other_length(file: Path, size: int) -> str:
    """Return what is wrong with the length of a file; "" when nothing is."""
    there = file.stat().st_size if file.is_file() else None
    if there == size:
        return ""
    return f"{'no file' if there is None else f'{there} bytes'}, the manifest says {size}"


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(8 * MIB):
            total.update(block)
    return total.hexdigest()
