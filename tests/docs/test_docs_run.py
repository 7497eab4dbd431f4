"""Every block marked ``<!-- run -->`` runs: commands end as they should, and outputs marked "same" are real."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, blocks, console_lines, meshwright_arguments, pages

TIMEOUT_S = 240
HERE = {"inspect", "models", "clusters", "plan", "estimate", "explain", "simulate", "init", "config"}
"""Commands that run in this process: no torch, no ranks."""


def marked(slow: bool) -> list[Path]:
    """Pages with blocks to run, quick ones or slow ones."""
    return [p for p in pages() if any(b.runs and (("slow" in b.words) == slow) for b in blocks(p))]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own that has the repository's recipes, with a cache of its own and a terminal's width."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run_command(command: str) -> tuple[int, str]:
    """Run one shell command and return (exit code, standard output and error)."""
    words = meshwright_arguments(command)
    plain = words is not None and shlex.split(command)[0] == "meshwright" and "|" not in command
    if plain and words and words[0] in HERE and ">" not in command:
        from meshwright.cli.main import run

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = run(words)
        return code, out.getvalue()
    return run_script(command)


def run_script(script: str) -> tuple[int, str]:
    """Run shell text that ends at its first failing command; return (exit code, standard output and error)."""
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def run_block(block: Block) -> None:
    """Run a block and hold its exit code, and its output when it is marked "same"."""
    if block.language == "python":
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(block.lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == block.exit_code, f"{block.name}: {done.stdout}"
        return
    if block.language == "yaml":  # a file that a later block of the page uses; its first line names it
        name = block.lines[0].removeprefix("#").split()[0]
        Path(name).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        return
    if block.language == "bash":  # one script, so that here-documents and variables work
        code, text = run_script("\n".join(block.lines))
        assert code == block.exit_code, f"{block.name} ended with {code}:\n{text[-3000:]}"
        return
    todo = block.commands()
    assert todo, f"{block.name}: nothing to run"
    outputs = outputs_of(block)
    for number, command in enumerate(todo):
        code, text = run_command(command)
        wanted = block.exit_code if number == len(todo) - 1 else 0
        assert code == wanted, f"{block.name}: {command} ended with {code}:\n{text[-3000:]}"
        if "same" in block.words:
            assert_shown(block, command, outputs[number], text)


def outputs_of(block: Block) -> list[list[str]]:
    """Return the output lines shown under each command of a console block."""
    outputs: list[list[str]] = []
    for kind, text in console_lines(block.lines):
        if kind == "command":
            outputs.append([])
        elif outputs:
            outputs[-1].append(text.rstrip())
    return outputs or [[] for _ in block.commands()]


def assert_shown(block: Block, command: str, shown: list[str], real: str) -> None:
    """Hold that every shown line stands in the real output, in order, with only "..." leaving lines out."""
    lines = [line.rstrip() for line in real.splitlines()]
    at, skipping = 0, False
    for line in shown:
        if line.strip() == "...":
            skipping = True
            continue
        if skipping:
            assert line in lines[at:], f"{block.name}: {command} does not print {line!r} there:\n{real}"
            at = lines.index(line, at)
        assert at < len(lines), f"{block.name}: {command} prints less:\n{real}"
        assert lines[at] == line, f"{block.name}: {command} prints {lines[at]!r}, shown is {line!r}"
        at, skipping = at + 1, False


@pytest.mark.parametrize("page", marked(slow=False), ids=page_id)
def test_quick_blocks_run(page: Path, workplace: Path) -> None:
    assert workplace.exists()
    for block in blocks(page):
        if block.runs and "slow" not in block.words:
            run_block(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", marked(slow=True), ids=page_id)
def test_all_blocks_run(page: Path, workplace: Path) -> None:
    assert workplace.exists()
    for block in blocks(page):
        if block.runs:
            run_block(block)


def test_a_wrong_output_is_noticed() -> None:
    """The check of outputs can fail, and lets lines out only where "..." stands."""
    block = Block(page=ROOT / "README.md", line=1, language="console", words=("run", "same"), lines=())
    assert_shown(block, "x", ["a", "...", "c"], "a\nb\nc\n")
    with pytest.raises(AssertionError):
        assert_shown(block, "x", ["a", "c"], "a\nb\nc\n")
    with pytest.raises(AssertionError):
        assert_shown(block, "x", ["a", "...", "d"], "a\nb\nc\n")
