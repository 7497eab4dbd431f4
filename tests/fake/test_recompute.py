"""Recompute and chunked loss on one device: gradients, random numbers, dtypes and live bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hazard_runs import MINI, Rig, tokens
from meshwright.model.logits import AfterHead
from meshwright.parallel.loss import chunked_loss_sum
from meshwright.parallel.recompute import ATTENTION_OPS
from meshwright.parallel.stage import changed_logits, token_loss_sum
from meshwright.train.memory import LiveBytes, watch_step

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 37,
    "n_positions": 32,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
}
MIXTRAL = MINI | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def gradients(layout: str, config: dict[str, Any], ties: bool = False) -> dict[str, torch.Tensor]:
    rig = Rig(0, layout, config=config)
    if ties:
        for name, p in rig.model.params.items():
            if name.endswith("mlp.gate.weight"):
                torch.nn.init.zeros_(p)
    inputs, labels = tokens(4, 1)
    torch.manual_seed(3)
    rig.model.zero_grad()
    rig.model.begin_step(1, torch.arange(len(inputs)).view(rig.rows(inputs).shape[:2]))
    rig.model.forward_backward(rig.rows(inputs), rig.rows(labels), 0.01)
    return {n: g.clone() for n, g in rig.model.gradients().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("config", "ties"), [(GPT2, False), (MINI, False), (MIXTRAL, True)])
def test_h117_h116_h85_gradients_are_the_same_bits(mode, precision, config, ties):
    """H117 dropout 0.5 draws the same masks; H116 autocast's dtype comes back; H85 equal router logits go one way."""
    without = gradients(f"dp=1,precision={precision}", config, ties)
    assert same(without, gradients(f"dp=1,precision={precision},recompute={mode}", config, ties))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_h84_names_and_buffers_stay(mode):
    """H84: a forward that runs twice leaves no second mark, and no parameter changes its name."""
    plain, again = Rig(0, "dp=1"), Rig(0, f"dp=1,recompute={mode}")
    for rig in (plain, again):
        rig.step(1)
    one, two = plain.model.module.state_dict(), again.model.module.state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(one[n], two[n]) for n in one)
    buffers = dict(again.model.module.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in plain.model.module.named_buffers())
    assert plain.model.executed == again.model.executed


def test_a_selective_block_keeps_attention_and_runs_it_once():
    """The kernel of this device is in the list: it runs once per block and micro-batch, not again in backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name().removeprefix("aten::").split(".")[0]
            self.seen += name in ATTENTION_OPS
            return func(*args, **(kwargs or {}))

    counts = {}
    for mode in ("none", "selective", "full"):
        rig = Rig(0, f"dp=1,recompute={mode}")
        with Count() as count:
            rig.step(1)
        counts[mode] = count.seen
    blocks = 2 * 4
    assert counts == {"none": blocks, "selective": blocks, "full": 2 * blocks}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("valid", [0, 1, 29])
def test_chunked_loss_equals_eager(bias, dtype, valid):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 37, bias=bias).to(dtype)
    hidden = torch.randn(1, 29, 16).to(dtype).requires_grad_(True)
    labels = torch.randint(0, 37, (1, 29))
    labels[:, valid:] = -100
    got = []
    for chunked in (False, True):
        head.zero_grad()
        hidden.grad = None
        loss = chunked_loss_sum(head, hidden, labels) if chunked else token_loss_sum(head(hidden), labels)
        (loss * 0.125).backward()
        got.append([loss.detach(), hidden.grad, *(p.grad for p in head.parameters())])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for one, two in zip(*got, strict=True):
        assert one.dtype == two.dtype
        assert (one - two).abs().max() <= bound * max(1.0, float(one.abs().max()))


@pytest.mark.parametrize(
    "after", [AfterHead(cap=0.7), AfterHead(divisor=3.0), AfterHead(divisor=0.5, cap=2.0)], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_loss_of_changed_logits_equals_eager(after, bias):
    """A cap near the logits: its slope is felt by every gradient."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 37, bias=bias).to(torch.float64)
    hidden = torch.randn(1, 29, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 37, (1, 29))
    labels[:, 25:] = -100
    given = [hidden, *head.parameters()]
    want = token_loss_sum(changed_logits(head(hidden), after), labels)
    got = chunked_loss_sum(head, hidden, labels, after=after)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    for one, two in zip(torch.autograd.grad(got, given), torch.autograd.grad(want, given), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        assert abs(float(chunked_loss_sum(head, hidden, labels) - want)) > 1e-2


@pytest.mark.parametrize("cap", [None, 5.0])
def test_no_logits_larger_than_a_chunk(cap):
    """640 tokens, 8 chunks of 80: at most two float32 tensors of a chunk's logits live beside the two gradients."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 500, bias=False)
    hidden = torch.randn(1, 640, 8, requires_grad=True)
    labels = torch.randint(0, 500, (1, 640))
    chunk = 80 * 500 * 4
    kept = (640 * 8 + 500 * 8) * 4
    counter = LiveBytes()
    counter.add([head.weight, hidden, labels], "batch")
    rest = sum(counter.current.values())
    with counter.watch():
        chunked_loss_sum(head, hidden, labels, after=AfterHead(cap=cap)).backward()
    assert 2 * chunk < counter.peak_total - rest < 2 * chunk + kept + 8 * 1024
    assert counter.peak_total - rest < 640 * 500 * 4  # less than the logits alone


WIDE = MINI | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 1024}


@pytest.mark.parametrize("loss", ["eager", "chunked"])
def test_peak_falls_as_predicted(loss):
    """Live bytes at the peak within 10 % of the prediction, and less with more recompute."""
    from meshwright.cluster.load import read_cluster
    from meshwright.cost.predict import predict
    from meshwright.schedule.generate import generate

    cluster = read_cluster("a100-80gb-x8", 1)
    peaks = []
    for mode in ("none", "selective", "full"):
        rig = Rig(
            0,
            f"dp=1,micro_batch=16,precision=fp32,recompute={mode},loss={loss}",
            config=WIDE,
            global_batch=32,
        )
        rig.step(1)
        with watch_step(rig.model, rig.optimizer, ()) as counter:
            rig.step(2)
        layout, batch = rig.plan.layout, rig.plan.batch
        found = predict(rig.spec, layout, batch, generate("1f1b", 1, batch.accumulation), cluster).memory
        moments = found.optimizer  # the rig's SGD keeps none
        wanted = found.total - found.outside_allocator - moments
        assert abs(wanted / counter.peak_total - 1) <= 0.10, (mode, wanted, counter.peak_total)
        peaks.append(counter.peak_total)
    assert peaks[0] > peaks[1] > peaks[2]
