"""What is used of bitsandbytes, and that packing, cutting and unpacking give the numbers that they should."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

from meshwright.base.errors import ExitCode, MeshwrightError
from meshwright.layout.parse import parse_layout
from meshwright.model.adapters import adapted, make_adapter
from meshwright.model.quantised import held_bytes
from meshwright.model.read_hf import read_model
from meshwright.orchestrate.proving import prove_command
from meshwright.orchestrate.trying import run_steps
from meshwright.parallel import quantised
from meshwright.parallel.quantised import Packed, missing_bitsandbytes, pack, packed_matrices
from meshwright.program.make import make_plan

TINY = "recipes/models/tiny-llama"
KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)]
needs = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes (extra: quantised) is not installed",
)


def adapter(levels, double):
    return make_adapter("qlora", 4, None, (), levels, double)


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    spec = adapted(read_model(TINY), adapter("nf4", True))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else real(name, *a)
    )
    found = missing_bitsandbytes(spec, "cpu")
    assert [p.code for p in found] == ["E272"]
    assert "kind = lora" in found[0].do
    assert "not installed" in found[0].found
    assert missing_bitsandbytes(read_model(TINY), "cpu") == []
    with pytest.raises(MeshwrightError) as error:
        prove_command(None, model=TINY, layout="dp=2", adapter="qlora:4", device="cpu")
    assert [p.code for p in error.value.problems] == ["E272"]
    assert error.value.exit_code == ExitCode.BAD_INPUT
    with pytest.raises(MeshwrightError) as error:
        run_steps(make_plan(spec, parse_layout("dp=2"), 4, 32, TINY), 1)
    assert [p.code for p in error.value.problems] == ["E272"]


@pytest.mark.parametrize("fails", [RuntimeError("no kernel image"), None])
def test_a_library_that_does_not_run_here_is_named(monkeypatch, fails):
    """A build without the device's path raises in its own ways, or unpacks something else."""
    spec = adapted(read_model(TINY), adapter("nf4", False))

    class Functions:
        QuantState = staticmethod(lambda **k: None)

        @staticmethod
        def quantize_4bit(flat, **options):
            if fails is not None:
                raise fails
            state = type("State", (), {"absmax": torch.ones(len(flat) // 64), "state2": None, "offset": None})
            return torch.zeros(len(flat) // 2, 1, dtype=torch.uint8), state

        @staticmethod
        def dequantize_4bit(codes, state):
            return torch.zeros(2 * codes.numel())

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name)
    monkeypatch.setattr(quantised, "bitsandbytes", lambda: Functions)
    (found,) = missing_bitsandbytes(spec, "cpu")
    assert found.code == "E272"
    assert ("no kernel image" if fails is not None else "other numbers") in found.found


@needs
def test_the_names_of_bitsandbytes_that_are_used():
    functions = quantised.bitsandbytes()
    assert {"A", "blocksize", "compress_statistics", "quant_type"} <= set(
        inspect.signature(functions.quantize_4bit).parameters
    )
    assert list(inspect.signature(functions.dequantize_4bit).parameters)[:2] == ["A", "quant_state"]
    assert {"absmax", "shape", "blocksize", "quant_type", "dtype"} <= set(
        inspect.signature(functions.QuantState).parameters
    )
    assert missing_bitsandbytes(adapted(read_model(TINY), adapter("nf4", True)), "cpu") == []


def by_hand(packed):
    """Sixteen levels times the scales, element by element."""
    functions = quantised.bitsandbytes()
    numel = packed.shape[0] * packed.shape[1]
    level = functions.get_4bit_type(packed.levels, device="cpu")
    halves = torch.stack([packed.codes >> 4, packed.codes & 15], 1).view(-1)[:numel].long()
    scales = packed.scales
    if packed.table is not None:
        group = torch.arange(len(scales)) // 256
        scales = packed.table[scales.long()] * packed.groups[group] + packed.mean
    return (level[halves] * scales.repeat_interleave(64)[:numel]).view(packed.shape)


@needs
@pytest.mark.parametrize(("levels", "double"), KINDS)
@pytest.mark.parametrize("shape", [(32, 32), (7, 9), (16, 96), (10, 34), (300, 64), (1, 1)])
def test_unpacked_are_the_levels_times_the_scales(shape, levels, double):
    """Rows of 32, 34 or 96 too, which bitsandbytes 0.50 unpacks wrongly on a CPU when it is given a table."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = Packed(weight, adapter(levels, double))
    want = by_hand(packed)
    assert torch.equal(packed.weight(torch.float32), want)
    assert torch.equal(packed.weight(torch.float64), want.double())
    assert torch.equal(packed.weight(torch.bfloat16), want.bfloat16())
    assert (want - weight).abs().max() < 0.25 * weight.abs().max()
    assert sum(b.numel() * b.element_size() for b in packed.buffers()) == held_bytes(weight.numel(), double)
    again = Packed(weight.double(), adapter(levels, double))
    assert again.digest == packed.digest
    changed = weight.clone()
    changed[0, 0] += 0.1
    assert Packed(changed, adapter(levels, double)).digest != packed.digest


@needs
@pytest.mark.parametrize(("levels", "double"), KINDS)
@pytest.mark.parametrize(
    ("shape", "dim", "ranges"),
    [
        ((640, 64), 0, [(0, 320)]),
        ((640, 64), 0, [(64, 64), (320, 32)]),
        ((128, 384), 1, [(192, 192)]),
        ((300, 1024), 1, [(64, 128), (512, 64)]),
        ((16, 32), 0, [(8, 8)]),
    ],
)
def test_a_part_is_the_same_part_of_the_whole(shape, dim, ranges, levels, double):
    """Whatever group of 256 scales a block is in: 300 x 1024 has 4,800 blocks."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = Packed(weight, adapter(levels, double)).weight(torch.float32)
    part = Packed(weight, adapter(levels, double))
    part.cut(dim, ranges)
    want = torch.cat([whole.narrow(dim, start, size) for start, size in ranges], dim)
    assert torch.equal(part.weight(torch.float32), want)


@needs
def test_packing_takes_the_weight_away_and_gives_the_products_and_gradients_of_the_rounded_one():
    spec = adapted(read_model(TINY), adapter("nf4", True))
    from meshwright.parallel.build import build_model

    model = build_model(spec.config, seed=0)
    rounded = build_model(spec.config, seed=0)
    pack(model, spec)
    held = packed_matrices(model)
    assert len(held) == 7 * spec.num_layers
    names = {n for n, _ in model.named_parameters()}
    assert not names & set(held)
    for name, matrix in held.items():
        rounded.get_parameter(name).data = matrix.weight(torch.float32)
    x = torch.randn(2, 5, 128, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for one, other in ((model, x), (rounded, y)):
        layer = one.get_submodule("model.layers.0.mlp.gate_proj")
        out = layer(other)
        out.square().sum().backward()
    assert (x.grad - y.grad).abs().max() <= 1e-6 * y.grad.abs().max()
