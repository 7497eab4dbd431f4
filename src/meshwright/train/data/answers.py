"""Which characters of a rendered conversation are answers, and what a template that rewrites earlier turns is given.

Most templates write a conversation so that its first n messages begin its first n + 1: then the whole conversation is
one sample, and each answer is what stands between the prompt that opens the turn and the turn's end, or what the
template marks. Some templates write earlier turns anew when the conversation goes on (they leave out their
reasoning). No single text then holds every answer as the model would have given it, so each answer becomes a sample
of its own, behind the context that the template really gives at that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from meshwright.base.errors import MeshwrightError, Problem, problem
from meshwright.train.data.chat import ChatTemplate, Message, Span

How: TypeAlias = Literal["whole", "marked", "per answer"]
"""How a conversation became text: whole, whole with the template's own marks, one sample per answer."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One sample: its text, the characters that are predicted, and whether the end-of-text token is missing.

    Attributes:
        answers: (first, end) of each answer, ascending.
        closes: an end-of-text token follows the text.
    """

    text: str
    answers: tuple[Span, ...]
    how: How
    closes: bool


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One answer: its message, the text that opens it, and the text up to its end."""

    index: int
    opened: str
    closed: str


def rendered(template: ChatTemplate, messages: Sequence[Message], where: str) -> list[Rendered]:
    """Return a conversation as samples: one, or one per answer where the template rewrites earlier turns.

    Raises:
        MeshwrightError: E642, E643 no telling where an answer begins, E644 special tokens in messages.
    """
    template.check(messages, where)
    whole, marks = template.marked(messages, where)
    turns = [
        _Turn(
            index=k,
            opened=template.render(messages[:k], opens_answer=True, where=where),
            closed=whole if k + 1 == len(messages) else template.render(messages[: k + 1], where=where),
        )
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if all(whole.startswith(turn.closed) for turn in turns):
        if marks is not None:
            return [_sample(template, whole, marks, "marked")]
        return [_sample(template, whole, tuple(_answer(turn, where) for turn in turns), "whole")]
    samples: list[Rendered] = []
    for turn in turns:
        span = _own_marks(template, messages, turn, where) or (_answer(turn, where),)
        samples.append(_sample(template, turn.closed, span, "per answer"))
    return samples


def _own_marks(
    template: ChatTemplate, messages: Sequence[Message], turn: _Turn, where: str
) -> tuple[Span, ...]:
    """Return what the template marks of this answer, when it is the last: marks behind all that the prompt shares."""
    if not template.marks_answers:
        return ()
    marks = template.marked(messages[: turn.index + 1], where)[1] or ()
    if turn.closed.startswith(turn.opened):
        return tuple(m for m in marks if m[0] >= len(turn.opened))
    return marks[-1:]


def _answer(turn: _Turn, where: str) -> Span:
    """Return the characters of the answer: those between the prompt that opens it and its end."""
    if not turn.closed.startswith(turn.opened):
        raise MeshwrightError(_no_beginning(turn, where))
    return len(turn.opened), len(turn.closed)


def _sample(template: ChatTemplate, text: str, answers: tuple[Span, ...], how: How) -> Rendered:
    eos = template.named.get("eos_token", "")
    last = text[answers[-1][0] :] if answers else ""
    kept = tuple(span for span in answers if span[0] < span[1])
    return Rendered(text=text, answers=kept, how=how, closes=not (eos and last.rstrip().endswith(eos)))


def _no_beginning(turn: _Turn, where: str) -> Problem:
    at = next(
        (i for i, (a, b) in enumerate(zip(turn.opened, turn.closed, strict=False)) if a != b),
        len(turn.closed),
    )
    return problem(
        "E643",
        where=where,
        found=f"message {turn.index + 1}: the prompt that opens the answer has {turn.opened[at : at + 24]!r} where the "
        f"conversation with the answer has {turn.closed[at : at + 24]!r}",
    )
