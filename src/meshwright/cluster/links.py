"""Links by name: what connects devices of a node, and adapters that a node's devices share."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from meshwright.base.errors import nearest
from meshwright.cluster.spec import Figure, LinkSpec

_TEXT = re.compile(r"^\s*(?:(\d{1,3})\s*[xX*]\s*)?(\S.*?)\s*$")


@cache
def link_rows() -> Mapping[str, Mapping[str, str]]:
    """Return the rows of the table of links by name: GB/s per direction of one device's link, or of one adapter."""
    text = (files("meshwright.cluster") / "data" / "links.csv").read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()


def link_named(text: str, gpus_per_node: int) -> LinkSpec | None:
    """Return the link called ``text`` ("NVLink 4", "100 GbE", "8 x IB NDR"), or None.

    An adapter's rate is shared by the devices of a node; a number before its name is how many of them a node has.
    """
    match = _TEXT.match(text)
    rows = {_plain(name): row for name, row in link_rows().items()}
    row = rows.get(_plain(match[2])) if match else None
    if match is None or row is None or match[1] == "0":
        return None
    shared = row["of"] == "node"
    count = int(match[1] or 1)
    rate = count * float(row["gb_per_s"]) * 1e9 / (gpus_per_node if shared else 1)
    source = row["source"] + (f"; {count} for the {gpus_per_node} devices of a node" if shared else "")
    return LinkSpec(
        name=f"{count} x {row['name']}" if count > 1 else row["name"],
        rate=Figure(value=rate, unit="bytes/s", source=source),
        latency=Figure(
            value=float(row["hop_us"]) * 1e-6,
            unit="s",
            source=f"{row['hop_kind']}: the catalogue's latency of such links",
            kind=row["hop_kind"],
        ),
    )


def nearest_links(text: str) -> list[str]:
    """Return the names of links that are most like ``text``; all of them where none is."""
    by_plain = {_plain(name): name for name in link_rows()}
    match = _TEXT.match(text)
    close = nearest(_plain(match[2] if match else text), by_plain)
    return [by_plain[name] for name in close] or list(link_rows())
