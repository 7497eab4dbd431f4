"""Conversations as text with a mask: the tokenizer's chat template, and which parts of its output are answers."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.base.errors import MeshwrightError, Problem, problem

Message: TypeAlias = Mapping[str, Any]
Segment: TypeAlias = tuple[str, bool]
"""Text, and whether it is an answer (its tokens are predicted)."""

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens that it may write.

    Attributes:
        source: the template.
        where: file it came from, for messages.
        named: ``bos_token``, ``eos_token``, ... as the template knows them.
        special: every special token of the tokenizer; a message must not contain one.
    """

    source: str
    where: str
    named: Mapping[str, str]
    special: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the text, not what was compiled from it."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_compiled", "_marks")}

    @functools.cached_property
    def _compiled(self) -> Any:
        jinja2 = importlib.import_module("jinja2")
        sandbox = importlib.import_module("jinja2.sandbox")
        loops = importlib.import_module("jinja2.ext").loopcontrols
        extension = importlib.import_module("jinja2.ext").Extension

        class Generation(extension):  # pyright: ignore[reportUntypedBaseClass]
            """``{% generation %}`` marks an answer for other programs; here it is its content."""

            tags = frozenset({"generation"})

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        def fail(message: str) -> None:
            raise jinja2.TemplateError(message)

        def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loops, Generation]
        )
        environment.filters["tojson"] = as_json
        environment.globals["raise_exception"] = fail
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise MeshwrightError(
                problem("E642", where=self.where, found=f"not a Jinja template: {error}")
            ) from error

    @functools.cached_property
    def _marks(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def render(self, messages: Sequence[Message], *, opens_answer: bool = False, where: str = "") -> str:
        """Return the conversation as the template writes it; ``opens_answer`` adds the head of an answer.

        The date is not given to the template, so that the same records make the same tokens every day.

        Raises:
            MeshwrightError: E642 when it is no template, or refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=opens_answer,
                **self.named,
            )
        except MeshwrightError:
            raise
        except Exception as error:  # whatever the template's own expressions raise
            raise MeshwrightError(
                problem("E642", where=where or self.where, found=f"{type(error).__name__}: {error}")
            ) from error

    def segments(self, messages: Sequence[Message], where: str) -> list[Segment]:
        """Return the rendered conversation in parts; the assistant's turns, with what ends them, are answers.

        An answer is what the template adds between the prompt that opens the turn and the turn's end. That is
        only known where the text of a shorter conversation begins the text of the longer one.

        Raises:
            MeshwrightError: E642, E643 a template that rewrites earlier turns, E644 special tokens in messages.
        """
        self._check(messages, where)
        whole = self.render(messages, where=where)
        out: list[Segment] = []
        at = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self.render(messages[:index], opens_answer=True, where=where)
            closed = whole if index + 1 == len(messages) else self.render(messages[: index + 1], where=where)
            if not (whole.startswith(closed) and closed.startswith(opened)):
                raise MeshwrightError(_rewrites(opened, closed, whole, index, where))
            if at < len(opened):
                out.append((whole[at : len(opened)], False))
            out.append((whole[len(opened) : len(closed)], True))
            at = len(closed)
        if at < len(whole):
            out.append((whole[at:], False))
        return [(text, answer) for text, answer in out if text]

    def closed(self, segments: Sequence[Segment]) -> bool:
        """Return whether the last answer ends with the end-of-text token already."""
        eos = self.named.get("eos_token", "")
        last = next((text for text, answer in reversed(segments) if answer), "")
        return bool(eos) and last.rstrip().endswith(eos)

    def _check(self, messages: Sequence[Message], where: str) -> None:
        if self._marks is None:
            return
        for index, message in enumerate(messages):
            hit = self._marks.search(str(message.get("content") or ""))
            if hit:
                found = f"message {index + 1} ({message['role']}) contains {hit.group()!r}"
                raise MeshwrightError(problem("E644", where=where, found=found))


def _rewrites(opened: str, closed: str, whole: str, index: int, where: str) -> Problem:
    shorter, longer = (closed, whole) if not whole.startswith(closed) else (opened, closed)
    at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
    return problem(
        "E643",
        where=where,
        found=f"message {index + 1}: with fewer messages the template writes {shorter[at : at + 24]!r} where the "
        f"whole conversation has {longer[at : at + 24]!r}",
    )


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of a record, as ``role`` and ``content``.

    Raises:
        MeshwrightError: E605 when they are not a list of messages.
    """
    key = "messages" if "messages" in record else "conversations"
    listed = record.get(key)
    if not isinstance(listed, list):
        found = f"{key!r} is a {type(listed).__name__}, not a list"
        raise MeshwrightError(problem("E605", where=where, found=found, needs="a list of messages"))
    out: list[Message] = []
    for index, item in enumerate(listed):
        given = dict(item) if isinstance(item, Mapping) else {}
        if "from" in given and "value" in given:
            role = given["from"]
            given = {"role": _ROLES.get(role, role), "content": given["value"]}
        role, content = given.get("role"), given.get("content")
        calls = bool(given.get("tool_calls"))
        if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
            there = ", ".join(map(str, given)) or type(item).__name__
            found = f"message {index + 1} of {key!r} has {there}, not role and content as text"
            raise MeshwrightError(
                problem("E605", where=where, found=found, needs="role and content in every message")
            )
        out.append({k: v for k, v in given.items() if v is not None} | {"content": content or ""})
    return out


def read_template(
    tokenizer_file: Path | None, template: str | None, eos_token: str, special: Sequence[str]
) -> ChatTemplate:
    """Return the chat template: the file that was named, else the one beside the tokenizer.

    Args:
        tokenizer_file: a tokenizer.json, or None where the tokenizer is not there yet.
        template: a Jinja file, or None.
        eos_token: the end-of-text token as it is written.
        special: every special token of the tokenizer.

    Raises:
        MeshwrightError: E642 when there is none or it cannot be read.
    """
    config: dict[str, Any] = {}
    folder = tokenizer_file.parent if tokenizer_file is not None else None
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MeshwrightError(
                problem("E642", where=str(folder / "tokenizer_config.json"), found=str(error))
            ) from error
    named = {name: _written(config.get(name)) for name in _NAMED}
    known = {name: text for name, text in named.items() if text is not None} | {"eos_token": eos_token}
    known.setdefault("bos_token", "")
    source, where = _source(folder, template, config)
    return ChatTemplate(source=source, where=where, named=known, special=tuple(special))


def _source(folder: Path | None, template: str | None, config: Mapping[str, Any]) -> tuple[str, str]:
    files = [Path(template).expanduser()] if template is not None else []
    if not files and folder is not None and (folder / "chat_template.jinja").is_file():
        files = [folder / "chat_template.jinja"]
    if files:
        try:
            return files[0].read_text(encoding="utf-8"), str(files[0])
        except (OSError, UnicodeDecodeError) as error:
            raise MeshwrightError(problem("E642", where=str(files[0]), found=str(error))) from error
    held = config.get("chat_template")
    if isinstance(held, list):
        held = next((item.get("template") for item in held if item.get("name") == "default"), None)
    if isinstance(held, str) and folder is not None:
        return held, str(folder / "tokenizer_config.json")
    found = f"{folder} has no chat_template" if folder is not None else "a tokenizer trained here has none"
    raise MeshwrightError(problem("E642", where="data.chat_template", found=found))


def _written(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
