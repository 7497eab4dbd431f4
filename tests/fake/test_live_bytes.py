"""LiveBytes against bytes counted by hand."""

from __future__ import annotations

import torch

from meshwright.train.memory import LiveBytes

FLOAT = 4


def test_a_step_counted_by_hand():
    """Rows 16, widths 2 -> 8 -> 2, fp32: the peak is where relu's backward makes the gradient of its input."""
    w1 = torch.ones(2, 8, requires_grad=True)
    w2 = torch.ones(8, 2, requires_grad=True)
    x = torch.ones(16, 2)
    hidden = 16 * 8 * FLOAT
    counter = LiveBytes()
    counter.add([w1, w2], "parameters")
    counter.add([x], "batch")
    with counter.watch():
        loss = (torch.relu(x @ w1) @ w2).sum()
        # relu keeps its result, the second product shares it; its own result and the logits are gone
        assert counter.current == {
            "parameters": 2 * 16 * FLOAT,
            "batch": 32 * FLOAT,
            "activations": hidden,
            "working": FLOAT,
        }
        loss.backward()
        assert counter.current["activations"] == 0
        assert (
            counter.current["working"] == FLOAT + 2 * 16 * FLOAT
        )  # the loss, and gradients nobody claimed yet
        counter.add([w1.grad, w2.grad], "gradients")
        assert counter.current["gradients"] == 2 * 16 * FLOAT
        assert counter.current["working"] == FLOAT
    # loss, its gradient (expanded: one element), w2's gradient, and relu's output and input gradients
    working = FLOAT + FLOAT + 16 * FLOAT + 2 * hidden
    memory = counter.memory()
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * 16 * FLOAT, 0, 0)
    assert memory.activations == hidden
    assert memory.working == working + 32 * FLOAT
    assert memory.total == counter.peak_total == 2 * 16 * FLOAT + 32 * FLOAT + hidden + working


def test_views_count_once_and_go_with_the_last():
    counter = LiveBytes()
    with counter.watch():
        base = torch.zeros(10)
        parts = [base.view(2, 5), base[3:], base.t()]
        base.add_(1.0)
        assert counter.current == {"working": 40}
        del base
        assert counter.current == {"working": 40}
        del parts
        assert counter.current == {"working": 0}
    assert counter.peak_total == 40


def test_resized_storages_count_at_their_present_size():
    """FSDP2 frees and refills gathered parameters like this; the category stays."""
    counter = LiveBytes()
    gathered = torch.zeros(100)
    counter.add([gathered], "parameters")
    with counter.watch():
        gathered.untyped_storage().resize_(0)
        assert counter.current == {"parameters": 0}
        other = torch.zeros(50)
        gathered.untyped_storage().resize_(400)
        assert counter.current == {"parameters": 400, "working": 200}
        del other
    assert counter.current == {"parameters": 400, "working": 0}
    assert counter.peak == {"parameters": 400, "working": 200}
    assert counter.peak_total == 600


def test_what_is_known_moves_and_is_not_doubled():
    counter = LiveBytes()
    with counter.watch():
        state = torch.zeros(25)
        counter.add([state], "optimizer")
        counter.add([state, state[5:]], "optimizer")
        assert counter.current == {"working": 0, "optimizer": 100}
    assert counter.memory().optimizer == 100


def test_the_peak_is_one_moment():
    """Categories are those of the highest total, not each at its own highest."""
    counter = LiveBytes()
    with counter.watch():
        first = torch.zeros(100)
        counter.add([first], "activations")
        del first
        second = torch.zeros(150)
        assert second.numel() == 150
    assert counter.peak_total == 600
    assert counter.peak == {"activations": 0, "working": 600}


def test_meta_tensors_have_no_bytes_and_hooks_are_taken_off():
    before = torch.UntypedStorage.resize_
    counter = LiveBytes()
    with counter.watch():
        torch.empty(1000, device="meta")
        kept = torch.zeros(3)
    assert counter.current == {"working": 12}
    assert torch.UntypedStorage.resize_ is before
    later = torch.zeros(1000)
    del kept, later
    assert counter.current == {"working": 12}  # outside, nothing is followed any more
