"""The offloaded optimizer on its own: bits, pieces, bytes that travel, checksums, memory of the process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.load import load_checkpoint
from meshwright.parallel.offload import FileStore, HostStore, cut_pieces
from meshwright.train.guards import Spikes
from meshwright.train.keep import Best, Keeper
from meshwright.train.memory import LiveBytes
from meshwright.train.offload import OffloadedAdamW, make_optimizer
from meshwright.train.optim import Rate
from meshwright.train.scale import loss_scale_for

ADAMW = SimpleNamespace(name="adamw", lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


def params(sizes=((40, 8), (8, 8), (8,), (3, 5), (7,)), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        f"p{i}": nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for i, s in enumerate(sizes)
    }


def fill(held, step):
    generator = torch.Generator().manual_seed(step)
    for p in held.values():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def made(held, tmp_path, offload="optimizer-nvme"):
    decays = {n for n, p in held.items() if p.ndim > 1}
    return make_optimizer(held, decays, ADAMW, offload=offload, folder=tmp_path / "away", rank=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offload", ["optimizer", "optimizer-nvme"])
def test_five_updates_have_the_same_bits(tmp_path, offload, dtype):
    """H209 beside: two groups with their own decay, every parameter and every moment."""
    plain, away = params(dtype=dtype), params(dtype=dtype)
    one, two = made(plain, tmp_path, "none"), made(away, tmp_path, offload)
    for step in range(5):
        for held, optimizer in ((plain, one), (away, two)):
            fill(held, step)
            optimizer.step()
    for name in plain:
        assert torch.equal(plain[name], away[name]), name
        for entry in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(one.state[plain[name]][entry], two.state[away[name]][entry]), (name, entry)
    assert [len(g["params"]) for g in two.param_groups] == [3, 2]


def test_a_parameter_without_gradient_stays(tmp_path):
    held = params()
    optimizer = made(held, tmp_path)
    fill(held, 0)
    held["p1"].grad = None
    before = held["p1"].detach().clone()
    optimizer.step()
    assert torch.equal(held["p1"], before)
    assert optimizer.state[held["p1"]]["step"] == 0


def test_pieces_are_at_most_as_large_as_the_largest_tensor():
    sizes = [("a", 5), ("b", 7), ("c", 20), ("d", 1), ("e", 19), ("f", 0), ("g", 20)]
    pieces = cut_pieces(sizes, 2)
    assert [[s.name for s in p.slots] for p in pieces] == [["a", "b"], ["c"], ["d", "e", "f"], ["g"]]
    assert all(p.numel <= 40 for p in pieces)
    assert sum(p.numel for p in pieces) == 2 * sum(n for _, n in sizes)
    assert cut_pieces([], 2) == ()


def test_every_byte_travels_once_each_way(tmp_path):
    held = params()
    optimizer = made(held, tmp_path)
    fill(held, 0)
    optimizer.step()
    assert isinstance(optimizer, OffloadedAdamW)
    assert optimizer.moved_bytes == 2 * 2 * 4 * sum(p.numel() for p in held.values())


@pytest.mark.parametrize("offload", ["optimizer", "optimizer-nvme"])
def test_an_update_holds_two_pieces(tmp_path, offload):
    """Live bytes of an update: two buffers of the largest tensor's moments, not the whole state."""
    held = params(sizes=[(64, 64)] * 12)
    optimizer = made(held, tmp_path, offload)
    fill(held, 0)
    counter = LiveBytes()
    counter.add([*held.values(), *(p.grad for p in held.values())], "parameters")
    with counter.watch():
        optimizer.step()
    own = counter.peak_total - 2 * 12 * 64 * 64 * 4
    assert own == pytest.approx(2 * 2 * 64 * 64 * 4, rel=0.02)


def test_a_flipped_byte_is_found_by_name(tmp_path):
    held = params()
    optimizer = made(held, tmp_path)
    fill(held, 0)
    optimizer.step()
    optimizer.verify()
    (path,) = sorted((tmp_path / "away").glob("*piece-0000*"))
    with path.open("r+b") as file:
        file.seek(40 * 8 * 4 + 12)  # in the second moment of p0
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    for act in (optimizer.verify, optimizer.step):
        with pytest.raises(MeshwrightError) as error:
            act()
        (problem,) = error.value.problems
        assert problem.code == "E277"
        assert problem.where == "exp_avg_sq of p0"
    optimizer.close()


