"""Families that draw from torch's own generator: other numbers on every replica, and the same ones after a resume."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hazard_runs import Rig
from meshwright.train.randomness import StepRandom, seed_for

pytestmark = pytest.mark.gloo

OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 37,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
    "dropout": 0.5,
    "pad_token_id": 1,
}


def losses(rank, world, layout, first, last):
    """Losses of steps ``first`` to ``last`` with the weights of the start, and the generator's state before layer 1."""
    rig = Rig(rank, layout, config=OPT)
    random = StepRandom(5, rig.plan.layout.dp, rig.view.dp_rank)
    random.attach(rig.model)
    rig.model.on_action = random.at
    states = []
    layer = next(m for n, m in rig.model.module.named_modules() if n.endswith("layers.1"))
    layer.register_forward_pre_hook(
        lambda m, i: states.append(hashlib.sha256(torch.get_rng_state().numpy()).hexdigest())
    )
    rig.settings.lr = 0.0
    out = []
    for step in range(first, last + 1):
        random.begin(step)
        out.append(rig.step(step).loss)
    return out, states


@pytest.mark.parametrize(("layout", "world"), [("dp=2", 2), ("dp=4", 4), ("dp=2,recompute=full", 2)])
def test_h39_numbers_do_not_depend_on_data_parallelism(pool, layout, world):
    """H39, H117: with the same micro-batch size, the float64 losses are those of one device; each step draws anew."""
    (want, states), *_ = pool.run(losses, 1, "dp=1", 1, 2)
    assert want[0] != want[1]
    assert len(set(states)) == len(states)
    for got, _ in pool.run(losses, world, layout, 1, 2):
        assert got == pytest.approx(want, abs=1e-12), layout


def test_h147_after_a_resume_they_are_those_of_the_unbroken_run(pool):
    """H147: steps 5 and 6 alone draw what they draw after steps 1 to 4, on each rank; the ranks' numbers differ."""
    whole = pool.run(losses, 2, "dp=2", 1, 6)
    later = pool.run(losses, 2, "dp=2", 5, 6)
    for (_, all_states), (_, states) in zip(whole, later, strict=True):
        assert all_states[-len(states) :] == states
    assert not set(later[0][1]) & set(later[1][1])


def test_seeds_are_apart():
    places = [(1, s, m, f"layer {n}") for s in range(5) for m in range(5) for n in range(5)]
    assert len({seed_for(*p) for p in places}) == len(places)
    assert all(0 <= seed_for(*p) < 2**63 for p in places)
