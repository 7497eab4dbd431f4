"""Parameters that rest away, one rank: what is on the device, bits, files, damage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.errors import MeshwrightError
from meshwright.parallel.away import Away
from meshwright.parallel.offload import FileStore, HostStore
from meshwright.parallel.replicate import Replicate
from meshwright.train.memory import AWAY, LiveBytes

WIDTH = 48
BLOCK = (WIDTH * WIDTH + WIDTH) * 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(0), requires_grad=False)

    def forward(self, x, scale=1.0):
        return x + torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.end(x).square().sum()


def batch(k):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(k))


def steps(net, engine, params, count=3, accumulation=2):
    """Train; return the values after it."""
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    for step in range(count):
        engine.zero_grad()
        for k in range(accumulation):
            loss = net(batch(step * accumulation + k))
            engine.before_backward(last=k == accumulation - 1)
            loss.backward()
        engine.finish()
        optimizer.step()
    return {n: p.detach().clone() for n, p in params.items()}


def away(net, store=None, names=None):
    names = names or dict(net.named_parameters())
    return Away(net, list(net.blocks), names, None, store or HostStore(False), CPU)


def plain(net):
    blocks = list(net.blocks)
    inside = {id(p) for b in blocks for p in b.parameters()}
    rest = [p for p in net.parameters() if p.requires_grad and id(p) not in inside]
    units = [
        ("root", rest),
        *((f"{i}", [p for p in b.parameters() if p.requires_grad]) for i, b in enumerate(blocks)),
    ]
    return Replicate(units, None)


@pytest.mark.parametrize("files", [False, True])
def test_every_bit_is_that_of_parameters_on_the_device(tmp_path, files):
    one, two = Net(), Net()
    want = steps(one, plain(one), {n: p for n, p in one.named_parameters() if p.numel()})
    store = FileStore(tmp_path / "away", 0) if files else None
    engine = away(two, store)
    trained = {n: m for n, m in engine.masters.items() if m.numel()}
    if files:
        optimizer_step = torch.optim.AdamW.step

        def sealed(self, *args, **kwargs):
            out = optimizer_step(self, *args, **kwargs)
            engine.seal()
            return out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", sealed)
            got = steps(two, engine, trained)
    else:
        got = steps(two, engine, trained)
    assert all(torch.equal(got[n], want[n]) for n in want)
    engine.close()
    assert not (tmp_path / "away").exists()


def test_values_that_are_not_those_at_home_are_seen(monkeypatch):
    """The comparison can fail: one element of one block that comes wrong changes the result."""
    copy = Away._copy

    def stale(self, unit):
        copy(self, unit)
        if unit.name == "block 2":
            unit.visit[7] += 1e-3

    monkeypatch.setattr(Away, "_copy", stale)
    one, two = Net(), Net()
    want = steps(one, plain(one), {n: p for n, p in one.named_parameters() if p.numel()}, count=1)
    engine = away(two)
    got = steps(two, engine, {n: m for n, m in engine.masters.items() if m.numel()}, count=1)
    assert not all(torch.equal(got[n], want[n]) for n in want)


def test_two_blocks_are_on_the_device_and_nothing_between_steps():
    net = Net()
    engine = away(net)
    seen = []
    net.blocks[3].linear.register_forward_hook(lambda *_: seen.append([u.here for u in engine.away]))
    counter = LiveBytes()
    counter.add(engine.homes(), AWAY)
    counter.add(engine.visits(), "parameters")
    counter.add([u.buffer for u in engine.away], "gradients")
    with counter.watch():
        engine.zero_grad()
        loss = net(batch(0))
        engine.before_backward(last=True)
        loss.backward()
        engine.finish()
    root = engine.away[0].numel * 4
    assert counter.peak["parameters"] == root + 2 * engine.away[1].numel * 4
    assert counter.peak["gradients"] <= root + BLOCK  # one replica: what is made goes home at once
    assert seen == [[True, False, False, False, True, False, False]]
    assert counter.current["parameters"] == counter.current["gradients"] == 0
    assert all(not u.here and not u.held for u in engine.away)
    assert counter.peak_total < 2 * root + 5 * BLOCK  # of 12 blocks' values and gradients


def test_the_next_block_comes_while_one_computes():
    net = Net()
    engine = away(net)
    order = []
    start, arrive = engine._start, engine._arrive
    engine._start = lambda unit: (order.append(("start", unit.index)), start(unit))
    engine._arrive = lambda unit: (order.append(("wait", unit.index)), arrive(unit))
    net(batch(0)).backward()
    ahead = [n for what, n in order if what == "start"]
    assert ahead[:4] == [0, 1, 2, 2]  # root, block 1, then each block's next one before its own turn
    assert order.index(("start", 4)) < order.index(("wait", 4))
    back = order[len(order) // 2 :]
    assert back.index(("start", 2)) < back.index(("wait", 2))


def test_a_frozen_start_and_unused_parameters():
    """No gradient flows into frozen blocks; a parameter that no backward reaches has zeros at home."""
    net = Net()
    net.extra = nn.Linear(3, 3)
    for p in (*net.start.parameters(), *net.blocks[0].parameters(), *net.blocks[1].parameters()):
        p.requires_grad_(False)
    engine = away(net)
    engine.zero_grad()
    loss = net(batch(0))
    engine.before_backward(last=True)
    loss.backward()
    engine.finish()
    masters = engine.masters
    assert masters["start.weight"].grad is None
    assert masters["blocks.0.linear.weight"].grad is None
    assert masters["blocks.2.linear.weight"].grad.abs().sum() > 0
    assert not masters["extra.weight"].grad.any()
    assert id(masters["extra.weight"]) not in engine.reached
    assert all(not u.here for u in engine.away)


def test_an_evaluation_leaves_nothing_on_the_device():
    net = Net()
    engine = away(net)
    with torch.no_grad():
        want = Net()(batch(0))
        assert torch.equal(net(batch(0)), want)
    engine.rest()
    assert all(not u.here for u in engine.away)


def test_a_changed_byte_is_found_by_name_before_it_is_used(tmp_path):
    net = Net()
    engine = away(net, FileStore(tmp_path / "away", 0, "stage-0-unit"))
    (path,) = (tmp_path / "away").glob("*unit-0003*")
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 4]))
    for act in (engine.verify, lambda: net(batch(0))):
        with pytest.raises(MeshwrightError) as error:
            act()
        (problem,) = error.value.problems
        assert (problem.code, problem.where) == ("E277", "blocks.2.linear.weight")
    engine.close()


def test_pages_of_files_leave_the_process(tmp_path):
    """Real memory: what was read for a forward is not in the process afterwards."""
    net = Net(depth=4)
    for block in net.blocks:
        block.linear = nn.Linear(WIDTH, WIDTH)
        block.big = nn.Parameter(torch.ones(1 << 20))
        block.forward = lambda x, scale, block=block: x + block.linear(x) * block.big[:WIDTH]
    engine = away(net, FileStore(tmp_path / "away", 0, "stage-0-unit"))
    with torch.no_grad():
        net(batch(0))
    engine.rest()
    with open("/proc/self/smaps") as file:
        lines = file.read().splitlines()
    at = [i for i, line in enumerate(lines) if f"{tmp_path}/away/rank" in line]
    held = [next(int(x.split()[1]) for x in lines[i:] if x.startswith("Rss:")) for i in at]
    assert len(held) == 5
    assert sum(held) < 1000  # KiB, of 16 MiB
    engine.close()
