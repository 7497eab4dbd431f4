"""What a config asks for and is not done is said, never passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.hf_folder import meta_model
from meshwright.parallel.build import build_model, config_problems

TINY = json.loads((Path(__file__).parents[2] / "recipes/models/tiny-llama/config.json").read_text())


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "E560"),
        ({"output_router_logits": True}, "E547"),
    ],
)
def test_refused(extra, code):
    with pytest.raises(MeshwrightError, match=code):
        build_model({**TINY, **extra}, seed=0, device="meta")


def test_custom_code_is_named_and_not_run():
    problems = config_problems({**TINY, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert [(p.code, p.severity) for p in problems] == [("W543", "warning")]


def test_initial_weights_do_not_depend_on_dtype():
    import torch

    a, b = (build_model(TINY, seed=3, dtype=d) for d in (torch.float32, torch.float64))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p.double(), q)


def test_a_config_is_left_as_it_is_and_its_outputs_do_not_matter():
    """transformers completes nested values in place; a config that asks for tuples is stepped through all the same."""
    import torch

    config = TINY | {"num_hidden_layers": 1, "return_dict": False, "output_attentions": True}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    before = json.dumps(config)
    model = build_model(config, seed=0)
    meta_model(config)
    assert json.dumps(config) == before
    out = model.model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert out.last_hidden_state.shape == (1, 4, 128)
    assert out.attentions is None
