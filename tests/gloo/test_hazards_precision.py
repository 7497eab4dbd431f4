"""Hazards of precision, by row: where sums are kept, what is reduced, what is updated, what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright
from hazard_runs import SGD, Rig
from meshwright.base.errors import MeshwrightError
from meshwright.layout.parse import parse_layout
from meshwright.layout.precision import precision_table
from meshwright.mesh.device_mesh import build_mesh
from meshwright.parallel.precision import dtype_of
from meshwright.parallel.replicate import Replicate
from meshwright.parallel.tied import local
from meshwright.parallel.zero import shard

pytestmark = pytest.mark.gloo


class Scaled(nn.Module):
    """Adds c * w: the gradient of each element of ``weight`` is c."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, c, total):
        return total + (self.weight * c.to(self.weight.dtype)).sum().float()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, c):
        total = torch.zeros(())
        for block in self.blocks:
            total = block(c, total)
        return total


def accumulated(rank, world, layout, by_rank):
    """Backward once per micro-batch with the gradients ``by_rank[rank]``; return one element of the sum and its dtype."""
    wanted = parse_layout(f"{layout},precision=bf16")
    view = build_mesh(wanted, rank)
    table = precision_table(wanted)
    model = Pair()
    if wanted.zero:
        engine = shard(
            model,
            list(model.blocks),
            view.submesh("dp_replicate", "dp_shard"),
            wanted.zero,
            param_dtype=dtype_of(table.gather),
            reduce_dtype=dtype_of(table.reduce),
        )
    else:
        units = [(f"block {k}", list(b.parameters())) for k, b in enumerate(model.blocks)]
        engine = Replicate(units, view.groups.get("dp_replicate"))
    values = by_rank[rank]
    for k, value in enumerate(values):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=table.autocast):
            loss = model(torch.tensor(value))
        engine.before_backward(last=k == len(values) - 1)
        loss.backward()
    engine.finish()
    grad = local(model.blocks[0].weight.grad)
    return float(grad.view(-1)[0]), str(grad.dtype)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_h91_small_gradients_add_up_in_fp32(pool, layout):
    """H91: 1.0 and 256 times 0.001 under precision=bf16 give 1.256 (a bf16 accumulator stays at 1.0)."""
    small = 0.001 if layout == "dp=2" else float(torch.tensor(0.001, dtype=torch.bfloat16))
    stuck = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(256):
        stuck += 0.001
    assert float(stuck) == 1.0
    count = 64 if layout in ("dp=2,zero=2", "dp=2,zero=3") else 256  # these two reduce at each micro-batch
    values = [[1.0] + [0.001] * count, [0.0] * (count + 1)]
    for value, dtype in pool.run(accumulated, 2, layout, values):
        assert dtype == "torch.float32"
        assert value == pytest.approx(1.0 + count * small, abs=1e-4)
    rows = {
        name: dtype for name, dtype, _, _ in precision_table(parse_layout(f"{layout},precision=bf16")).rows()
    }
    assert rows["gradient"] == rows["reduce"] == "fp32"  # what run.json records


@pytest.mark.parametrize("layout", ["dp=4", "dp=4,zero=1", "dp=4,zero=3", "dp=4,zero=2,shard=2"])
def test_h94_gradients_are_reduced_in_fp32(pool, layout):
    """H94: ranks with 1, 2^-9, 2^-9, 2^-9 sum to 1.005859375 (hop by hop in bf16: 1.0)."""
    hop = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(3):
        hop = hop + torch.tensor(2.0**-9, dtype=torch.bfloat16)
    assert float(hop) == 1.0
    results = pool.run(accumulated, 4, layout, [[1.0], [2.0**-9], [2.0**-9], [2.0**-9]])
    assert results == [(1.005859375, "torch.float32")] * 4


def slow_weights(rank, world, layout):
    rig = Rig(rank, f"{layout},precision=bf16", optimizer=SGD)
    rig.step(1, on_gradients=lambda m: [local(g).zero_() for g in m.gradients().values()])
    for g in rig.model.gradients().values():
        local(g).fill_(6e-4)
    for _ in range(100):
        rig.optimizer.step()
    norms = [p for n, p in rig.params().items() if "norm" in n]
    buffers = {n: str(b.dtype) for n, b in rig.model.module.named_buffers()}
    return [float(n.min()) for n in norms], [float(n.max()) for n in norms], buffers


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_h96_weights_near_one_move_in_bf16_training(pool, layout):
    """H96, H97: 100 steps of 6e-4 take 1.0 to 0.94 (without an fp32 copy: 1.0); rotary frequencies stay fp32."""
    assert float(torch.tensor(1.0, dtype=torch.bfloat16) - 6e-4) == 1.0
    for low, high, buffers in pool.run(slow_weights, 2, layout):
        assert low == pytest.approx([0.94] * 5, abs=1e-5)
        assert high == pytest.approx([0.94] * 5, abs=1e-5)
        assert buffers
        assert set(buffers.values()) == {"torch.float32"}


def own_module(rank, world, layout, change):
    model = Pair()
    if change == "bf16":
        model.to(torch.bfloat16)
    elif change == "frozen bf16":
        model.blocks[0].weight.requires_grad_(False)
        model.blocks[0].to(torch.bfloat16)
    elif change == "buffer" and rank == 1:
        model.table = model.table.to(torch.bfloat16)
    elif change == "shape" and rank == 1:
        model.blocks[1].weight = nn.Parameter(torch.ones(2, 2))
    elif change == "name" and rank == 0:
        model.register_buffer("extra", torch.ones(1))
    try:
        meshwright.parallelize(model, layout)
    except MeshwrightError as error:
        return [(p.code, p.where, p.found) for p in error.problems]
    return []


def test_h96_bf16_parameters_without_a_full_copy_are_refused(pool):
    """H96: a user's bf16 module would never move near 1; frozen bf16 parameters are no fault."""
    refused = pool.run(own_module, 2, "dp=2,precision=bf16", "bf16")
    assert (
        refused
        == [[("E557", "blocks.0.weight", "2 trainable parameters are not fp32; the first is bfloat16")]] * 2
    )
    assert pool.run(own_module, 2, "dp=2,precision=bf16", "frozen bf16") == [[], []]


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ("buffer", "table", "rank 0: float32 [3]; rank 1: bfloat16 [3]"),
        ("shape", "blocks.1.weight", "rank 0: float32 [4]; rank 1: float32 [2, 2]"),
        ("name", "extra", "rank 0: float32 [1]; rank 1: none"),
    ],
)
def test_h97_unlike_modules_are_refused_before_any_broadcast(pool, change, where, found):
    """H97: another dtype, shape or name on one rank is refused on all, with the tensor and both sides."""
    assert pool.run(own_module, 2, "dp=2,precision=fp32", change) == [[("E558", where, found)]] * 2


def low_gradients(rank, world, mode):
    rig = Rig(rank, f"dp=2,zero=3,precision=bf16,recompute={mode}")
    found = {}
    rig.step(1, on_gradients=lambda _: found.update(rig.gradients()))
    return found


def test_h116_recompute_runs_in_the_dtype_of_the_forward(pool):
    """H116: under FSDP2's own casts to bf16, gradients with recompute are those without, bit for bit."""
    kept = pool.run(low_gradients, 2, "none")
    for mode in ("full", "selective"):
        for want, got in zip(kept, pool.run(low_gradients, 2, mode), strict=True):
            assert want.keys() == got.keys()
            assert all(torch.equal(want[name], got[name]) for name in want)
    assert any(bool(g.any()) for g in kept[0].values())
