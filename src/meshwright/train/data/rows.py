"""Rows of tokenised documents: the index of which tokens stand in which row, made once and mapped by every rank."""

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
from meshwright.train.data.cache import discard_folder, whole_folder
from meshwright.train.data.documents import Documents
from meshwright.train.data.holdout import held_out
from meshwright.train.data.order import Ints
from meshwright.train.data.packing import Parts, RowKind, TooLong, cut_documents, pack
from meshwright.train.data.stream import NO_LOSS

PADDING: Final = -1
"""The document of a place that holds padding."""

_MOST_SHOWN = 5
_RECORD = "rows.json"
_INDEX_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DocumentRows:
    """Rows of one split of tokenised documents.

    Attributes:
        documents: where the tokens are.
        file: the index: ``bounds`` [rows + 1] and ``parts`` [parts, 2] (first token, inputs); for ``stream`` the
            parts are runs of neighbouring documents, and rows are cut from their concatenation.
        kind: how documents fill rows.
        num_samples: rows.
        num_tokens: labels with a loss, over all rows.
    """

    documents: Documents
    file: Path
    name: str
    kind: RowKind
    seq_len: int
    pad_id: int
    num_samples: int
    num_tokens: int

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the place of the index, not the index."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_parts", "_bounds")}

    @property
    def fresh_draws(self) -> int:
        """How many draws in a row hold no sample twice: an epoch."""
        return self.num_samples

    @property
    def isolated(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        return self.kind == "pack"

    @functools.cached_property
    def _parts(self) -> NDArray[Any]:
        return np.load(self.file / f"{self.name}-parts.npy", mmap_mode="r")

    @functools.cached_property
    def _bounds(self) -> NDArray[Any]:
        return np.load(self.file / f"{self.name}-bounds.npy", mmap_mode="r")

    def row(self, index: int) -> tuple[Ints, Ints]:
        """Return input ids and shifted labels of one row. Shapes: ``[seq_len]`` each."""
        inputs = np.full(self.seq_len, self.pad_id, np.int64)
        labels = np.full(self.seq_len, NO_LOSS, np.int64)
        at = 0
        for tokens, loss in self._pieces(index):
            count = len(tokens) - 1
            inputs[at : at + count] = tokens[:-1]
            labels[at : at + count] = tokens[1:] if loss is None else np.where(loss[1:], tokens[1:], NO_LOSS)
            at += count
        return inputs, labels

    def row_documents(self, index: int) -> Ints:
        """Return which document of the row each place is of, ``PADDING`` behind the last. Shapes: ``[seq_len]``."""
        out = np.full(self.seq_len, PADDING, np.int64)
        first, last = self._range(index)
        lengths = self._parts[first:last, 1]
        out[: int(lengths.sum())] = np.repeat(np.arange(last - first), lengths)
        return out

    def _range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"no sample {index} of {self.num_samples}")
        return int(self._bounds[index]), int(self._bounds[index + 1])

    def _pieces(self, index: int) -> list[tuple[Ints, NDArray[np.bool_] | None]]:
        if self.kind == "stream":
            return [self._window(index)]
        first, last = self._range(index)
        return [self.documents.read(int(a), int(a) + int(n) + 1) for a, n in self._parts[first:last]]

    def _window(self, index: int) -> tuple[Ints, None]:
        """Return seq_len + 1 tokens of the concatenation of the runs (fewer at its end)."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"no sample {index} of {self.num_samples}")
        start = index * self.seq_len
        stop = min(start + self.seq_len + 1, int(self._bounds[-1]))
        run = int(np.searchsorted(self._bounds, start, "right")) - 1
        found: list[Ints] = []
        while start < stop:
            begin = int(self._parts[run, 0]) + start - int(self._bounds[run])
            count = min(stop, int(self._bounds[run + 1])) - start
            found.append(self.documents.read(begin, begin + count)[0])
            start += count
            run += 1
        return np.concatenate(found), None


@dataclass(frozen=True, kw_only=True)
class RowWish:
    """How rows are to be made."""

    kind: RowKind
    seq_len: int
    too_long: TooLong
    eval_fraction: float


def split_rows(
    documents: Documents, wish: RowWish, cache_dir: Path
) -> tuple[DocumentRows, DocumentRows, dict[str, Any]]:
    """Return the rows to train on, those held out, and what was split, cut, skipped or left out.

    Rows that were made before come from the cache.

    Raises:
        MeshwrightError: E646 documents longer than a row where that is refused, E615 a cache that cannot be written.
    """
    identity = f"{_INDEX_VERSION} {documents.hash} {wish!r}"
    folder = cache_dir / f"rows-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not _whole(folder):
        discard_folder(folder)
        with whole_folder(folder) as temporary:
            _write(temporary, documents, wish)
    record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    rows = [
        DocumentRows(
            documents=documents,
            file=folder,
            name=name,
            kind=wish.kind,
            seq_len=wish.seq_len,
            pad_id=documents.eos_id,
            num_samples=record[name]["rows"],
            num_tokens=record[name]["valid_tokens"],
        )
        for name in ("train", "eval")
    ]
    return rows[0], rows[1], record


def _whole(folder: Path) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return all(
            len(np.load(folder / f"{name}-{kind}.npy", mmap_mode="r")) == record[name][kind]
            for name in ("train", "eval")
            for kind in ("parts", "bounds")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(folder: Path, documents: Documents, wish: RowWish) -> None:
    ends = documents.ends()
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    held, how = held_out(ends, documents.digests(), wish.eval_fraction, tail=False)
    record: dict[str, Any] = {"split": how}
    if wish.too_long == "refuse" and wish.kind != "stream":
        _refuse_long(documents, lengths, wish.seq_len)
    for name, chosen in (("train", ~held), ("eval", held)):
        if wish.kind == "stream":
            parts, bounds, facts = _runs(starts, ends, chosen, wish.seq_len, keep_partial=name == "eval")
        else:
            cut = cut_documents(starts[chosen], lengths[chosen], wish.seq_len, wish.too_long)
            parts, bounds, facts = _filled(documents, cut, wish)
        np.save(folder / f"{name}-parts.npy", parts)
        np.save(folder / f"{name}-bounds.npy", bounds)
        counts = {"parts": len(parts), "bounds": len(bounds), "documents": int(np.count_nonzero(chosen))}
        record[name] = facts | counts
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _filled(documents: Documents, cut: Parts, wish: RowWish) -> tuple[Ints, Ints, dict[str, int]]:
    """Return parts by row, bounds and counts of rows that hold whole parts; a part without any loss is left out."""
    valid = documents.predicted(cut.start + 1, cut.start + cut.length + 1)
    kept = cut.chosen(valid > 0)
    if wish.kind == "pack":
        order, bounds = pack(kept.length, wish.seq_len)
    else:
        order, bounds = np.arange(len(kept.start)), np.arange(len(kept.start) + 1)
    rows = len(bounds) - 1
    facts = {
        "rows": rows,
        "valid_tokens": int(valid.sum()),
        "split": cut.split,
        "truncated": cut.truncated,
        "skipped": cut.skipped,
        "without_loss": int(np.count_nonzero(valid == 0)),
        "padded_tokens": rows * wish.seq_len - int(kept.length.sum()),
    }
    return np.stack([kept.start, kept.length], axis=1)[order], bounds.astype(np.int64), facts


def _runs(
    starts: Ints, ends: Ints, chosen: NDArray[np.bool_], seq_len: int, *, keep_partial: bool
) -> tuple[Ints, Ints, dict[str, int]]:
    """Return runs of neighbouring documents as (first token, tokens), where each begins when joined, and counts."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    first, last = starts[edges[::2]], ends[edges[1::2] - 1]
    bounds = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int64)
    labels = max(int(bounds[-1]) - 1, 0)
    rows = -(-labels // seq_len) if keep_partial else labels // seq_len
    facts = {
        "rows": rows,
        "valid_tokens": labels if keep_partial else rows * seq_len,
        "dropped_tokens": 0 if keep_partial else labels - rows * seq_len,
        "padded_tokens": rows * seq_len - labels if keep_partial else 0,
    }
    return np.stack([first, last - first], axis=1), bounds, facts


def _refuse_long(documents: Documents, lengths: Ints, seq_len: int) -> None:
    long = np.flatnonzero(lengths - 1 > seq_len)
    if not len(long):
        return
    shown = ", ".join(f"{documents.place(int(d))} ({lengths[d]} tokens)" for d in long[:_MOST_SHOWN])
    more = f" and {len(long) - _MOST_SHOWN} more" if len(long) > _MOST_SHOWN else ""
    longest = int(lengths[long].max())
    raise MeshwrightError(
        problem(
            "E646",
            where="data.seq_len",
            found=f"{len(long)} of {len(lengths)} documents do not fit {seq_len} tokens: {shown}{more}",
            needs=f"seq_len of at least {longest - 1} for the longest ({longest} tokens)",
            do=f"set data.seq_len to {longest - 1}, or data.too_long to truncate, split or skip",
        )
    )
