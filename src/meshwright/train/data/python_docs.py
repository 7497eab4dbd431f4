"""The corpus that every Python carries: language topics, docstrings and sources of the standard library.

Files are read and parsed, never imported, so nothing runs and the order is the same on every machine with
the same Python.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 6_000_000
"""Text is cut off here: enough for a demonstration, seconds to tokenise."""

BEYOND = "beyond the limit of the built-in corpus"
"""Why a document of the standard library is left out."""

_LEFT_OUT = frozenset({"encodings", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"})
_SKIPPED_FOLDERS = frozenset({"test", "tests", "__pycache__", "site-packages", "dist-packages"})
_TOPICS = "pydoc_data/topics.py"


def python_files(root: Path | None = None) -> list[tuple[str, Path]]:
    """Return (name, path) of the sources that are read, in reading order; the topics come first."""
    base = root if root is not None else Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, Path]] = []
    for name in sorted(sys.stdlib_module_names):
        if name in _LEFT_OUT:
            continue
        if (base / f"{name}.py").is_file():
            found.append((f"{name}.py", base / f"{name}.py"))
        elif (base / name).is_dir():
            for path in sorted((base / name).rglob("*.py")):
                relative = path.relative_to(base)
                if not _SKIPPED_FOLDERS.intersection(relative.parts):
                    found.append((relative.as_posix(), path))
    topics = base / _TOPICS
    return ([(_TOPICS, topics)] if topics.is_file() else []) + found


def python_docs(
    files: list[tuple[str, Path]], limit_bytes: int = LIMIT_BYTES
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text, "") per document, or (name, "", reason) for one that is left out (BEYOND the limit).

    First the language topics, then each module's docstrings, then sources without the docstrings that were
    already given, until ``limit_bytes`` of UTF-8 are reached.
    """
    left = limit_bytes
    sources: list[tuple[str, str]] = []
    for name, path in files:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            yield name, "", f"not readable as Python: {type(error).__name__}"
            continue
        documents = _topics(tree) if name == _TOPICS else []
        if name != _TOPICS:
            documented, rest = _split(name, text, tree)
            documents = [(name, documented)]
            sources.append((name, rest))
        for title, document in documents:
            size = len(document.encode())
            if document and size <= left:
                left -= size
                yield title, document, ""
            elif document:
                yield title, "", BEYOND
    for name, text in sources:
        size = len(text.encode())
        if text and size <= left:
            left -= size
            yield f"{name} (source)", text, ""
        elif text:
            yield f"{name} (source)", "", BEYOND


def _topics(tree: ast.Module) -> list[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return [(f"topic {name}", topics[name]) for name in sorted(topics)]
    return []


def _split(name: str, text: str, tree: ast.Module) -> tuple[str, str]:
    """Return a module's docstrings as one text, and its source without those lines."""
    lines = [line + "\n" for line in text.split("\n")]  # as ast counts: form feeds end no line
    parts: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        if isinstance(node, ast.Module):
            title = f"module {name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        elif isinstance(node, ast.ClassDef):
            title = f"class {node.name}"
        else:
            title = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
        parts.append(f"{title}\n\n{docstring}\n")
        first = node.body[0]
        for number in range(first.lineno - 1, first.end_lineno or first.lineno):
            lines[number] = ""
    return "\n".join(parts), "".join(lines)