def keeper(held, optimizer, tmp_path):
    settings = SimpleNamespace(seed=0, keep_last=None, keep_every=0, keep_best=False, checkpoint_async=True)
    plan = SimpleNamespace(world_size=1, hash="h", batch=SimpleNamespace(seq_len=8, global_batch=2))
    data = SimpleNamespace(hash="d")
    task = SimpleNamespace(
        run=SimpleNamespace(run=settings), plan=plan, data=data, run_dir=tmp_path, manifest={}
    )
    rate = Rate(name="constant", peak=1e-2, warmup_steps=0, total_steps=9)
    return Keeper(
        task=task,
        rank=0,
        params=held,
        optimizer=optimizer,
        tied={},
        place=None,
        scale=loss_scale_for("fp32"),
        rate=rate,
        spikes=Spikes(2.0),
        best=Best(),
    )


@pytest.mark.parametrize("offload", ["optimizer", "optimizer-nvme"])
def test_a_background_save_holds_the_state_of_its_step(tmp_path, offload):
    """The update after ``save`` does not reach the checkpoint, and a resumed run goes on with the same bits.

    Its guards know what they knew: a loss that is a spike for the run is one for the resumed run's first step.
    """
    held = params()
    optimizer = made(held, tmp_path, offload)
    keeping = keeper(held, optimizer, tmp_path)
    keeping.spikes.remember([3.0] * 12)
    keeping.empty_in_row = 2
    for step in (0, 1):
        fill(held, step)
        optimizer.step()
        if step == 0:
            keeping.save(1, None, wait=False)
    keeping.save(2, None, wait=True)
    again = params()
    resumed = made(again, tmp_path / "again", offload)
    other = keeper(again, resumed, tmp_path)
    other.task.resume_from = tmp_path / "checkpoints" / "step-1"
    assert other.resume()[0] == 1
    assert (other.spikes.check(6.1), other.empty_in_row) == (3.0, 2)
    fill(again, 1)
    resumed.step()
    for name, p in held.items():
        assert torch.equal(p, again[name])
    whole = params()
    load_checkpoint(path=tmp_path / "checkpoints" / "step-2", params=whole, optimizer=None, tied={})
    assert all(torch.equal(p, held[n]) for n, p in whole.items())
    optimizer.close()
    resumed.close()


def test_damaged_state_is_not_saved(tmp_path):
    """A byte that flips in a file ends the save with E277; no checkpoint gets a name."""
    held = params()
    optimizer = made(held, tmp_path)
    fill(held, 0)
    optimizer.step()
    optimizer.homes[0][3] += 1.0
    with pytest.raises(MeshwrightError) as error:
        keeper(held, optimizer, tmp_path).save(1, None, wait=True)
    assert error.value.problems[0].code == "E277"
    assert not list(tmp_path.glob("checkpoints/step-*"))
    optimizer.close()


def test_names_are_stable_and_files_go_at_the_end(tmp_path):
    """H210: another process of the same rank uses the same names; a clean end leaves nothing."""
    names = []
    for _ in range(2):
        optimizer = made(params(), tmp_path)
        names.append(sorted(p.name for p in (tmp_path / "away").iterdir()))
        optimizer.close()
        assert not (tmp_path / "away").exists()
    assert names[0] == names[1]
    assert names[0][0] == "rank-00000-piece-0000.state"


def test_what_a_crash_left_is_not_read(tmp_path):
    first = params()
    crashed = made(first, tmp_path)
    fill(first, 0)
    crashed.step()  # no close: the files stay
    again = params()
    optimizer = made(again, tmp_path)
    assert all(not home.any() for home in optimizer.homes)


def test_files_leave_the_process_memory(tmp_path):
    """The pages of a piece are dropped from this process when it is written back."""
    store = FileStore(tmp_path / "away", 0)
    home = store.make(0, 1 << 22, torch.float32)
    home.fill_(1.0)

    def resident() -> int:
        with open("/proc/self/smaps") as file:
            lines = file.read().splitlines()
        at = next(i for i, line in enumerate(lines) if "piece-0000" in line)
        return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))

    assert resident() > 15000
    store.settle(0)
    assert resident() < 1000
    assert float(home[12345]) == 1.0
    store.close()


def test_no_room_is_said_before_the_first_step(tmp_path):
    store = FileStore(tmp_path / "away", 0)
    with pytest.raises(MeshwrightError) as error:
        store.make(0, 1 << 50, torch.float32)
    assert error.value.problems[0].code == "E278"
    assert not list((tmp_path / "away").glob("*")) if (tmp_path / "away").exists() else True


def test_host_memory_is_plain_memory_without_a_gpu():
    home = HostStore(pinned=False).make(0, 3, torch.float64)
    assert home.tolist() == [0.0, 0.0, 0.0]
