"""What ``transformers.models`` has in which file: read once for a version of the files, not at every start, and twice.

``transformers`` learns it by reading 45 MB of source when it is imported, and again when ``transformers.models`` is. Its
answer is kept in the cache folder under the sizes and times of all those files, as Python keeps bytecode, and given to
both; a file that is new, gone or changed makes another key, and then ``transformers`` reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from meshwright.base.files import write_whole

TOOLS = "transformers.utils.import_utils"
READER = "define_import_structure"
"""The function of ``TOOLS`` that reads: (file or folder, prefix of the names) to needs, to module, to names."""


@contextlib.contextmanager
def remembered(cache: Path) -> Iterator[None]:
    """Let ``transformers`` be imported, while the context is open, with what it found here before.

    Args:
        cache: folder for the files, made when there is something to write.
    """
    if "transformers" in sys.modules:
        yield
        return
    finder = _Finder(cache)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``TOOLS`` where Python finds it, and puts the remembering reader into it."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._tools: ModuleType | None = None
        self._read: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of ``TOOLS`` with a loader that changes the reader afterwards; None for all else."""
        if fullname != TOOLS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            read = getattr(module, READER, None)
            if read is not None and module.__file__ is not None:
                self._tools, self._read = module, read
                setattr(module, READER, Reader(read, Path(module.__file__), self._cache))

        spec.loader.exec_module = exec_module
        return spec

    def restore(self) -> None:
        """Put ``transformers``' own reader back."""
        if self._tools is not None:
            setattr(self._tools, READER, self._read)


class Reader:
    """Reads as ``read`` does, and all models from what is known of them."""

    def __init__(self, read: Any, tools_file: Path, cache: Path) -> None:
        self._read = read
        self._tools_file = tools_file
        self._models = tools_file.parent.parent / "models"
        self._cache = cache
        self._known: Any = None

    def __call__(self, module_path: Any, prefix: str | None = None) -> Any:
        """Return needs to module to names, as the function in whose place this stands."""
        if Path(module_path) not in (self._models, self._models / "__init__.py"):
            return self._read(module_path, prefix)
        if self._known is None:
            self._known = self._remembered()
        before = "" if prefix is None else f"{prefix}."
        return {
            frozenset(needs): {f"{before}{name}": set(names) for name, names in modules}
            for needs, modules in self._known
        }

    def _remembered(self) -> list[Any]:
        file = self._cache / f"transformers-models-{files_key(self._models, self._tools_file)}.json"
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(file.read_text(encoding="utf-8"))
            if _is_index(kept):  # a damaged file is read anew and replaced
                return kept
        found = self._read(str(self._models))
        known = [
            [sorted(needs), [[name, sorted(names)] for name, names in modules.items()]]
            for needs, modules in found.items()
        ]
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(known))
        return known


def _is_index(value: Any) -> bool:
    """Return whether ``value`` is what ``Reader`` writes: not empty, [needs, [[module, names], ...]] each."""

    def texts(found: Any) -> bool:
        return isinstance(found, list) and all(isinstance(t, str) for t in cast("list[Any]", found))

    def pair(found: Any) -> bool:
        return isinstance(found, list) and len(cast("list[Any]", found)) == 2

    def entry(found: Any) -> bool:
        return pair(found) and texts(found[0]) and isinstance(found[1], list) and all(map(module, found[1]))

    def module(found: Any) -> bool:
        return pair(found) and isinstance(found[0], str) and texts(found[1])

    return isinstance(value, list) and bool(value) and all(map(entry, cast("list[Any]", value)))


def files_key(folder: Path, *others: Path) -> str:
    """Return a hash of the names, sizes and times of all Python files under ``folder``, and of ``others``.

    An environment that is reached by another name (a link) has the same hash.
    """
    digest = hashlib.sha256()
    waiting = [str(folder.resolve())]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.endswith(".py"):
                    facts = entry.stat()
                    digest.update(f"{entry.path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
                elif entry.name != "__pycache__" and entry.is_dir():
                    waiting.append(entry.path)
    for other in (o.resolve() for o in others):
        facts = other.stat()
        digest.update(f"{other} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
