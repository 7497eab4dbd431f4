"""The axes of a mesh: their names, what each one cuts, and the order in which ranks are numbered."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Axis: TypeAlias = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
"""A named direction of the mesh. ``dp`` in a layout is ``dp_replicate * dp_shard``."""

MESH_AXES: Final[tuple[Axis, ...]] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Every axis of the mesh, outermost first, in the default order ``tp/cp/dp/pp`` (innermost first)."""

LAYOUT_AXES: Final[tuple[str, ...]] = ("tp", "cp", "dp", "pp")
"""The axes that a layout's ``order`` names, innermost first. ``dp`` stands for both data axes."""

WORLD: Final = "world"
"""Group name of a collective that runs over all ranks."""

TIED: Final = "tied"
"""Group name of the pair (first stage, last stage) that sums the gradient of a tied embedding."""
