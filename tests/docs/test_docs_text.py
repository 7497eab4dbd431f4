"""The documentation cannot drift: its command lines parse, its tables are the program's, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import (
    ROOT,
    blocks,
    built_table,
    command_of,
    commands,
    exit_table,
    inline_code,
    is_built,
    known_options,
    layout_defaults,
    layout_texts,
    meshwright_arguments,
    option_table,
    pages,
    run_file_table,
    table_after,
)

from meshwright.base.codes import CODES
from meshwright.config.schema import NOT_HONOURED, known_keys
from meshwright.layout.parse import parse_layout

PAGES = pages()
COMMANDS = {name: command for name, command in commands().items() if is_built(command)}
REFERENCE = ROOT / "docs" / "reference"


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def parses(words: list[str]) -> None:
    """Parse the words after ``meshwright`` as the program would, without running anything."""
    command, rest, name = command_of(words)
    if hasattr(command, "commands") or rest in (["--help"], ["-h"]) or not is_built(command):
        return
    command.make_context(name, list(rest))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_line_of_a_block_parses(page: Path) -> None:
    failed: list[str] = []
    for block in blocks(page):
        if "mistake" in block.words:
            continue
        for command in block.commands():
            try:
                words = meshwright_arguments(command)
                if words is not None:
                    parses(words)
            except Exception as error:  # the parser's classes differ between versions; the text says it
                text = error.format_message() if hasattr(error, "format_message") else str(error)  # pyright: ignore
                failed.append(f"{block.name}: {command}: {text}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_named_in_the_text_exists_with_its_options(page: Path) -> None:
    failed: list[str] = []
    for code in inline_code(page):
        if not re.match(r"(\S*/)?meshwright [a-z]", code):
            continue
        command, rest, name = command_of(re.sub(r"[()\[\]]", "", code).split()[1:])
        for word in rest:
            option = word.split("=")[0].rstrip(".,")
            if option.startswith("--") and is_built(command) and option not in known_options(command):
                failed.append(f"{page_id(page)}: {code}: {name} has no {option}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_layout_text_parses(page: Path) -> None:
    texts = [t for code in inline_code(page) for t in layout_texts(code)]
    for block in blocks(page):
        if "mistake" not in block.words:
            texts += [t for line in block.lines for t in layout_texts(line)]
    for text in texts:
        parse_layout(text)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```\s*$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    broken: list[str] = []
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the usual renderers make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", page.read_text(encoding="utf-8"), flags=re.M):
        plain = re.sub(r"[`*]", "", title).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_codes_named_on_a_page_exist(page: Path) -> None:
    named = set(re.findall(r"\b[EW]\d{3}\b", page.read_text(encoding="utf-8")))
    assert named <= set(CODES)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_path_of_one_machine_is_written(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(?:root|home|work|tmp|Users)/", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_page_with_exactly_its_options(name: str) -> None:
    page = REFERENCE / "commands" / f"{name.replace(' ', '-')}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}"
    assert table_after(page, "options") == option_table(COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_page_has_synopsis_exit_codes_and_example(name: str) -> None:
    page = REFERENCE / "commands" / f"{name.replace(' ', '-')}.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# meshwright {name}\n")
    for title in ("## Synopsis", "## Options", "## JSON", "## Exit codes", "## Example"):
        assert f"\n{title}\n" in text, f"{page.name} lacks {title}"
    shown = [c for b in blocks(page) for c in b.commands()]
    assert any(command.startswith(f"meshwright {name}") for command in shown)


def test_no_page_for_a_command_that_is_not_there() -> None:
    known = {f"{name.replace(' ', '-')}.md" for name in COMMANDS}
    there = {p.name for p in (REFERENCE / "commands").glob("*.md")} - {"index.md"}
    assert there == known


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_table_of_what_runs_today_is_the_programs(page: str) -> None:
    shown = table_after(ROOT / page, "built")
    made = built_table()
    if page == "README.md":
        assert shown == made
    else:  # the same keys and values under translated headings and words
        assert [code_of(row) for row in shown] == [code_of(row) for row in made]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_keys_that_are_not_honoured_are_all_told(page: str) -> None:
    told = {code for code in inline_code(ROOT / page) if code in known_keys() and "." in code}
    assert told - {"data.path"} == set(NOT_HONOURED)


def code_of(row: str) -> list[str]:
    """Return what of a table's row is not a word of a language: keys, values, numbers."""
    words = {"key", "runs", "today", "refused", "any", "degree", "above", "that", "divides", "model"}
    words |= {"families", "for", "others"}
    return [w for w in re.findall(r"[a-z0-9_@-]*[a-z0-9_@]+", row, flags=re.ASCII | re.I) if w not in words]


def test_the_run_file_page_is_the_schema() -> None:
    assert table_after(REFERENCE / "run-file.md", "keys") == run_file_table()


def test_the_layout_text_page_has_every_key_and_default() -> None:
    rows = [
        [c.strip() for c in row.strip("|").split("|")]
        for row in table_after(REFERENCE / "layout-text.md", "keys")[2:]
    ]
    shown = {row[0].strip("`"): row for row in rows}
    expected = layout_defaults()
    assert list(shown) == list(expected)
    for key, (values, default) in expected.items():
        assert shown[key][2].split()[0].strip("`") == default, key
        for value in values.split() if values != "whole number" else ():
            assert value in shown[key][1].split(), f"{key}: {value}"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/reference/json-and-exit-codes.md"])
def test_exit_codes_are_all_told(page: str) -> None:
    rows = table_after(ROOT / page, "exit codes")[2:]
    assert [int(row.split("|")[1]) for row in rows] == sorted(exit_table())


def test_every_variable_that_is_read_is_told() -> None:
    source = ROOT / "src" / "meshwright" / "mesh" / "env.py"
    read = set(re.findall(r"\"([A-Z][A-Z_]{3,})\"", source.read_text(encoding="utf-8")))
    names = {n for n in read if "_" in n or n == "RANK"} - {"_TORCHRUN"}
    text = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    assert {n for n in names if f"`{n}`" not in text} == set()


def test_both_readmes_show_the_same_commands_and_link_to_each_other() -> None:
    shown: list[list[str]] = []
    for name, other in (("README.md", "README.zh-CN.md"), ("README.zh-CN.md", "README.md")):
        page = ROOT / name
        shown.append([c for b in blocks(page) for c in b.commands()])
        assert f"]({other})" in "\n".join(page.read_text(encoding="utf-8").splitlines()[:8])
    assert shown[0] == shown[1]


def test_a_wrong_option_and_a_wrong_command_are_noticed() -> None:
    """The checks of this file can fail."""
    with pytest.raises(Exception, match=r"(?i)no such option|--no-such"):
        parses(shlex.split("plan llama-2-7b --cluster a --seq-len 8 --global-batch 8 --no-such 1"))
    with pytest.raises(KeyError):
        parses(["plann"])
    missing: Any = None
    try:
        parses(["plan", "llama-2-7b"])
    except Exception as error:
        missing = error
    assert missing is not None
