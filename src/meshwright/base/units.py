"""Units of bytes and seconds: parsing what people write and printing what they read.

GB is 10^9 bytes and GiB is 2^30 bytes; the two are never mixed without being named.
"""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4
KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12
DAY_S = 86_400
YEAR_S = 365 * DAY_S

_SUFFIXES: dict[str, int] = {
    "b": 1,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": TB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*$")


def parse_bytes(text: str) -> int:
    """Return the bytes named by ``text``, such as ``"80GB"`` (80 * 10^9) or ``"80GiB"`` (80 * 2^30).

    Raises:
        ValueError: when the text has no number, no unit or an unknown unit.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2).lower() not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 80GB or 80GiB")
    return int(float(match.group(1)) * _SUFFIXES[match.group(2).lower()])


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` in binary units (KiB, MiB, GiB, TiB) with the unit named."""
    sign = "-" if num_bytes < 0 else ""
    value = abs(float(num_bytes))
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{sign}{value / size:.2f} {unit}"
    return f"{sign}{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` in the unit that reads best (us, ms, s, min, h, days, years)."""
    value = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if value < 1e-3:
        return f"{sign}{value * 1e6:.1f} us"
    if value < 1.0:
        return f"{sign}{value * 1e3:.1f} ms"
    if value < 120.0:
        return f"{sign}{value:.2f} s"
    if value < 7200.0:
        return f"{sign}{value / 60:.2f} min"
    if value < 2 * DAY_S:
        return f"{sign}{value / 3600:.2f} h"
    if value < 2 * YEAR_S:
        return f"{sign}{value / DAY_S:.1f} days"
    return f"{sign}{value / YEAR_S:,.0f} years"


def format_count(count: float) -> str:
    """Return a count with a short-scale suffix: 135 M, 6.74 B, 1.01 T."""
    value = float(count)
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f} {suffix}"
    return f"{value:.0f}"
