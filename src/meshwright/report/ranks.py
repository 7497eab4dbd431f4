"""The mesh as a picture: every rank in its node, coloured by its coordinate on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from meshwright.base.axes import MESH_AXES
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import coordinates
from meshwright.report.blocks import Block, Note, Picture
from meshwright.report.svg import Box, Cell, grid

MAX_DRAWN = 512

AXIS_WORDS: Final[Mapping[str, str]] = {
    "pp": "pipeline stage",
    "dp_replicate": "replica",
    "dp_shard": "shard of the model state",
    "cp": "piece of the sequence",
    "tp": "slice of each matrix",
}


def layout_from_dict(data: Mapping[str, Any]) -> Layout | None:
    """Return the Layout whose ``as_dict`` is ``data``, or None when a value is not of its type."""
    plain = Layout()
    known = {f.name: data[f.name] for f in fields(Layout) if f.name in data}
    if "sp" in known:
        known["sp"] = known["sp"] in (True, "on")
    if isinstance(known.get("order"), str):
        known["order"] = tuple(known["order"].split("/"))
    elif "order" in known:
        known["order"] = tuple(known["order"])
    for name, value in known.items():
        expected = getattr(plain, name)
        if not isinstance(value, type(expected)) or (isinstance(value, bool) != isinstance(expected, bool)):
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value < (0 if name == "zero" else 1):
            return None
    return Layout(**known)


def layout_text(data: Mapping[str, Any]) -> str:
    """Return the shortest layout text of a layout's dict; every key in turn when it cannot be read."""
    layout = layout_from_dict(data)
    return layout.text() if layout else ",".join(f"{k}={v}" for k, v in data.items())


def used_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes with a degree above 1, outermost first."""
    degrees = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
    }
    return tuple(axis for axis in MESH_AXES if degrees[axis] > 1)


def mesh_blocks(layout: Layout | None, gpus_per_node: int | None, node_from: str) -> tuple[Block, ...]:
    """Return the mesh section; ``gpus_per_node`` draws node borders, None draws one frame."""
    if layout is None:
        return (Note(text="No layout could be read here, so the mesh is not drawn.", tone="missing"),)
    world = layout.world_size
    axes = used_axes(layout)
    drawn = min(world, MAX_DRAWN)
    per_box = gpus_per_node or world
    boxes: list[Box] = []
    for start in range(0, drawn, per_box):
        cells: list[Cell] = []
        for rank in range(start, min(start + per_box, drawn)):
            where = coordinates(layout, rank)
            short = " ".join(f"{_SHORT[a]}{where[a]}" for a in axes) or "alone"
            css = " ".join(f"{a}-{where[a] % 8}" for a in axes)
            words = ", ".join(f"{a} {where[a]}" for a in axes)
            cells.append(
                Cell(
                    title=f"rank {rank}",
                    subtitle=short,
                    css=css,
                    tip=f"rank {rank}: {words or short}",
                    rank=rank,
                )
            )
        label = f"node {start // per_box}" if gpus_per_node else "all ranks"
        boxes.append(Box(label=label, cells=tuple(cells)))
    words = "; ".join(f"{_SHORT[a]} = {a} coordinate, its {AXIS_WORDS[a]}" for a in axes)
    caption = (
        "Each box is one rank, one process on one device. Ranks of one colour share a coordinate on the chosen axis; "
        f"ranks that differ on that axis alone form a group and talk to each other. {words}."
        if axes
        else "One rank holds the whole model: nothing is cut and nothing is sent."
    )
    caption += (
        f" A frame is one node ({node_from})." if gpus_per_node else " The size of a node is not known here."
    )
    if drawn < world:
        caption += f" The first {drawn} of {world} ranks are drawn."
    return (
        Picture(
            svg=grid(
                boxes,
                name="mesh",
                title=f"{world} ranks on the mesh {' x '.join(axes) if axes else 'of one rank'}",
                axis=axes[0] if axes else "",
            ),
            title="Who holds what",
            caption=caption,
            axes=axes,
        ),
    )


_SHORT: Final[Mapping[str, str]] = {
    "pp": "pp",
    "dp_replicate": "dr",
    "dp_shard": "ds",
    "cp": "cp",
    "tp": "tp",
}
