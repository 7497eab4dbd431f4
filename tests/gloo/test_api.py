"""The Python API: a user's own module and loop, rank facts, descriptions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import meshwright
from meshwright.base.errors import MeshwrightError

pytestmark = pytest.mark.gloo


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.outlet = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def make(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batches(world: int):
    gen = torch.Generator().manual_seed(5)
    return torch.randn(3, world, 2, 4, 3, dtype=torch.float64, generator=gen)


def one_device(world: int) -> dict[str, torch.Tensor]:
    model = make(0)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for x in batches(world):
        opt.zero_grad()
        (model(x) ** 2).mean().mul(2).backward()  # two accumulated micro-batches, each a mean
        opt.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def own_loop(rank, world, layout, set_to_none):
    model = make(rank)  # other weights on each rank: rank 0's are sent to all
    model, opt, scheduler = meshwright.parallelize(model, layout, lr=1e-2)
    for x in batches(world):
        opt.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            (model(x[rank][0]) ** 2).mean().backward()
        (model(x[rank][1]) ** 2).mean().backward()
        with torch.no_grad():  # what it gathers must not be what the next step computes with
            model(x[rank][0])
        opt.step()
        scheduler.step()
    from torch.distributed.tensor import DTensor

    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_users_own_loop_equals_one_device(pool, zero, set_to_none):
    want = one_device(2)
    for got in pool.run(own_loop, 2, f"dp=2,zero={zero},precision=fp64", set_to_none):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_hsdp_in_a_users_own_loop(pool):
    want = one_device(4)
    for got in pool.run(own_loop, 4, "dp=4,zero=3,shard=2,precision=fp64", True):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


def refused(rank, world, layout):
    try:
        meshwright.parallelize(make(0), layout)
    except MeshwrightError as error:
        return [p.code for p in error.problems]
    return []


def test_what_an_own_loop_cannot_have_is_refused(pool):
    assert pool.run(refused, 1, "pp=2,precision=fp32") == [["E900"]]
    assert pool.run(refused, 1, "dp=2,precision=fp32") == [["E501"]]


def test_keys_that_nothing_would_do_in_an_own_loop_are_refused():
    """A layout that asks for more than a user's own loop gets is never taken as if it asked for less."""
    text = "dp=1,precision=fp16,loss=chunked,recompute=full,offload=optimizer,compile=blocks"
    with pytest.raises(MeshwrightError) as caught:
        meshwright.parallelize(make(0), text)
    assert sorted(p.where for p in caught.value.problems) == [
        f"layout.{key}" for key in ("compile", "loss", "offload", "precision", "recompute")
    ]
    with pytest.raises(MeshwrightError, match="precision=fp8"):
        meshwright.parallelize(make(0), "dp=1,precision=fp8")


def test_a_module_without_blocks_is_refused_with_the_lists_it_has():
    with pytest.raises(MeshwrightError, match="E549"):
        meshwright.parallelize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "dp=1,precision=fp32")


def test_inspect_a_module():
    net = make(0)
    net.copy_of_outlet = nn.Linear(6, 1, bias=False)
    net.copy_of_outlet.weight = net.outlet.weight
    about = meshwright.inspect(net)
    assert about["num_parameters"] == sum(p.numel() for p in make(0).parameters())
    assert about["tied"] == [["outlet.weight", "copy_of_outlet.weight"]]
    assert about["blocks"]["path"] == "blocks"
    assert about["blocks"]["count"] == 3
    assert about["parameter_bytes"] == 8 * about["num_parameters"]


def test_inspect_a_config_by_name():
    assert meshwright.inspect("llama-2-7b")["num_parameters"] == 6_738_415_616


def test_rank_info_of_the_64_gpu_example():
    info = meshwright.rank_info("tp=8,pp=2,dp=4,precision=bf16", rank=37)
    assert info.world_size == 64
    assert info.coordinates["tp"] == 5
    assert info.groups["tp"] == tuple(range(32, 40))
    assert info.groups["pp"] == (5, 37)
    assert info.stage == 1
    assert info.is_last_stage
    with pytest.raises(MeshwrightError):
        meshwright.rank_info("dp=2", rank=2)


def test_plan_by_layout_and_by_search():
    fixed = meshwright.plan(
        "recipes/models/tiny-llama", seq_len=64, global_batch=8, layout="dp=2,zero=3,precision=fp32"
    )
    assert fixed.world_size == 2
    assert copy.deepcopy(fixed).hash == fixed.hash
    best = meshwright.plan("llama-2-7b", seq_len=2048, global_batch=64, cluster="a100-40gb-x8")
    assert best.world_size == 8
    assert best.prediction is not None
    with pytest.raises(MeshwrightError, match="E555"):
        meshwright.plan("llama-3.1-405b", seq_len=131072, global_batch=64, cluster="a100-40gb-x8")
