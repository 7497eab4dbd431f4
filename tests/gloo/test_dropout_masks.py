"""Dropout: masks are those of one device under every layout, other ones on every replica, and the same after a resume."""

from __future__ import annotations

import pytest
import torch

from hazard_runs import Rig
from meshwright.train.randomness import StepRandom, seed_for

pytestmark = pytest.mark.gloo

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 37,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
}


def losses(rank, world, layout, first, last):
    """Losses of steps ``first`` to ``last`` with the weights of the start, and the masks of the first block."""
    rig = Rig(rank, layout, config=GPT2)
    random = StepRandom(5, rig.plan.layout.dp, rig.view.dp_rank)
    random.attach(rig.model)
    rig.model.on_action = random.at
    if rig.model.pipeline is not None:
        rig.model.pipeline._on_action = random.at
    masks = []
    drops = [m for n, m in rig.model.module.named_modules() if n.endswith("h.1.mlp.dropout")]
    for module in drops:
        module.register_forward_hook(lambda m, i, o: masks.append((o == 0).sum().item()))
    rig.settings.lr = 0.0
    out = []
    for step in range(first, last + 1):
        random.begin(step)
        out.append(rig.step(step).loss)
    return out, masks


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ("dp=2", 2),
        ("dp=4,zero=3,shard=2", 4),
        ("pp=2", 2),
        ("dp=2,pp=2,zero=2", 4),
        ("pp=2,schedule=interleaved", 2),
        ("dp=2,recompute=full", 2),
    ],
)
def test_h39_masks_do_not_depend_on_the_layout(pool, layout, world):
    """H39, H117: dropout 0.5 on embedding, attention and both residual paths: the losses of one device in float64."""
    (want, _), *_ = pool.run(losses, 1, "dp=1", 1, 2)
    assert want[0] != want[1]
    for got, _ in pool.run(losses, world, layout, 1, 2):
        assert got == pytest.approx(want, abs=1e-12), layout


def test_h147_masks_after_a_resume_are_those_of_the_unbroken_run(pool):
    """H147: steps 5 and 6 alone draw what they draw after steps 1 to 4, on each rank; the ranks' masks differ."""
    whole = pool.run(losses, 2, "dp=2", 1, 6)
    later = pool.run(losses, 2, "dp=2", 5, 6)
    for (_, all_masks), (_, masks) in zip(whole, later, strict=True):
        assert all_masks[-len(masks) :] == masks
    assert later[0][1] != later[1][1]


def test_seeds_are_apart():
    places = [(1, s, m, f"layer {n}") for s in range(5) for m in range(5) for n in range(5)]
    assert len({seed_for(*p) for p in places}) == len(places)
    assert all(0 <= seed_for(*p) < 2**63 for p in places)
    torch.manual_seed(seed_for(*places[0]))
