"""The shape of an error code's page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodeInfo:
    """One error code: what it means and what to do, without a case's numbers.

    ``kind`` is one of input, math, cost, code, world, fault. ``needs``, ``why`` and ``do`` are the
    defaults of a Problem with this code; ``page`` is the longer explanation that ``explain`` prints.
    """

    code: str
    title: str
    kind: str
    why: str
    needs: str = ""
    do: str = ""
    page: str = ""
