"""What the documentation says in code: blocks, command lines, layout texts and tables; and tables made from the program.

Markers (HTML comments on the line before a block):

- ``<!-- run -->``      the block is executed; every command must end with exit code 0
- ``<!-- run same -->`` and its output lines must appear in the real output, in this order; ``...`` skips lines
- ``<!-- run slow -->`` only under ``make test-all`` (it starts ranks)
- ``exit=N`` in a marker is the exit code of the block's last command
- ``<!-- mistake -->``  the block shows a mistake on purpose; it is neither run nor parsed

Blocks of one page run in one folder, in the order of the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer

from meshwright.base.errors import ExitCode
from meshwright.cli.main import app
from meshwright.config.schema import described_keys
from meshwright.layout import built
from meshwright.layout.layout import Layout
from meshwright.layout.parse import CHOICES, DEGREES, KEYS

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)\s*$")
MARKER = re.compile(r"^ *<!-- (?P<words>(?:run|mistake)\b[^>]*?) -->\s*$")
LAYOUT_TEXT = re.compile(r"(?:[a-z_]+=[A-Za-z0-9@./-]+,)*[a-z_]+=[A-Za-z0-9@./-]+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: where it stands, its language, its marker's words and its lines."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for test reports."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return "run" in self.words

    @property
    def exit_code(self) -> int:
        """What the last command must end with."""
        return next((int(w.removeprefix("exit=")) for w in self.words if w.startswith("exit=")), 0)

    def commands(self) -> list[str]:
        """The shell commands of the block: lines after ``$`` in console blocks, all lines else; ``\\`` goes on."""
        if self.language == "console":
            taken = console_lines(self.lines)
            return [text for kind, text in taken if kind == "command"]
        if self.language in ("bash", ""):
            text = "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))
            return [line.strip() for line in text.replace("\\\n", " ").split("\n") if line.strip()]
        return []


def console_lines(lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return ("command" | "output", text) of a console block, continued commands joined."""
    out: list[tuple[str, str]] = []
    going_on = False
    for line in lines:
        if going_on:
            out[-1] = ("command", out[-1][1] + " " + line.strip().removesuffix("\\").strip())
        elif line.startswith("$ "):
            out.append(("command", line[2:].strip().removesuffix("\\").strip()))
        else:
            out.append(("output", line))
        going_on = line.endswith("\\") and out[-1][0] == "command"
    return out


