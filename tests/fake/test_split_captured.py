"""What a block keeps from its input half to its weight half, against torch's own split backward in one process."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.cluster.load import read_cluster
from meshwright.cost.pieces import make_pricer
from meshwright.cost.work import work_key
from meshwright.layout.parse import parse_layout
from meshwright.model.read_hf import read_model
from meshwright.parallel.stage import cut_stage
from meshwright.train.memory import LiveBytes

ROWS, SEQ_LEN = 2, 64


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-mixtral"])
def test_gradients_that_wait_for_the_weight_half(name):
    path = f"recipes/models/{name}"
    spec = read_model(path)
    layers = spec.num_layers
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model = cut_stage(whole, spec, (1, layers - 2, 1), 1, torch.float32)
    x = torch.randn(ROWS, SEQ_LEN, spec.hidden_size, requires_grad=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    counter = LiveBytes()
    counter.add(model.parameters(), "parameters")
    with counter.watch():
        out = model(x)
        kept = sum(counter.current.values())
        inputs, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
        del inputs
        x.grad = None
        gc.collect()
        waits = sum(counter.current.values()) - kept
        stage_backward_weight(model.parameters(), groups)
    pricer = make_pricer(spec, read_cluster("a100-80gb-x8"), SEQ_LEN, "fp32")
    key = work_key(parse_layout(f"micro_batch={ROWS},pp=2,precision=fp32"))
    foreseen = (layers - 2) * pricer.block(0, key).captured
    assert foreseen == pytest.approx(waits, rel=0.05)
