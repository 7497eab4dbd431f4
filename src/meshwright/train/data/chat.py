"""Conversations as text: the tokenizer's chat template, and what it marks as answers."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.base.errors import MeshwrightError, problem

Message: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
"""First character, and the one behind the last."""

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_BEGIN, _END = "generation_begins_here", "generation_ends_here"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
            """``{% generation %}`` marks an answer: its content, between what two variables hold."""

            tags = frozenset({"generation"})

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                edges = [
                    jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line)
                    for name in (_BEGIN, _END)
                ]
                return jinja2.nodes.Scope([edges[0], *body, edges[1]], lineno=line)

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

    @functools.cached_property
    def marks_answers(self) -> bool:
        """Whether the template says itself what an answer is, in ``{% generation %}`` blocks."""
        return _GENERATION.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        opens_answer: bool = False,
        where: str = "",
        edges: tuple[str, str] = ("", ""),
    ) -> str:
        """Return the conversation as the template writes it; ``opens_answer`` adds the head of an answer.

        ``edges`` are written around what the template marks as an answer. The date is not given to the template, so
        that the same records make the same tokens every day.

        Raises:
            MeshwrightError: E642 when it is no template, or refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=opens_answer,
                **{_BEGIN: edges[0], _END: edges[1]},
                **self.named,
            )
        except MeshwrightError:
            raise
        except Exception as error:  # whatever the template's own expressions raise
            raise MeshwrightError(
                problem("E642", where=where or self.where, found=f"{type(error).__name__}: {error}")
            ) from error

    def marked(self, messages: Sequence[Message], where: str) -> tuple[str, tuple[Span, ...] | None]:
        """Return the conversation, and which characters of it the template marks as answers (None: it marks none).

        Raises:
            MeshwrightError: E642.
        """
        plain = self.render(messages, where=where)
        if not self.marks_answers:
            return plain, None
        edges = _absent(messages, self.source)
        if not edges[0]:
            return plain, None
        text = self.render(messages, where=where, edges=edges)
        spans: list[Span] = []
        at = 0
        for part in text.split(edges[0])[1:]:
            before = text.index(edges[0], at)
            begin = before - 2 * len(spans)  # each span before this one had two marks that are left out
            spans.append((begin, begin + len(part.partition(edges[1])[0])))
            at = before + 1
        if text.translate({ord(e): None for e in edges}) != plain or text.count(edges[1]) != len(spans):
            return plain, None  # the template computes with what it marked: the marks say nothing
        return plain, tuple(spans)

    def check(self, messages: Sequence[Message], where: str) -> None:
        """Refuse messages that contain a special token.

        Raises:
            MeshwrightError: E644.
        """
        if self._marks is None:
            return
        for index, message in enumerate(messages):
            hit = self._marks.search(str(message.get("content") or ""))
            if hit:
                found = f"message {index + 1} ({message['role']}) contains {hit.group()!r}"
                raise MeshwrightError(problem("E644", where=where, found=found))


def _absent(messages: Sequence[Message], source: str) -> tuple[str, str]:
    """Return two characters that occur in no message and not in the template (Unicode keeps 32 for such use)."""
    there = {*source, *json.dumps(list(messages), ensure_ascii=False, default=str)}
    free = [chr(c) for c in range(0xFDD0, 0xFDF0) if chr(c) not in there]
    return (free[0], free[1]) if len(free) > 1 else ("", "")


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
                problem("E642", where=str(folder / "tokenizer_config.json"), found=_reason(error))
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
            raise MeshwrightError(problem("E642", where=str(files[0]), found=_reason(error))) from error
    held = config.get("chat_template")
    if isinstance(held, list):
        held = next((item.get("template") for item in held if item.get("name") == "default"), None)
    if isinstance(held, str) and folder is not None:
        return held, str(folder / "tokenizer_config.json")
    found = f"{folder} has no chat_template" if folder is not None else "a tokenizer trained here has none"
    raise MeshwrightError(problem("E642", where="data.chat_template", found=found))


def _reason(error: Exception) -> str:
    """Return what an error says beside the path, which is said already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _written(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