def pages() -> list[Path]:
    """Every page of the documentation, README first."""
    top = [ROOT / n for n in ("README.md", "README.zh-CN.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [p for p in top if p.exists()] + sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    found: list[Block] = []
    opened: tuple[int, str, int, tuple[str, ...]] | None = None
    held: list[str] = []
    words: tuple[str, ...] = ()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            marker = MARKER.match(line)
            if marker:
                words = tuple(marker.group("words").split())
            elif fence:
                opened = (number, fence.group("language"), len(fence.group("indent")), words)
                held, words = [], ()
            elif line.strip():
                words = ()
        elif fence and not fence.group("language"):
            start, language, indent, marks = opened
            lines = tuple(text[indent:] if text[:indent].isspace() else text for text in held)
            found.append(Block(page=page, line=start, language=language, words=marks, lines=lines))
            opened = None
        else:
            held.append(line)
    assert opened is None, f"{page}: a block is not closed"
    return found


def inline_code(page: Path) -> list[str]:
    """Return the `code` of a page's text, outside fenced blocks."""
    text = re.sub(r"^ *```.*?^ *```\s*$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def meshwright_arguments(command: str) -> list[str] | None:
    """Return the arguments when a shell command is meshwright (in any of its spellings), else None."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words and words[0].rsplit("/", 1)[-1] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    elif words[1:3] == ["-m", "meshwright"] and "python" in words[0]:
        words = words[2:]
    if not words or words[0].rsplit("/", 1)[-1] != "meshwright":
        return None
    for mark in ("|", ">", "2>", "&&", ";"):
        words = words[: words.index(mark)] if mark in words else words
    return words[1:]


def command_of(words: list[str]) -> tuple[Any, list[str], str]:
    """Return (command, its arguments, its name) for the words after ``meshwright``."""
    command: Any = typer.main.get_command(app)
    name: list[str] = []
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise KeyError(f"meshwright {' '.join([*name, rest[0]])}: there is no such command")
        command = command.commands[rest[0]]
        name.append(rest.pop(0))
    return command, rest, " ".join(name)


def known_options(command: Any) -> set[str]:
    """Return every option of a command."""
    names = {n for p in command.params for n in (*p.opts, *p.secondary_opts) if n.startswith("-")}
    return names | {"--help", "-h"}


def layout_texts(text: str) -> Iterator[str]:
    """Yield what in ``text`` is a layout text: what stands after --layout and --fix, or is nothing else."""
    for match in re.finditer(r"--(?:layout|fix)[ =]+(?:\"([^\"]*)\"|'([^']*)'|(\S+))", text):
        held = next(g for g in match.groups() if g is not None).rstrip(")]")
        if held not in ("L", "LAYOUT", "TEXT", "..."):
            yield held
    for match in re.finditer(r"^\s*layout: +\"?([^\"#\s]+)", text, flags=re.M):
        if match.group(1) not in ("auto", "..."):
            yield match.group(1)
    whole = text.strip().strip('"')
    if LAYOUT_TEXT.fullmatch(whole) and whole.split("=", 1)[0] in KEYS:
        yield whole


# -- tables made from the program -----------------------------------------------------------------------------


def commands(root: Any = None, prefix: str = "") -> dict[str, Any]:
    """Return every command that does something, by its name ("checkpoint inspect")."""
    root = typer.main.get_command(app) if root is None else root
    found: dict[str, Any] = {}
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        else:
            found[f"{prefix}{name}"] = command
    return found


def is_built(command: Any) -> bool:
    """Whether a command does its work today."""
    return "not built yet" not in (command.help or "").lower()


def option_table(command: Any) -> list[str]:
    """Return the Markdown table of a command's arguments and options, as its --help shows them."""
    rows = ["| argument or option | default | meaning |", "|---|---|---|"]
    for p in command.params:
        option = next((n for n in p.opts if n.startswith("--")), None)
        if option == "--help":
            continue
        name = str(p.metavar or p.name) if option is None else option
        if option is not None and not p.is_flag:
            name += f" {p.metavar or _choices(p) or 'VALUE'}"
        default = "required" if p.required else ""
        if not p.required and p.default not in (None, False, ()):
            default = str(getattr(p.default, "value", p.default))
        meaning = " ".join((p.help or "").split()).replace("|", "\\|")
        name = name.replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {meaning} |".replace("|  |", "| |"))
    return rows


def _choices(param: Any) -> str:
    """Return the allowed words of an option with few values, or ""."""
    annotation = param.type_descriptor.annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            return "|".join(str(member.value) for member in kind)
    return ""


def built_table() -> list[str]:
    """Return the Markdown table of what runs today and what is refused, by key of the layout text."""
    rows = ["| key | runs today | refused today |", "|---|---|---|"]
    for axis in ("dp", "pp", "tp", "cp", "ep"):
        runs = "any degree" if axis in built.AXES else "1"
        rows.append(
            f"| `{axis}` | {runs} | {'' if axis in built.AXES else 'above 1'} |".replace("|  |", "| |")
        )
    rows.append("| `zero` | 0, 1, 2, 3 | |")
    rows.append("| `shard` | any that divides dp | |")
    for key, runs in built.OPTIONS.items():
        refused = [c for c in CHOICES[key] if c not in runs]
        also = ", `@FILE`" if key == "schedule" else ""
        rows.append(f"| `{key}` | {', '.join(runs)}{also} | {', '.join(refused)} |".replace("|  |", "| |"))
    rows.append(f"| model families for `pp` above 1 | {', '.join(built.PIPELINE_FAMILIES)} | |")
    for axis, families in (("tp", built.TENSOR_FAMILIES), ("cp", built.CONTEXT_FAMILIES)):
        others = ", ".join(f for f in built.PIPELINE_FAMILIES if f not in families)
        if others:
            rows.append(f"| model families for `{axis}` above 1 | others | {others} |")
    return rows


def layout_defaults() -> Mapping[str, tuple[str, str]]:
    """Return (values, default) of every key of the layout text."""
    values = Layout().as_dict()
    out: dict[str, tuple[str, str]] = {}
    for key in KEYS:
        allowed = "whole number" if key in DEGREES else " ".join(CHOICES.get(key, ()))
        out[key] = (allowed, str(values[key]))
    return out


def run_file_table() -> list[str]:
    """Return the Markdown table of the run file's keys."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in described_keys():
        rows.append(f"| `{key}` | {kind} | {default} | {meaning} |".replace(" | null", " \\| null", 1))
    return [_bars(row) for row in rows]


def _bars(row: str) -> str:
    """Escape the bars inside a type ("adamw | sgd"), which has exactly four cells in all."""
    cells = re.split(r"(?<!\\) \| ", row.removeprefix("| ").removesuffix(" |"))
    if len(cells) > 4:
        extra = len(cells) - 4
        cells = [cells[0], " \\| ".join(cells[1 : 2 + extra]), *cells[2 + extra :]]
    return "| " + " | ".join(cells) + " |" if not row.startswith("|---") else row


def exit_table() -> dict[int, str]:
    """Return the exit codes by number."""
    return {int(code): code.name for code in ExitCode}


def table_after(page: Path, marker: str) -> list[str]:
    """Return the lines of the table that follows ``<!-- MARKER -->`` on a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"<!-- {marker} -->") + 1
    while not lines[start].strip():
        start += 1
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return lines[start:end]


# -- writing them again ---------------------------------------------------------------------------------------


def write_table(page: Path, marker: str, table: list[str]) -> bool:
    """Put ``table`` after ``<!-- MARKER -->`` on a page; return whether the page changed."""
    old = table_after(page, marker)
    if old == table:
        return False
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("\n".join(old), "\n".join(table), 1), encoding="utf-8")
    return True


def refresh() -> list[Path]:
    """Write every table that is the program's (options, run-file keys, what runs today); return the changed pages."""
    reference = ROOT / "docs" / "reference"
    todo = [
        (ROOT / "README.md", "built", built_table()),
        (reference / "run-file.md", "keys", run_file_table()),
    ]
    for name, command in commands().items():
        if is_built(command):
            page = reference / "commands" / f"{name.replace(' ', '-')}.md"
            todo.append((page, "options", option_table(command)))
    return [page for page, marker, table in todo if write_table(page, marker, table)]


if __name__ == "__main__":
    for changed in refresh():
        print(f"written: {changed.relative_to(ROOT)}")
