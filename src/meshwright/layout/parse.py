"""Layout text to Layout: comma-separated ``key=value``, every problem at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from meshwright.base.axes import LAYOUT_AXES
from meshwright.base.errors import Problem, nearest, problem, refuse
from meshwright.layout.layout import Layout, default_chunks

KEYS: Final[tuple[str, ...]] = tuple(f.name for f in fields(Layout))
"""Every key of the layout text."""

DEGREES: Final = ("dp", "shard", "tp", "pp", "chunks", "cp", "ep", "micro_batch")
"""Keys whose value is a whole number from 1 upwards."""

CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "zero": ("0", "1", "2", "3"),
        "sp": ("on", "off"),
        "loss": ("eager", "chunked", "parallel"),
        "kv_heads": ("split", "replicate"),
        "compile": ("off", "blocks"),
        "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"),
        "cp_style": ("ring", "ulysses"),
        "recompute": ("none", "selective", "full"),
        "offload": ("none", "optimizer", "parameters", "optimizer-nvme", "parameters-nvme"),
        "precision": ("fp32", "bf16", "fp16", "fp64", "fp8", "fp8-rowwise", "fp8-blockwise"),
    }
)
"""Keys whose value is one of a few words."""

MAX_DEGREE: Final = 10**6


def parse_layout(text: str, where: str = "layout") -> Layout:
    """Return the layout written as ``text``; what is not written has its default.

    ``where`` names the place in problems. An empty text is one rank with all defaults.

    Raises:
        MeshwrightError: E110 no key=value, E111 unknown key, E112 wrong value, E113 key written twice.
    """
    written, problems = _items(text, where)
    values: dict[str, Any] = {}
    for key, raw in written.items():
        value = _value(key, raw, where, problems)
        if value is not None:
            values[key] = value
    refuse(problems)
    return complete(values)


def complete(values: Mapping[str, Any]) -> Layout:
    """Return the Layout with typed ``values`` and the defaults that depend on other keys (shard, sp, chunks)."""
    out = dict(values)
    dp, cp, zero = out.get("dp", 1), out.get("cp", 1), out.get("zero", 0)
    out.setdefault("shard", dp * cp if zero else 1)
    out.setdefault("sp", out.get("tp", 1) > 1)
    out.setdefault("chunks", default_chunks(out.get("schedule", "1f1b")))
    return Layout(**out)


def written_keys(text: str) -> dict[str, str]:
    """Return the keys that a legal layout text writes, with their values as written."""
    return _items(text, "layout")[0]


def _items(text: str, where: str) -> tuple[dict[str, str], list[Problem]]:
    written: dict[str, str] = {}
    problems: list[Problem] = []
    if not text.strip():
        return written, problems
    for item in text.split(","):
        key, sign, raw = (part.strip() for part in item.partition("="))
        if not sign or not key or not raw:
            problems.append(problem("E110", where=where, found=f"{item.strip()!r} is not key=value"))
        elif key not in KEYS:
            near = nearest(key, KEYS)
            problems.append(
                problem(
                    "E111",
                    where=where,
                    found=f"unknown key {key!r}",
                    needs="one of " + ", ".join(KEYS),
                    do="did you mean " + " | ".join(near) + "?" if near else f"remove {key}",
                )
            )
        elif key in written:
            problems.append(
                problem(
                    "E113",
                    where=f"{where}.{key}",
                    found=f"{key} is written twice: {written[key]} and {raw}",
                    do=f"keep {key}={written[key]} or {key}={raw}",
                )
            )
        else:
            written[key] = raw
    return written, problems


def _value(key: str, raw: str, where: str, problems: list[Problem]) -> Any:
    """Return the typed value of ``key``, or None after adding a problem."""
    if key in DEGREES:
        if raw.isascii() and raw.isdigit() and int(raw[:9]) >= 1 and int(raw) <= MAX_DEGREE:
            return int(raw)
        needs = f"a whole number from 1 to {MAX_DEGREE}"
        large = raw.isascii() and raw.isdigit() and int(raw[:9]) > MAX_DEGREE
        do = f"{key}={MAX_DEGREE if large else 1}, or the degree that is meant"
    elif key in CHOICES:
        if key == "schedule" and raw.startswith("@") and len(raw) > 1:
            return raw
        if raw in CHOICES[key]:
            return int(raw) if key == "zero" else raw == "on" if key == "sp" else raw
        allowed = CHOICES[key] + (("@FILE",) if key == "schedule" else ())
        needs = "one of " + ", ".join(allowed)
        near = nearest(raw, CHOICES[key]) or list(allowed)
        do = " | ".join(f"{key}={choice}" for choice in near)
    elif key == "order":
        axes = tuple(raw.split("/"))
        if sorted(axes) == sorted(LAYOUT_AXES):
            return axes
        needs = "tp, cp, dp and pp once each, innermost first, joined by /"
        do = "order=" + "/".join(LAYOUT_AXES)
    else:  # cut
        parts = raw.split("/")
        if raw in ("auto", "even") or all(p.isascii() and p.isdigit() and len(p) < 7 for p in parts):
            return raw if raw in ("auto", "even") else "/".join(str(int(p)) for p in parts)
        needs = "auto, even, or layers per stage such as 7/9/8/8"
        do = "cut=auto"
    problems.append(
        problem("E112", where=f"{where}.{key}", found=f"{key}={raw} is not allowed", needs=needs, do=do)
    )
    return None
