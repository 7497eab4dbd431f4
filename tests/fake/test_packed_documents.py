"""Packed documents do not see each other: a packed row has the losses and gradients of its documents apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_stage_cut import CONFIGS

from family_configs import LATER
from meshwright.layout.built import PACKING_FAMILIES
from meshwright.model.read_hf import spec_from_config
from meshwright.parallel.build import build_model
from meshwright.parallel.dropout import Dropout, use_dropout
from meshwright.parallel.precision import Float64Throughout
from meshwright.parallel.stage import cut_stage, token_loss_sum
from meshwright.train.data.packing import positions_of

LENGTHS = (5, 1, 7, 2)
SEQ_LEN = 18  # three places of padding


class Wide(Float64Throughout):
    """Eager attention, which no run uses, also names float32 for its softmax: a floor of 1e-8 here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.softmax and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = args[0].dtype
        return super().__torch_function__(func, types, args, kwargs)


def documents() -> list[torch.Tensor]:
    chance = np.random.default_rng(0)
    return [torch.from_numpy(chance.integers(3, 60, n + 1)) for n in LENGTHS]


def packed(docs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one row: inputs, labels and positions, with padding behind."""
    inputs, labels = torch.full((1, SEQ_LEN), 2), torch.full((1, SEQ_LEN), -100)
    ids = np.full((1, SEQ_LEN), -1)
    at = 0
    for number, tokens in enumerate(docs):
        count = len(tokens) - 1
        inputs[0, at : at + count], labels[0, at : at + count] = tokens[:-1], tokens[1:]
        ids[0, at : at + count] = number
        at += count
    return inputs, labels, torch.from_numpy(positions_of(ids))


def stages(config, cut, attention="sdpa"):
    spec = spec_from_config(config, "model")
    found = []
    for stage in range(len(cut)):
        model = build_model(config, seed=3, dtype=torch.float64)
        if attention == "eager":
            model.set_attn_implementation(attention)
        part = cut_stage(model, spec, cut, stage, torch.float64).eval()  # no dropout
        part.forward_context = Wide
        found.append(part)
    return found


def loss_of(parts, inputs, labels, positions=None):
    x = inputs
    for part in parts:
        given = {} if positions is None else {"positions": positions}
        x = part(x, labels=labels, **given) if part.is_last else part(x, **given)
    return x


def gradients(parts):
    named = [(f"{k}.{n}", p.grad) for k, part in enumerate(parts) for n, p in part.named_parameters()]
    return {name: grad.clone() for name, grad in named if grad is not None}


def cases():
    for name, config in CONFIGS.items():
        if config["model_type"] in PACKING_FAMILIES:
            yield pytest.param(config, id=name, marks=pytest.mark.slow if name in LATER else ())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", list(cases()))
def test_h75_h62_packed_equals_apart(config, attention):
    """H75: positions that restart also mask; H62: every one of three stages gets them. Losses and gradients, fp64."""
    docs = documents()
    for cut in ((5,), (2, 2, 1)):
        together, apart = stages(config, cut, attention), stages(config, cut, attention)
        inputs, labels, positions = packed(docs)
        one = loss_of(together, inputs, labels, positions)
        one.backward()
        total = torch.zeros((), dtype=torch.float64)
        for tokens in docs:
            alone = loss_of(apart, tokens[None, :-1], tokens[None, 1:])
            alone.backward()
            total += alone.detach()
        assert abs(float(one.detach() - total)) < 1e-10
        left, right = gradients(together), gradients(apart)
        assert left.keys() == right.keys()
        worst = max(
            float((left[n] - right[n]).abs().max() / right[n].abs().max().clamp_min(1e-12)) for n in left
        )
        assert worst < 1e-9


@pytest.mark.parametrize("config", list(cases()))
def test_h75_a_token_of_one_document_changes_no_logit_of_another(config):
    """H75: bitwise, and the same holds for the second row of a micro-batch with other borders."""
    (model,) = stages(config, (5,))
    inputs, _, positions = packed(documents())
    other = torch.arange(SEQ_LEN)[None] % 9
    both, places = torch.cat([inputs, inputs]), torch.cat([positions, other])
    with torch.no_grad():
        before = model.logits(both, places)
        changed = both.clone()
        changed[:, 2] += 1  # in the first document of each row
        after = model.logits(changed, places)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[1, 9:], after[1, 9:])
    assert not torch.equal(before[0, 4], after[0, 4])
    assert not torch.equal(before[1, 8], after[1, 8])


@torch.no_grad()
def test_h75_the_check_sees_a_mask_of_ones():
    """H75: with a mask of ones transformers does not look at positions, and documents see each other."""
    (model,) = stages(CONFIGS["llama"], (5,))
    inputs, labels, positions = packed(documents())
    right = loss_of([model], inputs, labels, positions)
    logits = model.causal_lm(
        input_ids=inputs, position_ids=positions, attention_mask=torch.ones_like(inputs), use_cache=False
    ).logits
    assert abs(float(token_loss_sum(logits, labels) - right)) > 1e-3


@torch.no_grad()
def test_h75_packing_without_positions_is_another_loss():
    """What the test above would miss if positions were dropped on the way: the loss then differs visibly."""
    parts = stages(CONFIGS["llama"], (2, 2, 1))
    inputs, labels, positions = packed(documents())
    right = loss_of(parts, inputs, labels, positions)
    x = parts[0](inputs, positions=positions)
    x = parts[1](x)  # a middle stage that is not told
    assert abs(float(parts[2](x, labels=labels, positions=positions) - right)) > 1e-6


@torch.no_grad()
def test_h75_documents_stay_apart_in_attention_with_dropout():
    """H75: attention that draws its own dropout masks is another code path, and is masked by document too."""
    model = build_model(CONFIGS["gpt2"] | {"attn_pdrop": 0.3}, seed=3, dtype=torch.float64)
    dropout = Dropout(seed=1)
    use_dropout(model, dropout, attends=True)
    part = cut_stage(model, spec_from_config(CONFIGS["gpt2"], "model"), (5,), 0, torch.float64)
    inputs, _, positions = packed(documents())
    dropout.start(1, torch.zeros(1, 1, dtype=torch.int64))
    dropout.micro_batch(0)
    before = part.logits(inputs, positions)
    changed = inputs.clone()
    changed[:, 2] += 1
    after = part.logits(changed, positions)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, 4], after[0, 4])
    assert not torch.equal(before, part.eval().logits(inputs, positions))  # dropout was on


def test_h75_documents_of_a_model_that_masks_without_positions_see_each_other():
    """H75: why gpt-oss may not be packed (E654); where this fails, transformers has learnt it."""
    assert "gpt_oss" not in PACKING_FAMILIES
    (model,) = stages(CONFIGS["gpt_oss"], (5,), "eager")
    inputs, _, positions = packed(documents())
    changed = inputs.clone()
    changed[:, 2] += 1
    with torch.no_grad():
        before, after = model.logits(inputs, positions), model.logits(changed, positions)
    assert not torch.equal(before[0, 5:], after[0, 5:])
