"""Text to values: the traps of YAML, duplicates with their lines, JSON and TOML."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.text import parse, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("3.", 3.0),
        (".5", 0.5),
        ("-2", -2),
        ("1_000", 1000),
        ("0", 0),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        # words and shapes that YAML 1.1 reads as something else
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    found = scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_infinities_are_numbers() -> None:
    assert scalar("-.inf") == -math.inf
    assert math.isnan(scalar(".nan"))


@settings(max_examples=100, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_every_number_python_prints_reads_back(number: float) -> None:
    assert scalar(repr(number)) == number


def test_quoted_scalars_stay_text() -> None:
    assert parse("a: \"1e-4\"\nb: 'true'\n", ".yaml", "f").value == {"a": "1e-4", "b": "true"}


def test_lines_by_dotted_key() -> None:
    parsed = parse("# top\na:\n  b: 1\n  c: [2, 3]\nd: 4\n", ".yaml", "f")
    assert parsed.value == {"a": {"b": 1, "c": [2, 3]}, "d": 4}
    assert [parsed.lines[key] for key in ("a", "a.b", "a.c", "d")] == [2, 3, 4, 5]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_duplicate_keys_are_named(suffix: str) -> None:
    parsed = parse('{"a": {"b": 1,\n "b": 2}}', suffix, "run")
    assert [p.code for p in parsed.problems] == ["E103"]
    assert "b" in parsed.problems[0].found


def test_duplicate_key_names_both_lines() -> None:
    (found,) = parse("run:\n  steps: 1\n  seed: 0\n  steps: 2\n", ".yaml", "run.yaml").problems
    assert found.where == "run.yaml:4"
    assert "line 2" in found.found


@pytest.mark.parametrize(
    ("text", "suffix", "line"),
    [
        ("a: [1, 2\nb: 3\n", ".yaml", "2"),
        ("a: 1\n\tb: 2\n", ".yaml", "2"),
        ("a: 1\n---\nb: 2\n", ".yaml", "2"),
        ("a: *nothing\n", ".yaml", "1"),
        ("a: !!python/object/apply:os.system ['true']\n", ".yaml", None),
        ("a: !!python/name:os.system x\n", ".yaml", "1"),
        ('{"a": 1,\n}', ".json", "2"),
        ("a = \n", ".toml", None),
        ("a = 1\na = 2\n", ".toml", None),
    ],
)
def test_what_does_not_parse_is_e101_with_its_line(text: str, suffix: str, line: str | None) -> None:
    parsed = parse(text, suffix, "run")
    if "apply" in text:  # a tagged list is read as a list: the tag itself does nothing
        assert parsed.value == {"a": ["true"]}
        return
    assert [p.code for p in parsed.problems] == ["E101"]
    if line:
        assert parsed.problems[0].where == f"run:{line}"


def test_aliases_that_unfold_without_end_are_refused() -> None:
    laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
        for before, name in zip("abcdef", "bcdefg", strict=True)
    )
    assert [p.code for p in parse(laughs, ".yaml", "f").problems] == ["E101"]
    assert [p.code for p in parse("a: &a [*a]\n", ".yaml", "f").problems] == ["E101"]


@pytest.mark.parametrize(
    ("text", "suffix"), [("", ".yaml"), ("# only\n", ".yaml"), ("", ".json"), ("", ".toml")]
)
def test_nothing_is_none(text: str, suffix: str) -> None:
    parsed = parse(text, suffix, "f")
    assert parsed.value is None
    assert parsed.problems == ()


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_problem(text: str) -> None:
    for suffix in (".yaml", ".json", ".toml"):
        parsed = parse(text, suffix, "f")
        assert all(p.code in ("E101", "E103") for p in parsed.problems)
