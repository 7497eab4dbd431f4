"""The few kinds of block a report section is made of; the page's template knows how to print each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An SVG with a caption that says what to see, and a legend. ``half`` pictures stand two abreast."""

    svg: Markup
    title: str
    caption: str
    legend: Markup = field(default_factory=Markup)
    half: bool = False
    axes: tuple[str, ...] = ()
    block: str = "picture"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table: head, rows of text, and a caption. ``numeric`` names the columns that align right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    block: str = "table"


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph. ``tone`` is "plain", "missing" (a file or figure that is not there), "good" or "bad"."""

    text: str
    tone: str = "plain"
    block: str = "note"


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list of sentences, in order."""

    sentences: tuple[str, ...]
    block: str = "items"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The "you are rank N" texts: one is printed, the page's script shows the others."""

    first: str
    ranks: tuple[int, ...]
    block: str = "ranks"


Block: TypeAlias = Picture | Grid | Note | Items | Ranks


@dataclass(frozen=True, kw_only=True)
class Section:
    """One heading of the page with its blocks; ``folded`` sections start closed."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    """One verdict: what it is about, the figure, and how to read it. ``tone`` is "plain", "good" or "bad"."""

    title: str
    figure: str
    detail: str
    tone: str = "plain"
