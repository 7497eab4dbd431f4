"""Text to values with line numbers: YAML (the safe part of it), JSON and TOML.

YAML is read by its 1.2 rules, because those of 1.1 surprise: ``no`` is a word and not false, ``1e-4`` is a
number, ``010`` is neither 8 nor 10 but refused where a number is needed, and ``12:30`` is not 750.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshwright.base.errors import Problem, problem

_MAX_NODES = 20_000
_MAX_DEPTH = 30
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


@dataclass(frozen=True)
class Parsed:
    """Values with the line of each dotted key (counted from 1; missing where the format does not say)."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict[str, int])
    problems: tuple[Problem, ...] = ()


def parse(text: str, suffix: str, source: str) -> Parsed:
    """Return what ``text`` holds, read as ``suffix`` says (.json, .toml, anything else is YAML).

    Problems: E101 for text that does not parse, E103 for a key that is written twice.
    """
    if suffix == ".json":
        return _parse_json(text, source)
    if suffix == ".toml":
        return _parse_toml(text, source)
    return _parse_yaml(text, source)


def scalar(text: str) -> Any:
    """Return the value of a plain scalar by the rules above."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)", text):
        return float("-inf" if text.startswith("-") else "inf")
    return float("nan") if text in (".nan", ".NaN", ".NAN") else text


class _Reader:
    """Walks one YAML node tree; collects lines and problems on the way."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        """Return the plain value of ``node`` at the dotted ``path``."""
        self.count += 1
        if self.count > _MAX_NODES or depth > _MAX_DEPTH:
            raise _TooLarge(node.start_mark.line + 1)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{path}.{i}", depth + 1) for i, item in enumerate(node.value)]
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in (
            "str",
            "int",
            "float",
            "bool",
            "null",
            "timestamp",
            "value",
            "merge",
        ):
            self.problems.append(
                problem(
                    "E101",
                    where=f"{self.source}:{node.start_mark.line + 1}",
                    found=f"{path or 'the file'} has the tag {node.tag!r}",
                    needs="plain values: text, numbers, true, false, null, lists and mappings",
                    do="remove the tag",
                )
            )
            return None
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return scalar(node.value) if plain else node.value

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.tag)
            dotted = f"{path}.{key}" if path else key
            if key in out:
                self.problems.append(duplicate(self.source, dotted, line, self.lines.get(dotted)))
                continue
            self.lines[dotted] = line
            out[key] = self.value(value_node, dotted, depth + 1)
        return out


class _TooLarge(Exception):
    """Aliases that unfold without end."""

    def __init__(self, line: int) -> None:
        self.line = line
        super().__init__(line)


def duplicate(source: str, dotted: str, line: int | None, first: int | None) -> Problem:
    """Return E103 for a key that stands twice."""
    before = f"; the first is on line {first}" if first else ""
    return problem(
        "E103",
        where=f"{source}:{line}" if line else source,
        found=f"{dotted} is written a second time{before}",
    )


def _parse_yaml(text: str, source: str) -> Parsed:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        return Parsed(None, problems=(_yaml_problem(error, source),))
    if node is None:
        return Parsed(None)
    reader = _Reader(source)
    try:
        value = reader.value(node, "", 0)
    except _TooLarge as error:
        found = f"the file nests deeper than {_MAX_DEPTH} levels or unfolds to more than {_MAX_NODES} values"
        where = f"{source}:{error.line}"
        return Parsed(
            None, problems=(problem("E101", where=where, found=found, do="write it without aliases"),)
        )
    return Parsed(value, reader.lines, tuple(reader.problems))


def _yaml_problem(error: yaml.YAMLError, source: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        found = f"column {mark.column + 1}: {error.problem}"
        if error.context:
            found += f" ({error.context})"
        return problem("E101", where=f"{source}:{mark.line + 1}", found=found)
    return problem("E101", where=source, found=str(error).splitlines()[0])


def _parse_json(text: str, source: str) -> Parsed:
    problems: list[Problem] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                problems.append(duplicate(source, key, None, None))
            out[key] = value
        return out

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        if not text.strip():
            return Parsed(None)
        found = f"column {error.colno}: {error.msg}"
        return Parsed(None, problems=(problem("E101", where=f"{source}:{error.lineno}", found=found),))
    except RecursionError:
        return Parsed(None, problems=(problem("E101", where=source, found="the file nests too deep"),))
    # JSON is YAML but for tabs; the second reading only finds the lines.
    lines = _parse_yaml(text, source).lines
    return Parsed(value, lines, tuple(problems))


def _parse_toml(text: str, source: str) -> Parsed:
    try:
        return Parsed(tomllib.loads(text) or None)
    except tomllib.TOMLDecodeError as error:
        return Parsed(None, problems=(problem("E101", where=source, found=str(error)),))
