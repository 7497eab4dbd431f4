"""Layout to DeviceMesh: the process groups of every axis, with the names that the ledger uses.

Only axes of degree above 1 become mesh dims; an axis that is not in the mesh has one member and no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.base.axes import TIED, WORLD
from meshwright.layout.layout import Layout
from meshwright.layout.ranks import (
    DATA,
    EP,
    EXPERT_AXES,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    SHARD,
    coordinates,
    group,
    mesh_shape,
)
from meshwright.layout.ranks import groups as all_groups


@dataclass(frozen=True)
class MeshView:
    """Who this rank is, and the groups it belongs to.

    Attributes:
        layout: the layout that was meshed.
        rank: global rank.
        coords: coordinate on every axis (0 where the degree is 1).
        mesh: torch's mesh over the axes above degree 1, or None for one rank.
        groups: process group per axis of degree above 1, and "world" and "tied" where they exist. With cp above 1 the
            gradients are summed over it too: "dp_shard" is then dp_shard x cp, and with zero=0 "dp_replicate" is
            dp x cp.
        data: the mesh that ZeRO shards over where cp is part of it, else None (then it is a part of ``mesh``).
        device: where tensors live.
    """

    layout: Layout
    rank: int
    coords: dict[str, int]
    mesh: DeviceMesh | None
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict[str, dist.ProcessGroup])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: DeviceMesh | None = None

    @property
    def dp_rank(self) -> int:
        """Index of this rank's replica of the data: dp_replicate * dp_shard + shard coordinate."""
        return self.coords["dp_replicate"] * self.layout.dp_shard + self.coords["dp_shard"]

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline; the schedule says which stages live there."""
        return self.coords["pp"]

    @property
    def counts_batch(self) -> bool:
        """Whether this rank counts its batch for the whole job: once per replica of the data."""
        return self.pp_rank == 0 and self.coords["tp"] == 0 and self.coords["cp"] == 0

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh over those of ``axes`` that have a degree above 1, or None when none has."""
        if self.data is not None:
            return self.data
        known = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        names: tuple[str, ...] = tuple(a for a in axes if a in known)
        if self.mesh is None or len(names) == 0:
            return None
        return self.mesh[names] if len(names) > 1 else self.mesh[next(iter(names))]

    @property
    def ep_rank(self) -> int:
        """Which of the ``ep`` parts of the experts this rank holds."""
        return group(self.layout, self.rank, EP).index(self.rank)

    def expert_mesh(self) -> DeviceMesh:
        """Return the mesh over the ranks that hold the same experts: expert_shard, in replicas where there are any.

        Either may have one rank: FSDP2 then sends nothing on it.
        """
        shards = group(self.layout, self.rank, EXPERT_SHARD)
        replicas = group(self.layout, self.rank, EXPERT_REPLICATE)
        if len(replicas) == 1:
            return DeviceMesh.from_group(
                self.groups[EXPERT_SHARD],
                self.device.type,
                mesh=torch.tensor(shards),
                mesh_dim_names=(EXPERT_SHARD,),
            )
        names = (EXPERT_REPLICATE, EXPERT_SHARD)
        ranks = [list(group(self.layout, r, EXPERT_SHARD)) for r in replicas]
        groups = [self.groups[a] for a in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=torch.tensor(ranks), mesh_dim_names=names)

    def group_names(self) -> dict[str, str]:
        """Return torch's name of each process group mapped to our axis name."""
        return {pg.group_name: axis for axis, pg in self.groups.items()}


def build_mesh(layout: Layout, rank: int, device_type: str = "cpu", *, tied: bool = False) -> MeshView:
    """Return this rank's view of the mesh of ``layout``; every rank must call it.

    ``tied``: also make the pair groups {first, last rank of a pipeline} that sum a tied embedding's gradient.

    Communication: creates process groups (no payload).
    """
    coords = coordinates(layout, rank)
    device = torch.device("cpu" if device_type == "cpu" else f"{device_type}:{torch.cuda.current_device()}")
    if layout.world_size == 1:
        return MeshView(layout, rank, coords, None, {}, device)
    shape = {axis: n for axis, n in mesh_shape(layout).items() if n > 1}
    if len(shape) == 1:
        # torch would use the default group for an axis over all ranks. It numbers what runs on a group, and the
        # messages of a pipeline would make those numbers differ over ranks: sums over the world stay apart.
        whole = _new_group(range(layout.world_size))
        assert whole is not None
        mesh = DeviceMesh.from_group(
            whole, device_type, mesh=torch.arange(layout.world_size), mesh_dim_names=tuple(shape)
        )
    else:
        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    groups: dict[str, dist.ProcessGroup] = {axis: mesh.get_group(axis) for axis in shape}
    world = dist.group.WORLD
    assert world is not None
    groups[WORLD] = world
    if layout.ep > 1:
        groups |= {axis: _own_group(layout, rank, axis) for axis in EXPERT_AXES}
    if tied and layout.pp > 1:
        mine = _tied_group(layout, rank)
        if mine is not None:
            groups[TIED] = mine
    data = _join_context(layout, rank, device_type, groups) if layout.cp > 1 else None
    return MeshView(layout, rank, coords, mesh, groups, device, data)


def _join_context(
    layout: Layout, rank: int, device_type: str, groups: dict[str, dist.ProcessGroup]
) -> DeviceMesh | None:
    """Put the data-parallel groups over dp and cp together in ``groups``; return the mesh that ZeRO shards over.

    A group of its own even where it has the ranks of ``cp``: attention's messages and sums of gradients stay apart.
    """
    if layout.zero == 0:
        groups["dp_replicate"] = _own_group(layout, rank, DATA)
        return None
    groups["dp_shard"] = shards = _own_group(layout, rank, SHARD)
    if layout.dp_replicate == 1:
        members = torch.tensor(group(layout, rank, SHARD))
        return DeviceMesh.from_group(shards, device_type, mesh=members, mesh_dim_names=("dp_shard",))
    table = torch.tensor([group(layout, other, SHARD) for other in group(layout, rank, "dp_replicate")])
    return DeviceMesh.from_group(
        [groups["dp_replicate"], shards],
        device_type,
        mesh=table,
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )


def _own_group(layout: Layout, rank: int, axis: str) -> dist.ProcessGroup:
    """Make every group of ``axis`` (all ranks take part in each creation); return this rank's."""
    made = {members: _new_group(members) for members in all_groups(layout, axis)}
    mine = made[group(layout, rank, axis)]
    assert mine is not None
    return mine


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group (all ranks of the job take part); return it where this rank is in it, else None."""
    made = dist.new_group(list(ranks))
    return made if isinstance(made, dist.ProcessGroup) else None


def _tied_group(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    """Make the pair group of every pipeline (all ranks take part in each creation); return this rank's."""
    mine: dist.ProcessGroup | None = None
    seen: set[tuple[int, ...]] = set()
    for other in range(layout.world_size):
        column = group(layout, other, "pp")
        pair = (column[0], column[-1])
        if pair in seen:
            continue
        seen.add(pair)
        made = _new_group(pair)
        if rank in pair:
            mine = made
    return mine
