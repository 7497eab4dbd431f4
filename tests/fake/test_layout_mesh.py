"""Our rank arithmetic against torch's DeviceMesh, on every rank of meshes of up to 4,096 ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.layout.parse import parse_layout
from meshwright.layout.ranks import coordinates, group, groups, mesh_shape

LAYOUTS = [
    "tp=8,pp=2,dp=4",
    "dp=8,zero=3,shard=4,pp=2",
    "dp=4,cp=2,tp=2,pp=2,zero=1,shard=4",
    "dp=6,tp=2,pp=3,order=dp/tp/cp/pp",
    "dp=4,cp=4,tp=4,pp=2,order=cp/pp/tp/dp",
    "dp=64,zero=3,shard=16,tp=8,pp=8",
    "dp=16,cp=4,tp=8,pp=8,zero=2,shard=32,order=tp/dp/pp/cp",
]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    size = parse_layout(request.param).world_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "text"), [(t, t) for t in LAYOUTS], indirect=["world"])
def test_coordinates_and_groups_equal_torch(world: None, text: str) -> None:
    layout = parse_layout(text)
    shape = mesh_shape(layout)
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    grid = mesh.mesh
    for rank in range(layout.world_size):
        place = (grid == rank).nonzero()[0].tolist()
        assert place == list(coordinates(layout, rank).values())
    for dim, axis in enumerate(shape):
        lines = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        assert sorted(map(tuple, lines)) == sorted(groups(layout, axis))
        assert tuple(mesh[axis].mesh.tolist()) == group(layout, 0, axis)
    dp = grid.movedim([list(shape).index("dp_replicate"), list(shape).index("dp_shard")], [-2, -1])
    lines = dp.reshape(-1, layout.dp).tolist()
    assert sorted(map(tuple, lines)) == sorted(groups(layout, "dp"))
