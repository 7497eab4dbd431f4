"""``docs/errors.md``, and the page of one code as JSON, from the tables under ``base/codes``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.base.codes import CODES

_KINDS = {
    "input": "what was written cannot be used",
    "math": "it cannot be right",
    "cost": "it is right, but it pays",
    "code": "it is not built yet",
    "world": "the machine or the job does not play along",
    "fault": "our fault",
}


def page_json(code: str) -> dict[str, Any]:
    """Return the page of a code that exists as JSON."""
    return asdict(CODES[code.strip().upper()])


def all_markdown() -> str:
    """Return every page, as ``docs/errors.md`` holds them: errors first, then warnings, by number."""
    parts = [
        "# Errors and warnings by code",
        "Made by `make errors-page` from `src/meshwright/base/codes`; `meshwright explain CODE` prints one of them.",
    ]
    for code in sorted(CODES):
        info = CODES[code]
        facts = [f"- kind: {info.kind} ({_KINDS[info.kind]})"]
        facts += [f"- needs: {info.needs}"] if info.needs else []
        facts += [f"- why: {info.why}"]
        facts += [f"- do: {info.do}"] if info.do else []
        parts += [f"## {code}: {info.title}", "\n".join(facts)]
        parts += [info.page] if info.page else []
    return "\n\n".join(parts)
